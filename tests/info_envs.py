"""Environments that tell something in `info`."""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Teller(gymnasium.Env[np.ndarray, int]):
    """Episodes of 2 to 9 steps by their seed. Only what is told in the last step is right, and not all of it is fit."""

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, length: int = 0) -> None:
        self.fixed = length

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.length = self.fixed or int(self.np_random.integers(2, 10))
        self.t, self.total = 0, 0.0
        return self.seen(), {"steps": -1000}

    def step(self, action: Any) -> Any:
        self.t += 1
        reward = float(action)
        self.total += reward
        info: dict[Any, Any] = {"steps": -1000, "is_success": True}
        if self.t == self.length:
            info = {
                "is_success": np.bool_(2 * self.total > self.t),
                "steps": self.t,
                "made/total": np.float32(self.total),
                "sometimes": self.t if self.t % 2 else math.nan,
                "text": "fine",
                "nested": {"steps": 1},
                "episode": {"r": self.total, "l": self.t},
                "array": np.ones(2),
                7: 7.0,
            }
        return self.seen(), reward, self.t == self.length, False, info

    def seen(self) -> np.ndarray:
        return np.array([self.t / 10, self.length / 10], np.float32)


class Odd(Teller):
    """Its `info` is no dict, or one that raises, or grows without end."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.count = kind, 0

    def step(self, action: Any) -> Any:
        *rest, _ = super().step(action)
        self.count += 1
        odd: Any = {
            "none": None,
            "raises": _Raises(a=1),
            "names": {f"name {self.count} {i}": i for i in range(100)},
        }[self.kind]
        return *rest, odd


class _Raises(dict[str, Any]):
    def items(self) -> Any:
        raise KeyError("not today")
