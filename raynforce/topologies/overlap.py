"""Overlap, lag exactly 1: the learner trains on one batch while the next is sampled with the version before."""

from __future__ import annotations

import time
from collections.abc import Iterator

from raynforce.topologies.declaration import Topology, learner_and_samplers
from raynforce.topologies.loop import LoopRound, Stream


class Overlap(Stream):
    def rounds(self) -> Iterator[LoopRound]:
        while True:
            fragments = self._take_held()
            if not fragments:  # the very first batch
                self._held = self._arrived(self._sample_all())
                continue
            began = time.monotonic()
            coming = self._sample_all()
            asked = time.monotonic()
            learning = self._learn(fragments)
            jobs = [asked.job for asked in coming]
            self._until([*jobs, learning.job])
            self._held = self._arrived(coming)
            sampled = max((job.answered for job in jobs), default=began)
            yield self._round(learning, sampled - began, learning.job.answered - asked)


OVERLAP = Topology("overlap", learner_and_samplers, lambda setup: Overlap(setup.roles, setup.start), several=True)
