"""Small environments for the tests: one that counts, and many that break their contract in one way each."""

from __future__ import annotations

import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Counter(gymnasium.Env[np.ndarray, int]):
    """Shows (a number drawn at reset, steps so far); ends after `length` steps in the way that `end` says."""

    def __init__(self, length: int = 3, end: str = "terminated", dtype: str = "float32") -> None:
        self.observation_space = spaces.Box(0, 10_000, (2,), np.dtype(dtype).type)
        self.action_space = spaces.Discrete(2)
        self.length, self.end, self.dtype = length, end, dtype

    def obs(self) -> Any:
        return np.array([self.start, self.t], self.dtype)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.start, self.t, self.seed_seen = int(self.np_random.integers(1, 10_000)), 0, seed
        return self.obs(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        over = self.t >= self.length
        return self.obs(), float(self.t), over and "term" in self.end, over and "trunc" in self.end, {}


class Bad(Counter):
    """A `Counter` with one fault."""

    def __init__(self, fault: str = "", length: int = 5, end: str = "truncated") -> None:
        super().__init__(length, end)
        self.fault, self.memory = fault, np.zeros(2, np.float32)
        if fault == "text":
            self.observation_space = spaces.Text(5)  # type: ignore[assignment]
        elif fault == "discrete":
            self.observation_space = spaces.Discrete(3)  # type: ignore[assignment]
        elif fault == "unbounded":
            self.action_space = spaces.Box(-np.inf, np.inf, (1,))  # type: ignore[assignment]
        elif fault == "make":
            raise RuntimeError("no licence")

    def obs(self) -> Any:
        obs = np.array([self.start, self.t], np.float32)
        if self.fault == "alias":
            self.memory[:] = obs
            return self.memory
        if self.fault == "random":
            obs[0] = np.random.default_rng().random()
        if self.fault == "late" and self.t == 2:
            obs[0] = np.random.default_rng().random()
        if self.fault == "nan" and self.t == 2:
            obs[1] = np.nan
        others = {"shape": obs[:1], "none": None, "float64": obs.astype(np.float64), "outside": -obs}
        others |= {"dict": {"a": obs}, "discrete": 7, "text": "abc", "large": obs}
        return others.get(self.fault, obs)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if self.fault == "fixed":
            seed = 0
        if self.fault == "reset raises":
            raise KeyError("map")
        if self.fault == "mid" and getattr(self, "t", 0) not in (0, self.length):
            raise RuntimeError("not now")
        result = super().reset(seed=seed)
        return result[0] if self.fault == "reset obs" else result

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = super().step(action)
        if self.fault == "step raises" and self.t == 3:
            raise ZeroDivisionError("division by zero\nsecond line")
        if self.fault == "old":
            return obs, reward, truncated, info
        if self.fault == "slow":
            time.sleep(0.004)
        rewards = {"reward": np.ones(2), "reward text": "1", "reward nan": float("nan")}
        flags = {"flag": None, "int flag": int(truncated)}
        return obs, rewards.get(self.fault, reward), terminated, flags.get(self.fault, truncated), info


class Tensor:
    """Cannot become an array, like one that has a gradient."""

    def __array__(self, *args: Any, **more: Any) -> np.ndarray:
        raise RuntimeError("detach it")


class Scripted(Counter):
    """A `Counter` whose episode of a seed in `script` breaks at a step (0: its reset) in the way that is named there.

    `every` breaks all episodes, at that step. `closed` and `made` count environments.
    """

    closed = made = 0

    def __init__(
        self, script: dict[int, tuple[int, str]] | None = None, length: int = 5, every: int = -1, end: str = "truncated"
    ) -> None:
        super().__init__(length, end)
        self.script, self.every = script or {}, every
        Scripted.made += 1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        result = super().reset(seed=seed)
        return self.broken(0, result)

    def step(self, action: Any) -> Any:
        return self.broken(self.t + 1, super().step(action))

    def broken(self, t: int, result: Any) -> Any:
        at, kind = (self.every, "raise") if self.every >= 0 else self.script.get(self.seed_seen or 0, (-1, ""))
        if t != at:
            return result
        if kind == "raise":
            raise ZeroDivisionError("division by zero\nsecond line")
        if kind == "exit":
            raise SystemExit(3)
        obs, *rest = result
        observations = {"nan": obs * np.nan, "inf": obs + np.inf, "shape": obs[:1], "none": None, "tensor": Tensor()}
        if kind in observations:
            return observations[kind], *rest
        _, terminated, truncated, info = rest
        rewards = {"reward": np.ones(2), "text": "1", "nan reward": np.nan, "large reward": 1e39, "huge": 10**400}
        if kind in rewards:
            return obs, rewards[kind], terminated, truncated, info
        if kind == "flag":
            return obs, 1.0, terminated, None, info
        return obs, 1.0, terminated, info  # the old interface

    def close(self) -> None:
        Scripted.closed += 1
        raise RuntimeError("it cannot even be closed")


class Flaky(Counter):
    """A `Counter` that raises with probability `p` in each step, by its seed; `p_reset` in each reset."""

    def __init__(self, p: float = 0.1, length: int = 20, p_reset: float = 0.0) -> None:
        super().__init__(length)
        self.p, self.p_reset = p, p_reset

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        result = super().reset(seed=seed)
        if self.np_random.random() < self.p_reset:
            raise RuntimeError("no map")
        return result

    def step(self, action: Any) -> Any:
        if self.np_random.random() < self.p:
            raise RuntimeError("bad luck")
        return super().step(action)


def not_an_env() -> dict[str, int]:
    return {}


a_number = 3
