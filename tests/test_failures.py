"""Runs in which something fails: they go on, end as they would have, and tell what happened."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from failing import ALGOS, ROUND, ROUNDS, STEPS, is_sound, train
from marks import slow, slowly
from rays import needs
from running import events, metrics, solve, without

import raynforce
from raynforce.algos.presets import PRESETS
from raynforce.cli import main
from raynforce.roles.learner import Learner
from raynforce.runtimes import pool


def quiet(base: Path, algo: str = "ppo", topology: str = "sync", steps: int = STEPS) -> raynforce.Run:
    """The same run when nothing happens."""
    return _quiet(base / f"{algo}-{topology}-{steps}", algo, topology, steps)


@cache
def _quiet(out: Path, algo: str, topology: str, steps: int) -> raynforce.Run:
    return train(out, algo=algo, steps=steps, runtime="inline", topology=topology)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quiet")


def learned(run: Path) -> list[dict[str, float]]:
    """What was measured, but for times, and for what says how the run fared."""
    lines = without(metrics(run), "time", "health", "charts/SPS", "replay/mb", "eval", "disk")
    return [line for line in lines if len(line) > 1]


# -- killing ------------------------------------------------------------------------------------------------


def family(pid: int) -> Iterator[int]:
    """A process and all that descend from it."""
    yield pid
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from family(int(child))


def roles(kind: str) -> list[int]:
    """Processes of this one's runs that are samplers, or the learner: only that has torch."""
    found = []
    for pid in family(os.getpid()):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"raynforce.runtimes.worker" in words or words.startswith(b"ray::RayHost"):
                torch = "libtorch" in Path(f"/proc/{pid}/maps").read_text()
                found += [pid] * (torch == (kind == "learner"))
    return found


class Kills(raynforce.Callback):
    """Kills a random role of a kind a moment after each of some rounds, when it is at work again."""

    def __init__(self, kind: str, rounds: tuple[int, ...]) -> None:
        self.kind, self.rounds, self.round = kind, rounds, 0
        self.killed: set[int] = set()  # one that is dying may be met again
        self.random = random.Random(f"{kind} {rounds}")

    def on_round(self, status: raynforce.Status) -> None:
        self.round += 1
        if self.round in self.rounds:
            threading.Timer(self.random.uniform(0, 0.02), self.kill).start()

    def kill(self) -> None:
        pids = roles(self.kind)
        if pids:
            with contextlib.suppress(ProcessLookupError):
                pid = self.random.choice(pids)
                os.kill(pid, signal.SIGKILL)
                self.killed.add(pid)


MATRIX = [(r, t, a) for r in ("process", "ray") for t in ("sync", "overlap", "async") for a in ALGOS]
SOME = {("process", "sync", "ppo"): "sampler", ("process", "overlap", "dqn"): "learner"}


@pytest.mark.parametrize(
    ("kind", "runtime", "topology", "algo"),
    [
        pytest.param(kind, *cell, marks=[] if SOME.get(cell) == kind else slow)
        for kind in ("sampler", "learner")
        for cell in MATRIX
    ],
)
def test_killing_changes_nothing_but_the_time(
    kind: str,
    runtime: str,
    topology: str,
    algo: str,
    base: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needs(runtime, request)
    if kind == "sampler":
        monkeypatch.setattr(pool, "RECOVERY_SECONDS", 0.05)  # so that some have a state to go back to
    kills = Kills(kind, (6, 14, 15, 30) if kind == "sampler" else (6, 14))  # a learner imports torch
    run = train(tmp_path / "run", algo=algo, runtime=runtime, topology=topology, callbacks=[kills])
    is_sound(run)
    faults, back = events(run.path, "fault"), events(run.path, "recovered")
    assert run.result.restarts == len(faults) == len(kills.killed) >= len(kills.rounds) - 1
    assert {(fault["kind"], fault["action"]) for fault in faults} == {("died", "restarted")}
    assert all(fault["role"].startswith(kind) and "SIGKILL" in fault["cause"] for fault in faults) or runtime == "ray"
    assert run.result.lost_steps == 0
    if kind == "learner":
        assert run.result.redone_updates > 0
    if topology == "async":
        assert run.result.steps >= STEPS
        return
    assert sorted(event["role"] for event in back) == sorted(fault["role"] for fault in faults)
    expected = quiet(base, algo, topology)
    assert run.result.weights_sha256 == expected.result.weights_sha256
    assert (run.result.steps, run.result.updates) == (expected.result.steps, expected.result.updates)
    assert learned(run.path) == learned(expected.path)


@slow
@pytest.mark.parametrize("runtime", ["process", "ray"])
@pytest.mark.parametrize("topology", ["sync", "overlap"])
def test_killing_by_the_clock(
    runtime: str, topology: str, base: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Whatever the samplers are at: also starting, taking their state back, or sampling again what was lost."""
    needs(runtime, request)
    steps = 150 * ROUND
    kills, trains, over = Kills("sampler", ()), threading.Event(), threading.Event()

    def keep_killing() -> None:
        trains.wait()
        while not over.wait(1.5):
            kills.kill()

    thread = threading.Thread(target=keep_killing)
    settings = {"env_args.slow": 0.0005, "faults.restarts": 100, "log_every": 960}
    how: dict[str, Any] = {"runtime": runtime, "topology": topology, "callbacks": [lambda status: trains.set()]}
    try:
        thread.start()
        run = train(tmp_path / "run", steps=steps, settings=settings, **how)
    finally:
        over.set()
        trains.set()
        thread.join()
    is_sound(run)
    assert run.result.restarts >= 4
    if not run.result.lost_steps:  # who has died three times in a row begins anew
        assert run.result.weights_sha256 == quiet(base, "ppo", topology, steps).result.weights_sha256


@pytest.mark.parametrize("what", slowly("segfault", "exit", "kill"))
def test_a_simulator_that_takes_its_process_along(what: str, base: Path, tmp_path: Path) -> None:
    args = {"env_args.what": what, "env_args.at": 100, "env_args.once": str(tmp_path / "once")}
    run = train(tmp_path / "run", "Sudden", runtime="process", topology="sync", settings=args)
    is_sound(run)
    (fault,) = events(run.path, "fault")
    reason = {"segfault": "SIGSEGV", "exit": "exit code 7", "kill": "SIGKILL"}[what]
    assert (fault["kind"], fault["action"], reason in fault["cause"]) == ("died", "restarted", True)
    assert f"about to {what}" in fault["said"]
    assert run.result.weights_sha256 == quiet(base).result.weights_sha256


@slow
def test_environments_without_seeds_go_on_too(tmp_path: Path) -> None:
    """What was lost cannot be done again exactly; the books balance all the same."""
    kills = Kills("sampler", (8, 20))
    run = train(tmp_path / "run", "NotDetermined", runtime="process", topology="overlap", callbacks=[kills])
    is_sound(run)
    assert run.result.restarts == len(kills.killed) == 2
    assert run.result.steps >= STEPS


# -- environments that break --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def raising(tmp_path_factory: pytest.TempPathFactory) -> raynforce.Run:
    """A run in processes whose environments have raised."""
    out = tmp_path_factory.mktemp("raising") / "run"
    return train(out, "Raising", runtime="process", topology="sync", settings={"env_args.p": 0.005})


def test_environments_that_raise_are_made_anew(raising: raynforce.Run, tmp_path: Path) -> None:
    is_sound(raising)
    faults, result = events(raising.path, "fault"), raising.result
    assert 5 <= sum(fault["role"] != "evaluator" for fault in faults) <= 50
    assert (result.restarts, result.lost_steps, result.dropped_steps) == (0, 0, 0)
    for fault in faults:
        if fault["action"] == "evaluation given up":
            continue
        assert fault["kind"] == "raised"
        assert "lost its connection" in fault["cause"]
        assert {"env", "lane", "seed", "step", "role"} <= set(fault)
    assert "in step" in faults[0]["trace"]
    assert result.return_mean is not None
    assert 8 <= result.return_mean <= 200
    inline = train(tmp_path / "b", "Raising", runtime="inline", topology="sync", settings={"env_args.p": 0.005}).result
    assert inline.weights_sha256 == result.weights_sha256
    assert (inline.env_restarts, inline.episodes) == (result.env_restarts, result.episodes)


@slow
@pytest.mark.parametrize(
    ("algo", "runtime", "topology"),
    [("ppo", "inline", "sync"), ("ppo", "process", "overlap"), ("dqn", "process", "sync"), ("ppo", "ray", "async")],
)
def test_cartpole_that_raises_is_solved(
    algo: str, runtime: str, topology: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    needs(runtime, request)
    settings = dict(PRESETS[algo, "CartPole-v1"]) | {"env_args.p": 0.001, "eval.final_episodes": 0}
    how: dict[str, Any] = {"runtime": runtime, "topology": topology, "settings": settings}
    run = solve("fault_envs:Raising", algo, tmp_path / "run", steps=200_000, target=450, **how)
    assert run.result.env_restarts > 10


def test_garbage_does_not_reach_the_learner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learn, seen = Learner.learn, []

    def looking(self: Learner, *fragments: Any) -> Any:
        for fragment in fragments:
            seen.append(all(np.isfinite(c).all() for c in fragment.columns.values() if c.dtype.kind == "f"))
        return learn(self, *fragments)

    monkeypatch.setattr(Learner, "learn", looking)
    run = train(tmp_path / "run", "Garbage", runtime="inline", topology="sync", settings={"env_args.p": 0.015})
    is_sound(run)
    assert len(seen) > ROUNDS
    assert all(seen)
    faults = events(run.path, "fault")
    assert len(faults) > 20
    assert {fault["role"] for fault in faults} == {"sampler 0", "sampler 1"}
    assert {fault["kind"] for fault in faults} == {"garbage"}
    causes = " ".join(fault["cause"] for fault in faults)
    for word in ("nan", "inf", "(3,)", "is a str", "much", "NoneType"):
        assert word in causes, word


def test_an_evaluation_that_begins_with_garbage_does_not_end_the_run(tmp_path: Path) -> None:
    """The samplers have shown that this is no broken contract."""
    settings = {"env_args.p": 0, "env_args.evaluation": 0.03, "eval.episodes": 20, "eval.max_length": 5}
    run = train(tmp_path / "run", "Garbage", steps=2 * ROUND, runtime="inline", topology="sync", settings=settings)
    is_sound(run)
    assert any(fault["step"] == 1 for fault in events(run.path, "fault"))


@pytest.mark.parametrize("runtime", ["process", *slowly("ray")])
def test_a_leak_is_stopped_between_fragments(
    runtime: str, base: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    needs(runtime, request)
    limit = 100 if runtime == "process" else 200
    settings = {"env_args.megabytes": 4, "faults.memory_mb": limit}
    run = train(tmp_path / "run", "Leaking", runtime=runtime, topology="sync", settings=settings)
    is_sound(run)
    faults = events(run.path, "fault")
    assert faults
    assert {(fault["kind"], fault["action"]) for fault in faults} == {("memory", "restarted")}
    assert all("has grown to" in fault["cause"] and "faults.memory_mb" in fault["cause"] for fault in faults)
    assert (run.result.lost_steps, run.result.redone_updates) == (0, 0)
    assert run.result.weights_sha256 == quiet(base).result.weights_sha256


# -- hanging ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "where", "runtime"),
    [
        ("hold the lock", "step", "process"),
        *slowly(
            ("sleep", "step", "process"),
            ("sleep", "reset", "process"),
            ("hold the lock", "reset", "process"),
            ("sleep", "step", "ray"),
            ("hold the lock", "step", "ray"),
        ),
    ],
)
def test_who_hangs_is_replaced_and_says_where(
    what: str, where: str, runtime: str, base: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    needs(runtime, request)
    at = 100 if where == "step" else 5
    settings = {"env_args.what": what, "env_args.where": where, "env_args.at": at, "faults.sample_seconds": 2}
    settings |= {"env_args.once": str(tmp_path / "once")}
    run = train(tmp_path / "run", "Sudden", runtime=runtime, topology="sync", settings=settings)
    is_sound(run)
    (fault,) = events(run.path, "fault")
    assert (fault["kind"], fault["action"]) == ("hung", "restarted")
    assert "faults.sample_seconds" in fault["cause"]
    assert "fault_envs:Sudden" in fault["cause"]
    assert "fault_envs.py" in fault["said"]
    assert " in fail" in fault["said"]
    (back,) = events(run.path, "recovered")
    assert back["role"] == fault["role"]
    assert run.result.weights_sha256 == quiet(base).result.weights_sha256


# -- looking back -------------------------------------------------------------------------------------------


def test_the_doctor_tells_of_it_and_shows_it_again(raising: raynforce.Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(raising.path)]) in (0, 1)
    told, err = capsys.readouterr()
    count = raising.result.env_restarts
    assert f"{count} restarts of environments" in told
    assert "an environment raised, in samplers 0 and 1" in told
    assert "lost its connection" in told
    assert "fault_envs.py:" in told
    assert err == ""
    evidence = json.loads((raising.path / "faults" / "0001.json").read_text())
    assert main(["doctor", str(raising.path), "--replay", "1"]) == 1
    assert f"broke again at step {evidence['step']:,}: RuntimeError: the simulator lost" in capsys.readouterr().out
