"""Resuming with other settings, from an async run, and from a run that was killed before its first checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from marks import slow, slowly
from running import events, metrics

import raynforce
from raynforce.driver.driver import Driver
from raynforce.engines.native.role_set import RoleSet
from raynforce.engines.native.takeover import ATTEMPTS, Takeover
from raynforce.errors import CheckpointError, RaynforceError, UsageError
from raynforce.runs.checkpoint import load as load_checkpoint

SMALL: dict[str, Any] = {"eval.episodes": 2, "eval.final_episodes": 0, "eval.every": 0, "checkpoint.every": 0}
SMALL |= {"log_every": 64, "sampling.samplers": 2, "sampling.envs": 2, "sampling.fragment": 16, "network.hidden": [8]}
DQN = {"algorithm.learning_starts": 64, "algorithm.buffer_size": 400, "algorithm.prioritized": True}


def train(out: Path, algo: str = "ppo", env: str = "CartPole-v1", steps: int = 640, **more: Any) -> raynforce.Run:
    settings = SMALL | (DQN if algo == "dqn" else {}) | more.pop("settings", {})
    more = {"runtime": "inline", "topology": "sync", "seed": 4} | more
    return raynforce.train(env, algo, steps=steps, out=out, settings=settings, progress="quiet", **more)


def resume(run: raynforce.Run, steps: int = 1280, **more: Any) -> raynforce.Run:
    return raynforce.resume(run.path, steps=steps, progress="quiet", **more)


def told(capsys: pytest.CaptureFixture[str], path: Path, *words: str) -> str:
    """What the command says when it resumes."""
    from raynforce.cli import main

    assert main(["resume", str(path), *words]) == 0
    return capsys.readouterr().out


def balances(run: raynforce.Run) -> None:
    reports = [line for line in metrics(run.path) if "health/produced_steps" in line]
    assert reports
    for line in reports:
        used = line["step"] + line["health/dropped_steps"] + line["health/in_flight_steps"]
        assert line["health/produced_steps"] == used, line


# -- other settings -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling.samplers": 1},
        {"sampling.samplers": 3},
        {"sampling.envs": 3},
        {"sampling.samplers": 1, "sampling.envs": 4},
        {"sampling.fragment": 8},
        {"sampling.exact_resume": False},
    ],
    ids=lambda changes: " ".join(f"{k.partition('.')[2]}={v}" for k, v in changes.items()),
)
@pytest.mark.parametrize(("algo", "topology"), [("ppo", "overlap"), ("dqn", "sync")])
def test_a_run_goes_on_with_other_samplers(algo: str, topology: str, changes: dict[str, Any], tmp_path: Path) -> None:
    first = train(tmp_path / "run", algo, topology=topology)
    run = resume(first, settings=changes)
    assert run.result.steps >= 1280
    assert run.result.updates > first.result.updates
    balances(run)
    samplers, envs = changes.get("sampling.samplers", 2), changes.get("sampling.envs", 2)
    gone = 4 if envs != 2 or "sampling.exact_resume" in changes else 2 * max(0, 2 - samplers)
    assert run.result.abandoned_episodes == gone
    again = resume(run, 1600)  # and is a run like any other then
    assert again.result.steps >= 1600
    assert again.result.abandoned_episodes == gone


def test_a_smaller_and_a_larger_replay(tmp_path: Path) -> None:
    first = train(tmp_path / "run", "dqn")
    smaller = resume(first, settings={"algorithm.buffer_size": 200})
    assert [line for line in metrics(first.path) if "replay/size" in line][-1]["replay/size"] <= 200
    larger = resume(smaller, 2000, settings={"algorithm.buffer_size": 5000})
    assert [line for line in metrics(first.path) if "replay/size" in line][-1]["replay/size"] > 600
    assert larger.result.abandoned_episodes == 0


def test_what_is_not_equal_any_more_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trained = train(tmp_path / "run")
    run, rate = trained.path, trained.config.algorithm.learning_rate
    out = told(capsys, run, "--steps", "700", "--set", "algorithm.learning_rate=0.01", "--set", "checkpoint.keep=3")
    assert "changed: checkpoint.keep 2 → 3; this changes nothing of what is learned" in out
    assert f"changed: algorithm.learning_rate {rate} → 0.01; from here on the run differs from one that was" in out
    assert "steps were 640 and are 700" in out
    out = told(capsys, run, "--steps", "800", "--set", "sampling.samplers=4")
    assert "changed: sampling.samplers 2 → 4; from here on the run differs" in out
    assert "algorithm.learning_rate" not in out
    assert "note: changed" not in told(capsys, run, "--steps", "900")


@slow
def test_another_runtime_is_said_to_change_nothing_and_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = train(tmp_path / "whole", steps=1280, topology="overlap")
    run = train(tmp_path / "run", topology="overlap", steps=1280, callbacks=[_stop_at(640)])
    out = told(capsys, run.path, "--runtime", "process")
    assert "changed: runtime inline → process; this changes nothing of what is learned" in out
    assert raynforce.load(run.path, "last").version.params.tobytes() == (
        raynforce.load(whole.path, "last").version.params.tobytes()
    )


def _stop_at(steps: int) -> Any:
    def stop(status: raynforce.Status) -> None:
        if status.steps >= steps:
            status.stop("enough")

    return stop


def test_another_machine_or_release_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from raynforce.driver import machines

    run = train(tmp_path / "run").path
    here = machines.provenance()
    monkeypatch.setattr(machines, "provenance", lambda: here | {"numpy": "3.1.4"})
    assert f"numpy {here['numpy']} → 3.1.4; equal results are promised" in told(capsys, run, "--steps", "700")


@pytest.mark.parametrize(
    "change", [{"network.hidden": [8, 8]}, {"seed": 5}, {"algo": "dqn"}, {"env": "Acrobot-v1"}, {"steps": 100}]
)
def test_what_cannot_change_is_refused_and_nothing_happens(tmp_path: Path, change: dict[str, Any]) -> None:
    run = train(tmp_path / "run")
    before = {p: p.read_bytes() for p in sorted(run.path.rglob("*")) if p.is_file() and p.name != "run.lock"}
    with pytest.raises((UsageError, CheckpointError)):
        raynforce.resume(run.path, settings=change, progress="quiet")
    assert {p: p.read_bytes() for p in sorted(run.path.rglob("*")) if p.is_file() and p.name != "run.lock"} == before


# -- what a checkpoint of async holds -----------------------------------------------------------------------


@pytest.mark.parametrize("then", ["sync", *slowly("async")])
def test_a_checkpoint_of_async_is_a_cut_and_what_was_in_flight_is_counted(tmp_path: Path, then: str) -> None:
    first = train(tmp_path / "run", "impala", topology="async", runtime="process")
    assert first.result.abandoned_episodes == 0
    run = resume(first, topology=then)
    assert run.result.abandoned_episodes == 4
    assert run.result.steps >= 1280
    balances(run)
    assert run.result.lost_steps <= 2 * 2 * 16
    weights = raynforce.load(run.path, "last").version
    assert weights.number > 0


def test_async_does_not_wait_for_a_slow_sampler_at_a_checkpoint(tmp_path: Path) -> None:
    """One sampler sleeps for seconds in its first fragment: checkpoints are written meanwhile."""
    run = train(
        tmp_path / "run", "impala", "fault_envs:OneSleeps", topology="async", runtime="process",
        settings={"checkpoint.every": 64, "stream.batch": 1}, callbacks=[_stop_at(320)],
    )  # fmt: skip
    pauses = [line["disk/checkpoint_pause"] for line in metrics(run.path) if "disk/checkpoint_pause" in line]
    assert len(list((run.path / "checkpoints").glob("step_*"))) == 2
    assert max(pauses) < 2.0


def test_every_resume_and_every_attempt_has_episodes_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those of samplers that begin anew in between, and whatever the number of restarts."""
    load, attempts = RoleSet.load, []

    def watched(self: RoleSet, saved: Any, takeover: Any) -> list[str]:
        attempts.append(takeover.fresh[1])
        told = load(self, saved, takeover)
        assert [sampler.attempts for sampler in self.samplers] == [takeover.fresh[1]] * 2
        return told

    monkeypatch.setattr(RoleSet, "load", watched)
    run = train(tmp_path / "run", "impala", topology="async")
    for count in range(1, 4):
        run = resume(run, 640 + 64 * count)
    assert attempts == [ATTEMPTS, 2 * ATTEMPTS, 3 * ATTEMPTS]


def test_restarts_of_roles_are_no_resumes(tmp_path: Path) -> None:
    run = train(tmp_path / "run")
    saved = load_checkpoint(run.path / "last")
    first = Takeover(saved, run.config).fresh
    saved["run"]["restarts"] = 3
    assert Takeover(saved, run.config).fresh == first


def test_what_fails_right_after_a_resume_is_told_with_the_steps_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train(tmp_path / "run")
    loop, seen = Driver._loop, []

    def watched(self: Driver) -> None:
        seen.append(self._supervision.steps)
        loop(self)

    monkeypatch.setattr(Driver, "_loop", watched)
    resume(run)
    assert seen == [run.result.steps]


# -- from the start -----------------------------------------------------------------------------------------


def test_a_run_that_was_killed_before_its_first_checkpoint_begins_from_its_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = train(tmp_path / "whole")
    run = train(tmp_path / "run").path
    shutil.rmtree(run / "checkpoints")
    for left in ("last", "best"):
        (run / left).unlink()
    assert "note: no checkpoint was written yet: beginning from the start" in told(capsys, run)
    assert raynforce.load(run, "last").version.params.tobytes() == raynforce.load(whole.path).version.params.tobytes()
    assert [line["step"] for line in metrics(run)] == [line["step"] for line in metrics(whole.path)]


def test_a_damaged_checkpoint_is_skipped_and_said_and_the_run_ends_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = train(tmp_path / "whole", "dqn", settings={"checkpoint.every": 300})
    run = train(tmp_path / "run", "dqn", settings={"checkpoint.every": 300}).path
    last = (run / "last").resolve()
    file = last / "learner.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    out = told(capsys, run)
    assert "skipped" in out
    assert "learner.safetensors" in out
    assert raynforce.load(run, "last").version.params.tobytes() == (
        raynforce.load(whole.path, "last").version.params.tobytes()
    )


def test_a_second_process_on_the_run_is_refused_by_name(tmp_path: Path) -> None:
    import os

    run = train(tmp_path / "run").path
    from raynforce.runs.directory import RunDirectory

    with RunDirectory.open(run).locked(), pytest.raises(RaynforceError, match=f"in use by process {os.getpid()} on"):
        raynforce.resume(run, steps=900, progress="quiet")


def test_resuming_is_an_event(tmp_path: Path) -> None:
    run = train(tmp_path / "run")
    resume(run)
    assert [event["steps"] for event in events(run.path, "started")] == [0, run.result.steps]


@pytest.mark.parametrize(
    ("setting", "had", "now"),
    [("faults.absent_seconds", 20.0, 20.0), ("faults.absent_seconds", 5.0, 20.0), ("eval.parallel", "threads", "auto")],
)
def test_a_setting_that_there_is_no_more_does_not_stop_a_run(
    setting: str, had: Any, now: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(tmp_path / "run", steps=128)
    path, (section, name) = run.path / "config.yaml", setting.split(".")
    config = yaml.safe_load(path.read_text())
    config[section][name] = had
    path.write_text(yaml.safe_dump(config))
    raynforce.resume(run.path, steps=256, progress="plain")
    note = f"note: {setting} = {had!r} is no setting any more: it is {now!r} from here on"
    assert (note in capsys.readouterr().out) == (had != now)
    assert name not in yaml.safe_load(path.read_text())[section]
    with pytest.raises(UsageError, match=rf"unknown setting '{section}\.{name}'"):
        raynforce.resume(run.path, settings={setting: had}, progress="quiet")
