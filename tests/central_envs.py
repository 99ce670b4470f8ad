"""Environments that go their own pace: they count, wait, fail in one lane alone, and write down what they play."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np
from fault_envs import fail
from gymnasium import spaces

from raynforce.envs.lane import Lane


class Steps(gymnasium.Env[np.ndarray, int]):
    """Shows (a number drawn from the seed, steps so far); step t pays t. Ends after `length` steps.

    Each step takes `seconds`, in lane `slow` so many `times` longer. In lane `lane` the `at`-th step of an environment
    does `what`; with a file `once` the first alone, or from then on all, `for_ever`. Seeds of episodes go to `log`.
    """

    observation_space = spaces.Box(0, 1e6, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(
        self,
        length: int = 7,
        seconds: float = 0.0,
        slow: int = -1,
        times: float = 10.0,
        what: str = "",
        lane: int = -1,
        at: int = 1,
        once: str = "",
        for_ever: bool = False,
        log: str = "",
    ) -> None:
        self.length, self.what, self.at, self.once, self.log = length, what, at, once, log
        here = lane_here()
        self.fails = bool(what) and here is not None and here == lane
        self.seconds = seconds * (times if here == slow else 1.0)
        self.count, self.for_ever = 0, for_ever

    def _now(self) -> bool:
        if self.for_ever and Path(self.once).exists():
            return True
        return self.count == self.at and _once(self.once)

    def obs(self) -> np.ndarray:
        return np.array([self.number, self.t], np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.number, self.t = int(self.np_random.integers(1, 1_000_000)), 0
        self.played = f"{seed}\n" if self.log and lane_here() is not None else ""
        return self.obs(), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        if self.played and not self.t:
            with open(self.log, "a") as file:
                file.write(self.played)
        if self.seconds:
            time.sleep(self.seconds)
        if self.fails and self._now():
            if self.what == "nan":
                return self.obs() * np.nan, 1.0, False, False, {}
            fail(self.what)
        self.t += 1
        return self.obs(), float(self.t), self.t >= self.length, False, {}


def lane_here() -> int | None:
    """The lane whose environment is being made or reset at the moment; None in a probe, or in evaluation."""
    frame: Any = sys._getframe()
    while frame is not None:
        maker = frame.f_locals.get("self")
        if isinstance(maker, Lane):
            return maker.number if maker.plan.sampler == 0 else None
        frame = frame.f_back
    return None


def _once(path: str) -> bool:
    if not path:
        return True
    try:
        Path(path).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class NoReset(Steps):
    """Raises in the `at`-th reset of an environment."""

    def __init__(self, at: int = 3) -> None:
        super().__init__(length=8)
        self.resets, self.bad = 0, at

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.resets += 1
        if self.resets == self.bad:
            raise RuntimeError("no reset today")
        return super().reset(seed=seed)


class MainThread(Steps):
    """Sets a signal handler, which only a main thread can, at `place`: `make`, `reset` or `step`."""

    def __init__(self, place: str = "make") -> None:
        super().__init__()
        self.place = place
        self._at("make")

    def _at(self, place: str) -> None:
        if place == self.place:
            signal.signal(signal.SIGUSR1, lambda *_: None)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self._at("reset")
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        self._at("step")
        return super().step(action)


class Several:
    """`Steps` of three agents, which see and earn the same; the first leaves two steps before the others."""

    metadata: ClassVar[dict[str, Any]] = {}
    render_mode = None

    def __init__(self, **how: Any) -> None:
        self.env = Steps(**how)
        self.possible_agents, self.agents = ["early", "one", "other"], list[str]()

    def observation_space(self, agent: str) -> Any:
        return Steps.observation_space

    def action_space(self, agent: str) -> Any:
        return Steps.action_space

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.agents = list(self.possible_agents)
        return dict.fromkeys(self.agents, self.env.reset(seed=seed)[0]), {}

    def step(self, said: dict[str, Any]) -> Any:
        here, (seen, reward, over, _, _) = self.agents, self.env.step(0)
        left = {agent: over or (agent == "early" and self.env.t + 2 >= self.env.length) for agent in here}
        self.agents = [agent for agent in here if not left[agent]]
        return dict.fromkeys(here, seen), dict.fromkeys(here, reward), left, dict.fromkeys(here, False), {}

    def close(self) -> None: ...
