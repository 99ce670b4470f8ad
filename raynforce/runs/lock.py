"""One writer for a run: a lock that names its holder, works between hosts, and is free again after any kind of end.

`run.lock` is locked with `flock`, which the kernel undoes when the process ends. Its content says who holds it. File
systems that hosts share do not always share `flock`, so the holder touches the file every few seconds too: a process
of another host takes a lock only if that has stopped.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from raynforce.errors import RaynforceError, UsageError
from raynforce.runs import disk

NAME = "run.lock"
BEAT, STALE = 10.0, 60.0  # seconds from touch to touch, and without one until a holder of another host counts as gone
SETTLE = 1.0  # seconds in which another host that takes the same lock would have written its name
LONGEST = 4096  # bytes of the content

_files: set[int] = set()  # descriptors of locks that are held
_live: set[str] = set()  # tokens of locks that this process holds


def _forget() -> None:
    """In a forked child: a lock lasts as long as any copy of its descriptor, and the child may outlive its parent."""
    for descriptor in _files:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _files.clear()


os.register_at_fork(after_in_child=_forget)


@dataclass(frozen=True)
class Holder:
    host: str = ""
    pid: int = 0  # in that host. 0 if the holder cannot be named
    boot: str = ""  # which start of which kernel, and which of its containers: a process id says nothing elsewhere
    started: float = 0.0  # when it took the lock: seconds since 1970, by the clock of its host
    token: str = ""

    def __str__(self) -> str:
        if not self.pid:
            return "another process"
        since = time.strftime("%H:%M (%Y-%m-%d)", time.localtime(self.started))
        return f"process {self.pid} on host {self.host} since {since}"

    @staticmethod
    def me() -> Holder:
        return Holder(os.uname().nodename, os.getpid(), _boot(), time.time(), uuid.uuid4().hex)

    @staticmethod
    def parse(text: bytes) -> Holder | None:
        """Who is named; None if the lock was released, a `Holder()` if nobody can make sense of it."""
        if not text:
            return None
        try:
            facts = json.loads(text)
            return Holder(**{name: type(value)(facts[name]) for name, value in asdict(Holder()).items()})
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return Holder()

    def has_ended(self) -> bool:
        """Whether it was a process of this machine that is gone, or this one when it could not say that it was done."""
        if not self.boot or (self.host, self.boot) != (os.uname().nodename, _boot()):
            return False
        if self.pid == os.getpid():
            return self.token not in _live
        try:
            os.kill(self.pid, 0)
        except (OSError, OverflowError) as error:
            return isinstance(error, ProcessLookupError)
        return False

    def same_kernel(self) -> bool:
        return self.boot.partition(" ")[0] == _boot().partition(" ")[0]


def _boot() -> str:
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return os.uname().nodename


class LockPlace(Protocol):
    def read(self) -> Holder | None: ...

    def touch(self, own: Holder) -> None:
        """Show that the holder lives."""

    def free(self, own: Holder | None) -> None:
        """Name nobody any more, where `own` is still the one who is named; let go of what was opened."""


class Lock:
    """A lock that is held: a thread shows every `BEAT` seconds that its holder lives, and sees if it was taken over."""

    def __init__(self, run: str, own: Holder, place: LockPlace, within: Lock | None = None) -> None:
        self.run, self.own, self._place, self._within = run, own, place, within
        self.lost: Holder | None = None
        """Who has taken it over because this process seemed gone (stopped, or cut off from the disk) for too long."""
        _live.add(own.token)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._work, name="raynforce-lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise if this process is not the run's one writer any more. Does not touch the disk."""
        if self._within is not None:
            self._within.check()
        if self.lost is not None:
            raise RaynforceError(f"run {self.run} was taken over by {self.lost}: nothing more is written to it here")

    def beat(self) -> None:
        """Show life now, and raise if another has taken it over."""
        now = self._place.read()
        if now is not None and now.token not in ("", self.own.token):
            self.lost = now
        self.check()
        if not self._end.is_set():  # a thread that comes too late must not take it again
            self._place.touch(self.own)

    def _work(self) -> None:
        while not self._end.wait(BEAT):
            with contextlib.suppress(OSError, RaynforceError):  # a disk that fails may come back
                self.beat()
        with contextlib.suppress(OSError, RaynforceError):
            self._place.free(None if self.lost else self.own)

    def release(self, timeout: float = 5.0) -> None:
        """Let others have it. The disk is not waited for any longer than `timeout`."""
        _live.discard(self.own.token)
        self._end.set()
        self._thread.join(timeout)


def in_use(run: str | Path, by: Holder) -> UsageError:
    return UsageError(f"run {run} is in use by {by}: wait, or end it first")


class _File:
    """`run.lock`, open and locked."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor

    def read(self) -> Holder | None:
        """The content, as other hosts see it: a file system asks again when a file is opened."""
        with open(self._path, "rb", opener=lambda path, _: os.open(path, os.O_RDONLY | os.O_NOFOLLOW)) as file:
            return Holder.parse(file.read(LONGEST))

    def write(self, own: Holder) -> None:
        """In one write, so that nobody sees half of it."""
        text = json.dumps(asdict(own)).encode() + b"\n"
        os.pwrite(self._descriptor, text, 0)
        os.ftruncate(self._descriptor, len(text))
        disk.sync(self._descriptor)  # other hosts see nothing of it before

    def touch(self, own: Holder) -> None:
        os.utime(self._descriptor)

    def free(self, own: Holder | None) -> None:
        try:
            if own is not None and self.read() == own:
                os.ftruncate(self._descriptor, 0)
        finally:
            _close(self._descriptor)


def _close(descriptor: int) -> None:
    _files.discard(descriptor)
    os.close(descriptor)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[Lock]:
    """Be the one writer of the run at `path`, until the end of this process at the latest, however that comes."""
    lock = _acquire(path)
    try:
        yield lock
    finally:
        lock.release()


def holder(path: Path) -> Holder | None:
    """Who writes to the run at `path`; None if nobody does. Changes nothing."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:  # there is none, or it is not a file
        descriptor = os.open(path / NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        stack.callback(os.close, descriptor)
        found, flock = Holder.parse(os.pread(descriptor, LONGEST, 0)), True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return found or Holder()
        except OSError:  # there is no such lock on this file system
            flock = False
        return found if _is_alive(found, time.time() - os.fstat(descriptor).st_mtime, flock) else None
    return None


def _acquire(path: Path) -> Lock:
    own = Holder.me()
    try:
        with contextlib.ExitStack() as stack:
            descriptor = os.open(path / NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
            _files.add(descriptor)
            stack.callback(_close, descriptor)
            file = _File(path / NAME, descriptor)
            before = Holder.parse(os.pread(descriptor, LONGEST, 0))
            flock = _flock(descriptor)
            if flock is None:
                raise in_use(path, before or Holder())
            with tempfile.TemporaryFile(dir=path) as probe:  # the file system's own clock need not be that of this host
                idle = os.fstat(probe.fileno()).st_mtime - os.fstat(descriptor).st_mtime
            if before is not None and _is_alive(before, idle, flock):
                raise in_use(path, before)
            file.write(own)
            # On a file system without a shared flock another host may break the same lock in this very moment.
            if not flock or (before is not None and not before.same_kernel()):
                time.sleep(SETTLE)
                if (now := file.read()) is not None and now.token != own.token:
                    raise in_use(path, now)
            stack.pop_all()
            return Lock(str(path), own, file)
    except OSError as error:
        fix = "make it writable (is there space?), or copy it"
        raise RaynforceError(f"cannot lock run {path}: {error.strerror or error}; {fix}") from error


def _flock(descriptor: int) -> bool | None:
    """Lock it: True if it is locked, None if another has it, False if the file system cannot."""
    for _ in range(5):  # once is not enough: somebody may just be looking who holds it
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.05)
        except OSError:
            return False
    return None


def _is_alive(holder: Holder | None, idle: float, flock: bool) -> bool:
    """Whether a holder that has not touched its lock for `idle` seconds is there although we can lock the file."""
    if holder is None or not holder.pid or holder.has_ended() or (flock and holder.same_kernel()):
        return False  # if we could lock it, the kernel knows of no holder
    return abs(idle) < STALE  # a clock that was set back leaves times of the future
