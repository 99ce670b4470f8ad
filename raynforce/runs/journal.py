"""The journal: appends to the files of a run in a thread of its own, so that training never waits for the disk."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from raynforce.errors import summary
from raynforce.runs import disk

BATCH = 1 << 16  # bytes that are written at once
MOST_SENT = 1000  # lines that are written before they are synced
_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC


class _File:
    """A file that is appended to, and what of it is not safe on disk."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.descriptor: int | None = None
        self.end = size  # bytes that are safe
        self.torn = False  # whether there may be more behind them, of an attempt that failed
        self.position = size  # bytes that will be there after all that was appended
        self.sent: deque[bytes] = deque()  # written or being written, not synced
        self.waiting: deque[bytes] = deque()  # not written
        self.appended = 0  # lines, of which
        self.settled = 0  # are safe, or were dropped
        self.error = ""  # why it could not be written; empty if it can
        self.delay = 0.0  # until the next attempt after that
        self.due = math.inf  # time of the next attempt, or of the next fsync

    def close(self) -> None:
        if self.descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self.descriptor)
            self.descriptor = None


def _look_at(path: Path) -> _File:
    """A regular file as it is now, made if there is none."""
    descriptor = os.open(path, _FLAGS | os.O_NONBLOCK, 0o666)
    try:
        status = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return _File(path, status.st_size)


class Journal:
    """Appends lines to files in a daemon thread.

    What cannot be written (a full, read-only or broken disk, or one that does not answer) stays in memory and is
    tried again, at first after `retry[0]` seconds, at last every `retry[1]`. Beyond `limit` bytes the oldest lines are
    dropped. No line is ever torn or doubled by this: all that was not synced when an attempt failed is cut off and
    written again.

    `alarm` is told in one line when such an outage begins and when it is over, always in the thread that calls
    `append`, `report` or `close`. All methods may be called from any thread.
    """

    def __init__(
        self,
        alarm: Callable[[str], None] = lambda text: None,
        *,
        limit: int = 64 << 20,
        stall: float = 10.0,
        sync: float = 5.0,
        retry: tuple[float, float] = (0.5, 30.0),
    ) -> None:
        self._alarm, self._limit, self._stall, self._sync, self._retry = alarm, limit, stall, sync, retry
        self._changed = threading.Condition()  # guards all that follows; never held while the disk is waited for
        self._files: dict[Path, _File] = {}
        self._bytes = 0  # kept in memory
        self._dropped = 0  # lines
        self._dropped_before = 0  # this outage
        self._outage: Path | None = None  # the file that it began with
        self._notices: list[str] = []  # not told yet
        self._busy: tuple[_File, float] | None = None  # what the thread is at, and since when
        self._urgent = False  # somebody waits for all to be synced
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="raynforce-journal", daemon=True)
        self._thread.start()

    # -- for whoever writes ---------------------------------------------------------------------------

    def add(self, path: Path) -> None:
        """Begin with a file, made if there is none; raises the `OSError` if it cannot be opened.

        From here on nobody else may write to it.
        """
        found = _look_at(path)
        with self._changed:
            if path in self._files:
                raise ValueError(f"{path} is written by this journal already")
            self._files[path] = found

    def append(self, path: Path, line: bytes) -> None:
        """Append a line, or any piece that is of use only as a whole."""
        if path not in self._files:
            found = _look_at(path)
            with self._changed:
                self._files.setdefault(path, found)  # another thread may have been first
        with self._changed:
            if self._closed:
                raise RuntimeError(f"the journal is closed; {path} cannot be appended to")
            file = self._files[path]
            file.waiting.append(line)
            file.appended += 1
            file.position += len(line)
            self._bytes += len(line)
            self._drop()
            self._changed.notify_all()
        self.report()

    def position(self, path: Path) -> int:
        """How many bytes the file will have after what was appended so far."""
        with self._changed:
            return self._files[path].position

    def flush(self, timeout: float, *, insist: bool = False) -> bool:
        """Wait until all that was appended so far is safe on disk; returns whether it is.

        It is given up at the first error, or with `insist` not before the time is over.
        """
        with self._changed:
            goals = [(file, file.appended) for file in self._files.values()]
            dropped = self._dropped
            for file in self._files.values():
                file.delay = 0.0  # at once, then again and again
                file.due = 0.0
            self._urgent = True
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: all(file.settled >= goal for file, goal in goals) or (self._trouble() and not insist), timeout
            )
            return all(file.settled >= goal for file, goal in goals) and self._dropped == dropped

    @property
    def trouble(self) -> str:
        """Why something is not on disk yet."""
        with self._changed:
            return self._trouble() or "the disk has not answered yet"

    def _trouble(self) -> str:
        """The error of the newest attempt, if it failed."""
        failed = next((file for file in self._files.values() if file.error and file.delay), None)
        return f"cannot write {failed.path}: {failed.error}" if failed else ""

    def report(self) -> None:
        """Tell of an outage that has begun or ended; `append` does so too."""
        with self._changed:
            if self._busy is not None and self._outage is None:
                file, since = self._busy
                if (silent := time.monotonic() - since) > self._stall:
                    self._begin_outage(file.path, f"the disk has not answered for {silent:.0f} s")
            notices, self._notices = self._notices, []
        for notice in notices:
            self._alarm(notice)

    def close(self, timeout: float = 5.0) -> bool:
        """Write what is left; returns whether all could be, and tells what could not."""
        with self._changed:
            if self._closed:
                return True
        done = self.flush(timeout, insist=True)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            left = [file for file in self._files.values() if file.settled < file.appended]
            if left:
                lines = sum(file.appended - file.settled for file in left) + self._dropped - self._dropped_before
                reason = left[0].error or "the disk does not answer"
                names = ", ".join(file.path.name for file in left)
                self._notices.append(
                    f"{_lines(lines)} of {names} could not be written and {_are(lines)} lost: "
                    f"cannot write {left[0].path}: {reason}"
                )
        self._thread.join(0.1 if left else timeout)  # it may hang for good
        self.report()
        return done

    # -- the thread -----------------------------------------------------------------------------------

    def _work(self) -> None:
        while (file := self._next()) is not None:
            try:
                self._advance(file)
            except Exception as error:  # whatever it is: this thread must not end
                self._failed(file, error)
        for each in tuple(self._files.values()):
            each.close()

    def _next(self) -> _File | None:
        """Wait for a file that there is something to do with; None at the end."""
        with self._changed:
            self._busy = None
            while not self._closed:
                now, first = time.monotonic(), math.inf
                for file in self._files.values():
                    at = self._when(file)
                    if at <= now:
                        self._busy = file, now
                        return file
                    first = min(first, at)
                if first == math.inf:
                    self._urgent = False
                self._changed.wait(None if first == math.inf else first - now)
            return None

    def _when(self, file: _File) -> float:
        if not file.waiting and not file.sent:
            return math.inf
        return 0.0 if not file.error and (file.waiting or self._urgent) else file.due

    def _advance(self, file: _File) -> None:
        """Write what waits, and sync it if it is time to."""
        descriptor = self._open(file)
        while True:
            with self._changed:
                if not file.sent:
                    file.due = time.monotonic() + self._sync
                data = bytearray()
                while file.waiting and len(data) < BATCH:
                    file.sent.append(file.waiting.popleft())
                    data += file.sent[-1]
                sync = not file.waiting and (self._urgent or time.monotonic() >= file.due)
                # After a failure every piece is made safe before the next, as there may not be room for all.
                sync = sync or bool(file.error) or len(file.sent) > MOST_SENT
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            if sync:
                disk.sync(descriptor)
                with self._changed:
                    self._settle(file)
            with self._changed:
                if not file.waiting:
                    file.error, file.delay = "", 0.0
                    self._end_outage()
                    return
                self._busy = file, time.monotonic()  # it does answer

    def _open(self, file: _File) -> int:
        if file.descriptor is None:
            file.descriptor = os.open(file.path, _FLAGS, 0o666)
            size = os.fstat(file.descriptor).st_size
            if file.torn and size > file.end:
                os.ftruncate(file.descriptor, file.end)
            else:  # it is what we know, or others have changed it
                with self._changed:
                    file.position += size - file.end
                    file.end = size
            file.torn = False
        return file.descriptor

    def _settle(self, file: _File) -> None:
        size = sum(map(len, file.sent))
        file.end += size
        self._bytes -= size
        file.settled += len(file.sent)
        file.sent.clear()
        self._changed.notify_all()

    def _failed(self, file: _File, error: Exception) -> None:
        if file.descriptor is not None:
            file.torn = True
            with contextlib.suppress(OSError):  # so that nothing torn is seen meanwhile
                os.ftruncate(file.descriptor, file.end)
        file.close()  # a new descriptor may work where this one never will again
        with self._changed:
            file.waiting.extendleft(reversed(file.sent))
            file.sent.clear()
            file.error = getattr(error, "strerror", None) or summary(error)
            first, longest = self._retry
            file.delay = min(2 * file.delay, longest) if file.delay else first
            file.due = time.monotonic() + file.delay
            self._begin_outage(file.path, file.error)
            self._drop()
            self._changed.notify_all()

    # -- outages; `_changed` is held ------------------------------------------------------------------

    def _begin_outage(self, path: Path, reason: str) -> None:
        if self._outage is None:
            self._outage, self._dropped_before = path, self._dropped
            lines = sum(len(file.sent) + len(file.waiting) for file in self._files.values())
            self._notices.append(
                f"cannot write {path}: {reason}; {_lines(lines)} {_are(lines)} kept in memory until it can be written"
            )

    def _end_outage(self) -> None:
        if self._outage is not None and not any(file.error or file.waiting for file in self._files.values()):
            lost = self._dropped - self._dropped_before
            loss = f"{_lines(lost)} did not fit into memory and {_are(lost)} lost" if lost else "nothing was lost"
            self._notices.append(f"{self._outage} can be written again: {loss}")
            self._outage, self._dropped_before = None, self._dropped

    def _drop(self) -> None:
        """Forget the oldest lines if there are too many to keep."""
        while self._bytes > self._limit:
            file = max(self._files.values(), key=lambda file: len(file.waiting))
            if not file.waiting:
                return
            self._begin_outage(file.path, "the disk is too slow")
            size = len(file.waiting.popleft())
            file.position -= size
            self._bytes -= size
            file.settled += 1
            self._dropped += 1


def _lines(count: int) -> str:
    return f"{count:,} line{'s' if count != 1 else ''}"


def _are(count: int) -> str:
    return "are" if count != 1 else "is"
