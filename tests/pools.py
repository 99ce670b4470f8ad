"""What the tests of pools share: a watcher that remembers, and how a member is killed."""

from __future__ import annotations

import os
import signal
from typing import Any

from raynforce.runtimes.member import Fault, Job, Member


class Witness:
    """Remembers what happened in a pool."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.said: list[tuple[str, ...]] = []
        self.seconds: list[float] = []
        self.redos: list[Job] = []

    def fault(self, fault: Fault, member: Member) -> None:
        self.faults.append(fault)

    def recovered(self, role: str, seconds: float) -> None:
        self.said.append(("recovered", role))
        self.seconds.append(seconds)

    def absent(self, role: str, cause: str) -> None:
        self.said.append(("absent", role))

    def back(self, role: str) -> None:
        self.said.append(("back", role))

    def note(self, text: str) -> None:
        self.said.append(("note", text))

    def redone(self, job: Job) -> None:
        self.redos.append(job)

    @property
    def kinds(self) -> list[tuple[str, str]]:
        return [(fault.kind, fault.action) for fault in self.faults]


def kill(member: Member) -> None:
    """Its process; a handle that wraps another is seen through."""
    handle: Any = getattr(member.handle, "_handle", member.handle)
    os.kill(handle.process.pid, signal.SIGKILL)
