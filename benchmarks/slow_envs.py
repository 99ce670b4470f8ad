"""Environments whose steps take their time, each a different one, for workers to find as `benchmarks.slow_envs:Name`.

They count their steps themselves, so that all who step them are measured alike. This module imports nothing of its
package: another library's Python finds it by its folder.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import mkstemp
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces

Observation = np.ndarray
Stepped = tuple[Observation, float, bool, bool, dict[str, Any]]


class Uniform(gymnasium.Env[Observation, int]):
    """Every step sleeps `low` to `high` seconds, as a simulator elsewhere would let us wait; an episode has 20 steps on
    average, with random observations and rewards.

    The one whose first episode is seeded with `slow_seed` sleeps `slowness` times as long: every lane has seeds of its
    own, so this singles out one of many that are made alike. One that is made anew after a fault is as fast as the
    others. With `counts`, a folder, it keeps the number of its steps in a file there.
    """

    observation_space = spaces.Box(0.0, 1.0, (3,), np.float32)
    action_space: spaces.Space[Any] = spaces.Discrete(2)

    def __init__(
        self,
        low: float = 0.01,
        high: float = 0.05,
        slow_seed: int | None = None,
        slowness: float = 10.0,
        counts: str | None = None,
    ) -> None:
        self._low, self._high = low, high
        self._slow_seed, self._slowness = slow_seed, slowness
        self._counter = Counter(counts) if counts else None
        self._began = False
        self._rng = np.random.default_rng()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        if not self._began and seed is not None and seed == self._slow_seed:
            self._low, self._high = self._low * self._slowness, self._high * self._slowness
            if self._counter:
                self._counter.mark()
        self._began = True
        return self._rng.random(3, np.float32), {}

    def step(self, action: int) -> Stepped:
        rng = self._rng
        time.sleep(rng.uniform(self._low, self._high))
        if self._counter:
            self._counter.add()
        return rng.random(3, np.float32), rng.random(), rng.random() < 0.05, False, {}


class SlowCartPole(gymnasium.Wrapper[Observation, int, Observation, int]):
    """CartPole whose every step sleeps `low` to `high` seconds first.

    With `slow_seeds` only those do whose first episode is seeded with one of them: with the seeds of the lanes that are
    trained on, evaluation, which has other seeds, costs next to nothing and does not blur what training takes.
    """

    def __init__(self, slow_seeds: Sequence[int] | None = None, low: float = 0.005, high: float = 0.025) -> None:
        super().__init__(gymnasium.make("CartPole-v1", disable_env_checker=True))
        self._low, self._high = low, high
        self._slow_seeds = frozenset(slow_seeds or ())
        self._slow: bool | None = True if slow_seeds is None else None  # None: the first seed will tell
        self._rng = np.random.default_rng()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        if self._slow is None:
            self._slow = seed in self._slow_seeds
        self._rng = np.random.default_rng(seed)
        return self.env.reset(seed=seed, options=options)

    def step(self, action: int) -> Stepped:
        if self._slow:
            time.sleep(self._rng.uniform(self._low, self._high))
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, float(reward), terminated, truncated, info


class Count(NamedTuple):
    """What is known of one environment."""

    steps: int
    marked: bool


class Counter:
    """Counts in a file of its own, which others may read at any time; that costs a step less than a microsecond."""

    FORMAT = "qq"

    def __init__(self, folder: str) -> None:
        handle, _ = mkstemp(dir=folder)
        size = os.write(handle, struct.pack(self.FORMAT, 0, 0))
        self._cells = memoryview(mmap.mmap(handle, size)).cast("q")
        os.close(handle)

    def add(self) -> None:
        self._cells[0] += 1

    def mark(self) -> None:
        """Be told apart from the others."""
        self._cells[1] = 1

    @staticmethod
    def read(folder: Path) -> dict[str, Count]:
        """All counts of a folder, by the name of the file."""
        found = {}
        for path in folder.iterdir():
            content = path.read_bytes()
            if len(content) == struct.calcsize(Counter.FORMAT):  # else it is being made
                steps, marked = struct.unpack(Counter.FORMAT, content)
                found[path.name] = Count(steps, bool(marked))
        return found
