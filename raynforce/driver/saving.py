"""Checkpoints written beside training, one after the other in a thread, and tried again when the disk fails."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from raynforce.errors import RaynforceError, summary
from raynforce.runs.mirrored import NotMirrored

BACKOFF = (5.0, 10.0, 20.0, 40.0, 60.0)  # seconds from a failed checkpoint to the next attempt
SLOW = 60.0  # seconds after which it is said that a checkpoint is still being written
LAST_SECONDS = 60.0  # that the last checkpoint of a run is tried for
CLOSE_SECONDS = 5.0  # that what is being written is waited for when the run ends otherwise
UNNOTICED = 2.0  # seconds that a user waits without being told what for
PIECE = 0.2  # seconds between two looks, where training waits


class Written(NamedTuple):
    step: int
    bytes: int  # that were written for it; what older ones have in common with it is not written again
    seconds: float  # that this took, beside training


class _Task(NamedTuple):
    what: str
    step: int
    write: Callable[[], int]  # writes it, and returns how many bytes
    whole: bool  # whether it is all that a resume needs


class Saver:
    """The one that writes a run's checkpoints. Training hands states over and goes on; `look` brings back the news."""

    def __init__(self, say: Callable[[str], None], event: Callable[..., None], patience: float | None = None) -> None:
        """`say` is for the user, `event` for the run's history, `patience` the seconds for the last checkpoint."""
        self.last: Written | None = None  # the newest checkpoint that this process has written
        self.failures = 0  # how often writing failed so far
        self.count = 0  # checkpoints that were written
        self._say, self._event, self._patience = say, event, patience
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._news: queue.SimpleQueue[tuple[_Task, int, float, Exception | None]] = queue.SimpleQueue()
        self._open: list[_Task] = []
        self._began = time.monotonic()  # the task that is being written
        self._slow = False
        self._in_a_row = 0
        self._reason = ""  # why the last attempt failed, and
        self._is_safe = False  # whether only a copy elsewhere is missing
        self._retry_at: float | None = None
        self._insists = False  # on the last checkpoint
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        return bool(self._open)

    @property
    def retry_is_due(self) -> bool:
        """Whether a checkpoint failed, and it is time to try with a new one."""
        return self._retry_at is not None and not self._open and time.monotonic() >= self._retry_at

    @property
    def failing(self) -> bool:
        return self._retry_at is not None

    def write(self, what: str, step: int, task: Callable[[], int], *, whole: bool = True) -> None:
        """Let something be written after what was given before; training need not wait for it."""
        if self._thread is None:
            # A daemon: storage that hangs for ever must not keep the process from ending.
            self._thread = threading.Thread(target=self._work, name="checkpoints", daemon=True)
            self._thread.start()
        if not self._open:
            self._began, self._slow = time.monotonic(), False
        self._open.append(_Task(what, step, task, whole))
        self._tasks.put(self._open[-1])

    def look(self) -> None:
        while not self._news.empty():
            task, size, seconds, error = self._news.get()
            self._open.remove(task)
            self._began, self._slow = time.monotonic(), False
            if error is None:
                self._succeeded(task, size, seconds)
            else:
                self._failed(task, error)
        lasts = time.monotonic() - self._began
        if self._open and lasts > SLOW and not self._slow:
            self._slow = True
            self._alarm(f"{self._open[0].what} has been under way for {lasts:.0f} s: the storage is slow", "slow")

    def wait(self, show: Callable[[str], None] = lambda doing: None, timeout: float = float("inf")) -> bool:
        """Wait until everything is written or has failed; False if the time was over before."""
        began = time.monotonic()
        while True:
            self.look()
            left = began + timeout - time.monotonic()
            if not self._open or left <= 0:
                return not self._open
            if time.monotonic() - began > UNNOTICED:
                show(f"writing {self._open[0].what}")
            piece_over = time.monotonic() + min(PIECE, left)
            while self._news.empty() and time.monotonic() < piece_over:
                time.sleep(0.005)

    def insist(self, begin: Callable[[], None], show: Callable[[str], None]) -> None:
        """Retry the last checkpoint for `LAST_SECONDS`, each attempt for `patience`; then it is a `RaynforceError`."""
        until = time.monotonic() + LAST_SECONDS
        while True:
            self._wait_or_raise(show)
            begin()
            self._wait_or_raise(show)
            if not self.failing:
                return
            self._insists = True  # it has been told once
            if time.monotonic() >= until:
                if self._is_safe:
                    raise NotMirrored(self._reason)
                newest = "there is none" if self.last is None else f"the newest is of step {self.last.step:,}"
                what = f"the last checkpoint could not be written ({self._reason}); {newest}"
                raise RaynforceError(f"{what}: what was learned since is lost")
            show("the last checkpoint could not be written; trying again")
            time.sleep(min(1.0, LAST_SECONDS / 10))

    def _wait_or_raise(self, show: Callable[[str], None]) -> None:
        seconds = self._patience or LAST_SECONDS
        if not self.wait(show, seconds):
            raise RaynforceError(f"{self._open[0].what} was not written within {seconds:.0f} s: slow storage")

    def require(self) -> None:
        if self.failing:
            raise RaynforceError(self._reason)

    def close(self) -> None:
        """Let the thread finish what it was given; storage that hangs is not waited for."""
        self._tasks.put(None)
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def metrics(self) -> dict[str, float]:
        found = {"disk/failures": float(self.failures), "disk/failures_in_a_row": float(self._in_a_row)}
        if self.last is not None:
            found |= {"disk/checkpoint_bytes": self.last.bytes, "disk/checkpoint_seconds": self.last.seconds}
            found |= {"disk/checkpoint_step": float(self.last.step), "disk/checkpoints": float(self.count)}
        return found

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            began, size, error = time.monotonic(), 0, None
            try:
                size = task.write()
            except Exception as found:  # whatever it is, training goes on, and the next one is tried
                error = found
            self._news.put((task, size, time.monotonic() - began, error))
            del task, error  # its states may be most of the memory

    def _succeeded(self, task: _Task, size: int, seconds: float) -> None:
        if not task.whole:
            return
        self.last, self.count = Written(task.step, size, seconds), self.count + 1
        if self._in_a_row:
            self._say(f"{task.what} is written: the storage works again")
            self._event("storage", state="works again", steps=task.step)
        self._in_a_row, self._retry_at = 0, None

    def _failed(self, task: _Task, error: Exception) -> None:
        self.failures += 1
        self._is_safe = isinstance(error, NotMirrored)
        self._reason = str(error) if isinstance(error, RaynforceError) else summary(error)
        pause = BACKOFF[min(self._in_a_row, len(BACKOFF) - 1)]
        self._in_a_row += 1
        self._retry_at = time.monotonic() + pause
        if not self._insists:
            self._alarm(f"{self._reason}; training goes on, next attempt in {pause:.0f} s", "failed")

    def _alarm(self, text: str, state: str) -> None:
        self._say(f"ALARM: {text}")
        self._event("storage", state=state, cause=text)
