"""What a step of an environment costs, how uneven it is, and whether it computes or waits, found in a moment."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raynforce.envs.make import Env, close_env, make_described
from raynforce.spaces import EnvSpec

PATIENCE = 0.5  # seconds; whoever is not through its first step by then is slow
ENOUGH_SECONDS, ENOUGH_STEPS = 0.025, 50  # a trial ends with either, so most of them take a millisecond or two
FEW = 10  # steps that slow environments are given longer for, within PATIENCE: fewer do not show how uneven they are
UNEVEN = 1.5  # times as long as the fastest tenth; a shared machine moves even steps by less


@dataclass(frozen=True)
class Cost:
    """What the steps of a trial took."""

    seconds: float | None
    """Of a step with its share of the resets, robust against the odd step that was held up; infinite if not even one
    ended in time, None if the environment raised before."""
    mean: float | None = None
    """The same as a plain mean, which rare long steps count in: what throughput depends on."""
    spread: tuple[float, float] = (0.0, 0.0)
    """Seconds within which the fastest tenth of the steps ended, and all but the slowest tenth. They are steps that
    there were, so that one that was held up moves neither far; a deviation would be all its."""
    computing: float | None = None
    """Share of the steps' time in which their thread computed; None: not known. An environment that computes in
    threads or processes of its own waits for these, and counts as waiting."""
    steps: int = 0

    @property
    def uneven(self) -> bool:
        """Whether waiting for the slowest of several would cost much."""
        return self.spread[1] > UNEVEN * self.spread[0]

    @staticmethod
    def of(steps: Sequence[float], computed: Sequence[float], resets: Sequence[float]) -> Cost:
        """Of the seconds that steps took, at least one, that they computed, and that resets took."""
        again = resets[1:]  # the first one may load what the others find
        low, high = (float(x) for x in np.percentile(steps, [10, 90], method="nearest"))
        return Cost(
            seconds=statistics.median(steps) + (min(again) * len(again) / len(steps) if again else 0.0),
            mean=(sum(steps) + sum(again)) / len(steps),
            spread=(low, high),
            computing=min(1.0, sum(computed) / max(1e-9, sum(steps))),
            steps=len(steps),
        )


class Stopwatch:
    """Times one call in this thread, without the time in which that was ready to go on and had no core to do so.

    Else environments would seem uneven, and to wait, on a machine that is busy with something else.
    """

    def __init__(self) -> None:
        self.queued = occupied()[1]
        self.computed, self.wall = time.thread_time(), time.perf_counter()

    def stop(self) -> tuple[float, float]:
        """Seconds that it took, and that it computed."""
        took, computed = time.perf_counter() - self.wall, time.thread_time() - self.computed
        return max(took - (occupied()[1] - self.queued), computed), computed


def occupied(thread: int | None = None) -> tuple[float, float]:
    """Seconds that a thread has computed, and stood in line for a core; by its native id, or this one."""
    try:
        with open(f"/proc/self/task/{thread or threading.get_native_id()}/schedstat") as file:
            computed, queued = (int(n) / 1e9 for n in file.read().split()[:2])
    except (OSError, ValueError):  # not Linux, or the thread is gone
        return math.nan if thread else 0.0, 0.0
    return computed, queued


def probe_cost(env: str, env_args: Mapping[str, Any] | None = None) -> tuple[EnvSpec, Cost]:
    """What `probe` finds, and what a step costs; of an environment that raises the roles will say what is wrong."""
    made, spec = make_described(env, env_args)
    trial = _Trial(made)
    trial.start()
    try:
        trial.join(PATIENCE)
        return spec, trial.cost()
    finally:
        trial.leave()


class _Trial(threading.Thread):
    """Random steps in a thread of their own, because a simulator may never return."""

    def __init__(self, made: Env) -> None:
        super().__init__(name="environment trial", daemon=True)
        self._made = made
        self._left = threading.Lock()
        self._steps: list[float] = []
        self._computed: list[float] = []
        self._resets: list[float] = []
        self._first: Stopwatch | None = None
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

    def cost(self) -> Cost:
        """What is known by now."""
        computed, resets = self._computed[:], self._resets[:]
        if computed:
            return Cost.of(self._steps[: len(computed)], computed, resets)
        return Cost(None) if self._failed else Cost(math.inf, math.inf, (math.inf, math.inf), self._first_computes())

    def _first_computes(self) -> float | None:
        """Share of the first step, which is under way; None if it has not begun, or nobody can tell."""
        first = self._first
        if first is None or self.native_id is None:
            return None
        computed, queued = occupied(self.native_id)
        share = (computed - first.computed) / max(1e-9, time.perf_counter() - first.wall - (queued - first.queued))
        return None if math.isnan(share) else min(1.0, max(0.0, share))

    def _play(self) -> None:
        made, began = self._made, time.monotonic()
        enough, longest = began + ENOUGH_SECONDS, began + PATIENCE
        made.action_space.seed(0)
        ended = True
        while len(self._steps) < ENOUGH_STEPS:
            if self._steps and time.monotonic() > (enough if len(self._steps) >= FEW else longest):
                break
            if ended:
                watch = Stopwatch()
                made.reset(seed=len(self._resets))
                self._resets.append(watch.stop()[0])
            action = made.action_space.sample()
            watch = Stopwatch()
            self._first = self._first or watch
            _, _, terminated, truncated, _ = made.step(action)
            took, computed = watch.stop()
            self._steps.append(took)
            self._computed.append(computed)
            ended = bool(terminated or truncated)
