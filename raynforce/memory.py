"""How much memory there is, asked before a large buffer is allocated, and how much this process has."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from raynforce.errors import UsageError


def resident_bytes() -> int:
    """What this process has in memory; 0 where that cannot be read."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def tree_bytes(pid: int) -> int:
    """What a process and all that it has started have in memory; 0 where that cannot be read."""
    total, left = 0, [pid]
    while left:
        process = Path(f"/proc/{left.pop()}")
        with contextlib.suppress(OSError, ValueError, IndexError):
            total += int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            for thread in (process / "task").iterdir():
                with contextlib.suppress(OSError):  # it has ended
                    left += map(int, (thread / "children").read_text().split())
    return total


def available_bytes() -> int | None:
    """Memory this process may still take: of the machine and of its container; None where neither can be read."""
    limits, group = [], Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        limits += [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    with contextlib.suppress(OSError, ValueError, KeyError):
        limit = int((group / "memory.max").read_text())  # the word "max" where there is no limit: ValueError
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        taken = int((group / "memory.current").read_text()) - int(stat["inactive_file"])  # that cache gives way
        limits.append(max(0, limit - taken))
    return min(limits, default=None)


def require_memory(
    needed: int, fraction: float, what: str, hint: str = "", fix: str = "lower algorithm.buffer_size"
) -> None:
    """Refuse `what` if it needs more than this fraction of the free memory; `fix` and `hint` end the message."""
    available = available_bytes()
    if available is not None and needed > fraction * available:
        there = f"{fraction * available / 1e9:.2f} GB ({fraction:.0%} of {available / 1e9:.2f} GB free memory)"
        raise UsageError(f"{what} needs {needed / 1e9:.2f} GB, available are {there}; {fix}{hint}")
