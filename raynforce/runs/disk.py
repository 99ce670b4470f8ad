"""Writing through to the disk, on file systems that can; and where a user has room for what can be had again."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

_NONE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)  # what file systems say that have no such thing, or not for folders


_FULL = tuple(os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT))


def is_full(told: str) -> bool:
    """Whether an error, as it was told, is of a disk without room: what failed for that can go on once there is."""
    return any(words in told for words in _FULL)


def sync(descriptor: int) -> None:
    """Return once what was written is safe, as far as the file system knows of that."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NONE:
            raise


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def numbered(path: Path) -> Path:
    """Make a folder of this name, or with `-2` behind it and so on where there is one: one process alone gets it."""
    for name in itertools.chain([path.name], (f"{path.name}-{number}" for number in itertools.count(2))):
        with contextlib.suppress(FileExistsError):
            path.with_name(name).mkdir()
            return path.with_name(name)
    raise AssertionError


@contextlib.contextmanager
def alone(path: Path, flags: int) -> Iterator[None]:
    """One process of this machine at a time; on a file system without locks it is up to the user."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            descriptor = os.open(path, flags, 0o666)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # the kernel undoes it however this process ends
        yield


def cache_folder() -> Path:
    """Where this user's copies of what can be had again are kept."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "raynforce"
