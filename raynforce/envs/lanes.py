"""Single environments that are stepped side by side: each at its own pace, or together as one vector environment."""

from __future__ import annotations

import math
import select
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from raynforce import settings
from raynforce.envs.executors import EnvExecutor, EnvFacts, LaneReport, Threads, require_files, require_tasks
from raynforce.envs.faults import EnvFault, count_break
from raynforce.envs.lane import LanePlan
from raynforce.envs.local import LaneVector
from raynforce.envs.make import closed_on_error
from raynforce.envs.processes import Processes
from raynforce.envs.vector import Parallel, derive_seed, first_of_attempt
from raynforce.errors import EnvError, UsageError, summary
from raynforce.infos import NOTHING, Info

_UNFIT = ("main thread", "event loop in thread")  # what is said where signals or asyncio are used in a thread


class BrokenLane(NamedTuple):
    """A lane whose step did not happen: its environment broke, and a new one has begun another episode."""

    lane: int
    code: str  # as `EnvFault.kind`: `raised`, `garbage`, `hung` or `died`
    text: str
    facts: Mapping[str, Any]  # those of `EnvFault`


class Lanes:
    """Single environments that are stepped side by side, each at its own pace.

    `parallel`: `no` steps them one after another in the calling thread, `threads` has a thread for each (for envs that
    wait), `processes` a process (for those that compute, or must not be in a thread). `collect` answers each lane that
    was asked to step once: as done, or as `Broken`.

    An env that raises or returns garbage is made again where it is (see `Lane`). One that hangs longer than
    `hang_seconds` is abandoned (thread) or killed (process) by `overdue`; a process that ends is noticed by `collect`.
    The lane's next episode begins in a new env; `BREAKS_IN_A_ROW` in a row is an `EnvError`, after which it can only be
    closed. Lane i has the number `first` + i in faults and seeds.
    """

    def __init__(
        self,
        env: str,
        args: Mapping[str, Any] | None,
        count: int,
        *,
        seed: int,
        sampler: int = 0,
        first: int = 0,
        parallel: Parallel,
        attempt: int = 0,
        record: bool = False,
        hang_seconds: float = math.inf,
        masked: bool = False,
    ) -> None:
        self.count = count
        self.hang_seconds, self._parallel = hang_seconds, parallel
        # By lane; lists, because a few elements of them are quicker than those of an array.
        self._since = [math.inf] * count  # when it was asked to step, if it has not answered
        self._stepped = [0] * count  # steps since the last replacement
        self._replaced = [0] * count  # in a row
        self._look = 0.0  # when a lane may be overdue
        self._unreported: dict[int, BrokenLane] = {}  # lanes that were replaced, until `collect` tells of it
        self._making: set[int] = set()  # those whose new env is not there yet
        self._faults: list[EnvFault] = []
        self._info: dict[int, Info] = {}  # by lane
        plan = LanePlan(env, dict(args or {}), seed, sampler, first, record, masked)
        self.executor = _executor(parallel, plan, count)
        self.fileno, self.threads, self.close = self.executor.fileno, self.executor.threads, self.executor.close
        self._poll = select.poll()
        self._poll.register(self.executor.fileno(), select.POLLIN)
        with closed_on_error(self):
            for lane in range(count):
                self.executor.make(lane, first_of_attempt(attempt) if attempt else 0)
            about: EnvFacts = next(iter(self._gather("made", " could not be made").values()))
        self.spec, self.note, self.way_back = about
        rows = self.rows = self.executor.rows
        self.obs, self.final = rows.obs, rows.final  # [N, ...]
        self.reward, self.seconds = rows.reward, rows.seconds  # [N]
        self.terminated, self.truncated = rows.terminated, rows.truncated  # [N]

    def step(self, lanes: np.ndarray, actions: np.ndarray) -> None:
        """Step these lanes, `[K]`, with actions `[K, ...]` that are ready for the environment. Returns at once."""
        self.rows.action[lanes] = actions
        asked: list[int] = lanes.tolist()
        now, since = time.monotonic(), self._since
        for lane in asked:
            since[lane] = now
        if self._unreported:
            asked = [lane for lane in asked if lane not in self._unreported]
            self.executor.bell.ring()  # their replacements may be ready
        self.executor.step(asked)

    def collect(self) -> tuple[np.ndarray, list[BrokenLane]]:
        """Lanes that are done with a step since the last call, `[K]` in order, and those that broke."""
        done, reports = self.executor.collect()
        broken = [found for report in reports if (found := self._handle(report, done)) is not None]
        if self._unreported:  # those that are there again, and were asked to step
            back = [lane for lane in self._unreported if lane not in self._making and self._since[lane] < math.inf]
            self.reward[back], self.terminated[back], self.truncated[back] = 0.0, False, False
            broken += [self._unreported.pop(lane) for lane in back]
        since, stepped = self._since, self._stepped
        for lane in done:
            since[lane] = math.inf
            stepped[lane] += 1
        for lost in broken:
            since[lost.lane] = math.inf
        return np.array(done, np.int64), broken

    def overdue(self, now: float) -> list[BrokenLane]:
        """Replace the lanes that hang at `now` (monotonic), unless results are pending; `collect` returns them."""
        if now < self._look or self._parallel == "no":
            return []
        late = [lane for lane, since in enumerate(self._since) if now - since > self.hang_seconds]
        if not late:
            self._look = min(now, *self._since) + self.hang_seconds
        if not late or self._poll.poll(0):
            return []
        found = []
        for lane in late:
            again = lane in self._unreported
            text = f"{'a new one' if again else 'it'} did not come back within {self.hang_seconds:g} s"
            gone = self.executor.abandon(lane)
            self._lose(lane, "hung", text)
            self._since[lane] = now  # the new one has as much time
            found.append(self._unreported[lane])
            if gone:
                self._replace(lane)
        return found

    def busy_since(self) -> np.ndarray:
        """When each lane was asked to step, `[N]` in monotonic seconds; infinite where it is idle."""
        return np.array(self._since)

    def take_faults(self) -> list[EnvFault]:
        """All environments that broke since the last call, also between two episodes."""
        faults, self._faults = self._faults, []
        return faults

    def take_info(self) -> Mapping[int, Info]:
        """By lane the numbers in `info` of episodes that ended in the steps that were last collected."""
        info, self._info = self._info, {}
        return info or NOTHING

    def reset(self, seed: int | None = None) -> None:
        """Begin the next episode in all lanes, while they are idle; with `seed`, their first ones by it."""
        if seed is not None:
            self.executor.plan = self.executor.plan._replace(seed=seed)
        self.call("reset", [(seed,)] * self.count)

    def call(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method of each `Lane` where it lives, while all are idle."""
        for lane in range(self.count):
            self.executor.call(lane, method, args[lane])
        answers = self._gather("answer", "")
        return [answers[lane] for lane in range(self.count)]

    def _gather(self, what: str, died: str) -> dict[int, Any]:
        """What all lanes report, in the order of arrival."""
        found: dict[int, Any] = {}
        while len(found) < self.count:
            self.wait()
            for report in self.executor.collect()[1]:
                if report.what == what:
                    found[report.lane] = report.value
                    self._faults += report.faults
                elif report.what == "died":
                    raise EnvError(f"env {self.executor.plan.env!r}{died}: {report.value}")
                else:
                    self._handle(report, [])
        return found

    def wait(self, seconds: float | None = None) -> None:
        self._poll.poll(None if seconds is None else max(0.0, seconds) * 1000)

    def _handle(self, report: LaneReport, done: list[int]) -> BrokenLane | None:
        lane, what, value, faults = report
        self._faults += faults
        if what in ("step", "broke"):
            for fault in faults[:1]:
                self._require_fit(fault.cause)
                if what == "broke":
                    return BrokenLane(lane, fault.kind, fault.cause, fault.facts())
            if value is not None:
                self._info[lane] = value
            done.append(lane)
        elif what == "made":
            self._making.discard(lane)
        elif what == "error" and lane not in self._making:
            self._require_fit(summary(value))
            raise value
        else:
            if what == "died":
                self._lose(lane, "died", value)
            elif what == "error":
                self._lose(lane, "raised", f"it could not be made again: {summary(value)}")
            self._replace(lane)
        return None

    def _lose(self, lane: int, code: str, text: str) -> None:
        """Note the fault of an environment that has to be replaced."""
        plan, rows = self.executor.plan, self.rows
        number = plan.first + lane
        seed = derive_seed(plan.seed, plan.sampler, number, int(rows.episode[lane]))
        fault = EnvFault(plan.env, plan.args, code, number, seed, int(rows.steps[lane]), text)
        self._faults.append(fault)
        self._unreported.setdefault(
            lane, BrokenLane(lane, code, text, fault.facts())
        )  # the first is what broke the step
        self._making.add(lane)
        self._replaced[lane] = count_break(fault, self._replaced[lane], self._stepped[lane])
        self._stepped[lane] = 0

    def _replace(self, lane: int) -> None:
        self.rows.episode[lane], self.rows.steps[lane] = self.rows.episode[lane] + 1, 0
        self.executor.make(lane, int(self.rows.episode[lane]))

    def _require_fit(self, text: str) -> None:
        if self._parallel == "threads" and any(words in text for words in _UNFIT):
            fix = "give each a process, --set sampling.parallel=processes (raynforce eval: --parallel processes)"
            raise UsageError(f"env {self.executor.plan.env!r} cannot run in a thread ({text}): {fix}")


def _executor(parallel: Parallel, plan: LanePlan, count: int) -> EnvExecutor:
    parallel = settings.coerce(parallel, Parallel, "parallel")
    if parallel != "no":
        what = f"{count} {parallel} for envs"
        require_tasks(count, what)
        if parallel == "processes":
            require_files(count, what)
    kinds: dict[Parallel, type[EnvExecutor]] = {"no": EnvExecutor, "threads": Threads, "processes": Processes}
    return kinds[parallel](plan, count)


class ParallelVector(LaneVector):
    """As `LocalVector`, side by side. An env that hangs or whose process ends is replaced."""

    def __init__(self, lanes: Lanes) -> None:
        super().__init__(lanes.spec, lanes.count, lanes.note, lanes.way_back)
        self._lanes, self._rows = lanes, lanes.rows
        self._all = np.arange(lanes.count)
        self._watch = None if lanes.hang_seconds == math.inf else lanes.hang_seconds / 10  # seconds between two looks
        self.ask, self.take_info, self.reward = lanes.step, lanes.take_info, lanes.reward

    def reset(self, seed: int | None = None) -> dict[str, np.ndarray]:
        while not self.idle.all():  # an evaluation at each lane's own pace may have been given up
            self.answers(math.inf)
        if not self._obs and seed is None:
            return self._show()  # the lanes began with their first episodes
        self._lanes.reset(seed)
        self._lanes.take_info()  # of episodes that were given up
        return self._show()

    def take_faults(self) -> list[EnvFault]:
        return sorted(self._lanes.take_faults(), key=lambda fault: fault.lane or 0)

    def close(self) -> None:
        self._lanes.close()

    def _call(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        return self._lanes.call(method, args)

    def _step_lanes(self, action: np.ndarray) -> tuple[Sequence[int], Sequence[int], Mapping[int, Info]]:
        self._lanes.step(self._all, action)
        broke: list[int] = []
        left = self.num_envs
        while left:
            done, broken = self.answers(math.inf)
            broke += broken.tolist()
            left -= len(done) + len(broken)
        return np.flatnonzero(self.ended).tolist(), broke, self._lanes.take_info()

    # -- each lane at its own pace: first come, first served ----------------------------------------------

    @property
    def idle(self) -> np.ndarray:
        return np.isinf(self._lanes.busy_since())

    def rows(self) -> dict[str, np.ndarray]:
        """What the policy sees next, `[B, ...]`; of lanes that are at a step, something in between."""
        return self._lanes.obs

    @property
    def ended(self) -> np.ndarray:
        return self._lanes.terminated | self._lanes.truncated

    def answers(self, until: float) -> tuple[np.ndarray, np.ndarray]:
        """Wait for some lanes, until a time on the monotonic clock: those that have stepped, and those that broke."""
        left = until - time.monotonic()
        self._lanes.wait(None if left == math.inf and self._watch is None else min(left, self._watch or left))
        done, broken = self._lanes.collect()
        if self._watch is not None:
            self._lanes.overdue(time.monotonic())
        return done, np.array([lane for lane, *_ in broken], np.int64)
