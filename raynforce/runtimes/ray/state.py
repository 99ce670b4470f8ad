"""What Ray changes in the process that uses it, and how it is put back; and the processes that our own Ray starts."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from raynforce.runtimes.ray import private

PACKAGE = Path(__file__).parents[2]
AUTH = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
CHANGED = ("RAY_ADDRESS", "PYTHONBREAKPOINT")  # what Ray sets in this process, to be put back
DRIVER = {"RAY_get_check_signal_interval_milliseconds": "100"}  # how soon Ctrl-C is noticed while waiting


@contextmanager
def environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables for a while; None removes one."""
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if any(name.startswith("RAY_") for name in values):
        private.reread_environment()


def unchanged() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in CHANGED}


@contextmanager
def silent() -> Iterator[None]:
    """Keep what Ray's C++ side writes to stderr from the screen; only around calls that end soon."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@contextmanager
def own_signals() -> Iterator[list[int]]:
    """Keep Ctrl-C and SIGTERM from `ray.init`, which they crash, and give those that came; the second interrupts."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def note(number: int, frame: Any) -> None:
        received.append(number)
        if len(received) > 1:
            raise KeyboardInterrupt(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with private.own_sigterm():
            yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def token_file() -> Path:
    return Path.home() / ".ray" / "auth_token"


class Process(NamedTuple):
    """A process, told from a later one with the same id by when it began."""

    pid: int
    began: str

    def alive(self) -> bool:
        return began(self.pid) == self.began


def began(pid: int) -> str:
    """When a process began, in the kernel's clock ticks; empty if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def workers(node: Any = None) -> list[Process]:
    children: list[int] = []
    for pid in private.started_processes(node):
        with suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                children += map(int, (task / "children").read_text().split())
    return [Process(child, began(child)) for child in children]


def kill(processes: Sequence[Process]) -> None:
    for process in processes:
        if process.alive():
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


def kill_marked(mark: str) -> None:
    """End what roles have started and left behind: it carries `mark`, a `NAME=value`, in its environment."""
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (place / "environ").read_bytes().split(b"\0"):
                os.kill(int(place.name), signal.SIGKILL)
