"""A small environment whose observation has parts to skip, and wrappers for it."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Told(gymnasium.Env[Any, Any]):
    """Ten steps, each worth 3 if the action says whether the first number is positive; a text and noise beside it."""

    def __init__(self) -> None:
        parts = {"pos": spaces.Box(-1, 1, (2,), np.float32), "mission": spaces.Text(20)}
        self.observation_space = spaces.Dict({**parts, "noise": spaces.Box(-1, 1, (3,), np.float32)})
        self.action_space = spaces.Discrete(2)

    def _obs(self) -> dict[str, Any]:
        self._pos = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return {"pos": self._pos, "mission": "go", "noise": self.np_random.uniform(-1, 1, 3).astype(np.float32)}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        reward = 3.0 * bool(action == (self._pos[0] > 0))
        self._steps += 1
        return self._obs(), reward, self._steps >= 10, False, {}


class Half(gymnasium.RewardWrapper[Any, Any]):
    def reward(self, reward: Any) -> float:
        return float(reward) / 2


class HalfOfBoth(Half):
    """One that is for evaluation too."""

    training_only = False


class Doubled(gymnasium.ObservationWrapper[Any, Any, Any]):
    training_only = True

    def observation(self, observation: Any) -> Any:
        return {**observation, "pos": 2 * observation["pos"]}


not_a_wrapper = 3
