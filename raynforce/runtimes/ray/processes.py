"""The processes of a Ray that was started here."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raynforce.runtimes.ray import private


@dataclass(frozen=True)
class Process:
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
    """What our own Ray has started: its workers and agents."""
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
