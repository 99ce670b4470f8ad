"""Simulators that can be saved: exact resume, and processes that are replaced while their episodes go on."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import raynforce
from raynforce.cli.summary import summary
from raynforce.envs import simulators
from raynforce.envs.faults import CUT, KEPT, RECYCLED
from raynforce.envs.simulator_vector import SimulatorVector
from raynforce.envs.simulators import Simulators
from raynforce.envs.vector import NEVER, Recycle, Step, make_vector
from raynforce.errors import UsageError
from raynforce.memory import tree_bytes

SMALL: dict[str, Any] = {
    "sampling.envs": 3,
    "sampling.fragment": 32,
    "algorithm.epochs": 2,
    "algorithm.minibatch_size": 32,
    "eval.every": 0,
    "eval.final_episodes": 0,
    "checkpoint.every": 400,
}
ROOT = Path(__file__).parents[2]
IN_PYTHON = """
import sys
sys.path.insert(0, {sdk!r})
import numpy as np
import raynforce_sim as sim

class Walk:
    observation_space = {{"place": sim.box((2,)), "hour": sim.discrete(100)}}
    action_space = sim.discrete(2)

    def reset(self, seed):
        self.rng, self.place, self.steps = np.random.default_rng(seed % (1 << 63)), np.zeros(2), 0
        return self.seen()

    def step(self, action):
        self.place += self.rng.normal(size=2) + action
        self.steps += 1
        return self.seen(), float(self.place[0]), False, self.steps == 12

    def seen(self):
        return {{"place": self.place, "hour": self.steps}}

    def save_state(self):
        state = self.rng.bit_generator.state
        numbers = {{key: str(value) for key, value in state["state"].items()}}
        return {{"place": self.place, "steps": [self.steps, None], "rng": numbers, "more": b"x"}}

    def load_state(self, tree):
        assert tree["more"] == b"x"
        self.place, self.steps = tree["place"], tree["steps"][0]
        state = self.rng.bit_generator.state
        state["state"] = {{key: int(value) for key, value in tree["rng"].items()}}
        self.rng.bit_generator.state = state

sim.serve(Walk)
"""


@pytest.fixture(scope="session")
def saving(compiled: Callable[..., str]) -> str:
    """The odd one, which can be saved."""
    return compiled("tests/simulators/odd.cpp", "-DSAVES")


@pytest.fixture
def vectors() -> Iterator[Callable[..., SimulatorVector]]:
    made: list[SimulatorVector] = []

    def make(env: str, envs: int = 3, seed: int = 1, recycle: Recycle = NEVER, **args: Any) -> SimulatorVector:
        found = make_vector(env, args, envs, seed=seed, recycle=recycle)
        assert isinstance(found, SimulatorVector)
        made.append(found)
        return found

    yield make
    for vector in made:
        vector.close()


def acted(vector: SimulatorVector, rng: np.random.Generator) -> Step:
    return vector.step(rng.uniform(-1, 1, (vector.num_envs, 2)).astype(np.float32))


def seen(steps: list[Step]) -> list[Any]:
    """All of them, to be compared."""
    return [
        ({k: v.tolist() for k, v in s.obs.items()}, s.reward.tolist(), s.terminated.tolist(), s.truncated.tolist(),
         {k: v.tolist() for k, v in s.final_obs.items()}, s.cut.tolist(), s.info) for s in steps
    ]  # fmt: skip


def pids(vector: SimulatorVector) -> int:
    assert vector._lanes._simulator is not None
    return vector._lanes._simulator.process.pid


# -- exact resume -----------------------------------------------------------------------------------------


def test_what_follows_a_load_is_what_followed_the_save(saving: str, vectors: Callable[..., SimulatorVector]) -> None:
    envs = vectors(saving, length=7)
    assert "snapshots" in envs.way_back
    envs.reset()
    rng = np.random.default_rng(0)
    for _ in range(10):
        acted(envs, rng)
    tree, now = envs.state(), envs.current()
    assert envs.take_faults() == []
    later = np.random.default_rng(1)
    expected = [acted(envs, later) for _ in range(20)]
    for other in (envs, vectors(saving, seed=99, length=7)):
        assert other.load(tree) == []
        assert other.restarted == []
        assert all((other.current()[path] == column).all() for path, column in now.items())
        again = np.random.default_rng(1)
        assert seen([acted(other, again) for _ in range(20)]) == seen(expected)
        assert other.take_faults() == []


def test_a_python_simulator_can_be_saved(tmp_path: Path, vectors: Callable[..., SimulatorVector]) -> None:
    script = tmp_path / "walk.py"
    script.write_text(IN_PYTHON.format(sdk=str(ROOT / "sdk" / "python")))
    env = f"sim:{sys.executable} {script}"
    one, other = vectors(env, 2), vectors(env, 2, seed=5)
    one.reset()
    for _ in range(5):
        one.step(np.array([0, 1]))
    tree = one.state()
    expected = [one.step(np.array([1, 0])) for _ in range(20)]
    assert other.load(tree) == []
    assert seen([other.step(np.array([1, 0])) for _ in range(20)]) == seen(expected)


class Dice(gymnasium.Env[Any, Any]):
    """Of gymnasium's interface: its random stream is saved for it."""

    observation_space = gymnasium.spaces.Box(-9, 9, (1,))
    action_space = gymnasium.spaces.Discrete(2)
    thrown = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.thrown = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.thrown += 1
        return self.np_random.normal(size=1).astype(np.float32), 1.0, self.thrown == 7, False, {}

    def save_state(self) -> dict[str, Any]:
        return {"thrown": self.thrown}

    def load_state(self, tree: dict[str, Any]) -> None:
        self.thrown = tree["thrown"]


def test_the_random_stream_of_gymnasium_is_saved(vectors: Callable[..., SimulatorVector]) -> None:
    code = "import sys; sys.path[:0] = sys.argv[1:3]; import raynforce_sim, test_simulator_snapshots as t; "
    code += "raynforce_sim.serve(t.Dice, [])"
    paths = f"{ROOT / 'sdk' / 'python'} {Path(__file__).parent}"
    envs = vectors(f"sim:{sys.executable} -c '{code}' {paths}", 2)
    envs.reset()
    for _ in range(3):
        envs.step(np.array([0, 1]))
    tree = envs.state()
    expected = [envs.step(np.array([1, 0])) for _ in range(20)]
    assert envs.load(tree) == []
    assert seen([envs.step(np.array([1, 0])) for _ in range(20)]) == seen(expected)


@pytest.mark.slow  # 240 MB
def test_large_states_go_in_several_messages(saving: str, vectors: Callable[..., SimulatorVector]) -> None:
    envs, rng = vectors(saving, fault="big"), np.random.default_rng(0)
    envs.reset()
    acted(envs, rng)
    tree = envs.state()
    assert (tree["sizes"] > 40 << 20).all()
    assert envs.load(tree) == []
    assert acted(envs, rng).obs["obs/speed"][:, 0].tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("load", r"2 of 2 .* start over: the simulator could not load it \(cannot go back\)"),
        ("exit in load", r"2 of 2 .* start over: the simulator has exited with code 9"),
        ("forget", r"2 of 2 .* start over: the simulator gave another observation for it than before"),
    ],
)
def test_a_state_that_does_not_come_back_begins_a_new_episode(
    saving: str, vectors: Callable[..., SimulatorVector], fault: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulators, "MOST_STATE", 1)  # so that each goes in a message of its own
    envs = vectors(saving, 2)
    envs.reset()
    rng = np.random.default_rng(0)
    acted(envs, rng)
    tree = envs.state()
    other = vectors(saving, 2, fault=fault)
    (told,) = other.load(tree)
    assert re.search(words, told), told
    assert other.restarted == [0, 1]
    assert other.current()["obs/speed"][:, 0].tolist() == [0, 0]
    assert acted(other, rng).valid.all()


@pytest.mark.parametrize(("fault", "kind"), [("save", "raised"), ("huge", "raised"), ("exit in save", "died")])
def test_one_that_cannot_be_saved_loses_its_episode(
    saving: str, vectors: Callable[..., SimulatorVector], fault: str, kind: str
) -> None:
    envs = vectors(saving, 2, fault=fault, at=3)
    envs.reset()
    rng = np.random.default_rng(0)
    for _ in range(3):
        acted(envs, rng)
    tree = envs.state()
    assert tree["sizes"].tolist() == [-1, -1]
    assert {one.kind for one in envs.take_faults()} == {kind}
    found = acted(envs, rng)
    assert found.cut.tolist() == [0, 1]
    assert acted(envs, rng).valid.all()
    (told,) = vectors(saving, 2).load(tree)
    assert told.endswith("start over: it was not saved")


def test_damaged_states_are_found_out(saving: str, vectors: Callable[..., SimulatorVector]) -> None:
    envs = vectors(saving)
    envs.reset()
    tree = envs.state()
    tree["states"] = tree["states"].copy()
    tree["states"][int(tree["sizes"][0]) + 40] ^= 1
    (told,) = envs.load(tree)
    assert told.startswith("1 of 3 running episodes")
    assert told.endswith(
        "start over: the simulator could not load it (a state that was not saved by such a simulator, or is damaged)"
    )
    assert envs.restarted == [1]


STEPS = 960


@pytest.fixture(scope="module")
def whole(cartpole: str, tmp_path_factory: pytest.TempPathFactory) -> raynforce.Result:
    """A run that nothing interrupts."""
    return trained(cartpole, tmp_path_factory.mktemp("runs") / "whole", runtime="inline").result


def trained(env: str, out: Path, **how: Any) -> raynforce.Run:
    given: dict[str, Any] = {"topology": "sync", "steps": STEPS, "settings": SMALL, "progress": "quiet"}
    return raynforce.train(env, out=out, **(given | how))


@pytest.mark.parametrize("runtime", ["inline", "process"])
def test_a_run_that_is_stopped_and_resumed_ends_as_one_that_is_not(
    cartpole: str, whole: raynforce.Result, tmp_path: Path, runtime: str
) -> None:
    trained(cartpole, tmp_path / "half", runtime=runtime, steps=STEPS // 2)
    resumed = raynforce.resume(tmp_path / "half", steps=STEPS, progress="quiet").result
    assert resumed.weights_sha256 == whole.weights_sha256
    assert resumed.episodes == whole.episodes


def test_without_exact_resume_nothing_is_saved(cartpole: str, whole: raynforce.Result, tmp_path: Path) -> None:
    settings = SMALL | {"sampling.exact_resume": False}
    trained(cartpole, tmp_path / "half", runtime="inline", steps=STEPS // 2, settings=settings)
    resumed = raynforce.resume(tmp_path / "half", steps=STEPS, progress="quiet").result
    assert resumed.weights_sha256 != whole.weights_sha256


class KillsSampler(raynforce.Callback):
    """Kills the process that has the simulator, after some rounds."""

    def __init__(self, env: str, rounds: tuple[int, ...]) -> None:
        self.env, self.rounds, self.round = env, rounds, 0

    def on_round(self, status: raynforce.Status) -> None:
        self.round += 1
        if self.round in self.rounds:
            found = [pid for pid in family(os.getpid()) if commands(pid) == [self.env]]
            os.kill(int(Path(f"/proc/{found[0]}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)


def family(pid: int) -> Iterator[int]:
    yield pid
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from family(int(child))


def commands(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
    return []


@pytest.mark.slow
def test_a_sampler_that_is_killed_comes_back_exactly(cartpole: str, whole: raynforce.Result, tmp_path: Path) -> None:
    kills = KillsSampler(cartpole, (3, 7))
    found = trained(cartpole, tmp_path / "run", runtime="process", callbacks=[kills]).result
    assert found.restarts == 2
    assert found.lost_steps == 0
    assert found.weights_sha256 == whole.weights_sha256


# -- recycle ----------------------------------------------------------------------------------------------


def played(envs: SimulatorVector, most: float = 20.0) -> list[Step]:
    """Steps until a process was replaced, and some more."""
    envs.reset()
    rng, steps, until = np.random.default_rng(0), [], time.monotonic() + most
    first = pids(envs)
    while pids(envs) == first or envs._lanes._old is not None:
        assert time.monotonic() < until, "nothing was replaced"
        steps.append(acted(envs, rng))
        time.sleep(1e-3)
    return steps + [acted(envs, rng) for _ in range(20)]


def test_one_that_can_be_saved_is_replaced_without_a_trace(
    saving: str, vectors: Callable[..., SimulatorVector]
) -> None:
    envs = vectors(saving, recycle=Recycle(episodes=6), length=9)
    first = pids(envs)
    found = played(envs)
    assert [one.kind for one in envs.take_faults()].count(RECYCLED) >= 1
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    plain, rng = vectors(saving, length=9), np.random.default_rng(0)
    plain.reset()
    assert seen(found) == seen([acted(plain, rng) for _ in range(len(found))])


def test_a_step_during_which_a_process_is_replaced_counts(saving: str, vectors: Callable[..., SimulatorVector]) -> None:
    """Each step ends an episode, and there is always another process on its way."""
    envs, plain = vectors(saving, recycle=Recycle(episodes=1), length=1), vectors(saving, length=1)
    envs.reset(), plain.reset()
    rng, faults, until = np.random.default_rng(0), [], time.monotonic() + 20
    while len(faults) < 12:
        actions = rng.uniform(-1, 1, (3, 2)).astype(np.float32)
        assert seen([envs.step(actions)]) == seen([plain.step(actions)])
        faults += envs.take_faults()
        assert time.monotonic() < until
    assert {one.kind for one in faults} == {RECYCLED}


def test_others_are_replaced_where_their_episodes_end(odd: str, vectors: Callable[..., SimulatorVector]) -> None:
    envs = vectors(odd, recycle=Recycle(episodes=3), length=9)
    found = played(envs)
    assert not any(len(step.cut) for step in found)
    assert all(step.valid.all() for step in found)
    ends = np.array([step.terminated | step.truncated for step in found])
    for lane in range(3):
        assert set(np.diff(np.flatnonzero(ends[:, lane]))) == {9}, "each episode has its 9 steps"
    for step in found:
        for place, lane in enumerate(step.final_lanes.tolist()):
            assert step.final_obs["obs/speed"][place, 0] == 9
            assert step.obs["obs/speed"][lane, 0] == 0
    kinds = {one.kind for one in envs.take_faults()}
    assert kinds == {RECYCLED}


def test_episodes_that_take_too_long_are_cut(
    odd: str, vectors: Callable[..., SimulatorVector], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulators, "LEAVE_SECONDS", 0.1)
    envs = vectors(odd, 2, recycle=Recycle(hours=0.5 / 3600), length=10**9)
    found = played(envs)
    cut = [step.cut.tolist() for step in found if len(step.cut)]
    assert cut == [[0, 1]]
    faults = envs.take_faults()
    assert sorted(one.kind for one in faults) == [CUT, CUT, RECYCLED]


def test_one_that_leaks_is_replaced(saving: str, vectors: Callable[..., SimulatorVector]) -> None:
    envs = vectors(saving, 2, recycle=Recycle(bytes=100 << 20), length=10, fault="leak")
    before = tree_bytes(pids(envs))
    assert 0 < before < 50 << 20
    found = played(envs)
    assert not any(len(step.cut) for step in found)
    assert tree_bytes(pids(envs)) < 100 << 20


@pytest.mark.parametrize("which", ["old", "new"])
def test_faults_while_a_process_is_replaced(odd: str, vectors: Callable[..., SimulatorVector], which: str) -> None:
    envs = vectors(odd, 2, recycle=Recycle(episodes=2), length=40)
    envs.reset()
    rng, until = np.random.default_rng(0), time.monotonic() + 20
    while envs._lanes._old is None:
        acted(envs, rng)
        time.sleep(1e-3)
        assert time.monotonic() < until
    lanes = envs._lanes
    assert lanes._old is not None
    assert lanes._simulator is not None
    os.kill((lanes._old if which == "old" else lanes._simulator).process.pid, signal.SIGKILL)
    steps = [acted(envs, rng) for _ in range(60)]
    assert all(step.valid.all() for step in steps[45:])
    cut = sum(len(step.cut) for step in steps)
    kinds = [one.kind for one in envs.take_faults()]
    assert (cut, kinds.count("died")) == ((2, 1) if which == "old" else (0, 0)), kinds
    assert kinds.count(KEPT) == (which == "new")


def test_a_process_that_cannot_be_replaced_stays(
    tmp_path: Path, saving: str, vectors: Callable[..., SimulatorVector]
) -> None:
    once = tmp_path / "once.sh"
    once.write_text(
        f"#!/bin/sh\n[ -e {tmp_path}/there ] && {{ echo one licence >&2; exit 5; }}\n"
        f"touch {tmp_path}/there\nexec {saving}\n"
    )
    once.chmod(0o755)
    envs = vectors(str(once), 2, recycle=Recycle(episodes=2), length=5)
    envs.reset()
    first, rng, faults, until = pids(envs), np.random.default_rng(0), [], time.monotonic() + 20
    while not faults:
        assert acted(envs, rng).valid.all()
        faults = envs.take_faults()
        assert time.monotonic() < until
    assert pids(envs) == first
    assert (faults[0].kind, "one licence" in faults[0].cause) == (KEPT, True)


def test_one_that_is_on_its_way_is_not_left_behind(saving: str) -> None:
    lanes = Simulators(saving, {}, 2, seed=1, recycle=Recycle(hours=1e-9))
    lanes.overdue(time.monotonic())
    assert lanes._next is not None
    pid = lanes._next.process.pid
    lanes.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_lanes_at_their_own_pace_move_one_by_one(saving: str) -> None:
    lanes = Simulators(saving, {"length": 5}, 2, seed=1, recycle=Recycle(episodes=2))
    rng, until, places = np.random.default_rng(0), time.monotonic() + 20, [0, 0]
    try:
        first = lanes._simulator
        while lanes._simulator is first or lanes._old is not None:
            lane = int(rng.integers(2))
            lanes.step(np.array([lane]), np.zeros((1, 2), np.float32))
            while np.isfinite(lanes.busy_since()).any():
                lanes.wait()
                _, broken = lanes.collect()
                assert not broken
            places[lane] = (places[lane] + 1) % 5
            assert lanes.obs["obs/speed"][lane, 0] == places[lane]
            assert time.monotonic() < until
            lanes.collect()
    finally:
        lanes.close()


@pytest.mark.parametrize("topology", ["sync", "central"])
def test_a_run_whose_processes_are_replaced(
    cartpole: str, whole: raynforce.Result, tmp_path: Path, topology: str
) -> None:
    settings = SMALL | {"sims.recycle_episodes": 10, "log_every": 96}
    run = trained(cartpole, tmp_path / "run", runtime="inline", topology=topology, settings=settings)
    found = run.result
    assert found.recycled >= 1
    assert (found.env_restarts, found.restarts, found.recycle_cuts) == (0, 0, 0)
    assert f"recycled: {found.recycled} simulator process" in "\n".join(summary(run.config, found, "", 80, "raynforce"))
    assert '"health/recycled"' in (run.path / "metrics.jsonl").read_text()
    if topology == "sync":
        assert found.weights_sha256 == whole.weights_sha256
        resumed = raynforce.resume(run.path, steps=STEPS + 96, progress="quiet").result
        assert resumed.recycled >= found.recycled, "the count goes on"


def test_only_simulators_are_recycled(tmp_path: Path) -> None:
    settings = {"sims.recycle_hours": 2}
    with pytest.raises(
        UsageError, match=r"sims\.recycle_hours = 2\.0 is for simulators, and env 'CartPole-v1' is none"
    ):
        raynforce.train("CartPole-v1", settings=settings, out=tmp_path / "run", progress="quiet")
