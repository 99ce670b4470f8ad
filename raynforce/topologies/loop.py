"""What every loop is made of: rounds, fragments that are on their way, and waiting for those that are ready."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from raynforce.experience.counts import Key, Receipt, Record
from raynforce.experience.fragment import Fragment
from raynforce.experience.ledger import Ledger
from raynforce.roles.learned import Contribution, Learned
from raynforce.runtimes.base import Pending
from raynforce.runtimes.member import Job, Member
from raynforce.runtimes.pool import Pool
from raynforce.trees import Tree

TELL_AFTER = 2.0  # seconds without an answer before it is said who is waited for
AWAY = 0.2  # seconds between two looks whether anybody is there
Held = Fragment | Contribution  # what samplers, or workers, have sent


class Turn(NamedTuple):
    """A call to a role, seen from the driver: the time before it, and on the way."""

    waiting: float  # seconds from its last answer until it was asked again
    transport: float  # seconds from asking until the answer was there, without the work itself


class LoopRound(NamedTuple):
    learned: Learned
    version: Job  # the policy version it led to
    learner: Turn
    receipts: Sequence[tuple[Receipt, Turn]]  # of the fragments that have come since the last round
    sample_seconds: float  # from asking for fragments until all were there
    learn_seconds: float  # from asking for the update until it was done


class Roles(Protocol):
    """Who takes part in a loop."""

    pool: Pool
    learner: Member
    samplers: Sequence[Member]
    shards: Sequence[Member]
    hosts: Sequence[Member]


@dataclass(frozen=True)
class Start:
    """Where a loop begins, and whom it tells."""

    version: Job  # the policy version that the learner has
    number: int  # of that version
    ledger: Ledger
    held: Sequence[Held] = ()  # what was sampled before, and not learned from yet
    max_lag: int = 0  # a fragment that is this many versions older than the newest is still learned from
    waiting: Callable[[str], None] = lambda who: None  # is told who is waited for, when that takes long


class Loop(ABC):
    """The loop of a run. Between two rounds `settle` brings every sampler to a fragment's border."""

    work = "produce"  # the method that samplers are asked for

    def __init__(self, roles: Roles, start: Start) -> None:
        self._pool, self._samplers, self._learner = roles.pool, roles.samplers, roles.learner
        self._version, self._number, self._max_lag = start.version, start.number, start.max_lag
        self._ledger, self._waiting = start.ledger, start.waiting
        share = roles.pool.runtime.share
        # Sampled and not learned from, the oldest first.
        self._held = [Sample(share(f), f.version, f.record) for f in start.held]
        self._coming: list[Asked] = []  # being sampled
        self._learning: Learning | None = None  # the update that is under way
        self._turns = list(roles.samplers)
        self._receipts: list[tuple[Receipt, Turn]] = []
        self._answered: dict[Member, float] = {}
        self._disturbed: list[tuple[float, float]] = []  # when roles failed and were brought back, the last few

    @abstractmethod
    def rounds(self) -> Iterator[LoopRound]:
        """Turn the loop, round by round, for ever."""

    @abstractmethod
    def _again(self, learning: Learning) -> Learning:
        """Ask for an update again, without what was lost on its way to the learner."""

    def abandon(self) -> LoopRound | None:
        """After a failure: finish and return the update under way; other fragments on their way count as lost."""
        round_ = None
        if self._learning is not None:
            self._until([self._learning.job])
            round_ = self._round(self._learning, 0.0, 0.0)
        self._ledger.lose(0, set(self._ledger.flying) - set(self.held))
        return round_

    def settle(self) -> list[Held]:
        """Wait until nothing is being sampled; returns the fragments that have not been learned from."""
        self._rest()
        return self.complete()

    def _rest(self) -> None:
        self._held += self._arrived(self._coming)
        self._coming = []

    def complete(self) -> list[Held]:
        """The fragments that are there and have not been learned from; nobody waits for those that are coming."""
        return [sample.value.result() for sample in self._held]

    @property
    def coming(self) -> int:
        return len(self._coming)

    @property
    def held(self) -> list[Key]:
        return [sample.record.key for sample in self._held]

    def metrics(self) -> dict[str, float]:
        """More to report, by full name."""
        return {}

    def with_counts(self, learner: Tree) -> Tree:
        """The learner's part of a checkpoint, with what the loop counts for it."""
        return learner

    # -- its steps ----------------------------------------------------------------------------------------

    def _sample_all(self) -> list[Asked]:
        while not (present := self._pool.present(self._samplers)):  # all that are left are being replaced
            self._pool.next((), AWAY)
        return [self._sample(member) for member in present]

    def _sample(self, member: Member) -> Asked:
        return Asked(self._pool.submit(member, self.work, self._version, parts=2), self._number)

    def _idle(self) -> list[Member]:
        """Samplers that could be asked, who was asked last at the end."""
        busy = {asked.job.member for asked in self._coming}
        return [sampler for sampler in self._pool.present(self._turns) if sampler not in busy]

    def _ask(self, sampler: Member) -> None:
        self._turns.remove(sampler)
        self._turns.append(sampler)
        self._coming.append(self._sample(sampler))

    def _arrived(self, asked: Sequence[Asked]) -> list[Sample]:
        """Wait for these fragments and enter them in the books; those that will never come are left out."""
        self._until([job for job, _ in asked])
        there = []
        for job, number in asked:
            if job.fault is None:
                receipt: Receipt = job.result()
                self._ledger.produce(receipt.record)
                self._ledger.skip(receipt.skipped)
                self._ledger.lose(receipt.lost)
                self._receive(job, receipt)
                there.append(Sample(job, number, receipt.record, receipt.size))
        return there

    def _receive(self, job: Job, receipt: Receipt) -> None:
        self._receipts.append((receipt, self._turn(job, sum(receipt.seconds.values()))))

    def _turn(self, job: Job, busy: float) -> Turn:
        before, self._answered[job.member] = self._answered.get(job.member, job.asked), job.answered
        if job.disturbed:  # what a restart takes is neither, also for those who wait for it
            self._disturbed = [*self._disturbed, (before, job.answered)][-2 * len(self._samplers) :]
            return Turn(0.0, 0.0)
        lost = max((min(job.asked, until) - max(before, since) for since, until in self._disturbed), default=0.0)
        waiting = job.asked - before - max(0.0, lost)
        if not self._pool.runtime.has_processes:  # what others did meanwhile is no transport
            return Turn(max(0.0, waiting), 0.0)
        return Turn(max(0.0, waiting), max(0.0, job.answered - job.asked - busy))

    def _update(
        self, method: str, *args: Any, fragments: Sequence[Sample] = (), parts: int = 1, size: int = 0
    ) -> Learning:
        """Ask for an update and for the version it leads to; `size` are bytes of `args` beside the fragments."""
        weight = size + sum(sample.size for sample in fragments)
        job = self._pool.submit(self._learner, method, *args, parts=parts, weight=weight)
        self._learning = Learning(job, self._pool.submit(self._learner, "publish"), fragments)
        return self._learning

    def _round(self, learning: Learning, sample_seconds: float, learn_seconds: float) -> LoopRound:
        while learning.job.fault is not None:  # the only copy of something went with the node that held it
            learning = self._again(learning)
            self._until([learning.job])
        self._learning = None
        learned: Learned = learning.job.result()
        self._learned(learning.job, learned)
        self._version, self._number = learning.version, learned.number
        turn = self._turn(learning.job, sum(learned.seconds.values()))
        receipts, self._receipts = self._receipts, []
        return LoopRound(learned, learning.version, turn, receipts, sample_seconds, learn_seconds)

    def _learned(self, job: Job, learned: Learned) -> None:
        self._ledger.train(learned.trained)

    def _without_lost(self, fragments: Sequence[Sample]) -> list[Sample]:
        """Those that are still there; the others are counted."""
        lost = [sample.record.key for sample in fragments if sample.value.failure() is not None]
        self._ledger.lose(0, lost)
        return [sample for sample in fragments if sample.record.key not in lost]

    def _next(self, others: Sequence[Job] = ()) -> Learning | None:
        """Wait for a fragment, or `others`, or the end of the update that is under way: then that is returned."""
        learning = self._learning
        coming = [job for job, _ in self._coming]
        self._first([*coming, *(others if learning is None else [learning.job])])
        self._held += self._arrived([asked for asked in self._coming if asked.job.settled])
        self._coming = [asked for asked in self._coming if not asked.job.settled]
        return learning if learning is not None and learning.job.settled else None

    def _until(self, jobs: Sequence[Job]) -> None:
        while left := [job for job in jobs if not job.settled]:
            self._first(left)

    def _first(self, jobs: Sequence[Job]) -> None:
        """Wait for at least one of them; who is waited for is said when that takes long."""
        if not jobs:  # all who could be asked are being replaced
            self._pool.next((), AWAY)
        while jobs and not self._pool.next(jobs, TELL_AFTER):
            self._tell_waiting(jobs)

    def _tell_waiting(self, jobs: Sequence[Job]) -> None:
        self._waiting(", ".join(sorted({job.member.name for job in jobs if not job.settled})))


class Stream(Loop):
    """The loop of samplers that send fragments, each to be learned from once."""

    def _learn(self, fragments: Sequence[Sample]) -> Learning:
        return self._update("learn", *(sample.source for sample in fragments), fragments=fragments)

    def _again(self, learning: Learning) -> Learning:
        return self._learn(self._without_lost(learning.fragments) or self._some())

    def _some(self) -> list[Sample]:
        """Fragments to learn from, for want of those that are lost."""
        while not (there := self._arrived(self._sample_all())):
            continue
        return there

    def _take_held(self) -> list[Sample]:
        """What was sampled before, by this loop or before a checkpoint, whose topology may have let it grow older."""
        self._drop_old(max(1, self._max_lag))
        held, self._held = self._held, []
        return held

    def _drop_old(self, max_lag: int) -> None:
        for sample in self._held:
            if self._number - sample.number > max_lag:
                self._ledger.drop(sample.record)
        self._held = [s for s in self._held if self._number - s.number <= max_lag]


class Asked(NamedTuple):
    """A fragment that is being sampled, and the number of its policy version."""

    job: Job
    number: int


class Sample(NamedTuple):
    """A fragment that is there, and the number of its policy version."""

    source: Job | Pending  # to be given to another role; a checkpoint's are no jobs
    number: int
    record: Record
    size: int = 0

    @property
    def value(self) -> Pending:
        return self.source.value if isinstance(self.source, Job) else self.source


class Learning(NamedTuple):
    """An update that is under way, and the version it will lead to."""

    job: Job
    version: Job
    fragments: Sequence[Sample]
