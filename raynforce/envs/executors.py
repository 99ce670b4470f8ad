"""What steps the environments of `Lanes`: the calling thread, one lane after another, or a thread for each lane."""

from __future__ import annotations

import contextlib
import os
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, NamedTuple

import numpy as np

from raynforce.doorbell import Doorbell
from raynforce.envs.faults import EnvFault
from raynforce.envs.lane import Lane, LanePlan
from raynforce.envs.local import other_spaces
from raynforce.envs.make import closed_on_error
from raynforce.envs.rows import Rows
from raynforce.errors import UsageError
from raynforce.spaces import EnvSpec

GRACE = 3  # seconds that environments have to close
_SPARE = 64  # files, for what else a process opens meanwhile
_FIX = "use fewer --envs, or raise"
FEWER = f"{_FIX} the limit (ulimit -u)"
_STACK = 1 << 20  # bytes for each thread: simulators in C need some
_stack_size = threading.Lock()


class LaneReport(NamedTuple):
    lane: int
    what: Literal["spaces", "made", "step", "broke", "answer", "error", "died", "gone"]
    """`spaces`: a process has made its env and waits for shared rows; `gone`: one that was abandoned has ended."""
    value: Any = None
    """`About` of a new env, `info` of an episode that ended, a method's answer, an exception, how a process died."""
    faults: Sequence[EnvFault] = ()  # the first is what a lane broke by


class EnvFacts(NamedTuple):
    spec: EnvSpec
    note: str
    way_back: str


class LaneWorker:
    """Makes the lane number `index` of a plan, beginning with `episode`, and calls it."""

    lane: Lane | None = None
    action: np.ndarray  # [1, ...] for the next step

    def __init__(self, plan: LanePlan, index: int, episode: int) -> None:
        self.plan, self.index, self.episode = plan, index, episode

    def make(self) -> LaneReport:
        return self._report("made", self._make)

    def step(self) -> LaneReport | None:
        """None if the row says it all."""
        lane = self.lane
        assert lane is not None
        begun = time.monotonic()
        try:
            broke = lane.step(lane.ready(self.action)[0])
        except BaseException as error:
            return LaneReport(self.index, "error", error)
        lane.row.seconds[0] = time.monotonic() - begun
        info = lane.take_info()
        if info is None and not lane.shared.faults:
            return None
        return LaneReport(self.index, "broke" if broke else "step", info, lane.shared.take_faults())

    def call(self, method: str, args: tuple[Any, ...]) -> LaneReport:
        return self._report("answer", lambda: getattr(self.lane, method)(*args))

    def close(self) -> None:
        if self.lane is not None:
            self.lane.close()

    def _report(self, what: Literal["made", "answer"], work: Callable[[], Any]) -> LaneReport:
        try:
            value = work()
        except BaseException as error:
            return LaneReport(self.index, "error", error)
        assert self.lane is not None
        return LaneReport(self.index, what, value, self.lane.shared.take_faults())

    def _make(self) -> EnvFacts:
        lane = Lane(self.plan, self.index)
        with closed_on_error(lane):
            lane.begin_at(self.episode)
        self.lane, self.action = lane, lane.row.action
        return EnvFacts(lane.spec, lane.note, lane.way_back)


class _Worker(LaneWorker):
    """A lane in this process; its row is its own, as one that was abandoned may come back at any time."""

    report: LaneReport | None = None

    def __init__(self, executor: EnvExecutor, index: int, episode: int) -> None:
        super().__init__(executor.plan, index, episode)
        self._done = executor.done

    def do(self, work: Callable[..., LaneReport | None], *args: Any) -> None:
        self.report = work(*args)
        self._done(self)

    def attach(self, rows: Rows) -> None:
        """Take actions from its row of `rows`, where `publish` puts what they led to."""
        assert self.lane is not None
        self.action = rows.action[self.index : self.index + 1]  # [1, ...]
        row = self.lane.row
        self._live, self._mine = rows.live[self.index], row.live[0]
        self._last, self._my_last = rows.last[self.index], row.last[0]
        self._ended = row.terminated, row.truncated

    def publish(self) -> None:
        self._live[...] = self._mine
        if self._ended[0][0] or self._ended[1][0]:
            self._last[...] = self._my_last


class EnvExecutor:
    """Steps the lanes of a plan one after another in the calling thread; those below do it side by side."""

    rows: Rows  # they are there as soon as a lane has made its environment

    def __init__(self, plan: LanePlan, count: int) -> None:
        self.plan, self.count = plan, count
        self.spec: EnvSpec | None = None
        self.bell = Doorbell()
        self._finished: deque[_Worker] = deque()
        self._workers: list[Any] = [None] * count

    def fileno(self) -> int:
        """Readable while there is something to `collect`, and once the bell was rung."""
        return self.bell.fileno()

    def make(self, lane: int, episode: int) -> None:
        """Have a new worker make a lane's environment; `collect` reports it."""
        worker = self._workers[lane] = _Worker(self, lane, episode)
        worker.do(worker.make)

    def step(self, lanes: Sequence[int]) -> None:
        for lane in lanes:
            worker = self._workers[lane]
            worker.do(worker.step)

    def call(self, lane: int, method: str, args: tuple[Any, ...]) -> None:
        """Call a method of the `Lane`; `collect` reports the answer."""
        worker = self._workers[lane]
        worker.do(worker.call, method, args)

    def done(self, worker: _Worker) -> None:
        self._finished.append(worker)
        self.bell.ring()

    def collect(self) -> tuple[list[int], list[LaneReport]]:
        """Lanes whose step went well without a report, and all reports, since the last call."""
        self.bell.clear()
        done: list[int] = []
        reports: list[LaneReport] = []
        while self._finished:
            worker = self._finished.popleft()
            if worker is not self._workers[worker.index]:  # it was abandoned
                continue
            report, worker.report = worker.report, None
            if report is None:
                done.append(worker.index)
            else:
                report = self._checked(report)
                reports.append(report)
                if report.what == "made":
                    worker.attach(self.rows)
            if report is None or report.what != "error":
                worker.publish()
        return done, reports

    def abandon(self, lane: int) -> bool:
        """Give up a worker that hangs; whether a new one can be made now, or `collect` reports when it is gone."""
        return False

    def threads(self) -> list[int]:
        """Native ids of the threads that environments are stepped in; none if it is the calling one."""
        return []

    def close(self) -> None:
        for worker in filter(None, self._workers):
            worker.close()
        self.bell.close()

    def _checked(self, report: LaneReport) -> LaneReport:
        """The report; an error if its environment is not like the first one, which rows are made for."""
        if report.what not in ("made", "spaces"):
            return report
        spec = report.value.spec
        if self.spec is None:
            self.spec, self.rows = spec, self._make_rows(spec)
        if spec == self.spec:
            return report
        return LaneReport(report.lane, "error", other_spaces(spec.env, self.plan.first + report.lane, self.plan.first))

    def _make_rows(self, spec: EnvSpec) -> Rows:
        return Rows(spec, self.count)


class _Thread(_Worker):
    def __init__(self, executor: EnvExecutor, index: int, episode: int) -> None:
        super().__init__(executor, index, episode)
        self.jobs: SimpleQueue[tuple[Any, ...] | None] = SimpleQueue()  # as for `do`; None ends it
        self.thread = threading.Thread(target=self._run, daemon=True, name=f"lane {index}")
        self.thread.start()

    def _run(self) -> None:
        self.do(self.make)
        while self.lane is not None and (job := self.jobs.get()) is not None:
            self.do(*job)
        self.close()


class Threads(EnvExecutor):
    """A thread for each lane: for environments that wait for something else than this process."""

    def make(self, lane: int, episode: int) -> None:
        with _stack_size:
            before = threading.stack_size(_STACK)
            try:
                self._workers[lane] = _Thread(self, lane, episode)
            except RuntimeError as error:
                started = f"{lane} of {self.count} threads for envs could be started ({error})"
                raise UsageError(f"{started}: {FEWER}") from None
            finally:
                threading.stack_size(before)

    def step(self, lanes: Sequence[int]) -> None:
        for lane in lanes:
            self._workers[lane].jobs.put((self._workers[lane].step,))

    def call(self, lane: int, method: str, args: tuple[Any, ...]) -> None:
        self._workers[lane].jobs.put((self._workers[lane].call, method, args))

    def threads(self) -> list[int]:
        return [worker.thread.native_id for worker in self._workers if worker is not None]

    def abandon(self, lane: int) -> bool:
        worker = self._workers[lane]
        if worker.lane is not None:
            self.rows.episode[lane], self.rows.steps[lane] = worker.lane.row.episode[0], worker.lane.row.steps[0]
        worker.jobs.put(None)
        return True

    def close(self) -> None:
        workers = [worker for worker in self._workers if worker is not None]
        for worker in workers:
            worker.jobs.put(None)
        until = time.monotonic() + GRACE
        for worker in workers:
            worker.thread.join(max(0.0, until - time.monotonic()))
        self.bell.close()


def require_files(count: int, what: str) -> None:
    """Make sure that `count` more files can be open, by raising our own limit if that is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + len(os.listdir("/proc/self/fd")) + _SPARE
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        limits = f"{needed} open files, and {hard} are allowed"
        raise UsageError(f"{what} need {limits}: {_FIX} the limit (ulimit -n {needed})")
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def require_tasks(count: int, what: str) -> None:
    """Make sure that `count` more threads or processes can be started, as far as that can be known."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and os.geteuid() and count > soft:
        raise UsageError(f"{what} are more than the {soft} allowed: {FEWER}")
    left = _left_in_group()
    if left is not None and count > left:
        most = f"the {left} that this container may still start"
        raise UsageError(f"{what} are more than {most}: {_FIX} its limit (pids.max)")


def _left_in_group() -> int | None:
    """How many tasks our control group, version 1 or 2, has room for; None if it has no limit or hides it."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            if kinds in ("", "pids"):
                group = Path("/sys/fs/cgroup", kinds, path.lstrip("/"))
                most = (group / "pids.max").read_text().strip()
                return None if most == "max" else int(most) - int((group / "pids.current").read_text())
    return None
