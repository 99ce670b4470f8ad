"""Environments that can be looked at."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium
import numpy as np
from gymnasium import spaces

shown: list[int] = []
"""Steps that were shown in a window."""


class Drawn(gymnasium.Env[np.ndarray, int]):
    """Five steps, as ever brighter frames of an odd size."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array", "human"], "render_fps": 12.5}
    observation_space = spaces.Box(0, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None, broken: str = "") -> None:
        self.render_mode, self.broken, self.episodes = render_mode, broken, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        self.episodes += 1
        return self.seen(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        if self.broken == "step" and self.episodes == 2 and self.t == 3 and self.render_mode:
            raise RuntimeError("it fell over")
        return self.seen(), 1.0, self.t == 5, False, {}

    def seen(self) -> np.ndarray:
        if self.render_mode == "human":
            shown.append(self.t)
        return np.array([self.t / 5], np.float32)

    def render(self) -> Any:
        if self.broken == "render":
            raise RuntimeError("no pencil")
        if self.broken == "frame":
            return np.zeros((33, 47))
        return np.full((33, 47, 3), 40 * self.t, np.uint8)


class Blind(Drawn):
    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}


def no_mode() -> Drawn:
    return Drawn()


def has_mode() -> Drawn:
    return Drawn("rgb_array")
