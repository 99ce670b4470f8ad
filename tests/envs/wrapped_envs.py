"""A small environment whose observation has parts to skip, and wrappers for it."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from raynforce.envs.tiny_agents import Aim


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


class Bare:
    """A class that is no wrapper."""


class Counted(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Shows how often it was asked since its reset."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.observation_space = spaces.Box(0, 99, (1,), np.float32)

    def reset(self, **how: Any) -> tuple[Any, dict[str, Any]]:
        self.count = 0
        return super().reset(**how)

    def observation(self, observation: Any) -> Any:
        self.count += 1
        return np.array([self.count], np.float32)


class Noisy(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Random numbers of the environment's own stream on what is seen."""

    def observation(self, observation: Any) -> Any:
        return np.asarray(observation + self.np_random.normal(size=1), np.float32)


class MaskedAim(Aim):
    """Each sees a mask beside its number."""

    def observation_space(self, agent: str) -> Any:
        mask = spaces.Box(0, 1, (4,), np.int8)
        return spaces.Dict({"observation": super().observation_space(agent), "action_mask": mask})

    def action_space(self, agent: str) -> Any:
        return spaces.Discrete(4)

    def show(self) -> Any:
        return {
            k: {"observation": v, "action_mask": np.array([1, 1, 0, 1], np.int8)} for k, v in super().show().items()
        }

    def score(self, said: Any) -> dict[str, float]:
        return dict.fromkeys(self.agents, 3.0)
