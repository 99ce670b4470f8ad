"""Environments whose steps cost what a benchmark asks for, for workers to find as `benchmarks.envs:Name`."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

Observation = np.ndarray


class Burning(gymnasium.Wrapper[Observation, int, Observation, int]):
    """CartPole whose every step takes `work` turns of an empty loop: time that only a core can give, not a clock."""

    def __init__(self, work: int = 0) -> None:
        super().__init__(gymnasium.make("CartPole-v1", disable_env_checker=True))
        self._work = work

    def step(self, action: int) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        burn(self._work)
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, float(reward), terminated, truncated, info


def burn(work: int) -> None:
    """Keep a core busy."""
    for _ in range(work):
        pass


class Sleeping(gymnasium.Env[Observation, int]):
    """Every step sleeps, as a simulator elsewhere would let us wait.

    The one whose first episode is seeded with `slow_seed` sleeps `slowness` times as long: every sampler seeds its
    environments differently, so this singles out one of many that are made alike.
    """

    observation_space = spaces.Box(-1.0, 1.0, (4,), np.float32)
    action_space: spaces.Space[Any] = spaces.Discrete(2)

    def __init__(self, seconds: float, slow_seed: int | None = None, slowness: float = 10.0) -> None:
        self._seconds = seconds
        self._slow_seed = slow_seed
        self._slowness = slowness
        self._began = False
        self._obs = np.zeros(4, np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        if not self._began and self._slow_seed is not None and seed == self._slow_seed:
            self._seconds *= self._slowness
        self._began = True
        return self._obs, {}

    def step(self, action: int) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        time.sleep(self._seconds)
        return self._obs, 0.0, False, False, {}


class Pictures(gymnasium.Env[Observation, int]):
    """Images of bytes that cost next to nothing, of any size; episodes of 100 steps."""

    action_space: spaces.Space[Any] = spaces.Discrete(6)

    def __init__(self, shape: tuple[int, ...] = (84, 84, 4)) -> None:
        self.observation_space = spaces.Box(0, 255, tuple(shape), np.uint8)
        self._pictures = np.random.default_rng(0).integers(256, size=(64, *shape)).astype(np.uint8)
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        self._steps = 0
        return self._pictures[0], {}

    def step(self, action: int) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        return self._pictures[self._steps % 64], float(action == self._steps % 6), False, self._steps >= 100, {}
