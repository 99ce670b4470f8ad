"""Sync, lag 0: everyone samples with the newest policy version, then the learner trains on exactly that."""

from __future__ import annotations

import time
from collections.abc import Iterator

from raynforce.topologies.declaration import Topology, learner_and_samplers
from raynforce.topologies.loop import LoopRound, Stream


class Sync(Stream):
    def rounds(self) -> Iterator[LoopRound]:
        while True:
            began = time.monotonic()
            fragments = self._take_held() or self._arrived(self._sample_all())
            if not fragments:  # all who were asked failed, and are being replaced
                continue
            sampled = time.monotonic()
            learning = self._learn(fragments)
            self._until([learning.job])
            yield self._round(learning, sampled - began, time.monotonic() - sampled)


SYNC = Topology(
    "sync",
    learner_and_samplers,
    lambda setup: Sync(setup.roles, setup.start),
    overlaps=False,
    lags=False,
    several=True,
)
