"""Single environments that are stepped side by side, each at its own pace."""

from __future__ import annotations

import math
import select
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from raynforce import settings
from raynforce.envs.faults import EnvFault
from raynforce.envs.lane import About, Plan, Told
from raynforce.envs.limits import require_files, require_tasks
from raynforce.envs.local import BREAKS_IN_A_ROW, STEPS_BETWEEN
from raynforce.envs.processes import Processes
from raynforce.envs.vector import derive_seed, first_of_attempt
from raynforce.envs.workers import Crew, Report, Serial, Threads
from raynforce.errors import EnvError, UsageError, summary
from raynforce.infos import NOTHING, Info

Parallel = Literal["no", "threads", "processes"]
_UNFIT = ("main thread", "event loop in thread")  # what is said where signals or asyncio are used in a thread


class Broken(NamedTuple):
    """A lane whose step did not happen: its environment broke, and a new one has begun another episode."""

    lane: int
    code: str
    """As `EnvFault.kind`: `raised`, `garbage`, `hung` or `died`."""
    text: str
    facts: Mapping[str, Any]
    """Those of `EnvFault`."""


class Lanes:
    """Single environments that are stepped side by side; whoever is ready is told.

    `parallel` says how: `no` steps them one after another in the calling thread, `threads` has a thread for each (for
    environments that wait for something), `processes` a process for each (for those that compute, or must not be in
    a thread). Each lane that was asked to step is answered once, by `take`: as done, or as `Broken`.

    An environment that raises or returns nonsense is made anew where it is (see `LocalVector`). One that is at a step,
    or at being made anew, for longer than `hang_seconds` is left to itself (a thread) or killed (a process) once
    `overdue` is asked; one whose process ends is noticed by `take`. A new one takes the place and goes on with the
    lane's next episode. It is an `EnvError` if that happens `BREAKS_IN_A_ROW` times in a row.

    Lane i has the number `first` + i in faults and seeds, which derive from (seed, sampler, number, episode).
    After an error was raised it can only be closed.
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
    ) -> None:
        self.count = count
        self._parallel, self._hang_seconds = parallel, hang_seconds
        # By lane; lists, because a few elements of them are quicker than those of an array.
        self._since = [math.inf] * count  # when it was asked to step, if it is at it
        self._taken = [0] * count  # steps since the last replacement
        self._replaced = [0] * count  # in a row
        self._look = 0.0  # when a lane may be overdue
        self._lost: dict[int, Broken] = {}  # lanes that were replaced, and are to be told of
        self._making: set[int] = set()  # those whose new env is not there yet
        self._faults: list[EnvFault] = []
        self._info: dict[int, Info] = {}  # by lane
        self._crew = _crew(parallel, Plan(env, dict(args or {}), seed, sampler, first, record), count)
        self._poll = select.poll()
        self._poll.register(self._crew.fileno(), select.POLLIN)
        try:
            about = self._start(first_of_attempt(attempt) if attempt else 0)
        except BaseException:
            self.close()
            raise
        self.spec, self.note, self.way_back, _ = about
        rows = self._crew.rows
        self.obs, self.final = rows.obs, rows.final  # [N, ...]
        self.reward, self.seconds = rows.reward, rows.seconds  # [N]
        self.terminated, self.truncated = rows.terminated, rows.truncated  # [N]

    def fileno(self) -> int:
        """Readable while `take` has something to tell."""
        return self._crew.fileno()

    def step(self, lanes: np.ndarray, actions: np.ndarray) -> None:
        """Have these lanes step, `[K]`, with these actions, `[K, ...]`, ready for the environment. Returns at once."""
        self._crew.rows.action[lanes] = actions
        asked: list[int] = lanes.tolist()
        now, since = time.monotonic(), self._since
        for lane in asked:
            since[lane] = now
        if self._lost:
            asked = [lane for lane in asked if lane not in self._lost]
            self._crew.ring()  # they may be ready to be told of
        self._crew.step(asked)

    def take(self) -> tuple[np.ndarray, list[Broken]]:
        """Lanes that are done with a step since this was last asked, `[K]` in order, and those that broke."""
        done, reports = self._crew.take()
        broken = [found for report in reports if (found := self._see(report, done)) is not None]
        if self._lost:
            broken += self._told()
        since, taken = self._since, self._taken
        for lane in done:
            since[lane] = math.inf
            taken[lane] += 1
        for lost in broken:
            since[lost.lane] = math.inf
        return np.array(done, np.int64), broken

    def overdue(self, now: float) -> list[Broken]:
        """Replace the lanes that hang, by the time `now` (monotonic). `take` will tell of them when they are back.

        Those that have come back already do not hang: nobody does as long as there is something to `take`.
        """
        found: list[Broken] = []
        if now < self._look or self._parallel == "no":
            return found
        late = [lane for lane, since in enumerate(self._since) if now - since > self._hang_seconds]
        if not late:
            self._look = min(now, *self._since) + self._hang_seconds
        if not late or self._poll.poll(0):
            return found
        for lane in late:
            again = lane in self._lost
            text = f"{'a new one' if again else 'it'} did not come back within {self._hang_seconds:g} s"
            gone = self._crew.hung(lane)
            self._lose(lane, "hung", text)
            self._since[lane] = now  # the new one has as much time
            found.append(self._lost[lane])
            if gone:
                self._replace(lane)
        return found

    def threads(self) -> list[int]:
        """Those that environments are stepped in, as the system names them; none if it is the calling one."""
        return self._crew.threads()

    def busy_since(self) -> np.ndarray:
        """When each lane was asked to step, `[N]` in monotonic seconds; infinite where it is idle."""
        return np.array(self._since)

    def take_faults(self) -> list[EnvFault]:
        """All environments that broke since this was last asked, also those that broke between two episodes."""
        faults, self._faults = self._faults, []
        return faults

    def take_info(self) -> Mapping[int, Info]:
        """By lane the numbers in `info` of episodes that have ended, of the steps that were last taken."""
        if not self._info:
            return NOTHING
        info, self._info = self._info, {}
        return info

    def reset(self, seed: int | None = None) -> None:
        """Begin the next episode in all lanes, while they are idle; with `seed`, their first ones by it."""
        if seed is not None:
            self._crew.plan = self._crew.plan._replace(seed=seed)
        self.call("reset", [(seed,)] * self.count)

    def call(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method of each lane's `LocalVector`, in its worker, while all are idle."""
        answers = self._call(method, args)
        self._faults += [fault for faults in self._call("take_faults", [()] * self.count) for fault in faults]
        return answers

    def _call(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        for lane in range(self.count):
            self._crew.ask(lane, method, args[lane])
        answers: dict[int, Any] = {}
        while len(answers) < self.count:
            self.wait()
            for report in self._crew.take()[1]:
                if report.what == "answer":
                    answers[report.lane] = report.value
                elif report.what == "died":
                    raise EnvError(f"env {self.spec.env!r}: {report.value}")
                else:
                    self._see(report, [])
        return [answers[lane] for lane in range(self.count)]

    def wait(self, seconds: float | None = None) -> None:
        """Until `take` has something to tell."""
        self._poll.poll(None if seconds is None else max(0.0, seconds) * 1000)

    def close(self) -> None:
        self._crew.close()

    def _start(self, episode: int) -> About:
        """Make all environments."""
        for lane in range(self.count):
            self._crew.make(lane, episode)
        made: list[About] = []
        while len(made) < self.count:
            self.wait()
            for report in self._crew.take()[1]:
                if report.what == "error":
                    raise self._told_well(report.value)
                if report.what == "died":
                    raise EnvError(f"env {self._crew.plan.env!r} could not be made: {report.value}")
                made.append(report.value)
                self._faults += report.value.faults
        return made[0]

    def _see(self, report: Report, done: list[int]) -> Broken | None:
        """Take note of what is no plain step."""
        lane, what, value = report
        if what == "step":
            return self._see_step(lane, value, done)
        elif what == "made":
            self._making.discard(lane)
            self._faults += value.faults
        elif what == "died":
            self._lose(lane, "died", value)
            self._replace(lane)
        elif what == "gone":
            self._replace(lane)
        elif what == "error":
            if lane not in self._making:
                raise self._told_well(value)
            self._lose(lane, "raised", f"it could not be made again: {summary(value)}")
            self._replace(lane)
        return None

    def _see_step(self, lane: int, told: Told, done: list[int]) -> Broken | None:
        self._faults += told.faults
        for fault in told.faults[:1]:
            if self._unfit(fault.cause):
                raise self._unfit_error(fault.cause)
            if told.broke:
                return Broken(lane, fault.kind, fault.cause, fault.facts())
        if told.info is not None:
            self._info[lane] = told.info
        done.append(lane)
        return None

    def _told(self) -> list[Broken]:
        """Replaced lanes that are there again, and were asked to step."""
        back = [lane for lane in self._lost if lane not in self._making and self._since[lane] < math.inf]
        rows = self._crew.rows
        rows.reward[back], rows.terminated[back], rows.truncated[back] = 0.0, False, False
        return [self._lost.pop(lane) for lane in back]

    def _lose(self, lane: int, code: str, text: str) -> None:
        """Take note of an environment that has to be replaced."""
        plan, rows = self._crew.plan, self._crew.rows
        number, episode = plan.first + lane, int(rows.episode[lane])
        seed = derive_seed(plan.seed, plan.sampler, number, episode)
        fault = EnvFault(plan.env, plan.args, code, number, seed, int(rows.steps[lane]), text)
        self._faults.append(fault)
        self._lost.setdefault(lane, Broken(lane, code, text, fault.facts()))  # the first is what broke the step
        self._making.add(lane)
        calm = self._taken[lane] > STEPS_BETWEEN
        self._replaced[lane] = 1 if calm else self._replaced[lane] + 1
        self._taken[lane] = 0
        if self._replaced[lane] > BREAKS_IN_A_ROW:
            often = f"{self._replaced[lane]} times in a row within {STEPS_BETWEEN} steps"
            where = f"in lane {number}, {often} (episode seed {seed}, step {fault.step})"
            error = EnvError(f"env {plan.env!r} broke {where}: {text}")
            error.facts = fault.facts()
            raise error

    def _replace(self, lane: int) -> None:
        rows = self._crew.rows
        rows.episode[lane] += 1
        rows.steps[lane] = 0
        self._crew.make(lane, int(rows.episode[lane]))

    def _told_well(self, error: BaseException) -> BaseException:
        """An error as it is raised for the user."""
        return self._unfit_error(summary(error)) if self._unfit(str(error)) else error

    def _unfit(self, text: str) -> bool:
        return self._parallel == "threads" and any(words in text for words in _UNFIT)

    def _unfit_error(self, text: str) -> UsageError:
        return UsageError(
            f"env {self._crew.plan.env!r} cannot run in a thread ({text}): give each a process, "
            "--set sampling.parallel=processes (raynforce eval: --parallel processes)"
        )


def _crew(parallel: Parallel, plan: Plan, count: int) -> Crew:
    parallel = settings.coerce(parallel, Parallel, "parallel")
    if parallel != "no":
        what = f"{count} {parallel} for envs"
        require_tasks(count, what)
        if parallel == "processes":
            require_files(count, what)
    kinds: dict[Parallel, type[Crew]] = {"no": Serial, "threads": Threads, "processes": Processes}
    return kinds[parallel](plan, count)
