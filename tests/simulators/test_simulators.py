"""Simulators in C++ as environments: spaces, episodes, seeds, faults, and runs that train on them."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import raynforce
from raynforce.envs.make import make
from raynforce.envs.simulators import Simulators, SimulatorVector
from raynforce.envs.vector import make_vector, probe
from raynforce.errors import EnvError, UsageError

SMALL: dict[str, Any] = {
    "sampling.envs": 4,
    "sampling.fragment": 32,
    "algorithm.epochs": 2,
    "algorithm.minibatch_size": 64,
    "eval.every": 500,
    "eval.episodes": 2,
    "eval.envs": 2,
    "eval.final_episodes": 2,
    "checkpoint.every": 400,
}


@pytest.fixture
def vectors() -> Iterator[list[SimulatorVector]]:
    made: list[SimulatorVector] = []
    yield made
    for vector in made:
        vector.close()


def vector(made: list[SimulatorVector], env: str, envs: int = 3, seed: int = 1, **more: Any) -> SimulatorVector:
    args = {key: more.pop(key) for key in ("fault", "at", "length") if key in more}
    found = make_vector(env, args, envs, seed=seed, **more)
    assert isinstance(found, SimulatorVector)
    made.append(found)
    return found


def still(envs: int = 3) -> np.ndarray:
    return np.zeros((envs, 2), np.float32)


def test_its_spaces_come_from_its_hello(odd: str) -> None:
    spec = probe(odd)
    assert [(leaf.path, leaf.kind, leaf.shape, leaf.dtype) for leaf in spec.obs] == [
        ("obs/camera", "box", (4, 4, 3), "uint8"),
        ("obs/gear", "discrete", (), "int64"),
        ("obs/speed", "box", (2,), "float32"),
    ]
    assert (spec.obs[1].sizes, spec.obs[1].start) == ((6,), (-1,))
    assert (spec.action.kind, spec.action.low, spec.action.high) == ("box", (-1.0, -1.0), (1.0, 1.0))


def test_episodes_end_and_begin_in_one_step(odd: str, vectors: list[SimulatorVector]) -> None:
    envs = vector(vectors, odd, length=3)
    first = envs.reset()
    assert first["obs/gear"].tolist() == [-1, -1, -1]
    for _ in range(3):
        found = envs.step(np.full((3, 2), 0.25, np.float32))
        assert found.valid.all()
        assert found.reward.tolist() == [0.5] * 3
    assert (found.terminated ^ found.truncated).all()
    assert found.final_lanes.tolist() == [0, 1, 2]
    assert found.final_obs["obs/speed"].tolist() == [[3, 0.5]] * 3
    assert found.obs["obs/speed"][:, 0].tolist() == [0, 0, 0]
    assert found.info == {lane: {"laps": 2.5, "is_success": 1.0} for lane in range(3)}
    assert envs.take_faults() == []


def test_equal_seeds_give_equal_episodes_and_lanes_differ(odd: str, vectors: list[SimulatorVector]) -> None:
    def cameras(seed: int) -> np.ndarray:
        envs = vector(vectors, odd, seed=seed, length=2)
        seen = [envs.reset()["obs/camera"]] + [envs.step(still()).obs["obs/camera"] for _ in range(5)]
        return np.stack(seen)

    one, same, other = cameras(1), cameras(1), cameras(2)
    np.testing.assert_array_equal(one, same)
    assert (one[0] != other[0]).any()
    assert len({one[0, lane].tobytes() for lane in range(3)}) == 3
    assert (one[0] != one[2]).any(), "the next episode has another seed"


def test_a_reset_with_a_seed_repeats_itself(cartpole: str) -> None:
    env = make(cartpole)
    try:
        assert env.observation_space == gymnasium.spaces.Box(-math.inf, math.inf, (4,), np.float32)
        one, two, three = (env.reset(seed=seed)[0] for seed in (5, 5, 6))
        assert one.tolist() == two.tolist() != three.tolist()
        assert env.reset()[0].tolist() != three.tolist()
    finally:
        env.close()


def test_its_physics_are_gymnasiums(cartpole: str) -> None:
    ours, theirs, rng = make(cartpole), gymnasium.make("CartPole-v1").unwrapped, np.random.default_rng(0)
    theirs.reset()
    worst, ends = 0.0, 0
    try:
        for seed in range(20):
            obs, _ = ours.reset(seed=seed)
            theirs.state, over = np.array(obs, np.float64), False
            while not over:
                action = int(rng.integers(2))
                obs, reward, over, truncated, _ = ours.step(action)
                expected, _, ended, _, _ = theirs.step(action)
                worst = max(worst, float(np.abs(obs - expected).max()))
                assert (over, reward, truncated) == (ended, 1.0, False)
            theirs.reset()
            ends += 1
    finally:
        ours.close()
    assert ends == 20
    assert worst < 1e-6


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("throw", "raised", "motor jammed"),
        ("nan", "garbage", "obs/speed has a value that its space does not have"),
        ("range", "garbage", "obs/gear has a value that its space does not have"),
        ("exit", "died", "has exited with code 7; it said: out of fuel"),
        ("abort", "died", "was ended by SIGSEGV"),
        ("hang", "hung", "did not come back within 0.5 s; was ended by SIGKILL"),
    ],
)
def test_what_breaks_begins_a_new_episode(
    odd: str, vectors: list[SimulatorVector], fault: str, kind: str, words: str
) -> None:
    envs = vector(vectors, odd, 2, fault=fault, at=14, length=20, hang_seconds=0.5)
    envs.reset()
    for _ in range(13):
        assert not len(envs.step(still(2)).cut)
    found = envs.step(still(2))
    assert found.cut.tolist() == [0, 1]
    assert not found.valid.any()
    assert not (found.terminated | found.truncated).any()
    assert found.obs["obs/speed"][:, 0].tolist() == [0, 0]
    faults = envs.take_faults()
    assert {one.kind for one in faults} == {kind}
    assert all(words in one.cause for one in faults)
    assert len(faults) == (1 if kind in ("died", "hung") else 2), "a process that ends is one fault"
    assert envs.step(still(2)).valid.all()


def test_one_that_breaks_again_and_again_is_given_up(odd: str, vectors: list[SimulatorVector]) -> None:
    envs = vector(vectors, odd, 2, fault="exit", at=1)
    envs.reset()
    for _ in range(3):
        assert len(envs.step(still(2)).cut) == 2
    with pytest.raises(EnvError, match=r"4 times in a row within 10 steps .*: has exited with code 7; it said: out of"):
        envs.step(still(2))


def test_a_slow_env_does_not_hold_up_the_others(odd: str) -> None:
    lanes = Simulators(odd, {}, 2, seed=1)
    try:
        lanes.step(np.array([1]), still(1))
        lanes.wait()
        done, broken = lanes.collect()
        assert (done.tolist(), broken) == ([1], [])
        assert np.isinf(lanes.busy_since()).all()
    finally:
        lanes.close()


def test_a_saved_state_goes_on_in_new_episodes(odd: str, vectors: list[SimulatorVector]) -> None:
    envs = vector(vectors, odd)
    before = envs.reset()["obs/camera"].copy()
    envs.step(still())
    state = envs.state()
    told = vector(vectors, odd).load(state)
    assert told == [f"3 of 3 running episodes of env {odd!r} start over: the simulator cannot save them"]
    assert vectors[1].restarted == [0, 1, 2]
    assert (vectors[1].current()["obs/camera"] != before).any()


def test_no_process_is_left(odd: str) -> None:
    lanes = Simulators(odd, {}, 2, seed=1)
    assert lanes._simulator is not None
    pid = lanes._simulator._process.pid
    lanes.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ("./no_such_simulator", "there is no file ./no_such_simulator"),
        ("/etc/passwd", "/etc/passwd cannot be executed"),
        ("/etc", "/etc cannot be executed"),
        ("sim:no-such-program --fast", "there is no program no-such-program on the PATH"),
        ("sim:", "names no simulator"),
        ("sim:'", "is no command"),
    ],
)
def test_a_command_that_cannot_be_started_is_refused(env: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make(env)


def test_one_that_exits_at_once_says_how(tmp_path: Path) -> None:
    with pytest.raises(EnvError, match="has exited with code 3; it said: no licence, before it had connected"):
        Simulators("sim:sh -c 'echo no licence >&2; exit 3'", {}, 1, seed=0)
    with pytest.raises(EnvError, match=r"has not connected within 0\.3 s; it said nothing"):
        Simulators("sim:sleep 60", {}, 1, seed=0, start_seconds=0.3)


def test_other_numbers_of_envs_are_refused(odd: str) -> None:
    with pytest.raises(UsageError, match=r"has 2 envs in a process, not 3: give --envs 2"):
        Simulators(f"{odd} --envs 2", {}, 3, seed=0)


@pytest.mark.parametrize(("algo", "topology"), [("ppo", "sync"), ("ppo", "central")])
def test_it_trains_on_every_runtime(cartpole: str, tmp_path: Path, algo: str, topology: str) -> None:
    found = {}
    for runtime in ("inline", "process"):
        run = raynforce.train(
            cartpole, algo, steps=1024, runtime=runtime, topology=topology, settings=SMALL, out=tmp_path / runtime,
            progress="quiet",
        )  # fmt: skip
        assert run.result.steps >= 1024
        assert run.result.eval_return is not None
        found[runtime] = run.result.weights_sha256
    if topology == "sync":
        assert found["inline"] == found["process"]
    resumed = raynforce.resume(tmp_path / "process", steps=1500, progress="quiet")
    assert resumed.result.steps >= 1500
    assert raynforce.load(tmp_path / "process").act(np.zeros(4, np.float32)) in (0, 1)


def test_one_that_is_killed_costs_nothing_but_episodes(odd: str, tmp_path: Path) -> None:
    """Each process ends in the middle of its tenth episode."""
    settings = SMALL | {"env_args.fault": "exit", "env_args.at": 40, "env_args.length": 50, "sampling.envs": 2}
    run = raynforce.train(odd, steps=1000, runtime="process", settings=settings, out=tmp_path / "run", progress="quiet")
    assert run.result.steps >= 1000
    assert run.result.env_restarts > 5
    assert run.result.lost_steps == 0
