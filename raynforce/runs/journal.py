"""The journal: appends to the files of a run in a thread of its own, so that training never waits for the disk."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

from raynforce.errors import summary
from raynforce.runs import disk

LIMIT = 64 << 20  # bytes of lines that are kept in memory
STALL = 10.0  # seconds without an answer from the disk that are told of
SYNC = 5.0  # seconds from fsync to fsync, where nobody waits for one
RETRY = 1.0  # seconds until what failed is tried again


class _File:
    """A file that is appended to, and what of it is not safe on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor: int | None = None
        os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o666))
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        self.end = status.st_size  # bytes that are safe
        self.lines: list[bytes] = []  # that are not, of which
        self.written = 0  # are written, or are being written
        self.settled = 0  # lines that are safe, or were dropped
        self.error = ""  # why the last attempt failed
        self.attempts = 0  # that failed
        self.due = 0.0  # time of the next attempt, or of the next fsync

    def reopen(self) -> None:
        """Cut off what an attempt left that failed; a new descriptor may work where the old one never will again."""
        if self.descriptor is None:
            self.descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            self.end = min(self.end, os.fstat(self.descriptor).st_size)  # others may have cut it
            os.ftruncate(self.descriptor, self.end)

    def close(self) -> None:
        if self.descriptor is not None:
            with contextlib.suppress(OSError):
                os.close(self.descriptor)
            self.descriptor = None


class Journal:
    """Appends lines to files in a daemon thread.

    What cannot be written (a full, read-only or broken disk, or one that does not answer) stays in memory and is tried
    again. Beyond `LIMIT` bytes the newest lines that are not written are dropped. No line is ever torn or doubled by
    this: all that was not synced when an attempt failed is cut off and written again.

    `alarm` is told in one line when such an outage begins and when it is over, always in the thread that calls
    `append`, `report` or `close`. All methods may be called from any thread.
    """

    def __init__(self, alarm: Callable[[str], None] = lambda text: None) -> None:
        self._alarm = alarm
        self._changed = threading.Condition()  # guards all that follows; never held while the disk is waited for
        self._files: dict[Path, _File] = {}
        self._bytes = 0  # kept in memory
        self._dropped = 0  # lines, in this outage
        self._outage: Path | None = None  # the file that it began with
        self._notices: list[str] = []  # not told yet
        self._busy: tuple[Path, float] | None = None  # what the thread is at, and since when
        self._awaited = 0  # callers that wait for all to be synced
        self._woken = self._closed = False
        self._thread = threading.Thread(target=self._work, name="raynforce-journal", daemon=True)
        self._thread.start()

    def add(self, path: Path) -> None:
        """Begin with a file, made if need be, that nobody else writes to; raises `OSError` if it cannot be opened."""
        with self._changed:
            if path in self._files:
                raise ValueError(f"{path} is written by this journal already")
            self._files[path] = _File(path)

    def append(self, path: Path, line: bytes) -> None:
        """Append a line, or any piece that is of use only as a whole."""
        with self._changed:
            if self._closed:
                raise RuntimeError(f"the journal is closed; {path} cannot be appended to")
            if path not in self._files:
                self.add(path)
            file = self._files[path]
            if self._bytes + len(line) > LIMIT:
                self._begin_outage(path, "the disk is too slow")
                self._dropped += 1
            else:
                file.lines.append(line)
                self._bytes += len(line)
            self._wake()
        self.report()

    def position(self, path: Path) -> int:
        """How many bytes the file will have after what was appended so far."""
        with self._changed:
            return self._files[path].end + sum(map(len, self._files[path].lines))

    def flush(self, timeout: float, *, insist: bool = False) -> bool:
        """Wait until what was appended is safe on disk; returns whether it is. An error ends it, unless `insist`."""
        with self._changed:
            goals = [(file, file.settled + len(file.lines), file.attempts) for file in self._files.values()]
            self._awaited += 1
            self._wake()

            def done() -> bool:
                return all(file.settled >= goal for file, goal, _ in goals)

            def failed() -> bool:
                return not insist and any(file.attempts > before for file, _, before in goals)

            self._changed.wait_for(lambda: done() or failed(), timeout)
            self._awaited -= 1
            return done()

    @property
    def trouble(self) -> str:
        """Why something is not on disk yet."""
        with self._changed:
            failed = next((file for file in self._files.values() if file.error), None)
            return f"cannot write {failed.path}: {failed.error}" if failed else "the disk has not answered yet"

    def report(self) -> None:
        """Tell of an outage that has begun or ended; `append` does so too."""
        with self._changed:
            if self._busy is not None and (silent := time.monotonic() - self._busy[1]) > STALL:
                self._begin_outage(self._busy[0], f"the disk has not answered for {silent:.0f} s")
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
            self._wake()
            left = [file for file in self._files.values() if file.lines]
            if left:
                names, reason = ", ".join(file.path.name for file in left), left[0].error or "the disk does not answer"
                lost = _lines(sum(len(file.lines) for file in left) + self._dropped)
                self._notices.append(f"cannot write {left[0].path}: {reason}; lost: {lost} of {names}")
        self._thread.join(0.1 if left else timeout)  # it may hang for good
        self.report()
        return done

    # -- the thread -----------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._changed:
                self._busy = None
                pending = any(file.lines for file in self._files.values())
                self._changed.wait_for(lambda: self._woken, RETRY if pending else None)
                self._woken = False
                files = list(self._files.values())
                if self._closed:
                    break
            for file in files:
                try:
                    self._advance(file)
                except Exception as error:  # whatever it is: this thread must not end
                    self._failed(file, error)
        for file in files:
            file.close()

    def _advance(self, file: _File) -> None:
        """Write what waits, and sync it if it is time to."""
        with self._changed:
            now = time.monotonic()
            if not file.lines or (file.error and now < file.due and not self._awaited):
                return
            if not file.written and not file.error:
                file.due = now + SYNC
            data, file.written = b"".join(file.lines[file.written :]), len(file.lines)
            sync = bool(self._awaited or file.error or now >= file.due)
            self._busy = file.path, now
        file.reopen()
        assert file.descriptor is not None
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(file.descriptor, rest) :]
        if sync:
            disk.sync(file.descriptor)
        with self._changed:
            self._busy = None
            file.error = ""
            if sync:
                size = sum(map(len, file.lines[: file.written]))
                file.end += size
                self._bytes -= size
                file.settled += file.written
                del file.lines[: file.written]
                file.written = 0
                self._changed.notify_all()
            self._end_outage()

    def _failed(self, file: _File, error: Exception) -> None:
        if file.descriptor is not None:
            with contextlib.suppress(OSError):  # so that nothing torn is seen meanwhile
                os.ftruncate(file.descriptor, file.end)
        file.close()
        with self._changed:
            file.written, file.due = 0, time.monotonic() + RETRY
            file.error, file.attempts = getattr(error, "strerror", None) or summary(error), file.attempts + 1
            self._begin_outage(file.path, file.error)
            self._changed.notify_all()

    # -- `_changed` is held ---------------------------------------------------------------------------

    def _wake(self) -> None:
        self._woken = True
        self._changed.notify_all()

    def _begin_outage(self, path: Path, reason: str) -> None:
        if self._outage is None:
            self._outage = path
            kept = _lines(sum(len(file.lines) for file in self._files.values()))
            self._notices.append(f"cannot write {path}: {reason}; {kept} kept in memory until it can be written")

    def _end_outage(self) -> None:
        behind = any(file.error or file.written < len(file.lines) for file in self._files.values())
        if self._outage is not None and not behind:
            lost = f"lost: {_lines(self._dropped)}, for lack of memory" if self._dropped else "nothing was lost"
            self._notices.append(f"{self._outage} can be written again: {lost}")
            self._outage, self._dropped = None, 0


def _lines(count: int) -> str:
    return f"{count:,} line{'s' * (count != 1)}"
