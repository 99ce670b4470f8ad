"""Async, lag as it comes: fragments that are ready make the next batch; a late one joins a later batch."""

from __future__ import annotations

import time
from collections.abc import Iterator

from raynforce.topologies.declaration import Setup, Topology, learner_and_samplers
from raynforce.topologies.loop import LoopRound, Roles, Start, Stream


class Async(Stream):
    """The learner takes `batch` fragments at a time; by default as many as there are samplers. Backpressure: beside the
    batch being learned from, at most one (or one fragment of each sampler, if that is more) is there or coming."""

    def __init__(self, roles: Roles, start: Start, batch: int | None = None) -> None:
        super().__init__(roles, start)
        self._batch = batch

    def rounds(self) -> Iterator[LoopRound]:
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


def _loop(setup: Setup) -> Async:
    return Async(setup.roles, setup.start, setup.config.stream.batch)


ASYNC = Topology("async", learner_and_samplers, _loop, exact=False)
