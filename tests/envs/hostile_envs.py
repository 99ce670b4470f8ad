"""Environments as users write them in their first week: each is wrong, or odd, in one way."""

from __future__ import annotations

import random
import sys
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces, wrappers

STEPS = 0


class Walk(gymnasium.Env[np.ndarray, int]):
    """A noisy walk of `length` steps, sound; the faults are in its subclasses."""

    def __init__(self, length: int = 20) -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.action_space: Any = spaces.Discrete(2)
        self.length = length

    def obs(self) -> Any:
        return np.array([self.place, self.t / self.length], np.float32)

    def noise(self) -> float:
        return float(self.np_random.normal())

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.t, self.place = 0, 0.1 * self.noise()
        return self.obs(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        self.place += 0.1 * (2 * float(np.sum(action)) - 1) + 0.01 * self.noise()
        return self.obs(), -abs(self.place), abs(self.place) > 3, self.t >= self.length, {}


class LateNaN(Walk):
    """The 700th step of its life has a NaN in its observation."""

    def __init__(self, at: int = 700, length: int = 20) -> None:
        super().__init__(length)
        self.at, self.life = at, 0

    def step(self, action: Any) -> Any:
        self.life += 1
        obs, *rest = super().step(action)
        return obs * (np.nan if self.life == self.at else 1.0), *rest


class NaNAtReset(Walk):
    """The first observation of every episode holds a NaN."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        obs, info = super().reset(seed=seed)
        return obs * np.nan, info


class NaNAfterMid(Walk):
    """Gives a NaN after a reset in the middle of an episode, and only then."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.torn = 0 < getattr(self, "t", 0) < self.length
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        obs, *rest = super().step(action)
        return obs * (np.nan if self.torn else 1.0), *rest


class Curriculum(Walk):
    """Gets harder with every episode that has ended."""

    level = 0

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = super().step(action)
        self.level += bool(terminated or truncated)
        return obs, reward - self.level, terminated, truncated, info


class SavedCurriculum(Curriculum):
    """The same, and it can be saved; with `forgets`, all but the level."""

    def __init__(self, length: int = 20, forgets: bool = False) -> None:
        super().__init__(length)
        self.forgets = forgets

    def save_state(self) -> Any:
        return {"t": self.t, "place": self.place} | ({} if self.forgets else {"level": self.level})

    def load_state(self, tree: Any) -> None:
        vars(self).update(tree)


class Unseeded(Walk):
    """Draws from a stream of its own, made in `__init__`, that no reset seeds."""

    def __init__(self, length: int = 20) -> None:
        super().__init__(length)
        self.rng = np.random.default_rng(3)

    def noise(self) -> float:
        return float(self.rng.normal())


class Fresh(Walk):
    """Draws from a stream that nobody could seed."""

    def noise(self) -> float:
        return float(np.random.default_rng().normal())


class GlobalNumpy(Walk):
    """Draws from numpy's global stream."""

    def noise(self) -> float:
        return float(np.random.normal())  # noqa: NPY002


class GlobalRandom(Walk):
    """Draws from Python's global stream."""

    def noise(self) -> float:
        return random.gauss(0, 1)


class ClassCounter(Walk):
    """Counts the resets of all its copies, and starts elsewhere each time."""

    resets = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        ClassCounter.resets += 1
        _, info = super().reset(seed=seed)
        self.place += 0.01 * ClassCounter.resets
        return self.obs(), info


class NoSuper(Walk):
    """Does not hand the seed on."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return super().reset()


class GlobalCounter(Walk):
    """Counts its steps in a variable of its module."""

    def step(self, action: Any) -> Any:
        global STEPS
        STEPS += 1
        obs, reward, *rest = super().step(action)
        return obs, reward + 0.001 * STEPS, *rest


class Clock(Walk):
    """Shows the time of day."""

    def obs(self) -> Any:
        return np.array([self.place, time.time() % 100], np.float32)


class RunningMean(gymnasium.Wrapper[Any, Any, Any, Any]):
    """A user's own normaliser: takes off the mean of all that it has seen."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.count, self.mean = 0, np.zeros(2, np.float32)

    def seen(self, obs: np.ndarray) -> np.ndarray:
        self.count += 1
        self.mean = self.mean + (obs - self.mean) / self.count
        return obs - self.mean

    def reset(self, **how: Any) -> Any:
        obs, info = self.env.reset(**how)
        return self.seen(obs), info

    def step(self, action: Any) -> Any:
        obs, *rest = self.env.step(action)
        return self.seen(obs), *rest


class Unreadable(dict[str, int]):
    """A mapping that cannot be looked into."""

    def items(self) -> Any:
        raise RuntimeError("not for you")


class Hoarder(Curriculum):
    """Holds what nobody should look into: itself, a module, a mapping that raises, a large map, a lot of objects."""

    def __init__(self, length: int = 20) -> None:
        super().__init__(length)
        self.me, self.numpy, self.closed, self.chart = self, np, Unreadable(), np.zeros((2000, 2000))
        self.crowd = [[RunningMean(Walk()) for _ in range(30)] for _ in range(30)]
        self.odd = np.array([self, None], object)


class LongWalk(Walk):
    """Ends only by its time limit, which is far away."""

    def __init__(self) -> None:
        super().__init__(100_000)

    def step(self, action: Any) -> Any:
        obs, reward, _, truncated, info = super().step(action)
        return obs, reward, False, truncated, info


def wrapped(name: str, length: int = 20) -> Any:
    """The walk in a wrapper of gymnasium's, or in `RunningMean`."""
    walk = LongWalk() if name == "LongRunningMean" else Walk(length)
    if name in ("RunningMean", "LongRunningMean"):
        return RunningMean(walk)
    if name == "StickyAction":
        return wrappers.StickyAction(walk, 0.3)
    if name == "TimeAware":
        return wrappers.TimeAwareObservation(wrappers.TimeLimit(walk, 15))
    return getattr(wrappers, name)(walk)


class Leaky(Walk):
    """Breaks at the end of its life: `raises`, `exits` or `hangs` at the step `at`."""

    def __init__(self, how: str = "raises", at: int = 100) -> None:
        super().__init__()
        self.how, self.at, self.life = how, at, 0

    def step(self, action: Any) -> Any:
        self.life += 1
        if self.life == self.at:
            if self.how == "hangs":
                time.sleep(60)
            if self.how == "exits":
                sys.exit(3)
            raise ValueError("a message\nof two lines that goes on and on " + "and on " * 60)
        return super().step(action)


class Ends(Walk):
    """Ends in odd ways: `at once` in every first step, `reward` gives an inf at the end, `info` gives no dict."""

    def __init__(self, how: str = "at once") -> None:
        super().__init__(1 if how == "at once" else 20)
        self.how = how

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = super().step(action)
        if self.how == "reward" and truncated:
            reward = float("inf")
        if self.how == "info":
            return obs, reward, terminated, truncated, None
        if self.how == "large":
            reward = 1e39  # not finite once it is a float32
        return obs, reward, terminated, truncated, info


class Spaced(gymnasium.Env[Any, Any]):
    """Odd spaces, by name; it shows samples of them."""

    OBSERVATIONS: dict[str, spaces.Space[Any]] = {  # noqa: RUF012
        "image": spaces.Box(0, 255, (16, 16, 3), np.uint8),
        "float image": spaces.Box(0.0, 1.0, (3, 16, 16), np.float32),
        "scalar": spaces.Box(-1, 1, (), np.float32),
        "empty": spaces.Box(-1, 1, (0,), np.float32),
        "dict": spaces.Dict({"a": spaces.Discrete(3), "b": spaces.Dict({"c": spaces.MultiBinary(4)})}),
        "tuple": spaces.Tuple((spaces.MultiDiscrete([2, 5]), spaces.Box(-1, 1, (2,)))),
        "slash": spaces.Dict({"a/b": spaces.Discrete(3)}),
        "text": spaces.Text(4),
        "graph": spaces.Graph(spaces.Box(-1, 1, (2,)), None),
        "sequence": spaces.Sequence(spaces.Discrete(3)),
        "start": spaces.Discrete(5, start=-2),
        "float64": spaces.Box(-1, 1, (3,), np.float64),
        "bool": spaces.Box(0, 1, (3,), bool),
        "int": spaces.Box(-1000, 1000, (3,), np.int64),
    }
    ACTIONS: dict[str, spaces.Space[Any]] = {  # noqa: RUF012
        "discrete": spaces.Discrete(3),
        "start": spaces.Discrete(3, start=5),
        "box": spaces.Box(-2.0, 2.0, (3,), np.float32),
        "box of one side": spaces.Box(np.array([0.0], np.float32), np.array([np.inf], np.float32)),
        "box of ints": spaces.Box(0, 5, (2,), np.int32),
        "scalar box": spaces.Box(-1, 1, (), np.float32),
        "multi": spaces.MultiDiscrete([2, 3]),
        "grid": spaces.MultiDiscrete(np.array([[2, 3], [4, 5]])),
        "binary": spaces.MultiBinary(3),
        "dict": spaces.Dict({"move": spaces.Discrete(2)}),
        "one": spaces.Discrete(1),
    }

    def __init__(self, obs: str = "float64", action: str = "discrete") -> None:
        self.observation_space, self.action_space = self.OBSERVATIONS[obs], self.ACTIONS[action]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.t = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), f"{action!r} is not in {self.action_space}"
        self.t += 1
        return self.observation_space.sample(), 1.0, False, self.t >= 10, {}


class NoReset(gymnasium.Env[Any, Any]):
    """The template of somebody who was called away."""

    observation_space, action_space = spaces.Box(-1, 1, (1,)), spaces.Discrete(2)


class NoSpaces(gymnasium.Env[Any, Any]):
    """Sets no spaces."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return np.zeros(1, np.float32), {}


class NoSeed(Walk):
    """The reset of old gym."""

    def reset(self) -> Any:  # type: ignore[override]
        return super().reset()


class Huge(Walk):
    """Rewards and observations beyond what a float32 holds."""

    def obs(self) -> Any:
        return np.array([1e300, self.t], np.float64)
