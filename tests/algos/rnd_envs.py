"""A corridor with a reward at its far end alone."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Corridor(gymnasium.Env[Any, Any]):
    """One of four actions leads on, another one in each place; all others lead back to the start."""

    def __init__(self, length: int = 10) -> None:
        self.length = length
        self._on = np.random.default_rng(7).integers(4, size=length)
        self.observation_space = spaces.Box(0, 1, (length + 1,), np.float32)
        self.action_space = spaces.Discrete(4)

    def _obs(self) -> np.ndarray:
        return np.eye(self.length + 1, dtype=np.float32)[self._place]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._place = self._steps = 0
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        self._place = self._place + 1 if action == self._on[self._place] else 0
        there = self._place == self.length
        return self._obs(), float(there), there, self._steps >= 4 * self.length, {}
