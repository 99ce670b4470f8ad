"""What a step of an environment costs, found in a tenth of a second at most."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Mapping
from typing import Any

from raynforce.envs.make import Env, close_env, make_described
from raynforce.spaces import EnvSpec

PATIENCE = 0.1  # seconds; whoever is not through its first step by then is slow
ENOUGH_SECONDS, ENOUGH_STEPS = 0.025, 50  # a trial ends with either, so most of them take a millisecond or two


def probe_cost(env: str, env_args: Mapping[str, Any] | None = None) -> tuple[EnvSpec, float | None]:
    """What `probe` finds, and the seconds of a step with its share of the resets.

    The seconds are infinite if not even one step ended in time, and None if the environment raised before: the roles
    will say what is wrong with it.
    """
    made, spec = make_described(env, env_args)
    trial = _Trial(made)
    trial.start()
    try:
        trial.join(PATIENCE)
        return spec, trial.seconds()
    finally:
        trial.leave()


class _Trial(threading.Thread):
    """Random steps in a thread of their own, because a simulator may never return."""

    def __init__(self, made: Env) -> None:
        super().__init__(name="environment trial", daemon=True)
        self._made = made
        self._left = threading.Lock()
        self._steps: list[float] = []
        self._resets: list[float] = []
        self._failed = False

    def run(self) -> None:
        try:
            self._play()
        except BaseException:
            self._failed = True
        self.leave()

    def leave(self) -> None:
        """Called by both sides: the environment is closed by whoever has no more use for it last."""
        if not self._left.acquire(blocking=False):
            close_env(self._made)

    def seconds(self) -> float | None:
        """Robust against the odd step that was held up: a cheap environment must not be taken for a slow one."""
        steps, resets = self._steps[:], self._resets[:]
        if not steps:
            return None if self._failed else math.inf
        again = resets[1:]  # the first one may load what the others find
        return statistics.median(steps) + (min(again) * len(again) / len(steps) if again else 0.0)

    def _play(self) -> None:
        made, until = self._made, time.monotonic() + ENOUGH_SECONDS
        made.action_space.seed(0)
        ended = True
        while len(self._steps) < ENOUGH_STEPS and (time.monotonic() < until or not self._steps):
            if ended:
                began = time.perf_counter()
                made.reset(seed=len(self._resets))
                self._resets.append(time.perf_counter() - began)
            action = made.action_space.sample()
            began = time.perf_counter()
            _, _, terminated, truncated, _ = made.step(action)
            self._steps.append(time.perf_counter() - began)
            ended = bool(terminated or truncated)
