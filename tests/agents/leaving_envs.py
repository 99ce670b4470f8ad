"""Parallel environments in which agent `b` is over after 3 of 8 steps, and says so in one way or another."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces


class Leaves:
    """`b` leaves `agents`, and no flag says that it is over; with `back` it is there again from step 5 on."""

    metadata: ClassVar[dict[str, Any]] = {}
    render_mode = None

    def __init__(self, back: bool = False) -> None:
        self.possible_agents, self.back = ["a", "b"], back

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(-1e3, 1e3, (1,), np.float32)

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(2)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.t, self.agents = 0, list(self.possible_agents)
        return self._seen(), {agent: {} for agent in self.agents}

    def _seen(self) -> dict[str, np.ndarray]:
        return {agent: np.array([self.t], np.float32) for agent in self.agents}

    def step(self, actions: dict[str, int]) -> Any:
        self.t += 1
        here, seen = list(self.agents), self._seen()
        terminated, truncated = dict.fromkeys(here, self.t == 8), dict.fromkeys(here, False)
        if self.t == 3:
            self._b_is_over(terminated)
        if self.t == 5 and self.back:
            self.agents = ["a", "b"]
            seen = self._seen()
        if self.t == 8:
            self.agents = []
        return seen, dict.fromkeys(here, 1.0), terminated, truncated, {agent: {} for agent in here}

    def _b_is_over(self, terminated: dict[str, bool]) -> None:
        self.agents = ["a"]

    def render(self) -> None: ...

    def close(self) -> None: ...


class Stays(Leaves):
    """`b` is flagged in every step from then on, and stays in `agents`."""

    def step(self, actions: dict[str, int]) -> Any:
        seen, rewards, terminated, truncated, infos = super().step(actions)
        if self.t >= 3:
            terminated["b"] = True
        return seen, rewards, terminated, truncated, infos

    def _b_is_over(self, terminated: dict[str, bool]) -> None: ...
