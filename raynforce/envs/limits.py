"""How many files, threads and processes may still be opened here: told before they run out."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path

from raynforce.errors import UsageError

_SPARE = 64  # for what else a process opens meanwhile
_FIX = "use fewer --envs, or raise"


def require_files(count: int, what: str) -> None:
    """Make sure that `count` more files can be open, by raising our own limit if that is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + len(os.listdir("/proc/self/fd")) + _SPARE
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise UsageError(
            f"{what} need {needed} open files, and {hard} are allowed: {_FIX} the limit (ulimit -n {needed})"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def require_tasks(count: int, what: str) -> None:
    """Make sure that `count` more threads or processes can be started, as far as that can be known."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and os.geteuid() and count > soft:
        raise UsageError(f"{what} are more than the {soft} allowed: {_FIX} the limit (ulimit -u)")
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
