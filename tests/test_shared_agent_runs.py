"""Whole runs with a shared agent: killed, stopped, resumed, with other workers; the counts agree wherever they are."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from failing import SMALL, is_sound
from marks import slowly
from rays import needs
from running import events, metrics, solve
from test_failures import family

import raynforce
from raynforce.errors import UsageError
from raynforce.runs import checkpoint
from raynforce.runs.directory import RunDirectory
from raynforce.runtimes import pool

ALGOS: dict[str, dict[str, Any]] = {
    "dqn": {"sampling.fragment": 4, "algorithm.learning_starts": 100, "algorithm.buffer_size": 1200},
    "a3c": {"sampling.fragment": 8},
}
ALGOS["dqn"] |= {"algorithm.prioritized": True, "algorithm.target_every": 20}
STEPS = 1500


def train(out: Path, algo: str = "dqn", *, steps: int = STEPS, settings: Any = None, **more: Any) -> raynforce.Run:
    given = SMALL | ALGOS[algo] | dict(settings or {})
    how: dict[str, Any] = {"topology": "shared-agent", "runtime": "inline", "progress": "quiet"} | more
    return raynforce.train("fault_envs:CartPole", algo, steps=steps, seed=7, out=out, settings=given, **how)


def stop_at(steps: int) -> Callable[[raynforce.Status], None]:
    return lambda status: status.stop("half way") if status.steps >= steps else None


def counts_agree(run: raynforce.Run) -> None:
    """The agent's counts, at the last checkpoint, the ledger's and the result's."""
    is_sound(run)
    parts = checkpoint.load(RunDirectory(run.path).last)
    counters, books, tally = parts["learner"]["counters"], parts["run"]["ledger"], parts["run"]
    assert counters["steps"] == books["trained"] == tally["steps"] == run.result.steps
    assert counters["episodes"] == tally["episodes"] == run.result.episodes > 10
    assert counters["recent"].tolist() == tally["recent"].tolist()
    assert counters["best_return"] >= max(tally["recent"])
    assert parts["learner"]["updates"] == tally["updates"] == run.result.updates > 10
    held = sum(tree["arrival"]["steps"] for tree in parts.get("stream", {}).values())
    assert books["produced"] == books["trained"] + books["dropped"] + held
    last = [line for line in metrics(run.path) if "agent/steps" in line][-1]
    assert last["agent/steps"] == last["step"]
    assert last["agent/episodes"] == last["charts/episodes"]
    assert last["agent/recent_return"] == pytest.approx(last["charts/episodic_return"])


# -- the same run -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", ALGOS)
def test_a_resumed_run_equals_one_never_stopped(algo: str, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", algo)
    counts_agree(whole)
    half = train(tmp_path / "halves", algo, callbacks=[stop_at(STEPS // 2)])
    assert half.result.steps < whole.result.steps
    resumed = raynforce.resume(tmp_path / "halves", progress="quiet")
    counts_agree(resumed)
    for count in ("weights_sha256", "steps", "episodes", "updates", "return_mean"):
        assert getattr(resumed.result, count) == getattr(whole.result, count), count


@pytest.mark.parametrize("algo", ["dqn", *slowly("a3c")])
def test_one_worker_gives_the_same_run_in_processes(algo: str, tmp_path: Path) -> None:
    """With more, who comes first is up to the machine."""
    one = {"sampling.samplers": 1}
    inline = train(tmp_path / "inline", algo, settings=one)
    processes = train(tmp_path / "process", algo, settings=one, runtime="process")
    assert processes.result.weights_sha256 == inline.result.weights_sha256
    assert processes.result.episodes == inline.result.episodes


# -- killing ------------------------------------------------------------------------------------------------


class Kills(raynforce.Callback):
    """Kills a role a moment after each of some rounds. All have torch; workers step back for the agent."""

    def __init__(self, kind: str, rounds: tuple[int, ...] = (20, 60)) -> None:
        self.kind, self.rounds, self.round, self.random = kind, rounds, 0, random.Random(kind)
        self.killed: set[int] = set()

    def on_round(self, status: raynforce.Status) -> None:
        self.round += 1
        if self.round in self.rounds:
            threading.Timer(self.random.uniform(0, 0.02), self.kill).start()

    def kill(self) -> None:
        own = os.getpriority(os.PRIO_PROCESS, 0)
        found = []
        for pid in family(os.getpid()):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes()
                nice = os.getpriority(os.PRIO_PROCESS, pid) - own
                if b"raynforce.runtimes.worker" in words or words.startswith(b"ray::RayHost"):
                    found += [pid] * (nice == 0 if self.kind == "agent" else 0 < nice < 15)
        if found:
            with contextlib.suppress(ProcessLookupError):
                pid = self.random.choice(found)
                os.kill(pid, signal.SIGKILL)
                self.killed.add(pid)


@pytest.mark.parametrize(
    ("kind", "algo", "runtime"),
    [
        ("worker", "dqn", "process"),
        *slowly(
            ("agent", "a3c", "process"),
            ("agent", "dqn", "process"),
            ("worker", "a3c", "process"),
            ("worker", "dqn", "ray"),
            ("agent", "dqn", "ray"),
        ),
    ],
)
def test_killing_loses_nothing_and_the_counts_agree(
    kind: str,
    algo: str,
    runtime: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needs(runtime, request)
    monkeypatch.setattr(pool, "RECOVERY_SECONDS", 0.05)
    kills = Kills(kind)
    run = train(tmp_path / "run", algo, steps=3 * STEPS, runtime=runtime, callbacks=[kills])
    counts_agree(run)
    faults = events(run.path, "fault")
    assert run.result.restarts == len(faults) == len(kills.killed) > 0
    name = "learner" if kind == "agent" else "sampler"
    assert all(fault["role"].startswith(name) for fault in faults)
    assert run.result.lost_steps == 0
    resumed = raynforce.resume(run.path, steps=4 * STEPS, runtime="inline", progress="quiet")
    counts_agree(resumed)


# -- resuming otherwise -------------------------------------------------------------------------------------


@pytest.mark.parametrize("runtime", slowly("process", "ray"))
def test_what_is_under_way_at_a_checkpoint_is_not_lost(
    runtime: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    needs(runtime, request)
    often = {"checkpoint.every": 200, "sampling.samplers": 3}
    run = train(tmp_path / "run", steps=STEPS, runtime=runtime, settings=often)
    counts_agree(run)
    resumed = raynforce.resume(run.path, steps=2 * STEPS, progress="quiet", runtime="inline")
    counts_agree(resumed)
    assert (resumed.result.lost_steps, resumed.result.abandoned_episodes) == (0, 0)
    parts = checkpoint.load(RunDirectory(run.path).last)
    for index in range(3):
        replay = parts[f"sampler_{index}"]["worker"]["algo"]["replay"]
        assert sum(replay["head"]) > STEPS // 3 // 3 / 2, "what it had kept came along"


@pytest.mark.parametrize("now", [1, 3])
def test_another_number_of_workers(now: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "run")
    resumed = raynforce.resume(tmp_path / "run", steps=2 * STEPS, settings={"sampling.samplers": now}, progress="plain")
    counts_agree(resumed)
    said = "".join(capsys.readouterr())
    parts = checkpoint.load(RunDirectory(resumed.path).last)
    assert sum(name.startswith("sampler_") for name in parts) >= now
    if now == 1:
        assert "transitions in the buffers of workers that are gone are lost" in said
        assert "3 episodes that were in flight start over" in said
        assert parts["run"]["lost_transitions"] > 100
    else:
        assert "1 worker starts without a saved state" in said
        assert parts["run"]["lost_transitions"] == 0


def test_another_topology_is_refused(tmp_path: Path) -> None:
    for before, after in (("shared-agent", "sync"), ("sync", "shared-agent")):
        train(tmp_path / before, steps=300, topology=before)
        with pytest.raises(UsageError, match=f"topology of .* is '{before}' and cannot become '{after}'"):
            raynforce.resume(tmp_path / before, steps=600, settings={"topology": after}, progress="quiet")


# -- learning -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("runtime", "samplers", "seed"), [("inline", 4, 0), *slowly(("process", 2, 1), ("process", 4, 2), ("ray", 2, 0))]
)
def test_a3c_solves_cartpole(
    runtime: str, samplers: int, seed: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    needs(runtime, request)
    settings = {"sampling.samplers": samplers, "eval.final_episodes": 0}
    how: dict[str, Any] = {"runtime": runtime, "topology": "shared-agent", "seed": seed, "settings": settings}
    solve("CartPole-v1", "a3c", tmp_path / "run", steps=200_000, target=475, **how)
