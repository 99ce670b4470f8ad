"""Environments that fail as simulators do: now and then, for ever, or by taking their process with them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

from raynforce.envs.lane import Lane
from raynforce.roles.evaluator import EVALUATION_STREAM

_leaked: list[np.ndarray] = []


class CartPole(gymnasium.Wrapper[np.ndarray, int, np.ndarray, int]):
    """CartPole-v1 as single environments, each of whose episodes follows from its seed."""

    def __init__(self, *, slow: float = 0.0) -> None:
        super().__init__(gymnasium.wrappers.TimeLimit(CartPoleEnv(), 500))
        self.slow = slow

    def step(self, action: Any) -> Any:
        if self.slow:
            time.sleep(self.slow)
        return super().step(action)

    def chance(self, p: float) -> bool:
        """Drawn from the random stream of the episode, which CartPole itself uses in `reset` alone."""
        return bool(self.unwrapped.np_random.random() < p)


class Raising(CartPole):
    """Raises in one of `1 / p` steps."""

    def __init__(self, p: float = 0.001) -> None:
        super().__init__()
        self.p = p

    def step(self, action: Any) -> Any:
        if self.chance(self.p):
            raise RuntimeError("the simulator lost its connection")
        return super().step(action)


class Garbage(CartPole):
    """Returns what is no observation or no reward in one of `1 / p` steps; in evaluation of `1 / evaluation`."""

    def __init__(self, p: float = 0.01, evaluation: float = 0.0) -> None:
        super().__init__()
        self.p = evaluation if sampler_here() == EVALUATION_STREAM else p

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = super().step(action)
        if self.chance(self.p):
            kinds: list[Any] = [obs * np.nan, np.full(4, np.inf, np.float32), np.zeros(3, np.float32), "nothing", None]
            kind = int(self.unwrapped.np_random.integers(len(kinds) + 2))
            if kind < len(kinds):
                obs = kinds[kind]
            else:
                reward = (float("nan"), "much")[kind - len(kinds)]
        return obs, reward, terminated, truncated, info


class Leaking(CartPole):
    """Keeps `megabytes` for ever with every episode."""

    def __init__(self, megabytes: float = 5.0, slow: float = 0.0) -> None:
        super().__init__(slow=slow)
        self.megabytes = megabytes

    def reset(self, **options: Any) -> Any:
        _leaked.append(np.ones(int(self.megabytes * 1e6 / 8)))
        return super().reset(**options)


class Trapped(CartPole):
    """Its episodes never end; the first that comes to `place`, make or reset, while there is a file `trap` removes it
    and hangs."""

    def __init__(self, trap: str, place: str) -> None:
        super().__init__(slow=0.002)
        self.trap, self.place = Path(trap), place
        self._come_to("make")

    def reset(self, **options: Any) -> Any:
        self._come_to("reset")
        return super().reset(**options)

    def _come_to(self, place: str) -> None:
        if place == self.place and self.trap.exists():
            self.trap.unlink(missing_ok=True)
            time.sleep(600)

    def step(self, action: Any) -> Any:
        self.unwrapped.state = np.zeros(4)  # type: ignore[attr-defined]
        obs, reward, *_ = super().step(action)
        return obs, reward, False, False, {}


class Passing(CartPole):
    """Says where it comes to: a reset or a step."""

    def reset(self, **options: Any) -> Any:
        self._come_to("reset")
        return super().reset(**options)

    def step(self, action: Any) -> Any:
        self._come_to("step")
        return super().step(action)

    def _come_to(self, where: str) -> None:
        raise NotImplementedError


class Sudden(Passing):
    """Does `what` in `where` (make, reset, step), the `at`-th time that this object is there.

    Never in the process `spared`, such as the driver, which looks at an environment before it trains. With `once`, the
    path of a file, the first that gets there makes the file, and nobody does it again.
    """

    def __init__(
        self, what: str, where: str = "step", at: int = 1, spared: int = 0, once: str = "", slow: float = 0.0
    ) -> None:
        super().__init__(slow=slow)
        self.what, self.where, self.at, self.spared, self.once = what, where, at, spared, once
        self.count = 0
        self._come_to("make")

    def _come_to(self, where: str) -> None:
        if where != self.where or os.getpid() == self.spared:
            return
        self.count += 1
        if self.count < self.at or (self.once and not _first(self.once)):
            return
        print(f"about to {self.what}", flush=True)
        fail(self.what)


def fail(what: str) -> None:
    """Fail in one of the ways that a simulator has."""
    if what == "sleep":
        time.sleep(1000)
    elif what == "hold the lock":  # as C code does that never lets another thread of Python run
        ctypes.PyDLL(None).sleep(1000)
    elif what == "segfault":
        ctypes.string_at(0)
    elif what == "exit":
        os._exit(7)
    elif what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "raise":
        raise RuntimeError("no licence")
    else:
        raise AssertionError(what)


class Doomed(Passing):
    """Of sampler `sampler`, raises in every step or reset (`where`) once one of them has taken `at` of them."""

    def __init__(self, flag: str, sampler: int = 0, where: str = "step", at: int = 100) -> None:
        super().__init__()
        self.flag, self.where, self.at = Path(flag), where, at
        self.mine = sampler_here() == sampler
        self.count = 0

    def _come_to(self, where: str) -> None:
        if self.mine and where == self.where:
            self.count += 1
            if self.count > self.at:
                self.flag.touch()
            if self.flag.exists():
                raise RuntimeError("the licence has run out")


class Misfit(CartPole):
    """Its observations are not of its space, but for the process `spared`."""

    def __init__(self, spared: int, tries: str) -> None:
        super().__init__()
        self.spared, self.tries = spared, tries

    def reset(self, **options: Any) -> Any:
        obs, info = super().reset(**options)
        if os.getpid() == self.spared:
            return obs, info
        with open(self.tries, "a") as file:
            file.write(f"{os.getpid()}\n")
        return obs[:3], info


class NotDetermined(CartPole):
    """Its observations do not follow from its seed."""

    def step(self, action: Any) -> Any:
        obs, *rest = super().step(action)
        return obs + np.random.default_rng().normal(scale=1e-3, size=4).astype(np.float32), *rest


def sampler_here() -> int | None:
    """The index of the sampler that is making an environment at the moment, as its callers know it."""
    frame = sys._getframe()
    while frame is not None:
        maker = frame.f_locals.get("self")
        if isinstance(maker, Lane):
            return maker.plan.sampler
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _first(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


class OneSleeps(CartPole):
    """In sampler 1 the third step takes seconds."""

    def step(self, action: int) -> Any:
        self._steps = getattr(self, "_steps", 0) + 1
        if self._steps == 3 and sampler_here() == 1:
            time.sleep(6)
        return super().step(action)
