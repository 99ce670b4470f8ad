"""Stream: samplers send fragments to the learner, the learner sends policy versions back.

Three presets differ in who waits for whom. Fragments and versions go from role to role; the driver sees receipts. The
pool keeps roles alive: a job is done, however often its role had to be restarted, or it has a fault, and the round
goes on without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from raynforce.experience.fragment import Fragment
from raynforce.experience.ledger import Key, Ledger
from raynforce.experience.receipt import Receipt
from raynforce.roles.learned import Learned
from raynforce.runtimes.base import Pending
from raynforce.runtimes.member import Job, Member
from raynforce.runtimes.pool import Pool

PATIENCE = 2.0  # seconds without an answer before it is said who is waited for
AWAY = 0.2  # seconds between two looks whether anybody is there


class Turn(NamedTuple):
    """A call to a role, seen from the driver: the time before it, and on the way."""

    waiting: float
    """Seconds from its last answer until it was asked again."""
    transport: float
    """Seconds from asking until the answer was there, without the work itself."""


class Round(NamedTuple):
    """One turn of the loop."""

    learned: Learned
    version: Job
    """The policy version it led to."""
    learner: Turn
    receipts: Sequence[tuple[Receipt, Turn]]
    """Of the fragments that have come since the last round."""
    sample_seconds: float
    """From asking for fragments until all were there."""
    learn_seconds: float
    """From asking for the update until it was done."""


class Stream:
    """The loop of a run. Between two rounds `settle` brings every sampler to a fragment's border."""

    def __init__(
        self,
        pool: Pool,
        samplers: Sequence[Member],
        learner: Member,
        version: Job,
        number: int,
        *,
        ledger: Ledger,
        held: Sequence[Fragment] = (),
        batch: int | None = None,
        max_lag: int = 0,
        waiting: Callable[[str], None] = lambda who: None,
    ) -> None:
        """`version` and its `number` are where the learner stands; `held` are fragments it has not learned from yet."""
        self._pool = pool
        self._samplers = samplers
        self._learner = learner
        self._version = version
        self._number = number
        self._ledger = ledger
        self._batch = batch
        self._max_lag = max_lag
        self._waiting = waiting
        share = pool.runtime.share
        # Sampled and not learned from, the oldest first.
        self._held = [_Sample(share(f), f.version, None, (f.sampler, f.sequence), f.steps) for f in held]
        self._coming: list[_Sample] = []  # being sampled
        self._learning: _Learning | None = None  # the update that is under way
        self._turns = list(samplers)
        self._receipts: list[tuple[Receipt, Turn]] = []
        self._answered: dict[Member, float] = {}
        self._disturbed: list[tuple[float, float]] = []  # when roles failed and were brought back, the last few

    def settle(self) -> list[Fragment]:
        """Wait until nothing is being sampled; returns the fragments that have not been learned from."""
        self._held += self._arrived(self._coming)
        self._coming = []
        return self.complete()

    def complete(self) -> list[Fragment]:
        """The fragments that are there and have not been learned from; nobody waits for those that are coming."""
        return [sample.value.result() for sample in self._held]

    @property
    def coming(self) -> int:
        """How many fragments are being sampled."""
        return len(self._coming)

    def abandon(self) -> Round | None:
        """After a failure: let an update that is under way come to its end, and return it, as it is learned from.

        Other fragments that were on the way to the learner are lost, and counted.
        """
        round_ = None
        if self._learning is not None:
            self._until([self._learning.job])
            round_ = self._round(self._learning, 0.0, 0.0)
        self._ledger.lose(0, set(self._ledger.flying) - set(self.held))
        return round_

    @property
    def held(self) -> list[Key]:
        """Names of the fragments that are complete and not learned from."""
        return [sample.key for sample in self._held]

    # -- the presets --------------------------------------------------------------------------------------

    def sync(self) -> Iterator[Round]:
        """Lag 0: everyone samples with the newest version, then the learner trains on exactly that."""
        while True:
            began = time.monotonic()
            fragments = self._take_held() or self._arrived(self._sample_all())
            if not fragments:  # all who were asked failed, and are being replaced
                continue
            sampled = time.monotonic()
            learning = self._learn(fragments)
            self._until([learning.job])
            yield self._round(learning, sampled - began, time.monotonic() - sampled)

    def overlap(self) -> Iterator[Round]:
        """Lag exactly 1: the learner trains on one batch while the next is sampled with the version before."""
        while True:
            fragments = self._take_held()
            if not fragments:  # the very first batch
                self._held = self._arrived(self._sample_all())
                continue
            began = time.monotonic()
            coming = self._sample_all()
            asked = time.monotonic()
            learning = self._learn(fragments)
            jobs = [sample.job for sample in coming if sample.job]
            self._until([*jobs, learning.job])
            self._held = self._arrived(coming)
            sampled = max((job.answered for job in jobs), default=began)
            yield self._round(learning, sampled - began, learning.job.answered - asked)

    def async_(self) -> Iterator[Round]:
        """Lag as it comes: whoever is ready makes the next batch; who is late joins a later one with an old version.

        Samplers are kept busy while at most one batch (or one fragment of each sampler, if that is more) is there or
        coming beside the one being learned from, so that a slow learner does not fill the memory or learn from the
        distant past. What one very slow sampler sends may still be older than `max_lag` versions: it is dropped, and
        counted.
        """
        began = sampled = time.monotonic()
        while True:
            present = self._pool.present(self._turns)
            size = self._batch or max(1, len(present))
            most = size + max(size, len(present))  # so that the slow ones can never take all turns
            busy = {sample.member for sample in self._coming}
            alive = len(self._held) + len(self._coming) + (size if self._learning else 0)
            for sampler in [s for s in present if s not in busy][: max(0, most - alive)]:
                self._turns.remove(sampler)  # who was asked last is asked last
                self._turns.append(sampler)
                self._coming.append(self._sample(sampler))
            if self._learning is None:
                self._drop_old(self._max_lag)
                if len(self._held) >= size:
                    batch, self._held = self._held[:size], self._held[size:]
                    sampled = time.monotonic()
                    self._learn(batch)
            learning = self._learning
            waited = [sample.job for sample in self._coming if sample.job]
            self._first(waited if learning is None else [*waited, learning.job])
            self._held += self._arrived([s for s in self._coming if s.job and s.job.settled])
            self._coming = [s for s in self._coming if s.job and not s.job.settled]
            if learning is not None and learning.job.settled:
                now = time.monotonic()
                yield self._round(learning, sampled - began, now - sampled)
                began = now

    # -- its steps ----------------------------------------------------------------------------------------

    def _sample_all(self) -> list[_Sample]:
        while not (present := self._pool.present(self._samplers)):  # all that are left are being replaced
            self._pool.next((), AWAY)
        return [self._sample(member) for member in present]

    def _sample(self, member: Member) -> _Sample:
        job = self._pool.submit(member, "produce", self._version, parts=2)
        return _Sample(None, self._number, job, (member.index, -1), 0)

    def _arrived(self, samples: Sequence[_Sample]) -> list[_Sample]:
        """Wait for these fragments and enter them in the books; those that will never come are left out."""
        self._until([sample.job for sample in samples if sample.job])
        there = []
        for sample in samples:
            job = sample.job
            if job is None or job.fault is not None:
                continue
            receipt: Receipt = job.result()
            self._ledger.produce(receipt)
            self._receipts.append((receipt, self._turn(job, sum(receipt.seconds.values()))))
            key = (receipt.sampler, receipt.sequence)
            there.append(sample._replace(key=key, steps=receipt.steps, size=receipt.size))
        return there

    def _turn(self, job: Job, busy: float) -> Turn:
        before, self._answered[job.member] = self._answered.get(job.member, job.asked), job.answered
        if job.disturbed:  # what a restart takes is neither, also for those who wait for it
            self._disturbed = [*self._disturbed, (before, job.answered)][-2 * len(self._samplers) :]
            return Turn(0.0, 0.0)
        lost = max((min(job.asked, until) - max(before, since) for since, until in self._disturbed), default=0.0)
        waiting = job.asked - before - max(0.0, lost)
        return Turn(max(0.0, waiting), max(0.0, job.answered - job.asked - busy))

    def _learn(self, fragments: Sequence[_Sample]) -> _Learning:
        """Ask for an update and for the version it leads to."""
        values = [sample.job or sample.value for sample in fragments]
        weight = sum(sample.size for sample in fragments)
        job = self._pool.submit(self._learner, "learn", *values, weight=weight)
        self._learning = _Learning(job, self._pool.submit(self._learner, "publish"), fragments)
        return self._learning

    def _round(self, learning: _Learning, sample_seconds: float, learn_seconds: float) -> Round:
        while learning.job.fault is not None:  # the only copy of a fragment went with the node that held it
            learning = self._learn(self._without_lost(learning.fragments))
            self._until([learning.job])
        self._learning = None
        learned: Learned = learning.job.result()
        self._ledger.train(learned.trained)
        self._version, self._number = learning.version, learned.number
        turn = self._turn(learning.job, sum(learned.seconds.values()))
        receipts, self._receipts = self._receipts, []
        return Round(learned, learning.version, turn, receipts, sample_seconds, learn_seconds)

    def _without_lost(self, fragments: Sequence[_Sample]) -> list[_Sample]:
        lost = [sample.key for sample in fragments if sample.value.failure() is not None]
        self._ledger.lose(0, lost)
        left = [sample for sample in fragments if sample.key not in lost]
        while not left:
            left = self._arrived(self._sample_all())
        return left

    def _take_held(self) -> list[_Sample]:
        """What was sampled before, by this loop or before a checkpoint, whose topology may have let it grow older."""
        self._drop_old(max(1, self._max_lag))
        held, self._held = self._held, []
        return held

    def _drop_old(self, max_lag: int) -> None:
        """Give up what is too old to learn from."""
        for sample in self._held:
            if self._number - sample.number > max_lag:
                self._ledger.drop(*sample.key, sample.steps)
        self._held = [s for s in self._held if self._number - s.number <= max_lag]

    def _until(self, jobs: Sequence[Job]) -> None:
        """Wait until all of these are done."""
        while left := [job for job in jobs if not job.settled]:
            self._first(left)

    def _first(self, jobs: Sequence[Job]) -> None:
        """Wait for at least one of them; who is waited for is said when that takes long."""
        if not jobs:  # all who could be asked are being replaced
            self._pool.next((), AWAY)
        while jobs and not self._pool.next(jobs, PATIENCE):
            self._waiting(", ".join(sorted({job.member.name for job in jobs if not job.settled})))


class _Sample(NamedTuple):
    """A fragment that is there or coming, and the number of the version it is sampled with."""

    given: Pending | None
    """The fragment itself, if it comes from a checkpoint."""
    number: int
    job: Job | None
    key: Key
    steps: int
    size: int = 0

    @property
    def member(self) -> Member | None:
        return None if self.job is None else self.job.member

    @property
    def value(self) -> Pending:
        if self.job is not None:
            return self.job.value
        assert self.given is not None
        return self.given


class _Learning(NamedTuple):
    """An update that is under way, and the version it will lead to."""

    job: Job
    version: Job
    fragments: Sequence[_Sample]
