"""What a step of an environment costs, how uneven it is, and whether it computes or waits, found in a moment."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raynforce.envs import masks
from raynforce.envs.make import Env, close_env

TRIAL_SECONDS = 0.5  # seconds; an env whose first step takes longer is slow
STEPS, PASSES = 25, 3  # a trial plays the same steps again and again: the fastest time of each is what it costs
ENOUGH = 0.025  # seconds after which a trial ends all the same; most of them take a millisecond or two
FEW = 10  # steps that slow environments get longer for, within TRIAL_SECONDS: fewer do not show how uneven they are
UNEVEN = 1.5  # times as long as the fastest tenth; a shared machine moves even steps by less


@dataclass(frozen=True)
class Cost:
    seconds: float | None  # of a step with its share of the resets; infinite if none ended in time, None if it raised
    mean: float | None = None  # the same as a plain mean, which rare long steps count in: what throughput depends on
    spread: tuple[float, float] = (0.0, 0.0)  # seconds within which the fastest tenth, and nine tenths, of steps ended
    computing: float | None = None  # share of the time in which their own thread computed, if known
    steps: int = 0

    @property
    def uneven(self) -> bool:
        """Whether waiting for the slowest of several would cost much."""
        return self.spread[1] > UNEVEN * self.spread[0]

    @staticmethod
    def of(
        steps: Sequence[float], computed: Sequence[float], resets: Sequence[float], *, ends: int, length: int = 0
    ) -> Cost:
        """Of seconds that steps took and computed, and resets took; `length` steps may have been repeated."""
        length = length or len(steps)
        # On a busy machine a median moved by half between two trials where these minima moved by a twentieth.
        fastest = [min(steps[place::length]) for place in range(min(length, len(steps)))]
        low, high = (float(x) for x in np.percentile(fastest, [10, 90], method="nearest"))
        again = resets[1:]  # the first one may load what the others find
        share = ends / len(steps)
        seconds = statistics.median(fastest) + (min(again) * share if again else 0.0)
        mean = statistics.fmean(steps) + (statistics.fmean(again) * share if again else 0.0)
        return Cost(seconds, mean, (low, high), min(1.0, sum(computed) / max(1e-9, sum(steps))), len(steps))


class Stopwatch:
    """Times calls in the thread that made it, without the time it waited for a core, which would look uneven."""

    def __init__(self) -> None:
        self._file = -1
        with contextlib.suppress(OSError):  # not Linux
            self._file = os.open(_schedstat(threading.get_native_id()), os.O_RDONLY | os.O_CLOEXEC)
        self.start()

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    def start(self) -> None:
        self.queued = self._queued()
        self.computed, self.wall = time.thread_time(), time.perf_counter()

    def stop(self) -> tuple[float, float]:
        """Seconds that it took since the start, and that it computed."""
        took, computed = time.perf_counter() - self.wall, time.thread_time() - self.computed
        return max(took - (self._queued() - self.queued), computed), computed

    def _queued(self) -> float:
        """Read through an open file: to open it takes longer than most steps, and their data out of the caches."""
        return _seconds(os.pread(self._file, 100, 0))[1] if self._file >= 0 else 0.0


def occupied(thread: int) -> tuple[float, float]:
    """Seconds that a thread has computed, and stood in line for a core, by its native id."""
    try:
        with open(_schedstat(thread), "rb") as file:
            return _seconds(file.read())
    except OSError:  # not Linux, or the thread is gone
        return math.nan, 0.0


def _schedstat(thread: int) -> str:
    return f"/proc/self/task/{thread}/schedstat"


def _seconds(schedstat: bytes) -> tuple[float, float]:
    computed, queued = schedstat.split()[:2]
    return int(computed) / 1e9, int(queued) / 1e9


def try_out(made: Env) -> Cost:
    """What a step of it costs. It is closed afterwards, by a thread that waits for it if it hangs."""
    trial = _Trial(made)
    trial.start()
    try:
        trial.join(TRIAL_SECONDS)
        return trial.cost()
    finally:
        trial.leave()


class _Trial(threading.Thread):
    """Random steps in a thread of their own, because a simulator may never return."""

    def __init__(self, made: Env) -> None:
        super().__init__(name="environment trial", daemon=True)
        self._made = made
        self._left = threading.Lock()
        self._steps: list[tuple[float, float]] = []  # seconds that they took, and computed
        self._resets: list[float] = []
        self._ends = 0
        self._length = 0  # of the first pass, once it is over
        self._began: tuple[float, float, float] | None = None  # the first step: queued, computed, wall
        self._failed = False

    def run(self) -> None:
        try:
            self._play()
        except BaseException:
            self._failed = True
        self.leave()

    def leave(self) -> None:
        """Called by both sides; the second call closes the environment."""
        if not self._left.acquire(blocking=False):
            close_env(self._made)

    def cost(self) -> Cost:
        if self._steps:
            steps, computed = zip(*self._steps, strict=True)
            return Cost.of(steps, computed, self._resets[:], ends=self._ends, length=self._length)
        return Cost(None) if self._failed else Cost(math.inf, math.inf, (math.inf, math.inf), self._first_computes())

    def _first_computes(self) -> float | None:
        """Share of the first step, which is under way; None if it has not begun, or is not known."""
        if self._began is None or self.native_id is None:
            return None
        before, computed_before, wall = self._began
        computed, queued = occupied(self.native_id)
        share = (computed - computed_before) / max(1e-9, time.perf_counter() - wall - (queued - before))
        return None if math.isnan(share) else min(1.0, max(0.0, share))

    def _play(self) -> None:
        began = time.monotonic()
        with contextlib.closing(Stopwatch()) as watch:
            self._pass(watch, STEPS, began + ENOUGH / 2, began + TRIAL_SECONDS)
            self._length = len(self._steps)
            for _ in range(PASSES - 1):
                self._pass(watch, self._length, began + ENOUGH, began + ENOUGH)

    def _pass(self, watch: Stopwatch, steps: int, until: float, longest: float) -> None:
        """So many steps, the same each time; not as many if time is up, which comes later for the first `FEW`."""
        made = self._made
        made.action_space.seed(0)
        episode, ended = 0, True
        for step in range(steps):
            if self._steps and time.monotonic() > (until if step >= FEW else longest):
                return
            if ended:
                watch.start()
                seen, info = made.reset(seed=episode)
                self._resets.append(watch.stop()[0])
                episode += 1
            action = masks.random_action(made.action_space, masks.found(seen, info))
            watch.start()
            self._began = self._began or (watch.queued, watch.computed, watch.wall)
            seen, _, terminated, truncated, info = made.step(action)
            self._steps.append(watch.stop())
            ended = bool(terminated or truncated)
            self._ends += ended
