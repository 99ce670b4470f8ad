"""What a pool is made of: members, the jobs they are given, the rules they are kept alive by, and their faults."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from raynforce.errors import RaynforceError
from raynforce.runtimes.base import Handle, Pending, RoleDied
from raynforce.trees import Tree

Kind = Literal["died", "hung", "failed", "memory", "lost", "absent"]


@dataclass(frozen=True)
class Rules:
    """How the members of one kind are kept alive."""

    restarts: int = 5
    """In a row without getting any further; then the member is given up."""
    backoff: float = 0.5
    """Seconds before the second restart in a row; doubled for each further one."""
    start_seconds: float = math.inf
    """For a member to be built, or to take its state back."""
    job_seconds: float = math.inf
    """For one job."""
    absent_seconds: float = math.inf
    """After which jobs of a member that is being replaced are given up, so that others need not wait."""
    quorum: int = 1
    """Members without which the run cannot go on."""
    work: str = ""
    """The method that shows that a member works. It is not restarted if it raises before its first success."""
    shows_progress: Callable[[Any], bool] = lambda answer: True
    """Whether an answer of `work` shows progress: only then the failures before it are forgiven."""
    restartable: tuple[type[RaynforceError], ...] = (RoleDied,)
    """Errors that a restart may mend; others end the run."""
    has_state: bool = True
    """Whether it has `state` and `load`."""
    start_fresh: Callable[[Member], Sequence[Any]] | None = None
    """The call that lets a member begin anew that has lost its state, or whose state leads into failure."""
    evidence: Callable[[Member], Callable[[], dict[str, Tree]] | None] = lambda member: None
    """What to write down of a member that died or hangs, so that it can be seen again; nothing by default."""
    greeting: str = ""
    """A method to call first on a member that is made again and has no state to take back."""
    hint: str = ""
    """What a user can do about a member that does not answer in time, to be put behind that."""


@dataclass(frozen=True)
class Fault:
    """One failure of a member, and what was done about it."""

    role: str
    kind: Kind
    error: RaynforceError
    action: Literal["restarted", "given up", "stopped", "left out"]
    attempt: int = 0
    """Failures in a row."""

    @property
    def cause(self) -> str:
        return str(self.error)


class Watcher(Protocol):
    """Who is told what happens in a pool."""

    def fault(self, fault: Fault, member: Member) -> None:
        """Something failed."""

    def recovered(self, role: str, seconds: float) -> None:
        """It works again, so long after it failed."""

    def absent(self, role: str, cause: str) -> None:
        """The others go on without it until it is back."""

    def back(self, role: str) -> None:
        """It is there again."""

    def note(self, text: str) -> None:
        """Something a user should know."""

    def redone(self, job: Job) -> None:
        """A job whose answer was there before was done again."""


class Job:
    """A call to a member that outlives the member's failures. It may be an argument of other jobs."""

    def __init__(self, member: Member, method: str, args: Sequence[Any], parts: int, weight: int) -> None:
        self.member = member
        self.method = method
        self.args = args
        self.parts = parts
        self.weight = weight
        self.pendings: list[Pending] = []  # of the newest try; empty while it is not made
        self.again: Pending | None = None  # if it is done again though its answer is there
        self.settled = False
        self.fault: Fault | None = None
        """Why there will be no result."""
        self.asked = self.answered = 0.0
        self.disturbed = False
        """Whether its member failed on the way, so that these times say nothing."""

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


class Member:
    """One role of a pool, whichever process it lives in at the moment."""

    def __init__(self, name: str, index: int, kind: str, make: Callable[[int], Handle], rules: Rules) -> None:
        self.name, self.index, self.kind, self.rules = name, index, kind, rules
        self.make = make
        self.handle: Handle | None = None
        self.origin: Sequence[Any] = (
            [rules.greeting] if rules.greeting else []
        )  # what to call first without a recovery point
        self.recovery_point: Pending | None = None
        self.log: list[Job] = []  # since the recovery point
        self.logged = 0  # bytes that these hold on to, at most
        self.open: list[Job] = []  # of those, not answered yet, or to be answered again
        self.loading: Pending | None = None
        self.greeted: Pending | None = None  # what it answered when it was made again
        self.saving: Saving | None = None  # the next recovery point
        self.fresh = True  # this process has not answered anything yet
        self.proven = False
        self.gone = False
        self.absent = False
        self.renew: Fault | None = None  # to be replaced at its next recovery point
        self.failures = 0
        self.wake = 0.0  # when it may be restarted
        self.down_since: float | None = None
        self.spawned = 0.0
        self.heard = 0.0  # when it last answered, was spawned, or was without room
        self.recovery_at = 0.0
        self.recovery_cost = math.inf  # seconds, as far as we know
        self.recovery_every = (
            0.0  # seconds between two recovery points at least; infinite if its state is too large for that
        )
        self.attempts = 0  # to begin anew

    @property
    def remembers(self) -> bool:
        """Whether it can come back to where it was: its jobs are kept until a recovery point covers them."""
        return self.rules.has_state and math.isfinite(self.recovery_every)


class Saving(NamedTuple):
    """A state on its way here."""

    state: Pending
    covered: Sequence[Job]
    """What was done before it."""
    asked: float
