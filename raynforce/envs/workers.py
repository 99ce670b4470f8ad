"""Who steps the environments of `Lanes`: the calling thread, one lane after another, or a thread for each lane."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from raynforce.envs.lane import Lane, Plan
from raynforce.envs.nursery import GRACE
from raynforce.envs.rows import Rows
from raynforce.errors import UsageError
from raynforce.spaces import EnvSpec

_STACK = 1 << 20  # bytes for each thread: simulators in C need some
_stack_size = threading.Lock()
_END: tuple[str, tuple[Any, ...]] = ("close", ())


class Report(NamedTuple):
    """Something else than a step that went well."""

    lane: int
    what: Literal["step", "made", "answer", "error", "died", "gone"]
    """With a step that has more to tell than its row, `Told`; with a new env, `About`; with an answer, what the
    method returned; with an error, the exception; with a process that died, how. One that was given up is gone."""
    value: Any


class Doorbell:
    """A descriptor that is readable once it was rung, until it is cleared. Rung by many threads, cleared by one."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._rung = False
        self._open = threading.Lock()  # a thread that is late must not write to a descriptor that is another's by now

    def fileno(self) -> int:
        return self._fd

    def ring(self) -> None:
        if self._rung:  # a system call less for most
            return
        with self._open:
            if self._fd >= 0:
                self._rung = True
                os.eventfd_write(self._fd, 1)

    def clear(self) -> None:
        """What is looked at after this either is there already or will ring again."""
        if self._rung:
            os.eventfd_read(self._fd)
            self._rung = False

    def close(self) -> None:
        with self._open:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1


class Crew(ABC):
    """The workers of all lanes. `rows` are there as soon as one has made its environment."""

    rows: Rows

    def __init__(self, plan: Plan, count: int) -> None:
        self.plan, self.count = plan, count
        self.spec: EnvSpec | None = None

    @abstractmethod
    def fileno(self) -> int:
        """Readable while `take` has something to tell."""

    @abstractmethod
    def make(self, lane: int, episode: int) -> None:
        """Have a lane's environment made by a new worker, in place of what there is; `take` will tell."""

    @abstractmethod
    def step(self, lanes: Sequence[int]) -> None:
        """Have these lanes step with their rows' actions."""

    @abstractmethod
    def ask(self, lane: int, method: str, args: tuple[Any, ...]) -> None:
        """Have a method of the `Lane` called; `take` will tell the answer."""

    @abstractmethod
    def take(self) -> tuple[list[int], list[Report]]:
        """Lanes that took a step, and all else that happened."""

    @abstractmethod
    def hung(self, lane: int) -> bool:
        """Give up the worker of a lane; whether a new one can begin now, or `take` will tell of the old one's end."""

    def threads(self) -> list[int]:
        """Those that environments are stepped in, as the system names them."""
        return []

    @abstractmethod
    def ring(self) -> None:
        """Make `fileno` readable until the next `take`."""

    @abstractmethod
    def close(self) -> None: ...

    def fits(self, lane: int, spec: EnvSpec) -> UsageError | None:
        """Whether an environment is like the first one, which all memory is made for."""
        if self.spec is None:
            self.spec, self.rows = spec, self._make_rows(spec)
        if spec == self.spec:
            return None
        number, first = self.plan.first + lane, self.plan.first
        return UsageError(
            f"env {spec.env!r} has other spaces in lane {number} than in lane {first}; they must be equal"
        )

    def _make_rows(self, spec: EnvSpec) -> Rows:
        return Rows(spec, self.count)


class _Worker:
    """One lane's environment and what became of its last job. Its row is its own, until the crew takes it over."""

    lane: Lane | None = None
    report: Report | None = None

    def __init__(self, crew: Serial, index: int, episode: int) -> None:
        self.crew, self.index, self.episode = crew, index, episode

    def make(self) -> None:
        try:
            lane = self.lane = self.crew.plan.lane(self.index, self.episode)
            self.report = Report(self.index, "made", lane.about())
        except BaseException as error:
            self.report = Report(self.index, "error", error)
        self.crew.post(self)

    def settle(self, rows: Rows) -> None:
        """Take actions from its row of `rows`, where `hand_over` puts what they led to."""
        assert self.lane is not None
        self._action = rows.action[self.index : self.index + 1]  # [1, ...]
        self._settled, row = self.lane, self.lane.row
        self._live, self._mine = rows.live[self.index], row.live[0]
        self._last, self._my_last = rows.last[self.index], row.last[0]
        self._terminated, self._truncated = row.terminated, row.truncated

    def hand_over(self) -> None:
        self._live[...] = self._mine
        if self._terminated[0] or self._truncated[0]:
            self._last[...] = self._my_last

    def step(self) -> None:
        lane = self._settled
        try:
            broke = lane.step_one(self._action)
            if (told := lane.take_told(broke)) is not None:
                self.report = Report(self.index, "step", told)
        except BaseException as error:
            self.report = Report(self.index, "error", error)
        self.crew.post(self)

    def answer(self, method: str, args: tuple[Any, ...]) -> None:
        try:
            self.report = Report(self.index, "answer", getattr(self.lane, method)(*args))
        except BaseException as error:
            self.report = Report(self.index, "error", error)
        self.crew.post(self)

    def close(self) -> None:
        if self.lane is not None:
            self.lane.close()


class Serial(Crew):
    """One lane after another, in the thread that asks for it."""

    def __init__(self, plan: Plan, count: int) -> None:
        super().__init__(plan, count)
        self._bell = Doorbell()
        self._posted: deque[_Worker] = deque()
        self._workers: list[Any] = [None] * count

    def fileno(self) -> int:
        return self._bell.fileno()

    def ring(self) -> None:
        self._bell.ring()

    def post(self, worker: _Worker) -> None:
        """A job is done; called by whoever did it."""
        self._posted.append(worker)
        self._bell.ring()

    def make(self, lane: int, episode: int) -> None:
        worker = self._workers[lane] = _Worker(self, lane, episode)
        worker.make()

    def step(self, lanes: Sequence[int]) -> None:
        for lane in lanes:
            self._workers[lane].step()

    def ask(self, lane: int, method: str, args: tuple[Any, ...]) -> None:
        self._workers[lane].answer(method, args)

    def take(self) -> tuple[list[int], list[Report]]:
        self._bell.clear()
        done: list[int] = []
        reports: list[Report] = []
        while self._posted:
            worker = self._posted.popleft()
            if worker is not self._workers[worker.index]:  # it was given up
                continue
            if worker.report is None:
                worker.hand_over()
                done.append(worker.index)
            else:
                reports.append(self._see(worker, worker.report))
                worker.report = None
        return done, reports

    def _see(self, worker: _Worker, report: Report) -> Report:
        if report.what == "made":
            wrong = self.fits(report.lane, report.value.spec)
            if wrong is not None:
                return Report(report.lane, "error", wrong)
            worker.settle(self.rows)
        if report.what != "error":
            worker.hand_over()
        return report

    def hung(self, lane: int) -> bool:
        return False

    def close(self) -> None:
        for worker in filter(None, self._workers):
            worker.close()
        self._bell.close()


class _Thread(_Worker):
    """A worker with a thread of its own, in which everything is done that the environment does."""

    def __init__(self, crew: Serial, index: int, episode: int) -> None:
        super().__init__(crew, index, episode)
        self.over = False
        self.job: tuple[str, tuple[Any, ...]] | None = None  # a call; otherwise it is a step
        self._wake = threading.Lock()  # as a semaphore: held while there is nothing to do
        self._wake.acquire()
        self.wake = self._wake.release
        self.thread = threading.Thread(target=self._run, daemon=True, name=f"lane {index}")
        self.thread.start()

    def _run(self) -> None:
        self.make()
        while self.lane is not None and not self.over:
            self._wake.acquire()
            if self.job is None:
                self.step()
                continue
            (method, args), self.job = self.job, None
            if not self.over:
                self.answer(method, args)
        self.close()

    def end(self) -> None:
        """Have it close its environment as soon as it is idle."""
        self.over, self.job = True, _END
        with contextlib.suppress(RuntimeError):  # it was awake
            self.wake()


class Threads(Serial):
    """A thread for each lane: for environments that wait for something else than this process."""

    def make(self, lane: int, episode: int) -> None:
        with _stack_size:
            before = threading.stack_size(_STACK)
            try:
                self._workers[lane] = _Thread(self, lane, episode)
            except RuntimeError as error:
                started = f"{lane} of {self.count} threads for envs could be started ({error})"
                raise UsageError(f"{started}: use fewer --envs, or raise the limit (ulimit -u)") from None
            finally:
                threading.stack_size(before)

    def step(self, lanes: Sequence[int]) -> None:
        for lane in lanes:
            self._workers[lane].wake()

    def ask(self, lane: int, method: str, args: tuple[Any, ...]) -> None:
        self._workers[lane].job = method, args
        self._workers[lane].wake()

    def threads(self) -> list[int]:
        return [worker.thread.native_id for worker in self._workers if worker is not None]

    def hung(self, lane: int) -> bool:
        worker = self._workers[lane]
        if worker.lane is not None:
            self.rows.episode[lane], self.rows.steps[lane] = worker.lane.row.episode[0], worker.lane.row.steps[0]
        worker.end()
        return True

    def close(self) -> None:
        workers = [worker for worker in self._workers if worker is not None]
        for worker in workers:
            worker.end()
        until = time.monotonic() + GRACE
        for worker in workers:
            worker.thread.join(max(0.0, until - time.monotonic()))
        self._bell.close()
