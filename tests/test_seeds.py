"""Several seeds side by side: ordinary runs, one view, their median, and nothing lost if one of them fails."""

from __future__ import annotations

import io
import json
import math
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import Start, starting

import raynforce
from raynforce import seeds as seeds_module
from raynforce.cli.seeds import lines
from raynforce.config import Config, LearnerConfig, RayConfig, SamplingConfig
from raynforce.driver.status import Result
from raynforce.envs.tiny import Identity
from raynforce.errors import RaynforceError, UsageError
from raynforce.runs.catalog import find
from raynforce.runs.progress import ProgressState
from raynforce.runs.seeds_view import LiveSeeds, PlainSeeds
from raynforce.seeds import SeedRun, Seeds, cores_of, numbers, resume_seeds

SETTINGS = {"sampling.envs": 2, "sampling.fragment": 16, "eval.episodes": 2, "eval.final_episodes": 2}
SMALL: dict[str, Any] = {"runtime": "inline", "steps": 64, "settings": SETTINGS, "progress": "quiet"}
ENV = "raynforce.envs.tiny:Identity"
WORDS = ["--envs", "2", "--no-preset", "--runtime", "inline", "--set", "sampling.fragment=16"]
WORDS += ["--set", "eval.episodes=2", "--set", "eval.final_episodes=2"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    with starting(tmp_path) as start:
        yield start


def result(seed: int = 0, **facts: Any) -> Result:
    plain: dict[str, Any] = dict.fromkeys(Result.__dataclass_fields__, 0)
    text = {"run": f"runs/x/seed{seed}", "algo": "ppo", "env": "x", "stopped": "target met"}
    return Result(**plain | text | {"seed": seed, "solved_steps": None, "solved_at": None} | facts)


# -- which seeds, how many at once ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "first", "found"),
    [(3, 0, [0, 1, 2]), ("3", 7, [7, 8, 9]), ("11,12,13", 0, [11, 12, 13]), ("11,", 0, [11]), ([4, 2], 0, [4, 2])],
)
def test_a_number_of_seeds_or_those_named(given: Any, first: int, found: list[int]) -> None:
    assert numbers(given, first) == found


@pytest.mark.parametrize("given", [0, "0", "-3", "many", "1,1", "1,x", ",", [], [1, 1], 10_000])
def test_seeds_that_make_no_sense_are_one_line(given: Any) -> None:
    with pytest.raises(UsageError, match=r"^seeds = .* must be"):
        numbers(given, 0)


@pytest.mark.parametrize(
    ("config", "cores"),
    [
        (Config(env="x", runtime="inline", topology="sync", sampling=SamplingConfig(samplers=4)), 1),
        (Config(env="x", runtime="inline", topology="sync", learner=LearnerConfig(threads=2)), 2),
        (Config(env="x", runtime="process", topology="sync", sampling=SamplingConfig(samplers=4)), 4),
        (Config(env="x", runtime="process", topology="overlap", sampling=SamplingConfig(samplers=4)), 5),
        (Config(env="x", runtime="inline", topology="sync", sampling=SamplingConfig(envs=6, parallel="processes")), 6),
    ],
)
def test_a_run_takes_as_many_cores_as_its_roles_keep_busy(config: Config, cores: int) -> None:
    assert cores_of(config) == cores


# -- the summary ------------------------------------------------------------------------------------------


def test_median_and_spread_count_a_seed_that_never_met_the_target_as_the_last() -> None:
    figures = [(100, 1.0, 480.0), (300, 3.0, 500.0), (None, None, 20.0)]
    results = [
        result(seed, solved_steps=steps, solved_at=at, eval_return=score, steps_per_second=10.0 * (seed + 1))
        for seed, (steps, at, score) in enumerate(figures)
    ]
    runs = [SeedRun(seed, f"runs/x/seed{seed}", one) for seed, one in enumerate(results)]
    seeds = Seeds("runs/x", [*runs, SeedRun(3, "runs/x/seed3", error="it broke")], 475.0, 2)
    assert seeds.summary() == {
        "eval_return": (480.0, 20.0, 500.0),
        "solved_steps": (300, 100, math.inf),
        "solved_at": (3.0, 1.0, math.inf),
        "steps_per_second": (20.0, 10.0, 30.0),
    }
    told = json.loads(json.dumps(seeds.to_json(), allow_nan=False))
    assert told["summary"]["solved_steps"] == {"median": 300, "low": 100, "high": None}
    assert (told["summary"]["solved"], told["summary"]["failed"], told["seeds"]) == (2, 1, [0, 1, 2, 3])
    assert told["runs"][3] == {"run": "runs/x/seed3", "seed": 3, "error": "it broke"}
    text = "\n".join(lines(seeds, "raynforce"))
    assert "target       475 met by 2 of 3, after 300 (100 to never) steps and 3.0 (1.0 to never) s" in text
    assert "best policy  480.0 (20.0 to 500.0)" in text
    assert "failed: seed 3" in text
    assert "the same command with --seed 3 --out runs/x/seed3" in text
    assert "resume" not in text, "those that began are done"
    assert all(len(line) < 120 for line in text.splitlines())


def test_where_most_seeds_never_met_the_target_there_is_no_median() -> None:
    figures = [(100, 1.0), (None, None), (None, None)]
    results = [result(seed, solved_steps=steps, solved_at=at) for seed, (steps, at) in enumerate(figures)]
    runs = [SeedRun(seed, f"runs/x/seed{seed}", one) for seed, one in enumerate(results)]
    told = list(lines(Seeds("runs/x", runs, 475.0, 1), "raynforce"))
    assert "  target       475 met by 1 of 3, the first after 100 steps and 1.0 s" in told
    assert "target       475 met by 0 of 2" in "\n".join(lines(Seeds("runs/x", runs[1:], 475.0, 1), "raynforce"))


def test_without_a_target_nothing_is_said_of_it() -> None:
    seeds = Seeds("runs/x", [SeedRun(0, "runs/x/seed0", result(eval_return=1.0))], None, 1)
    assert seeds.summary()["solved_steps"] is None
    assert "target" not in "\n".join(lines(seeds, "raynforce"))


# -- the view ---------------------------------------------------------------------------------------------


def snapshot(steps: int) -> ProgressState:
    return ProgressState(steps, 1000, 1.0, 500.0, 3, 3, 12.5, 20.0, None, {})


def test_a_pipe_gets_one_line_for_all_seeds_and_none_twice() -> None:
    stream, now = io.StringIO(), [0.0]
    view = PlainSeeds(stream, clock=lambda: now[0])
    view.start("ppo on x, 20 seeds", range(20), 1000, target=475.0)
    for second in range(100):
        now[0] = float(second)
        for seed in range(20):
            view.began(seed)
            view.update(seed, snapshot(10 * min(second, 50)))
            view.told(seed, "note: the same for all")
        view.draw()
    view.ended(3, result(3, solved_steps=100, solved_at=2.0, eval_return=480.0), "")
    view.ended(4, None, "it broke")
    said = stream.getvalue().splitlines()
    assert said.count("note: the same for all") == 1
    assert len(said) == len(set(said)) < 35, "half of the time nothing happens"
    assert all(len(line) < 120 for line in said)
    assert said[-2:] == ["seed 3: target met at 100 steps, after 2.0 s; best policy 480.0", "seed 4: failed: it broke"]


def test_a_target_that_was_removed_is_not_told() -> None:
    met = result(3, solved_steps=100, solved_at=2.0, eval_return=480.0)
    stream = io.StringIO()
    view = PlainSeeds(stream, clock=lambda: 0.0)
    view.start("resuming x", [3], 1000, target=None)
    view.ended(3, met, "")
    assert stream.getvalue().splitlines()[-1].startswith(f"seed 3: {met.stopped} at {met.steps:,} steps;")
    assert Seeds("runs/x", [SeedRun(3, "runs/x/seed3", met)], None, 1).to_json()["summary"]["solved"] == 0


def test_a_terminal_gets_a_table_with_those_at_work_first() -> None:
    class Terminal(io.StringIO):
        encoding = "utf-8"

        def isatty(self) -> bool:
            return True

    stream = Terminal()
    view = LiveSeeds(stream, clock=lambda: 0.0)
    view.start("ppo on x, 2 seeds", [0, 1], 1000)
    view.began(1)
    view.update(1, snapshot(250))
    view.draw()
    view.stop()
    said = stream.getvalue()
    assert said.index("training") < said.index("waiting")
    assert "250  25%" in said


# -- runs -------------------------------------------------------------------------------------------------


def test_seeds_are_ordinary_runs_and_one_that_fails_does_not_lose_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a class that only this process knows, one seed after the other; the third process to make it breaks."""
    seen, folder = tmp_path / "seen", tmp_path / "several"

    class Local(Identity):
        def __init__(self) -> None:
            super().__init__()
            pids = seen.read_text().split() if seen.exists() else []
            if str(os.getpid()) not in pids:
                seen.write_text(" ".join([*pids, str(os.getpid())]))
            if pids[2:] == [str(os.getpid())]:
                raise RuntimeError("no licence")

    monkeypatch.setattr(seeds_module, "cores", lambda: 1)
    found = raynforce.train_seeds(Local, seeds=3, seed=3, out=folder, **SMALL)
    assert [(run.seed, run.path) for run in found.runs] == [(seed, f"{folder}/seed{seed}") for seed in (3, 4, 5)]
    (failed,) = found.failed
    assert (failed.seed, failed.result, failed.exit_code, found.at_once) == (4, None, 2, 1)
    assert "no licence" in failed.error
    alone = raynforce.train(Local, seed=5, out=tmp_path / "alone", **SMALL)
    assert [one.seed for one in found.results] == [3, 5]
    assert found.results[1].weights_sha256 == alone.result.weights_sha256
    assert found.results[0].weights_sha256 != alone.result.weights_sha256
    assert sorted(find(tmp_path)) == [tmp_path / "alone", folder / "seed3", folder / "seed5"]
    with pytest.raises(UsageError, match=r"holds the runs of 2 seeds: name one, such as .*several/seed3"):
        raynforce.resume(folder)
    with pytest.raises(RaynforceError, match="name one, such as"):
        raynforce.load(folder)
    with pytest.raises(UsageError, match="several/seed5 exists already"):
        raynforce.train_seeds(Local, seeds=[4, 5], out=folder, **SMALL)


def test_what_all_seeds_would_stumble_over_is_said_once_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="dqn needs discrete actions"):
        raynforce.train_seeds("Pendulum-v1", "dqn", seeds=2, **SMALL | {"settings": {}})
    assert list((tmp_path / "runs").iterdir()) == []


def test_ctrl_c_ends_all_with_checkpoints(start: Start, tmp_path: Path) -> None:
    interrupted(start, tmp_path)


@pytest.mark.slow
def test_resume_goes_on_with_all(start: Start, tmp_path: Path) -> None:
    folder = interrupted(start, tmp_path)
    step = max(json.loads((folder / f"seed{seed}" / "last" / "manifest.json").read_text())["step"] for seed in (0, 1))
    again = start("resume", str(folder), "--steps", str(step + 200), "--json", "--quiet")
    assert again.ended() == 0, again.said
    found = json.loads(again.said.splitlines()[-1])
    assert [run["stopped"] for run in found["runs"]] == ["steps done", "steps done"]
    assert min(run["steps"] for run in found["runs"]) >= step + 200


def interrupted(start: Start, tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "both"
    words = ["train", "ppo", ENV, *WORDS, "--set", "log_every=100", "--out", str(folder)]
    command = start(*words, "--steps", "1e9", "--seeds", "2", terminal=True)
    metrics = [folder / f"seed{seed}" / "metrics.jsonl" for seed in (0, 1)]
    command.until(lambda: all(file.is_file() and file.stat().st_size for file in metrics))
    command.send("terminal")
    assert command.ended() == 130
    command.nothing_left()
    assert "Traceback" not in command.said
    for seed in (0, 1):
        last = [json.loads(line) for line in (folder / f"seed{seed}" / "events.jsonl").read_text().splitlines()][-2]
        assert (last["event"], last["reason"]) == ("stopped", "SIGINT")  # before the result
    return folder


@pytest.mark.slow
def test_a_command_that_is_killed_leaves_no_seed_behind_and_each_has_its_checkpoint(
    start: Start, tmp_path: Path
) -> None:
    folder = tmp_path / "runs" / "both"
    words = ["train", "ppo", ENV, *WORDS, "--runtime", "process", "--set", "log_every=100", "--out", str(folder)]
    command = start(*words, "--steps", "1e9", "--seeds", "2")
    metrics = [folder / "seed0" / "metrics.jsonl"]
    command.until(lambda: all(file.is_file() and file.stat().st_size for file in metrics))
    command.send("SIGKILL")
    assert command.ended() == -signal.SIGKILL
    command.nothing_left(60.0)
    last = [json.loads(line) for line in (folder / "seed0" / "events.jsonl").read_text().splitlines()][-2]
    assert (last["event"], last["reason"]) == ("stopped", "SIGTERM")


@pytest.mark.slow
def test_two_signals_end_all_at_once(start: Start, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "both"
    words = ["train", "ppo", ENV, *WORDS, "--set", "log_every=100", "--out", str(folder)]
    command = start(*words, "--steps", "1e9", "--seeds", "2")
    metrics = [folder / "seed0" / "metrics.jsonl"]
    command.until(lambda: all(file.is_file() and file.stat().st_size for file in metrics))
    for _ in range(2):
        command.send("SIGINT")
    assert command.ended() == 130
    command.nothing_left()


def test_the_same_again_with_resume_trains_what_is_left_and_refuses_another_config(tmp_path: Path) -> None:
    first = raynforce.train(ENV, out=tmp_path / "s/seed0", **SMALL | {"topology": "sync"})
    again = seeds_module.train_seeds(ENV, seeds=2, out=tmp_path / "s", resume=True, **SMALL)
    assert [result.seed for result in again.results] == [0, 1]
    assert again.results[0] == first.result  # as it was told then
    events = (tmp_path / "s/seed0/events.jsonl").read_text()
    assert events.count('"started"') == 1
    assert again.results[1].topology == "sync"  # what was chosen for the first, not what `auto` would choose now
    with pytest.raises(UsageError, match=r"another config \(steps is 64 and not 128\)"):
        seeds_module.train_seeds(ENV, seeds=3, out=tmp_path / "s", resume=True, **SMALL | {"steps": 128})
    assert not (tmp_path / "s/seed2").exists()


def test_on_a_cluster_one_seed_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """How much room it has is not for this machine to say."""
    config = Config(env="x", runtime="ray", topology="sync")
    monkeypatch.setattr(seeds_module, "cores", lambda: 8)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert seeds_module.at_once(config, 5) == 5
    assert seeds_module.at_once(replace(config, ray=RayConfig(address="auto")), 5) == 1
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert seeds_module.at_once(config, 5) == 1


def test_resumed_seeds_have_a_port_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in (10, 9):
        (tmp_path / f"seed{seed}").mkdir()
        (tmp_path / f"seed{seed}" / "config.yaml").write_text(Config(env="CartPole-v1", seed=seed).to_yaml())
    found: list[Any] = []
    monkeypatch.setattr(seeds_module, "_side_by_side", lambda title, folder, config, jobs, *_: found.append(jobs))
    resume_seeds(tmp_path, {"metrics_port": 9100}, progress="quiet")
    assert {seed: job.changes["metrics_port"] for seed, job in found[0].items()} == {9: 9100, 10: 9101}
    resume_seeds(tmp_path, {"steps": 10}, progress="quiet")
    assert {seed: dict(job.changes) for seed, job in found[1].items()} == {9: {"steps": 10}, 10: {"steps": 10}}
    with pytest.raises(UsageError, match="metrics_port 65535 leaves no room for 2 seeds: 65534 at most"):
        resume_seeds(tmp_path, {"metrics_port": 65535}, progress="quiet")
