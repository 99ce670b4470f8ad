"""What users may bring: environments and algorithms that break in one way each, at a moment that the test chooses."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from raynforce import Algorithm

sick = False  # `Sick` breaks while this is set


class Plain(gymnasium.Env[np.ndarray, int]):
    """Counts to five, one point for each step."""

    def __init__(self, fault: str = "") -> None:
        self.observation_space, self.action_space = spaces.Box(0, 10, (1,)), spaces.Discrete(2)
        self.fault = fault
        if self.broken():
            self.fail("make")

    def broken(self) -> bool:
        return True

    def fail(self, where: str) -> None:
        if self.fault == f"{where} raises":
            raise RuntimeError("no licence\nsecond line")
        if self.fault == f"{where} exits":
            sys.exit()  # what a script does that was not made to be imported

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        if self.broken():
            self.fail("reset")
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> Any:
        self.t += 1
        obs: Any = np.full(1, self.t, np.float32)
        reward: Any = 1.0
        if self.broken():
            self.fail("step")
            obs = {"nan obs": obs * np.nan, "shape": np.zeros(2, np.float32), "none": None}.get(self.fault, obs)
            reward = {"nan reward": np.nan, "inf reward": np.inf, "text reward": "1"}.get(self.fault, reward)
        return obs, reward, self.t >= 5, False, {}

    def close(self) -> None:
        if self.broken():
            self.fail("close")


class Sick(Plain):
    """Well until `sick` is set."""

    def broken(self) -> bool:
        return sick


class SickInEvaluation(Plain):
    """Well in training."""

    def broken(self) -> bool:
        frame = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
            if frame.f_globals.get("__name__") == "raynforce.roles.evaluator":
                return True
        return False


class Talkative(Plain):
    """Prints to stdout whenever it can."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        print('{"noise": "reset"}')
        return super().reset(seed=seed)

    def close(self) -> None:
        print('{"noise": "close"}')


class Continuous(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.action_space = spaces.Box(-1, 1, (1,))  # type: ignore[assignment]


def not_an_env() -> int:
    return 3


number = 3


class Unfinished(Algorithm[Any]):
    """Nothing is defined."""


class Stumbling(Plain):
    """Raises in one of thirty steps or so, by its seed."""

    def step(self, action: int) -> Any:
        if self.np_random.random() < 0.03:
            raise RuntimeError("it stumbled")
        return super().step(action)


class Interrupting(Plain):
    """Sends its process a signal in its hundredth step, if the file `signal` is there, and removes it."""

    count = 0

    def step(self, action: int) -> Any:
        self.count += 1
        if self.count == 100 and (file := Path("signal")).exists():
            number = int(file.read_text())
            file.unlink()
            os.kill(os.getpid(), number)
        return super().step(action)
