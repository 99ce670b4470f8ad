"""What a pool is made of: members, the jobs they are given, the rules they are kept alive by, and their faults."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from raynforce.errors import RaynforceError
from raynforce.runtimes.base import Handle, Pending, RoleDied
from raynforce.trees import Tree

Kind = Literal["died", "hung", "failed", "memory", "lost", "absent"]


@dataclass(frozen=True)
class Rules:
    """How the members of one kind are kept alive."""

    restarts: int = 5  # in a row without getting any further; then the member is given up
    backoff: float = 0.5  # seconds before the second restart in a row; doubled for each further one
    start_seconds: float = math.inf  # for a member to be built, or to take its state back
    job_seconds: float = math.inf  # for one job
    absent_seconds: float = math.inf  # after which others no longer wait for a member that is being replaced
    quorum: int = 1  # members without which the run cannot go on
    work: str = ""  # the method that proves a member; one that raises before its first success is not restarted
    shows_progress: Callable[[Any], bool] = lambda answer: True  # whether an answer of `work` resets the failures
    restartable: tuple[type[RaynforceError], ...] = (RoleDied,)  # errors that a restart may mend; others end the run
    has_state: bool = True  # whether it has `state` and `load`
    start_fresh: Callable[[Member], Sequence[Any]] | None = None  # the call that starts a member without its state
    evidence: Callable[[Member], Callable[[], dict[str, Tree]] | None] = lambda member: None
    """What to write down of a member that died or hangs, for a replay in the debugger."""
    greeting: str = ""  # a method to call first on a member that is made again and has no state to take back
    hint: str = ""  # what a user can do about a member that does not answer in time, to be put behind that


@dataclass(frozen=True)
class Fault:
    """One failure of a member, and what was done about it."""

    role: str
    kind: Kind
    error: RaynforceError
    action: Literal["restarted", "given up", "stopped", "left out"]
    attempt: int = 0  # failures in a row

    @property
    def cause(self) -> str:
        return str(self.error)


class Watcher(Protocol):
    """Notified of what happens in a pool."""

    def fault(self, fault: Fault, member: Member) -> None: ...
    def recovered(self, role: str, seconds: float) -> None: ...  # it works again, so long after it failed
    def absent(self, role: str, cause: str) -> None: ...  # the others go on without it
    def back(self, role: str) -> None: ...
    def note(self, text: str) -> None: ...  # something a user should know
    def redone(self, job: Job) -> None: ...  # a job was done again though its answer was there


@dataclass(eq=False, repr=False)
class Job:
    """A call to a member that outlives the member's failures. It may be an argument of other jobs."""

    member: Member
    method: str
    args: Sequence[Any]
    parts: int
    weight: int
    pendings: list[Pending] = field(default_factory=list)  # of the newest try; empty while it is not made
    again: Pending | None = None  # if it is done again though its answer is there
    settled: bool = False
    fault: Fault | None = None  # why there will be no result
    asked: float = 0.0
    answered: float = 0.0
    disturbed: bool = False  # its member failed on the way, so that these times say nothing

    @property
    def value(self) -> Pending:
        """Its first part, to be handed on."""
        return self.pendings[0]

    def result(self) -> Any:
        """Its last part, which is small and says how it went."""
        return self.pendings[-1].result()

    @property
    def watched(self) -> Pending | None:
        """What to look at for its answer; None while it is not made."""
        if self.settled:
            return self.again
        return self.pendings[-1] if self.pendings else None


@dataclass(eq=False, repr=False)
class Member:
    """One role of a pool, whichever process it lives in at the moment."""

    name: str
    index: int
    kind: str
    make: Callable[[int], Handle]
    rules: Rules
    recovery_every: float = 0.0  # seconds between two recovery points at least; infinite if its state is too large
    handle: Handle | None = None
    origin: Sequence[Any] = ()  # what to call first without a recovery point
    recovery_point: Pending | None = None
    log: list[Job] = field(default_factory=list)  # since the recovery point
    logged: int = 0  # bytes that these hold on to, at most
    open: list[Job] = field(default_factory=list)  # of those, not answered yet, or to be answered again
    loading: Pending | None = None
    greeted: Pending | None = None  # what it answered when it was restarted
    saving: Saving | None = None  # the next recovery point
    fresh: bool = True  # this process has not answered anything yet
    proven: bool = False
    gone: bool = False
    absent: bool = False
    renew: Fault | None = None  # to be replaced at its next recovery point
    failures: int = 0
    attempts: int = 0  # to start fresh
    wake: float = 0.0  # when it may be restarted
    down_since: float | None = None
    spawned: float = 0.0
    heard: float = 0.0  # when it last answered, was spawned, or was without room
    recovery_at: float = 0.0
    recovery_cost: float = math.inf  # seconds, as far as we know

    def __post_init__(self) -> None:
        self.origin = [self.rules.greeting] if self.rules.greeting else []

    @property
    def remembers(self) -> bool:
        """Whether it can come back to where it was: its jobs are kept until a recovery point covers them."""
        return self.rules.has_state and math.isfinite(self.recovery_every)


class Saving(NamedTuple):
    state: Pending
    covered: Sequence[Job]  # what was done before it
    asked: float
