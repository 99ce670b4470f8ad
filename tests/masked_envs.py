"""Environments with action masks, some of which are wrong in one way each."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from raynforce.envs.tiny import MaskedGrid


class Locks(gymnasium.Env[Any, Any]):
    """Several choices at once, all but a few of them forbidden, others at each step; the best return is `length`.

    Pays for the share of choices that are the highest allowed ones, which the observation tells; raises on a forbidden
    one. The last mask forbids everything, if it ends by itself.
    """

    SIZES = (3, 4)

    def __init__(self, length: int = 8, truncates: bool = False) -> None:
        self.length, self.truncates = length, truncates
        self.observation_space = spaces.Box(0, 1, (sum(self.SIZES),))
        self.action_space = spaces.MultiDiscrete(self.SIZES, start=(5, 0))

    def _seen(self, over: bool = False) -> tuple[Any, dict[str, Any]]:
        self.mask = (self.np_random.random(sum(self.SIZES)) < 0.5).astype(np.int8)
        self.mask[[self.np_random.integers(3), 3 + self.np_random.integers(4)]] = 1
        shown = self.mask.astype(np.float32)
        if over and not self.truncates:
            self.mask[:] = 0
        return shown, {"action_mask": self.mask.copy()}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self._seen()

    def step(self, action: np.ndarray) -> Any:
        parts, choices = np.split(self.mask, [3]), action - np.array([5, 0])
        assert all(part[choice] for part, choice in zip(parts, choices, strict=True)), f"{action} is forbidden"
        best = [np.flatnonzero(part)[-1] for part in parts]
        self.steps += 1
        over = self.steps == self.length
        seen, info = self._seen(over)
        return seen, float(np.mean(choices == best)), over and not self.truncates, over and self.truncates, info


class Wrong(MaskedGrid):
    """`MaskedGrid` whose masks are wrong from step `at` on; 0 is the first reset."""

    def __init__(self, fault: str, at: int = 3) -> None:
        super().__init__()
        self.fault, self.at, self.count = fault, at, 0

    def reset(self, **how: Any) -> Any:
        self.count = 0
        return super().reset(**how)

    def _seen(self) -> tuple[Any, dict[str, Any]]:
        seen, info = super()._seen()
        if self.count >= self.at:
            wrong: dict[str, Any] = {"everything": np.zeros(8, np.int8), "length": np.ones(5, np.int8)}
            wrong |= {"dtype": np.full(8, 0.5), "values": np.full(8, 2), "missing": None}
            info = {} if self.fault == "missing" else {"action_mask": wrong[self.fault]}
        self.count += 1
        return seen, info


class Continuous(gymnasium.Env[Any, Any]):
    """Masks where there are none to be had."""

    observation_space, action_space = spaces.Box(-1, 1, (2,)), spaces.Box(-1, 1, (2,))

    def __init__(self, where: str = "info") -> None:
        self.where = where
        if where == "obs":
            self.observation_space = spaces.Dict(x=spaces.Box(-1, 1, (2,)), action_mask=spaces.MultiBinary(2))  # type: ignore[assignment]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {"action_mask": np.ones(2, np.int8)}

    def step(self, action: np.ndarray) -> Any:
        return np.zeros(2, np.float32), 0.0, False, False, {}


class Leaf(MaskedGrid):
    """A leaf `action_mask` of another shape or dtype than actions have."""

    def __init__(self, fault: str) -> None:
        super().__init__(masks="obs")
        flags = {"length": spaces.MultiBinary(3), "dtype": spaces.Box(0, 1, (8,)), "alone": spaces.MultiBinary(8)}
        place = {} if fault == "alone" else {"place": spaces.Box(0.0, 1.0, (2,))}
        self.observation_space = spaces.Dict(**place, action_mask=flags[fault])


class GridVector(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """`MaskedGrid`s as an implementation of their own, with masks in `infos`, in each of the three ways to reset."""

    def __init__(self, num_envs: int, mode: str = "NextStep") -> None:
        self.num_envs, self.mode = num_envs, AutoresetMode(mode)
        self.metadata = {"autoreset_mode": self.mode}
        self.envs = [MaskedGrid(n=3) for _ in range(num_envs)]
        self.single_observation_space, self.single_action_space = (
            self.envs[0].observation_space,
            self.envs[0].action_space,
        )
        self.observation_space = gymnasium.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gymnasium.vector.utils.batch_space(self.single_action_space, num_envs)
        self.over = np.zeros(num_envs, bool)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        which = (options or {}).get("reset_mask", np.ones(self.num_envs, bool))
        for i, env in enumerate(self.envs):
            if which[i]:
                env.reset(seed=None if seed is None else seed + i)
        self.over &= ~which
        return self._seen()

    def _seen(self) -> Any:
        each = [env._seen() for env in self.envs]
        return np.stack([seen for seen, _ in each]), {
            "action_mask": np.stack([info["action_mask"] for _, info in each])
        }

    def step(self, actions: Any) -> Any:
        reward, flags, finals = np.zeros(self.num_envs), np.zeros((2, self.num_envs), bool), {}
        for i, env in enumerate(self.envs):
            if self.over[i]:
                env.reset()
                continue
            seen, reward[i], flags[0, i], flags[1, i], info = env.step(int(actions[i]))
            if flags[:, i].any() and self.mode is AutoresetMode.SAME_STEP:
                finals[i] = seen, info["action_mask"]
                env.reset()
        self.over = flags.any(axis=0) & (self.mode is AutoresetMode.NEXT_STEP)
        seen, infos = self._seen()
        if finals:
            last, told, there = (
                np.zeros_like(seen),
                np.zeros((self.num_envs, 8), np.int8),
                np.zeros(self.num_envs, bool),
            )
            for i, (final, mask) in finals.items():
                last[i], told[i], there[i] = final, mask, True
            infos |= {"final_obs": last, "final_info": {"action_mask": told, "_action_mask": there}}
        return seen, reward, *flags, infos


class NoneAtAll(MaskedGrid):
    """Says in `info` that it has no mask."""

    def __init__(self) -> None:
        super().__init__(masks="none")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return super().reset(seed=seed)[0], {"action_mask": None}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return *super().step(action)[:4], {"action_mask": None}
