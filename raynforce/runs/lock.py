"""One writer for a run: a lock that names its holder, works between hosts, and is free again after any kind of end.

`run.lock` is locked with `flock`, which the kernel undoes when the process ends. Its content says who holds it. File
systems that hosts share do not always share `flock`, so the holder touches the file every few seconds too: a process
of another host takes a lock only if that has stopped.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from raynforce.errors import RaynforceError, UsageError
from raynforce.runs import disk

NAME = "run.lock"
BEAT, STALE = 10.0, 60.0  # seconds from touch to touch, and without one until a holder of another host counts as gone
SETTLE = 1.0  # seconds in which another host that breaks the same stale lock would have written its name
LONGEST = 4096  # bytes of the content

_held: set[int] = set()  # descriptors


def _forget() -> None:
    """In a forked child: a lock lasts as long as any copy of its descriptor, and the child may outlive its parent."""
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget)


@dataclass(frozen=True)
class Holder:
    """The process that writes to a run."""

    host: str = ""
    pid: int = 0
    """In that host. 0 if the holder cannot be named."""
    boot: str = ""
    """Differs from host to host, and from one start of a host to the next."""
    started: float = 0.0
    """When it took the lock: seconds since 1970, by the clock of its host."""
    token: str = ""

    def __str__(self) -> str:
        if not self.pid:
            return "another process"
        since = time.strftime("%H:%M (%Y-%m-%d)", time.localtime(self.started))
        return f"process {self.pid} on host {self.host} since {since}"


class Lock:
    """A lock that is held."""

    def __init__(self, path: Path, descriptor: int, own: Holder) -> None:
        self.path, self.own = path, own
        self.lost: Holder | None = None
        """Who has taken it over because this process seemed gone (stopped, or cut off from the disk) for too long."""
        self._descriptor = descriptor
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="raynforce-lock", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise if this process is not the run's one writer any more. Does not touch the disk."""
        if self.lost is not None:
            raise RaynforceError(f"run {self.path} was taken over by {self.lost}: nothing more is written to it here")

    def _beat(self) -> None:
        wait = min(SETTLE, BEAT)  # soon, in case another host took it in the same moment
        while not self._end.wait(wait):
            wait = BEAT
            with contextlib.suppress(OSError):  # a disk that fails may come back
                if self._is_own():
                    os.utime(self._descriptor)
        with contextlib.suppress(OSError):
            if self._is_own():
                os.ftruncate(self._descriptor, 0)
        _held.discard(self._descriptor)
        os.close(self._descriptor)

    def _is_own(self) -> bool:
        now = _read(self.path / NAME)
        if now is not None and now.token not in ("", self.own.token):
            self.lost = now
        return self.lost is None

    def release(self, timeout: float = 5.0) -> None:
        """Let others have it. The disk is not waited for any longer than `timeout`."""
        self._end.set()
        self._thread.join(timeout)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[Lock]:
    """Be the one writer of the run at `path`, until the end of this process at the latest, however that comes."""
    lock = _take(path)
    try:
        yield lock
    finally:
        lock.release()


def holder(path: Path) -> Holder | None:
    """Who writes to the run at `path`; None if nobody does. Changes nothing."""
    try:
        descriptor = os.open(path / NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return None
        found = _parse(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return found or Holder()
        except OSError:  # there is none on this file system
            return found if _alive(found, time.time() - status.st_mtime, flock=False) else None
        return found if _alive(found, time.time() - status.st_mtime, flock=True) else None
    finally:
        os.close(descriptor)


def _take(path: Path) -> Lock:
    own = Holder(os.uname().nodename, os.getpid(), _boot(), time.time(), uuid.uuid4().hex)
    try:
        with contextlib.ExitStack() as stack:
            file = path / NAME
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(file, flags, 0o666)
            stack.callback(os.close, descriptor)
            _held.add(descriptor)
            stack.callback(_held.discard, descriptor)
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, f"{NAME} is not a regular file")
            flock = _flock(descriptor, path)
            before = _parse(descriptor)
            if before is not None and _alive(before, _clock(path) - os.fstat(descriptor).st_mtime, flock):
                raise _in_use(path, before)
            _write(descriptor, own)
            # On a file system without a shared flock another host may break the same lock in this very moment.
            if not flock or (before is not None and before.boot != own.boot):
                time.sleep(SETTLE)
                now = _read(file)
                if now is not None and now.token != own.token:
                    raise _in_use(path, now)
            stack.pop_all()
            return Lock(path, descriptor, own)
    except OSError as error:
        raise RaynforceError(
            f"cannot lock run {path}: {error.strerror or error}; make it writable (is there space?), or copy it"
        ) from error


def _flock(descriptor: int, path: Path) -> bool:
    """Lock it; returns whether the file system can."""
    for _ in range(5):  # once is not enough: somebody may just be looking who holds it
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(0.05)
        except OSError:
            return False
    raise _in_use(path, _parse(descriptor) or Holder())


def _in_use(path: Path, holder: Holder) -> UsageError:
    return UsageError(f"run {path} is in use by {holder}: wait, or end it first")


def _alive(holder: Holder | None, idle: float, flock: bool) -> bool:
    """Whether a holder that has not touched its lock for `idle` seconds is there although we can lock the file."""
    if holder is None or not holder.pid:
        return False
    if holder.boot == _boot():
        if flock:
            return False  # the kernel knows
        if holder.host == os.uname().nodename and not _exists(holder.pid):
            return False
    return abs(idle) < STALE  # a clock that was set back leaves times of the future


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is another user's
        return True
    return True


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename


def _clock(path: Path) -> float:
    """The time by the file system's own clock, which need not be that of this host."""
    file = path / f".{NAME}.clock"
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        os.utime(descriptor)
        return os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)
        with contextlib.suppress(OSError):
            file.unlink()


def _read(file: Path) -> Holder | None:
    """The content, as other hosts see it: a file system asks again when a file is opened."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return _parse(descriptor)
    finally:
        os.close(descriptor)


def _parse(descriptor: int) -> Holder | None:
    """Who is named; None if the lock was released, a `Holder()` if nobody can make sense of it."""
    try:
        text = os.pread(descriptor, LONGEST, 0)
    except OSError:  # some file systems let nobody read what another has locked
        return Holder()
    if not text:
        return None
    try:
        facts = json.loads(text)
        return Holder(
            str(facts["host"]), int(facts["pid"]), str(facts["boot"]), float(facts["started"]), str(facts["token"])
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return Holder()


def _write(descriptor: int, own: Holder) -> None:
    """In one write, so that nobody sees half of it."""
    text = json.dumps(asdict(own)).encode() + b"\n"
    if os.pwrite(descriptor, text, 0) != len(text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.ftruncate(descriptor, len(text))
    disk.sync(descriptor)  # other hosts see nothing of it before
