"""Stream: samplers send fragments to the learner, the learner sends policy versions back.

Three presets differ in who waits for whom. Fragments and versions go from role to role; the driver sees receipts. The
pool keeps roles alive: a job is done, however often its role had to be restarted, or it has a fault, and the round
goes on without it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from raynforce.topologies.loop import Learning, Loop, Roles, Round, Sample, Start


class Stream(Loop):
    """The loop of a run. Between two rounds `settle` brings every sampler to a fragment's border."""

    def __init__(
        self, roles: Roles, start: Start, *, preset: str = "sync", batch: int | None = None, max_lag: int = 0
    ) -> None:
        """`preset` is `sync`, `overlap` or `async`."""
        super().__init__(roles, start)
        self._preset = preset
        self._batch = batch
        self._max_lag = max_lag

    def rounds(self) -> Iterator[Round]:
        presets = {"sync": self.sync, "overlap": self.overlap, "async": self.async_}
        return presets[self._preset]()

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
            alive = len(self._held) + len(self._coming) + (size if self._learning else 0)
            for sampler in self._idle()[: max(0, most - alive)]:
                self._ask(sampler)
            if self._learning is None:
                self._drop_old(self._max_lag)
                if len(self._held) >= size:
                    batch, self._held = self._held[:size], self._held[size:]
                    sampled = time.monotonic()
                    self._learn(batch)
            learning = self._next()
            if learning is not None:
                now = time.monotonic()
                yield self._round(learning, sampled - began, now - sampled)
                began = now

    # -- its steps ----------------------------------------------------------------------------------------

    def _learn(self, fragments: Sequence[Sample]) -> Learning:
        return self._update("learn", *(sample.argument for sample in fragments), fragments=fragments)

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
        """Give up what is too old to learn from."""
        for sample in self._held:
            if self._number - sample.number > max_lag:
                self._ledger.drop(sample.record)
        self._held = [s for s in self._held if self._number - s.number <= max_lag]
