"""Runs in which something fails: they go on, end as they would have, and tell what happened; or stop with the cause."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_stopping import Command

import raynforce
from raynforce.algos.presets import PRESETS
from raynforce.cli import main
from raynforce.errors import EnvError, RaynforceError
from raynforce.roles.learner import Learner
from raynforce.runtimes import pool
from raynforce.runtimes.base import RoleDied

SMALL: dict[str, Any] = {"eval.episodes": 2, "eval.final_episodes": 0, "eval.every": 0, "checkpoint.every": 0}
SMALL |= {"log_every": 96, "sampling.samplers": 2, "sampling.envs": 3, "preset": "none", "faults.backoff": 0.05}
ALGOS: dict[str, dict[str, Any]] = {
    "ppo": {"sampling.fragment": 16, "algorithm.minibatch_size": 32},
    "dqn": {"sampling.fragment": 16, "algorithm.learning_starts": 100, "algorithm.prioritized": True},
    "impala": {"sampling.fragment": 16},
}
ROUND, ROUNDS = 96, 40
STEPS = ROUND * ROUNDS
slow = pytest.mark.slow


def train(
    out: Path, env: str = "CartPole", algo: str = "ppo", *, steps: int = STEPS, settings: Any = None, **more: Any
) -> raynforce.Run:
    given = SMALL | ALGOS[algo] | dict(settings or {})
    return raynforce.train(
        f"fault_envs:{env}", algo, steps=steps, seed=7, out=out, settings=given, progress="quiet", **more
    )


def quiet(base: Path, algo: str = "ppo", topology: str = "sync", steps: int = STEPS) -> raynforce.Run:
    """The same run when nothing happens."""
    return _quiet(base / f"{algo}-{topology}-{steps}", algo, topology, steps)


@cache
def _quiet(out: Path, algo: str, topology: str, steps: int) -> raynforce.Run:
    return train(out, algo=algo, steps=steps, runtime="inline", topology=topology)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("quiet")


def needs(runtime: str, request: pytest.FixtureRequest) -> None:
    """Ray is the one that all tests share."""
    if runtime == "ray":
        request.getfixturevalue("shared_ray")


# -- what a run has written ---------------------------------------------------------------------------------


def events(run: Path, *kinds: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] in kinds]


def metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def learned(run: Path) -> list[dict[str, float]]:
    """What was measured, but for times, and for what says how the run fared."""
    skipped = ("time", "health", "charts/SPS", "replay/mb", "eval")
    lines = [{k: v for k, v in line.items() if not k.startswith(skipped)} for line in metrics(run)]
    return [line for line in lines if len(line) > 1]


def is_sound(run: raynforce.Run) -> None:
    """The books balance at every report, no line is there twice, and every fault of a role has its line."""
    reports = [line for line in metrics(run.path) if "health/produced_steps" in line]
    assert reports
    for line in reports:
        used = line["step"] + line["health/dropped_steps"] + line["health/in_flight_steps"]
        assert line["health/produced_steps"] == used, line
    steps = [line["step"] for line in reports]
    assert steps == sorted(set(steps))
    for line in metrics(run.path):
        assert all(math.isfinite(value) for value in line.values()), line
    restarted = [fault for fault in events(run.path, "fault") if fault["action"] == "restarted"]
    assert len(restarted) == run.result.restarts
    repaired = [fault for fault in events(run.path, "fault") if fault["action"] == "environment restarted"]
    assert len(repaired) == run.result.env_restarts


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

    def __init__(self, kind: str, rounds: tuple[int, ...] = (6, 14, 15, 30)) -> None:
        self.kind, self.rounds, self.round, self.killed = kind, rounds, 0, 0
        self.random = random.Random(f"{kind} {rounds}")

    def on_round(self, status: raynforce.Status) -> None:
        self.round += 1
        if self.round in self.rounds:
            threading.Timer(self.random.uniform(0, 0.02), self.kill).start()

    def kill(self) -> None:
        pids = roles(self.kind)
        if pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.random.choice(pids), signal.SIGKILL)
                self.killed += 1


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
        monkeypatch.setattr(pool, "BORDER_SECONDS", 0.05)  # so that some have a state to go back to
    kills = Kills(kind)
    run = train(tmp_path / "run", algo=algo, runtime=runtime, topology=topology, callbacks=[kills])
    is_sound(run)
    faults, back = events(run.path, "fault"), events(run.path, "recovered")
    assert run.result.restarts == len(faults) == kills.killed >= 3
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


@pytest.mark.parametrize("what", ["segfault", *(pytest.param(how, marks=slow) for how in ("exit", "kill"))])
def test_a_simulator_that_takes_its_process_along(what: str, base: Path, tmp_path: Path) -> None:
    args = {"env_args.what": what, "env_args.at": 100, "env_args.once": str(tmp_path / "once")}
    run = train(tmp_path / "run", "Sudden", runtime="process", topology="sync", settings=args)
    is_sound(run)
    (fault,) = events(run.path, "fault")
    reason = {"segfault": "SIGSEGV", "exit": "exit code 7", "kill": "SIGKILL"}[what]
    assert (fault["kind"], fault["action"], reason in fault["cause"]) == ("died", "restarted", True)
    assert f"about to {what}" in fault["said"]
    assert run.result.weights_sha256 == quiet(base).result.weights_sha256


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
    run = raynforce.train(
        "fault_envs:Raising",
        algo,
        steps=200_000,
        target=450,
        runtime=runtime,
        topology=topology,
        out=tmp_path / "run",
        settings=settings,
        progress="quiet",
    )
    assert run.result.env_restarts > 10
    assert run.result.solved_steps is not None, run.result


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


@pytest.mark.parametrize("runtime", ["process", pytest.param("ray", marks=slow)])
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
        *(
            pytest.param(*cell, marks=slow)
            for cell in (
                ("sleep", "step", "process"),
                ("sleep", "reset", "process"),
                ("hold the lock", "reset", "process"),
                ("sleep", "step", "ray"),
                ("hold the lock", "step", "ray"),
            )
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


def words(env: str, runtime: str = "process", **settings: Any) -> list[str]:
    """The command of a small run in the directory `run`."""
    given = SMALL | ALGOS["ppo"] | settings
    assigned = [word for name, value in given.items() for word in ("--set", f"{name}={json.dumps(value)}")]
    where = ["--runtime", runtime, "--topology", "sync", "--steps", str(STEPS), "--out", "run", "--quiet"]
    return ["train", "ppo", f"fault_envs:{env}", *where, *assigned]


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Commands in a directory that has the environments; whatever of them still runs at the end is killed."""
    shutil.copy(Path(__file__).with_name("fault_envs.py"), tmp_path)
    commands: list[Command] = []

    def start(*given: str) -> Command:
        commands.append(Command(tmp_path, *given))
        return commands[-1]

    yield start
    for each in commands:
        each.kill()


@pytest.mark.parametrize("runtime", ["process", pytest.param("ray", marks=slow)])
@pytest.mark.parametrize("what", ["sleep", pytest.param("hold the lock", marks=slow)])
def test_a_reset_that_never_returns_is_named(
    what: str, runtime: str, tmp_path: Path, command: Callable[..., Command]
) -> None:
    began = time.monotonic()
    settings = {"env_args.what": what, "env_args.where": "reset", "faults.start_seconds": 2}
    started = command(*words("Sudden", runtime, **settings))
    assert started.ended() == 1, started.said
    line = started.said.splitlines()[-1]
    assert line.startswith("raynforce: "), started.said
    for word in ("sampler", "has not started within 2 s", "'fault_envs:Sudden'", "reset", "faults.start_seconds"):
        assert word in line
    assert time.monotonic() - began < (20 if runtime == "process" else 40)
    assert not (tmp_path / "run").exists()
    started.nothing_left()


@slow
@pytest.mark.parametrize("what", ["sleep", "hold the lock"])
def test_a_make_that_never_returns_is_named(what: str, tmp_path: Path) -> None:
    settings = {"env_args.what": what, "env_args.where": "make", "env_args.spared": os.getpid()}
    settings |= {"faults.start_seconds": 2}
    with pytest.raises(RoleDied, match=r"has not started within 2 s: env 'fault_envs:Sudden' .* faults.start_seconds"):
        train(tmp_path / "run", "Sudden", runtime="process", topology="sync", settings=settings)
    assert not (tmp_path / "run").exists()


# -- failing for good ---------------------------------------------------------------------------------------


def doomed(tmp_path: Path, quorum: float, **more: Any) -> dict[str, Any]:
    settings = {"env_args.flag": str(tmp_path / "flag"), "faults.restarts": 2, "faults.quorum": quorum}
    return settings | {f"env_args.{name}": value for name, value in more.items()}


@pytest.mark.parametrize(
    ("runtime", "topology", "where"),
    [
        ("process", "sync", "step"),
        *(
            pytest.param(*cell, marks=slow)
            for cell in (
                ("process", "sync", "reset"),
                ("process", "overlap", "step"),
                ("process", "async", "step"),
                ("ray", "sync", "step"),
                ("ray", "async", "reset"),
            )
        ),
    ],
)
def test_a_sampler_that_cannot_go_on_is_given_up(
    runtime: str, topology: str, where: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    needs(runtime, request)
    settings = doomed(tmp_path, 0.5, where=where, at=100 if where == "step" else 4)
    run = train(tmp_path / "run", "Doomed", runtime=runtime, topology=topology, settings=settings)
    faults = [fault for fault in events(run.path, "fault") if "attempt" in fault]
    seen = [(fault["role"], fault["action"], fault["attempt"]) for fault in faults]
    expected = [("sampler 0", "restarted", 1), ("sampler 0", "restarted", 2), ("sampler 0", "given up", 3)]
    assert seen == (expected if topology != "async" else expected[: len(seen)])  # the other one may be done before
    assert seen
    is_sound(run)
    assert "the licence has run out" in faults[0]["cause"]
    assert run.result.stopped == "steps done"
    assert run.result.steps >= STEPS


def test_too_few_samplers_stop_the_run_with_the_cause(tmp_path: Path, command: Callable[..., Command]) -> None:
    started = command(*words("Doomed", **doomed(tmp_path, 1.0)))
    assert started.ended() == 1, started.said
    line = started.said.splitlines()[-1]
    assert line.startswith("raynforce: sampler 0 failed 3 times in a row"), started.said
    for word in ("faults.restarts", "1 of 2 samplers are left", "'fault_envs:Doomed'", "seed", "step", "licence"):
        assert word in line
    assert "Traceback" not in started.said
    started.nothing_left()
    run = tmp_path / "run"
    last = [fault for fault in events(run, "fault") if "attempt" in fault][-1]
    assert last["action"] in ("given up", "stopped")
    assert {"env", "seed", "step"} <= set(last)
    assert any("in _come_to" in fault.get("trace", "") for fault in events(run, "fault"))
    assert "the licence has run out" in events(run, "failed")[-1]["reason"]


def test_a_wrong_space_is_not_tried_again(tmp_path: Path) -> None:
    settings = {"env_args.spared": os.getpid(), "env_args.tries": str(tmp_path / "tries")}
    with pytest.raises(EnvError, match=r"sampler . *: env 'fault_envs:Misfit' broke .*\(3,\)"):
        train(tmp_path / "run", "Misfit", runtime="process", topology="sync", settings=settings)
    assert max(Counter((tmp_path / "tries").read_text().split()).values()) == 1
    assert len((tmp_path / "tries").read_text().split()) <= 2
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_imported_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere.py").write_text(
        "import os\n"
        "from fault_envs import CartPole\n"
        f"if os.getpid() != {os.getpid()}:\n"
        f"    open({str(tmp_path / 'tries')!r}, 'a').write('x')\n"
        "    import no_such_simulator\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    began = time.monotonic()
    with pytest.raises(RaynforceError, match="no_such_simulator"):
        raynforce.train(
            "elsewhere:CartPole",
            steps=STEPS,
            out=tmp_path / "run",
            runtime="process",
            topology="sync",
            settings=SMALL | ALGOS["ppo"],
            progress="quiet",
        )
    assert (tmp_path / "tries").read_text() in ("x", "xx"), "once in each sampler"
    assert time.monotonic() - began < 20
    assert not (tmp_path / "run").exists()


@slow
def test_a_learner_that_raises_is_not_tried_again(tmp_path: Path) -> None:
    with pytest.raises(RaynforceError, match=r"learner: network.factory's forward raised ZeroDivisionError"):
        train(tmp_path / "run", runtime="process", topology="sync", settings={"network.factory": f"{__name__}:broken"})


def broken(leaves: Any, heads: Mapping[str, int]) -> Any:
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = torch.nn.ModuleDict({k: torch.nn.Linear(4, n) for k, n in heads.items()})

        def forward(self, obs: torch.Tensor) -> dict[str, torch.Tensor]:
            if torch.is_grad_enabled():
                raise ZeroDivisionError
            return {k: head(obs) for k, head in self.heads.items()}

    return Net()


def test_environments_without_seeds_go_on_too(tmp_path: Path) -> None:
    """What was lost cannot be done again exactly; the books balance all the same."""
    kills = Kills("sampler", (8, 20))
    run = train(tmp_path / "run", "NotDetermined", runtime="process", topology="overlap", callbacks=[kills])
    is_sound(run)
    assert run.result.restarts == kills.killed == 2
    assert run.result.steps >= STEPS


# -- bad input ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "setting",
    [
        "faults.restarts=-1",
        "faults.restarts=1.5",
        "faults.quorum=0",
        "faults.quorum=2",
        "faults.quorum=nan",
        "faults.quorum=.nan",
        "faults.sample_seconds=0",
        "faults.sample_seconds=soon",
        "faults.start_seconds=-5",
        "faults.learn_seconds=.inf",
        "faults.backoff=-1",
        "faults.absent_seconds=null",
        "faults.memory_mb=0",
        "faults.memory_mb=lots",
        "faults.retries=3",
    ],
)
def test_settings_that_make_no_sense(
    setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "ppo", "CartPole-v1", "--set", setting]) == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert line.startswith("raynforce: ")
    assert setting.partition("=")[0] in line
    assert (out, list(tmp_path.iterdir())) == ("", [])


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
