"""Environments that allow some of three choices, another two or one at each step."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class InInfo(gymnasium.Env[Any, int]):
    def __init__(self) -> None:
        self.observation_space: Any = spaces.Box(0.0, 1.0, (2,))
        self.action_space = spaces.Discrete(3)

    def _seen(self) -> tuple[Any, dict[str, Any]]:
        self.mask = np.array([self.steps % 2, 1, self.steps % 3 == 0], np.int8)
        return np.array([self.steps % 2, self.steps % 3], np.float32) / 2, {"action_mask": self.mask}

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self._seen()

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.mask[action]
        self.steps += 1
        seen, info = self._seen()
        return seen, 1.0, self.steps >= 7, False, info


class InDict(InInfo):
    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Dict(seen=self.observation_space, action_mask=spaces.MultiBinary(3))

    def _seen(self) -> tuple[Any, dict[str, Any]]:
        seen, info = super()._seen()
        return {"seen": seen, **info}, {}
