"""Evaluations side by side: first come, first served, to the outcome of those that go one after another."""

from __future__ import annotations

import threading
from typing import Any

import gymnasium
import numpy as np
import pytest

from raynforce.algos.ppo import PPO
from raynforce.envs.vector import EnvArgs, derive_seed, probe
from raynforce.experiment import resolve
from raynforce.policies.acting import PolicyVersion
from raynforce.roles.evaluator import EVALUATION_STREAM, Evaluator

DEADLINE = 20.0
HERE = __name__
LANES, EPISODES, SEED = 4, 8, 7


class Walk(gymnasium.Env[np.ndarray, Any]):
    """A random walk of ten to thirty steps; rewards are what the policy does."""

    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed: int | None = None, **_: Any) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(10, 30))
        return self._obs(), {}

    def _obs(self) -> np.ndarray:
        return self.np_random.normal(size=2).astype(np.float32)

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        return self._obs(), float(action[0]), self.left == 0, False, {}


class Counted(Walk):
    steps = 0

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        Counted.steps += 1
        return super().step(action)


class Gate(Walk):
    """In the first lane each step waits until the other lanes have played all their episodes."""

    opened = threading.Event()
    ended = 0

    def reset(self, *, seed: int | None = None, **_: Any) -> tuple[np.ndarray, dict[str, Any]]:
        stream = derive_seed(SEED, EVALUATION_STREAM, 0, 0)
        self.waits = seed in [derive_seed(stream, EVALUATION_STREAM, 0, episode) for episode in range(2)]
        return super().reset(seed=seed)

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        found = super().step(action)
        if self.waits and not Gate.opened.wait(DEADLINE):
            raise RuntimeError("the other lanes waited for this one")
        if found[2] and not self.waits:
            Gate.ended += 1
            if Gate.ended == EPISODES - EPISODES // LANES:
                Gate.opened.set()
        return found


class Sticks(Walk):
    """A step that never comes back, at the end of every episode."""

    stuck = threading.Event()

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        found = super().step(action)
        if found[2]:
            Sticks.stuck.wait()
        return found


def made(env: str, parallel: Any, breaks: int = 5, hang_seconds: float = 60.0) -> tuple[Evaluator, PolicyVersion]:
    config = resolve({"env": f"{HERE}:{env}", "preset": "none"}, {})[0]
    algo = PPO(config, probe(config.env))
    size = sum(param.size for param in algo.network().params())
    params = np.random.default_rng(0).normal(size=size).astype(np.float32) / 4
    envs = EnvArgs(config.env, LANES, SEED, parallel=parallel)
    return Evaluator(algo.acting(), envs, breaks, hang_seconds), PolicyVersion(0, params)


def test_nobody_waits_for_the_slowest() -> None:
    evaluator, version = made("Gate", "threads")
    try:
        found = evaluator.play(version, EPISODES)
    finally:
        evaluator.close()
    assert (found.over, found.failure, len(found.returns)) == (True, None, EPISODES)


@pytest.mark.parametrize("parallel", ["threads", "processes"])
def test_the_outcome_is_that_of_one_after_another(parallel: str) -> None:
    outcomes = []
    for how in ("no", parallel):
        evaluator, version = made("Walk", how)
        try:
            evaluator.begin(version, 3)
            evaluator.advance(0.0)  # given up: lanes may be at a step
            found = evaluator.play(version, EPISODES)
        finally:
            evaluator.close()
        outcomes.append((sorted(found.returns.tolist()), found.steps))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("episodes", [EPISODES, 3])
def test_lanes_that_have_played_their_episodes_are_not_stepped(episodes: int) -> None:
    evaluator, version = made("Counted", "no")
    try:
        Counted.steps = 0
        first = evaluator.play(version, episodes)
        assert (Counted.steps, len(first.returns)) == (first.steps, episodes)
        again = evaluator.play(version, episodes)
        assert Counted.steps == 2 * first.steps
        assert again.returns.tolist() == first.returns.tolist()
    finally:
        evaluator.close()


def test_one_that_hangs_in_every_episode_is_given_up() -> None:
    evaluator, version = made("Sticks", "threads", breaks=1, hang_seconds=0.3)
    try:
        found = evaluator.play(version, EPISODES)
    finally:
        Sticks.stuck.set()
        evaluator.close()
    assert found.over
    assert "broke in 2 evaluation episodes in a row" in str(found.failure)
    assert "did not come back within 0.3 s" in str(found.failure)
