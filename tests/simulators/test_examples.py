"""The examples: each builds, holds against the protocol and trains; what it claims of itself is tried."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import raynforce
from raynforce.envs.conformance import check
from raynforce.envs.make import make
from raynforce.envs.simulators import Simulators

ROOT = Path(__file__).parents[2]
FEW: dict[str, Any] = {
    "sampling.envs": 4,
    "sampling.fragment": 32,
    "eval.every": 0,
    "eval.episodes": 1,
    "eval.final_episodes": 0,
}


@pytest.fixture(scope="module")
def pixels(compiled: Callable[[str], str]) -> str:
    return compiled("examples/cpp/pixels.cpp") + " --size 20"


@pytest.fixture(scope="module")
def slow_uneven(compiled: Callable[[str], str]) -> str:
    return compiled("examples/cpp/slow_uneven.cpp")


# -- CartPole ---------------------------------------------------------------------------------------------


def test_long_episodes_are_gymnasiums(cartpole: str) -> None:
    """Step for step, each from the same state: over hundreds of steps a pole makes any difference large."""
    ours, theirs, rng = make(cartpole), gymnasium.make("CartPole-v1").unwrapped, np.random.default_rng(0)
    theirs.reset()
    worst, terminations, truncations, steps = 0.0, 0, 0, 0
    try:
        for seed in range(45):
            obs, _ = ours.reset(seed=seed)
            chance, length = (0.0, 0.2, 1.0)[seed % 3], 0  # of an action at random: some balance, some fall
            while True:
                theirs.state, theirs.steps_beyond_terminated = tuple(obs.astype(np.float64)), None
                lean = obs @ (0.05, 0.15, 1.0, 0.3)
                action = int(rng.integers(2)) if rng.random() < chance else int(lean > 0)
                obs, reward, terminated, truncated, _ = ours.step(action)
                expected, paid, ended, _, _ = theirs.step(action)
                length += 1
                worst = max(worst, float(np.abs(obs - expected).max()))
                assert (terminated, reward) == (ended, paid)
                assert truncated == (length == 500)
                if terminated or truncated:
                    break
            steps, terminations, truncations = steps + length, terminations + terminated, truncations + truncated
    finally:
        ours.close()
        theirs.close()
    assert worst < 1e-6
    assert steps > 8_000
    assert min(terminations, truncations) >= 10


# -- the pixel game ---------------------------------------------------------------------------------------


def test_the_pixel_game_passes(pixels: str) -> None:
    found = {name: why for name, _, why in check(pixels)}
    assert not [why for why in found.values() if why and not why.startswith("skipped")], found


def test_the_pixel_game_is_as_it_says(pixels: str) -> None:
    env = raynforce.simulator(pixels)
    try:
        assert env.observation_space == gymnasium.spaces.Box(0, 255, (4, 20, 20), np.uint8)
        returns: dict[str, list[float]] = {"follow": [], "flee": []}
        for name, found in returns.items():
            for seed in range(30):
                before, _ = env.reset(seed=seed)
                assert (before == before[0]).all()
                over = False
                while not over:
                    action = _follow(before)
                    obs, reward, over, truncated, _ = env.step(action if name == "follow" else 2 - action)
                    assert not truncated
                    np.testing.assert_array_equal(obs[:3], before[1:])
                    assert (reward != 0) == over
                    before = obs
                lit = np.count_nonzero(obs[3][19])  # the net has 6 pixels, a ball beside it 2
                assert (reward, lit) in ((1, 6), (-1, 8))
                found.append(reward)
        assert np.mean(returns["follow"]) == 1
        assert np.mean(returns["flee"]) < 0
    finally:
        env.close()


def _follow(obs: np.ndarray) -> int:
    """Move the net to where the ball is now."""
    ball, net = np.flatnonzero(obs[3][:18].any(0)).mean(), np.flatnonzero(obs[3][19]).mean()
    return 1 + int(np.sign(ball - net))


@pytest.mark.parametrize("algo", [pytest.param("ppo", marks=pytest.mark.slow), "dqn"])
def test_the_pixel_game_trains(pixels: str, tmp_path: Path, algo: str) -> None:
    settings = FEW | ({"algorithm.learning_starts": 200} if algo == "dqn" else {"algorithm.epochs": 2})
    run = raynforce.train(
        pixels, algo, steps=600, runtime="process", settings=settings, out=tmp_path / "run", progress="quiet"
    )
    assert run.result.steps >= 600
    assert run.result.updates > 0


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_the_pixel_game_is_learned(pixels: str, tmp_path: Path, algo: str) -> None:
    """At random the return is -0.4."""
    settings = {"sampling.envs": 16, "eval.every": 5_000, "eval.episodes": 50}
    run = raynforce.train(
        pixels, algo, steps=100_000, target=0.9, runtime="process", settings=settings, out=tmp_path / "run",
        progress="quiet",
    )  # fmt: skip
    assert run.result.solved_steps is not None
    env, policy, returns = raynforce.simulator(pixels), raynforce.load(tmp_path / "run"), []
    try:
        for seed in range(200):
            (obs, _), over = env.reset(seed=1_000_000 + seed), False
            while not over:
                obs, reward, over, _, _ = env.step(policy.act(obs))
            returns.append(reward)
    finally:
        env.close()
    assert np.mean(returns) > 0.7


# -- the slow and uneven one ------------------------------------------------------------------------------


def test_the_slow_simulator_passes(slow_uneven: str) -> None:
    cases = ["hello", "step", "step-again", "close", "timing"]
    found = {name: why for name, _, why in check(slow_uneven, cases)}
    assert not [why for why in found.values() if why and not why.startswith("skipped")], found


def test_slow_steps_overlap_and_cost_no_cpu(slow_uneven: str) -> None:
    lanes = Simulators(slow_uneven, {}, 64, seed=0)
    try:
        assert lanes._simulator is not None
        pid, took = lanes._simulator.process.pid, []
        lanes.step_all(np.zeros(64, np.int64))
        cpu, began = _cpu_seconds(pid), time.monotonic()
        for _ in range(10):
            lanes.step_all(np.zeros(64, np.int64))
            took.append(lanes.seconds.copy())
        wall, cpu = time.monotonic() - began, _cpu_seconds(pid) - cpu
    finally:
        lanes.close()
    seconds = np.concatenate(took)
    assert 0.028 < seconds.mean() < 0.1
    assert seconds.min() > 0.009
    assert seconds.max() > 0.045
    assert wall < seconds.sum() / 20
    assert cpu < wall


def _cpu_seconds(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def test_the_slow_simulator_trains(slow_uneven: str, tmp_path: Path) -> None:
    settings = FEW | {"sampling.envs": 32, "sampling.fragment": 16, "env_args.low": 1, "env_args.high": 5}
    run = raynforce.train(
        slow_uneven, steps=1500, runtime="process", topology="central", settings=settings, out=tmp_path / "run",
        progress="quiet",
    )  # fmt: skip
    assert run.result.steps >= 1500
    assert run.result.lost_steps == 0


# -- another Python ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def other_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The Python of a virtual environment that has numpy, by its path, and nothing of ours."""
    folder = tmp_path_factory.mktemp("other") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    numpy = Path(np.__file__).parent
    for name in ("numpy", "numpy.libs"):
        if (numpy.parent / name).exists():
            (packages / name).symlink_to(numpy.parent / name)
    return str(folder / "bin" / "python")


def test_the_example_runs_in_another_virtual_environment(
    other_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    names = ("numpy", "raynforce", "gymnasium", "torch")
    code = f"import importlib.util; print([name for name in {names} if importlib.util.find_spec(name)])"
    found = subprocess.run([other_python, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert found.stdout.strip() == "['numpy']"
    env = f"sim:{other_python} {ROOT / 'examples' / 'other_python.py'}"
    assert not any(why for *_, why in check(env, ["hello", "step", "equal-seeds", "close"]))
    run = raynforce.train(env, steps=500, runtime="inline", settings=FEW, out=tmp_path / "run", progress="quiet")
    assert run.result.steps >= 500
    assert raynforce.load(tmp_path / "run").act(np.zeros(2, np.float32)).shape == (1,)
