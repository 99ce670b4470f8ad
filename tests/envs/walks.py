"""A walk whose running episodes can be saved, in many ways, right and wrong."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from raynforce.envs.snapshots import register_snapshot


class Plain(gymnasium.Env[np.ndarray, int]):
    """Pushed left and right, with noise, until it is far away; its speed is hidden, and it has no pair.

    `drifts` lets rewards depend on how many steps all walks have taken, `wanders` the starts on how many resets.
    """

    taken = resets = 0

    def __init__(self, far: float = 3.0, drifts: bool = False, wanders: bool = False) -> None:
        self.observation_space, self.action_space = spaces.Box(-10_000, 10_000, (1,)), spaces.Discrete(2)
        self.far, self.drifts, self.wanders = far, drifts, wanders

    def obs(self) -> np.ndarray:
        return np.array([self.body[0]], np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        Plain.resets += 1
        self.body = np.array([self.np_random.normal() + self.wanders * Plain.resets, 0.0])  # place, speed
        return self.obs(), {}

    def step(self, action: int) -> Any:
        Plain.taken += 1
        self.body[1] += 0.1 * (2 * action - 1) + 0.1 * self.np_random.normal()
        self.body[0] += self.body[1]
        reward = float(self.body[1]) + self.drifts * Plain.taken
        return self.obs(), reward, abs(self.body[0]) > self.far, False, {}


class Walk(Plain):
    """With a pair that has the fault of that name, or none; those of `save …` come when the walk is saved after
    `after` times."""

    def __init__(self, fault: str = "", after: int = 0, **more: Any) -> None:
        super().__init__(**more)
        self.fault, self.after = fault, after

    def save_state(self) -> Any:
        self.after -= 1
        if self.fault == "save raises" and self.after < 0:
            raise RuntimeError("no space\nin memory")
        if self.fault == "save draws":
            self.np_random.random()
        if self.fault == "forgets":
            return {"place": self.body[0]}
        others = {"pickle": b"\x80", "tuple": (1.0, 2.0), "object": self, "objects": np.array([self]), "key": {3: 1}}
        if self.fault in others:
            return {"body": others[self.fault]}
        return self.body if self.fault == "array" else {"body": self.body}

    def load_state(self, tree: Any) -> None:
        if self.fault == "load raises":
            raise RuntimeError("another version")
        if self.fault == "forgets":
            self.body[0] = tree["place"]
            return
        self.body = tree["body"]  # kept, and written to from now on
        if self.fault == "lies":
            self.body[1] = 0.0


class Half(Plain):
    def save_state(self) -> Any:
        raise AssertionError


class Stranger(Plain):
    """Cannot be edited, but there is a snapshot."""


class StrangerSnapshot:
    def save(self, env: Any) -> Any:
        return {"body": env.body}

    def load(self, env: Any, tree: Any) -> None:
        env.body[:] = tree["body"]


register_snapshot("walks:Stranger", StrangerSnapshot())


class Delayed(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Takes each action a step late. It forwards all names, so it seems to have the pair of the walk inside."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.late = 0
        return self.env.reset(seed=seed, options=options)

    def step(self, action: int) -> Any:
        action, self.late = self.late, action
        return self.env.step(action)


class Saved(Delayed):
    """With a pair of its own around that of the walk."""

    def save_state(self) -> Any:
        return {"late": self.late, "inside": self.env.save_state()}  # type: ignore[attr-defined]

    def load_state(self, tree: Any) -> None:
        self.late = tree["late"]
        self.env.load_state(tree["inside"])  # type: ignore[attr-defined]


def delayed(**args: Any) -> Any:
    return Delayed(Walk(**args))


def saved(**args: Any) -> Any:
    """A time limit inside of the pair and one outside."""
    from gymnasium.wrappers import TimeLimit

    class Inner(TimeLimit):
        def save_state(self) -> Any:
            return self.env.save_state()  # type: ignore[attr-defined]

        def load_state(self, tree: Any) -> None:
            self.env.load_state(tree)  # type: ignore[attr-defined]

    return TimeLimit(Saved(Inner(Walk(**args), 29)), 31)


def wrapped(**args: Any) -> Any:
    """Wrappers that are known to have no state."""
    from gymnasium.wrappers import ClipReward, FlattenObservation

    return ClipReward(FlattenObservation(Walk(**args)), -1.0, 1.0)
