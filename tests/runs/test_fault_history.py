"""The history of faults: what is written, what is kept as evidence, and how it is read back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raynforce.runs import checkpoint
from raynforce.runs.directory import RunDirectory
from raynforce.runs.faults import FaultHistory, each_event, evidence_of, kind_of, same_cause, summarise
from raynforce.runs.repeats import Repeats
from raynforce.trees import Tree


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "run")
    run.create("env: CartPole-v1\n")
    return run


def facts(seed: int = 7, **changes: Any) -> dict[str, Any]:
    """As `EnvFault.facts()` gives them."""
    known = {"env": "my:Env", "args": {"n": 3}, "kind": "raised", "lane": 1, "seed": seed, "step": 2}
    known |= {"cause": f"step raised ValueError: seed {seed}", "trace": "Traceback\nValueError"}
    return known | {"actions": [0, 1], "dtype": "int64"} | changes


def parts() -> dict[str, Tree]:
    return {"sampler": {"returns": np.arange(3.0)}, "versions": {"0": {"number": 4}}}


def test_an_environment_that_broke_is_one_short_line_and_evidence(run: RunDirectory) -> None:
    history = FaultHistory(run)
    history.env_fault("sampler 1", facts(), 640)
    history.env_fault("sampler 2", facts(seed=8), 700)
    first, second = list(each_event(run.events))
    assert first.pop("time") > 1e9
    assert first == {
        "event": "fault",
        "steps": 640,
        "role": "sampler 1",
        "kind": "raised",
        "cause": "step raised ValueError: seed 7",
        "action": "environment restarted",
        "env": "my:Env",
        "lane": 1,
        "seed": 7,
        "step": 2,
        "trace": "Traceback\nValueError",
        "evidence": "faults/0001.json",
    }
    assert "trace" not in second  # of an equal cause
    evidence = json.loads((run.path / "faults" / "0001.json").read_text())
    del evidence["time"]
    assert evidence == {
        "kind": "episode",
        "fault": "raised",
        "steps": 640,
        "role": "sampler 1",
        "cause": "step raised ValueError: seed 7",
        "action": "environment restarted",
        "env": "my:Env",
        "args": {"n": 3},
        "lane": 1,
        "seed": 7,
        "step": 2,
        "actions": [0, 1],
        "dtype": "int64",
        "trace": "Traceback\nValueError",
    }
    assert history.faults == 2
    assert history.last == "an environment of sampler 2 raised, restarted: step raised ValueError: seed 8"


def test_a_role_that_died_leaves_the_fragment_to_sample_again(run: RunDirectory) -> None:
    history = FaultHistory(run)
    cause = "sampler 3 was killed by SIGKILL; it had said:\n  hello"
    history.role_fault("sampler 3", "died", cause, "restarted", 1, 50, said="hello", evidence=parts)
    (line,) = list(each_event(run.events))
    assert (line["role"], line["kind"], line["attempt"], line["said"]) == ("sampler 3", "died", 1, "hello")
    assert "\n" not in line["cause"]
    ((number, evidence),) = evidence_of(run)
    assert (number, evidence["kind"], evidence["index"]) == (1, "fragment", 3)
    np.testing.assert_equal(checkpoint.load(run.path / "faults" / "0001"), parts())
    assert history.last == "sampler 3 restarted: was killed by SIGKILL"


def test_what_failed_last_is_not_cut_at_a_colon(run: RunDirectory) -> None:
    """Names of environments and errors have some; a view cuts it to its width."""
    history = FaultHistory(run)
    cause = "sampler 0: env 'my_sims:make_arm' raised ValueError: joint 3, again; raise faults.restarts"
    history.role_fault("sampler 0", "raised", cause, "restarted", 1, 50)
    assert history.last == "sampler 0 restarted: env 'my_sims:make_arm' raised ValueError: joint 3, again"


def test_a_role_that_failed_over_its_environment_leaves_the_episode(run: RunDirectory) -> None:
    history = FaultHistory(run)
    history.role_fault("sampler 0", "raised", "it broke", "given up", 5, 50, facts=facts(), evidence=parts)
    ((_, evidence),) = evidence_of(run)
    assert (evidence["kind"], evidence["actions"]) == ("episode", [0, 1])
    unrecorded = facts(cause="another")
    del unrecorded["actions"]
    history.role_fault("sampler 0", "raised", "another", "stopped", 5, 50, facts=unrecorded, evidence=parts)
    assert [e["kind"] for _, e in evidence_of(run)] == ["episode", "fragment"]
    history.env_fault("sampler 0", unrecorded, 60)
    assert list(each_event(run.events))[-1]["evidence"] is None  # nothing to see it again with
    history.env_fault("sampler 0", unrecorded | {"step": 0, "cause": "reset raised"}, 60)
    assert [e["actions"] for _, e in evidence_of(run) if e["kind"] == "episode"] == [[0, 1], []]


def test_an_episode_too_long_to_be_seen_again_leaves_room_for_those_that_can(run: RunDirectory) -> None:
    history = FaultHistory(run)
    long = {k: v for k, v in facts(too_long=True, step=10**6).items() if k not in ("actions", "dtype")}
    for known in (long, long, facts(), long, facts()):
        history.env_fault("sampler 0", known, 1)
    assert [e["evidence"] is not None for e in each_event(run.events)] == [True, False, True, False, True]
    kept = [evidence for _, evidence in evidence_of(run)]
    assert [(e["kind"], e.get("too_long", False), e["actions"]) for e in kept] == [
        ("episode", True, []),
        ("episode", False, [0, 1]),
        ("episode", False, [0, 1]),
    ]


def test_evidence_is_kept_of_the_first_three_of_a_cause_and_twenty_in_all_also_after_a_resume(
    run: RunDirectory,
) -> None:
    history = FaultHistory(run)
    for seed in range(5):
        history.env_fault("sampler 0", facts(seed), 1)
    assert [n for n, _ in evidence_of(run)] == [1, 2, 3]
    resumed = FaultHistory(run)
    resumed.env_fault("sampler 0", facts(99), 1)
    assert list(each_event(run.events))[-1]["evidence"] is None
    (run.path / "faults" / "0003.json").write_text("torn")
    (run.path / "faults" / "0004").mkdir()  # a kill came between its state and its JSON
    for word in "abcdefghijklmnopqrstuvwxyz":
        (history := FaultHistory(run)).env_fault("sampler 0", facts(cause=f"cause {word}"), 1)
    assert [n for n, _ in evidence_of(run)] == [1, 2, *range(5, 23)]
    assert history.faults == 1  # of this process


def test_an_equal_cause_in_another_kind_of_role_is_a_story_of_its_own(run: RunDirectory) -> None:
    history = FaultHistory(run)
    for role in [*("sampler 0",) * 4, "evaluator"]:
        history.env_fault(role, facts(), 1)
    assert [e["role"] for _, e in evidence_of(run)] == [*("sampler 0",) * 3, "evaluator"]
    sampler, evaluator = summarise(each_event(run.events)).groups
    assert (sampler.trace, evaluator.trace) == (facts()["trace"],) * 2


def test_equal_causes() -> None:
    first, second = "seed 123, x = -1.5e-3 at 0x7fA0", "seed 4, x = -22 at 0x1"
    assert same_cause("sampler 0", "raised", first) == same_cause("sampler 1", "raised", second)
    assert same_cause("sampler 0", "raised", "x is 1") != same_cause("sampler 0", "garbage", "x is 1")
    assert same_cause("sampler 0", "raised", "x is 1") != same_cause("sampler 0", "raised", "y is 1")
    assert same_cause("sampler 0", "raised", "x is 1") != same_cause("evaluator", "raised", "x is 1")
    assert [kind_of(role) for role in ("sampler 12", "learner")] == ["sampler", "learner"]


def test_a_history_that_cannot_be_written_ends_nothing_and_is_said_once(run: RunDirectory) -> None:
    said: list[str] = []
    history = FaultHistory(run, said.append)
    run.events.unlink()
    run.events.mkdir()
    (run.path / "faults").write_text("in the way")
    for seed in range(3):
        history.env_fault("sampler 0", facts(seed), 1)
        history.role_fault("sampler 0", "died", "it died", "restarted", 1, 1, evidence=parts)
        history.recovered("sampler 0", 0.5)
    (line,) = said
    assert "training goes on" in line
    assert str(run.path) in line
    assert history.faults == 6


def test_evidence_that_cannot_be_had_costs_only_itself(run: RunDirectory) -> None:
    def gone() -> dict[str, Tree]:
        raise RuntimeError("the node is gone")

    said: list[str] = []
    FaultHistory(run, said.append).role_fault("sampler 0", "died", "it died", "restarted", 1, 1, evidence=gone)
    assert next(each_event(run.events))["evidence"] is None
    assert "the node is gone" in said[0]


def test_torn_lines_are_left_out_and_what_follows_them_is_not(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    whole = '{"time": 1.0, "event": "started", "steps": 0}'
    torn = '{"time": 2.0, "event": "fault", "role": "samp'
    path.write_bytes(
        f'{whole}\n{torn}{whole}\n\n[1]\n{{"time": "x", "event": 3}}\n'.encode() + b"\xff\xfe\n" + torn.encode()
    )
    assert [e["event"] for e in each_event(path)] == ["started", "started"]
    assert list(each_event(tmp_path / "none")) == []


def test_a_summary_groups_equal_causes_by_kind_of_role(run: RunDirectory) -> None:
    history = FaultHistory(run)
    run.event("started", steps=0)
    for seed in range(4):
        history.env_fault(f"sampler {seed % 2}", facts(seed), 10 * seed)
    history.role_fault("sampler 1", "died", "killed", "restarted", 1, 50, facts={"lost": 16})
    history.recovered("sampler 1", 0.5)
    history.role_fault("sampler 1", "died", "killed", "restarted", 2, 60, facts={"lost": 16})
    history.recovered("sampler 1", 1.5)
    history.role_fault("sampler 2", "died", "killed", "given up", 5, 70, said="bye")
    history.absent("sampler 2", "given up")
    history.absent("sampler 1", "late")
    history.back("sampler 1")
    run.event("stopped", reason="steps done", steps=100)
    found = summarise(list(each_event(run.events)))
    assert (found.steps, found.starts, found.outcome, found.reason) == (100, 1, "stopped", "steps done")
    assert (found.faults, found.lost, found.given_up, found.absent) == (7, 32, ["sampler 2"], {"sampler 2": "given up"})
    assert found.recoveries == {"sampler": [0.5, 1.5]}
    died, raised = found.groups  # what was given up comes first
    assert (raised.count, raised.roles, raised.evidence) == (4, {"sampler 0": 2, "sampler 1": 2}, [1, 2, 3])
    assert (raised.first[1], raised.last[1], raised.trace) == (0, 30, "Traceback\nValueError")
    assert (died.count, died.actions, died.said) == (3, {"restarted": 2, "given up": 1}, "bye")
    data = json.loads(json.dumps(found.to_json()))
    assert data["recoveries"] == {"sampler": {"count": 2, "median_seconds": 1.0, "max_seconds": 1.5}}
    assert [g["last_steps"] for g in data["groups"]] == [70, 30]


def test_a_summary_of_a_run_that_was_killed_and_resumed() -> None:
    def line(time: float, event: str, **more: Any) -> dict[str, Any]:
        return {"time": time, "event": event, **more}

    lines = [line(10, "started", steps=0), line(15, "fault", steps=40, role="sampler 0", action="given up")]
    found = summarise(lines)
    assert (found.outcome, found.steps, found.seconds, found.given_up) == ("none", 40, 5, ["sampler 0"])
    lines += [line(100, "started", steps=32), line(107, "failed", steps=50, reason="EnvError: x")]
    found = summarise(lines)
    assert (found.outcome, found.steps, found.seconds, found.starts) == ("failed", 50, 12, 2)
    assert found.given_up == []  # it was tried again
    assert summarise([]).began is None


def test_a_broken_history_does_not_break_its_reader(run: RunDirectory) -> None:
    strange = [
        {"time": 1, "event": "fault"},
        {"time": 1, "event": "fault", "role": 3, "steps": "x", "evidence": "../../x", "lost": None},
        {"time": 1, "event": "recovered"},
        {"time": 1, "event": "stopped", "steps": float("inf")},
    ]
    assert summarise(strange).faults == 2
    shutil.rmtree(run.checkpoints)
    assert list(evidence_of(run)) == []


def test_equal_faults_are_counted_and_not_repeated(run: RunDirectory) -> None:
    history = FaultHistory(run)
    for index in range(12_345):
        history.env_fault(f"sampler {index % 2}", facts(seed=index), index)
        history.recovered("sampler 0", 0.5)
    history.role_fault("sampler 1", "died", "sampler 1 was killed", "restarted", 1, 7, facts={"lost": 3})
    history.close()
    lines = list(each_event(run.events))
    assert len(lines) < 150
    assert run.events.stat().st_size < 50_000
    told = summarise(lines)
    assert history.faults == told.faults == 12_346
    assert told.groups[0].roles == {"sampler 0": 6173, "sampler 1": 6172}
    assert told.groups[0].last[1] >= 12_343


def test_what_was_lost_with_faults_that_are_not_told_one_by_one_is_counted(run: RunDirectory) -> None:
    history = FaultHistory(run)
    for _ in range(57):
        history.role_fault("sampler 1", "died", "sampler 1 was killed", "restarted", 1, 7, facts={"lost": 3})
    history.close()
    assert summarise(each_event(run.events)).lost == 171


def test_causes_without_end_are_counted_together(run: RunDirectory) -> None:
    history = FaultHistory(run)
    for index in range(2000):
        history.env_fault("sampler 0", facts(cause="reason " + "x" * (index % 1000) + "y"), 1)
    history.close()
    told = summarise(each_event(run.events))
    assert told.faults == 2000
    assert len(told.groups) <= 250


def test_a_line_a_minute_keeps_the_count() -> None:
    now = 0.0
    repeats: Repeats[str] = Repeats(lambda: now)
    for _ in range(15):
        repeats.add("a")
    now = 61.0
    assert repeats.add("a") == 6
    assert repeats.add("a") == 0
    assert list(repeats.rest()) == [("a", 1)]
    assert list(repeats.rest()) == []
    assert repeats.total("a") == 17
