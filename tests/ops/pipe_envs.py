"""Environments for pipelines: what a policy is worth in them is known, and one kills its process when it is told to."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

LENGTH = 5


class Choice(gymnasium.Env[np.ndarray, int]):
    """Five steps; each gives `worth` times the action, and noise."""

    def __init__(self, worth: float = 1.0, noise: float = 0.1, kill: str = "", after: int = 0) -> None:
        self.observation_space, self.action_space = spaces.Box(-1, 1, (2,)), spaces.Discrete(2)
        self.worth, self.noise, self.kill, self.after, self.steps = worth, noise, Path(kill), after, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self.np_random.uniform(-1, 1, 2).astype(np.float32), {}

    def step(self, action: int) -> Any:
        self.t += 1
        self.steps += 1
        if self.steps == self.after and self.kill.is_file():
            self.kill.unlink()  # once
            os.kill(os.getpid(), signal.SIGKILL)
        reward = self.worth * float(action) + self.noise * float(self.np_random.standard_normal())
        obs = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return obs, reward, self.t >= LENGTH, False, {}
