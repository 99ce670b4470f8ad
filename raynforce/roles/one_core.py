"""Threads that take turns for Python's lock anyway, kept on one core: there they wake one another at less cost."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

FITS, FULL = 0.7, 0.95  # how busy a core may be for the threads to be kept on it, and to stay there
WINDOW = 1.0  # seconds over which that is measured
_SPAWNS = frozenset(("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system"))


class OneCore:
    """Keeps the calling thread and `threads` on one core as long as they fit there. They are released for good if they
    do not, or when one of them starts a process, which would inherit the core."""

    def __init__(self, threads: Callable[[], Iterable[int]], number: int, wanted: bool = True) -> None:
        self.kept = False
        self._threads, self._main = threads, threading.get_native_id()
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []
        self._all, self._core = cores, cores[number % len(cores)] if cores else 0
        self._over = not wanted or len(cores) < 2
        self._since, self._busy = time.monotonic(), time.process_time()
        self._changing = threading.RLock()

    def look(self, now: float) -> None:
        if self._over or now - self._since < WINDOW:
            return
        busy = time.process_time()
        load = (busy - self._busy) / (now - self._since)
        self._since, self._busy = now, busy
        with self._changing:
            if self.kept and (load > FULL or any(self._is_here(process) for process in self._children())):
                self.close()
            elif not self.kept and not self._over and load < FITS:
                _keepers.add(self)
                _watch_spawns()
                self.kept = True
                for thread in (
                    self._main,
                    *self._threads(),
                ):  # a thread that wakes up interrupts no other
                    _put(thread, [self._core], os.SCHED_BATCH)

    def close(self) -> None:
        """Let them go, for good, and whatever else they have started there."""
        with self._changing:
            self._over = True
            if not self.kept:
                return
            self.kept = False
            for thread in (*_tasks("self"), *(task for child in self._children() for task in _tasks(child))):
                if self._is_here(thread):
                    _put(thread, self._all, os.SCHED_OTHER)

    def _is_here(self, thread: int) -> bool:
        """Whether a thread or process is on this core alone: those that were there before are not."""
        with suppress(OSError):  # it has ended
            return os.sched_getaffinity(thread) == {self._core}
        return False

    def _children(self) -> list[int]:
        found: list[int] = []
        for thread in _tasks("self"):
            with suppress(OSError):  # it has ended, or the system does not tell
                found += map(int, Path(f"/proc/self/task/{thread}/children").read_text().split())
        return found


def _tasks(process: int | str) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{process}/task")]
    except OSError:
        return []


def _put(thread: int, cores: list[int], policy: int) -> None:
    with suppress(OSError):  # it has ended, or this is not allowed
        os.sched_setaffinity(thread, cores)
        os.sched_setscheduler(thread, policy, os.sched_param(0))


_keepers: weakref.WeakSet[OneCore] = weakref.WeakSet()


@cache
def _watch_spawns() -> None:
    """From now on, keepers let go before a process is started."""
    sys.addaudithook(_before)


def _before(event: str, _: tuple[Any, ...]) -> None:
    if event in _SPAWNS:
        for keeper in tuple(_keepers):
            keeper.close()
