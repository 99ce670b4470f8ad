"""Environments for the tests of lanes: they do as a script says, or cannot live in a thread."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import numpy as np
from bad_envs import Counter
from gymnasium import spaces

awake = threading.Event()
"""Lets go of those that hang in this process."""


class Scripted(Counter):
    """A `Counter` that does at some steps (0: its reset) of the episode of a seed what `script` says, or of all (-1).

    A number is slept for; `hang`, `raise`, `nan`, `exit` and `kill` are what they say.
    """

    def __init__(self, script: dict[int, dict[int, Any]] | None = None, length: int = 5) -> None:
        super().__init__(length)
        self.script = script or {}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        result = super().reset(seed=seed)
        return self.does(0, result)

    def step(self, action: Any) -> Any:
        return self.does(self.t + 1, super().step(action))

    def does(self, t: int, result: Any) -> Any:
        what = self.script.get(self.seed_seen or 0, self.script.get(-1, {})).get(t)
        if isinstance(what, float):
            time.sleep(what)
        elif what == "hang":
            awake.wait(30)
        elif what == "raise":
            raise ZeroDivisionError("division by zero")
        elif what == "nan":
            return result[0] * np.nan, *result[1:]
        elif what == "exit":
            os._exit(3)
        elif what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return result


class MainThread(Counter):
    """Sets a signal handler, which only a main thread can, at `place`: `make`, `reset` or `step`."""

    def __init__(self, place: str = "make") -> None:
        super().__init__()
        self.place = place
        self.at("make")

    def at(self, place: str) -> None:
        if place == self.place:
            signal.signal(signal.SIGUSR1, lambda *_: None)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.at("reset")
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        self.at("step")
        return super().step(action)


class Turning(Counter):
    """A box action and several observations: what the seed drew, how often each of three was chosen."""

    def __init__(self, length: int = 7) -> None:
        super().__init__(length)
        box = spaces.Box(-100.0, 100.0, (3,), np.float32)
        self.observation_space = spaces.Dict({"sum": box, "many": spaces.MultiDiscrete([9, 9])})  # type: ignore
        self.action_space = spaces.Box(-1.0, 1.0, (3,), np.float64)  # type: ignore

    def obs(self) -> Any:
        return {"sum": self.sum.astype(np.float32), "many": np.array([self.t, self.start % 9])}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.sum = np.zeros(3)
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        assert action.dtype == np.float64
        self.sum += action * self.np_random.random()
        return super().step(action)
