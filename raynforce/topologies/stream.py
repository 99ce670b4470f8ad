"""Stream: samplers send fragments to the learner, the learner sends policy versions back.

Three presets differ in who waits for whom. Fragments and versions go from role to role; the driver only sees that
they are there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from raynforce.experience.fragment import Fragment
from raynforce.roles.learned import Learned
from raynforce.runtimes.base import Handle, Pending, Runtime

PATIENCE = 2.0  # seconds without an answer before it is said who is waited for


class Round(NamedTuple):
    """One turn of the loop."""

    learned: Learned
    version: Pending
    """The policy version it led to."""
    sample_seconds: float
    """From asking for fragments until all were there."""
    learn_seconds: float
    """From asking for the update until it was done."""
    dropped: int = 0
    """Environment steps of fragments that had become too old to learn from."""


class Stream:
    """The loop of a run. Between two rounds `settle` brings every sampler to a fragment's border."""

    def __init__(
        self,
        runtime: Runtime,
        samplers: Sequence[Handle],
        learner: Handle,
        version: Pending,
        number: int,
        *,
        held: Sequence[Fragment] = (),
        batch: int | None = None,
        max_lag: int = 0,
        waiting: Callable[[str], None] = lambda who: None,
    ) -> None:
        """`version` and its `number` are where the learner stands; `held` are fragments it has not learned from yet."""
        self._runtime = runtime
        self._samplers = samplers
        self._learner = learner
        self._version = version
        self._number = number
        self._batch = batch or len(samplers)
        self._max_lag = max_lag
        self._waiting = waiting
        self._held = [_Sample(runtime.share(f), f.version) for f in held]  # sampled, not learned from, oldest first
        self._coming: list[_Sample] = []  # being sampled
        self._turns = list(samplers)
        self._dropped = 0

    def settle(self) -> list[Fragment]:
        """Wait until nothing is being sampled; returns the fragments that have not been learned from."""
        self._until(self._coming)
        self._held += self._coming
        self._coming = []
        return [sample.pending.result() for sample in self._held]

    # -- the presets --------------------------------------------------------------------------------------

    def sync(self) -> Iterator[Round]:
        """Lag 0: everyone samples with the newest version, then the learner trains on exactly that."""
        while True:
            began = time.monotonic()
            fragments = self._take_held() or [self._sample(s) for s in self._samplers]
            (sampled,) = self._until(fragments)
            learning = self._learn(fragments)
            (learned,) = self._until([learning])
            yield self._round(learning, sampled - began, learned - sampled)

    def overlap(self) -> Iterator[Round]:
        """Lag exactly 1: the learner trains on one batch while the next is sampled with the version before."""
        while True:
            fragments = self._take_held()
            if not fragments:  # the very first batch
                fragments = [self._sample(s) for s in self._samplers]
                self._until(fragments)
            began = time.monotonic()
            coming = [self._sample(s) for s in self._samplers]
            asked = time.monotonic()
            learning = self._learn(fragments)
            sampled, learned = self._until(coming, [learning])
            self._held = coming
            yield self._round(learning, sampled - began, learned - asked)

    def async_(self) -> Iterator[Round]:
        """Lag as it comes: whoever is ready makes the next batch; who is late joins a later one with an old version.

        Samplers are kept busy while at most one batch (or one fragment of each sampler, if that is more) is there or
        coming beside the one being learned from, so that a slow learner does not fill the memory or learn from the
        distant past. What one very slow sampler sends may still be older than `max_lag` versions: it is dropped, and
        counted.
        """
        most = self._batch + max(self._batch, len(self._samplers))  # so that the slow ones can never take all turns
        learning: _Learning | None = None
        began = sampled = time.monotonic()
        while True:
            busy = {sample.sampler for sample in self._coming}
            idle = [s for s in self._turns if s not in busy]
            alive = len(self._held) + len(self._coming) + (self._batch if learning else 0)
            for sampler in idle[: max(0, most - alive)]:
                self._turns.remove(sampler)  # who was asked last is asked last
                self._turns.append(sampler)
                self._coming.append(self._sample(sampler))
            if learning is None:
                self._drop_old(self._max_lag)
                if len(self._held) >= self._batch:
                    batch, self._held = self._held[: self._batch], self._held[self._batch :]
                    sampled, learning = time.monotonic(), self._learn(batch)
            waited = [sample.pending for sample in self._coming]
            ready = set(self._first(waited if learning is None else [*waited, learning.pending]))
            self._held += [s for s in self._coming if s.pending in ready]
            self._coming = [s for s in self._coming if s.pending not in ready]
            if learning is not None and learning.pending in ready:
                now = time.monotonic()
                done, learning = learning, None
                yield self._round(done, sampled - began, now - sampled)
                began = now

    # -- its steps ----------------------------------------------------------------------------------------

    def _sample(self, sampler: Handle) -> _Sample:
        return _Sample(sampler.call("sample", self._version), self._number, sampler)

    def _learn(self, fragments: Sequence[_Sample]) -> _Learning:
        """Ask for an update and for the version it leads to."""
        learned = self._learner.call("learn", *(f.pending for f in fragments))
        return _Learning(learned, self._learner.call("publish"))

    def _round(self, learning: _Learning, sample_seconds: float, learn_seconds: float) -> Round:
        learned: Learned = learning.pending.result()
        self._version, self._number = learning.version, learned.number
        dropped, self._dropped = self._dropped, 0
        return Round(learned, learning.version, sample_seconds, learn_seconds, dropped)

    def _take_held(self) -> list[_Sample]:
        """What was sampled before, by this loop or before a checkpoint, whose topology may have let it grow older."""
        self._drop_old(max(1, self._max_lag))
        held, self._held = self._held, []
        return held

    def _drop_old(self, max_lag: int) -> None:
        """Give up what is too old to learn from; only to count its steps does the driver open a fragment."""
        old = [s for s in self._held if self._number - s.number > max_lag]
        self._held = [s for s in self._held if self._number - s.number <= max_lag]
        self._dropped += sum(s.pending.result().steps for s in old)

    def _until(self, *groups: Sequence[_Sample | _Learning]) -> list[float]:
        """Wait until every group is complete; returns when each was."""
        ends = [time.monotonic()] * len(groups)
        left = [{one.pending for one in group} for group in groups]
        while waited := [p for group in left for p in group]:
            ready = set(self._first(waited))
            for index, group in enumerate(left):
                if group & ready:
                    group -= ready
                    ends[index] = time.monotonic()
        return ends

    def _first(self, pendings: Sequence[Pending]) -> list[Pending]:
        """Wait for at least one of them; who is waited for is said when that takes long."""
        while True:
            ready, rest = self._runtime.wait(pendings, 1, PATIENCE)
            if ready:
                return ready
            self._waiting(", ".join(sorted({p.name for p in rest})))


class _Sample(NamedTuple):
    """A fragment that is there or coming, and the number of the version it is sampled with."""

    pending: Pending
    number: int
    sampler: Handle | None = None


class _Learning(NamedTuple):
    """An update that is under way, and the version it will lead to."""

    pending: Pending
    version: Pending
