"""What loops share in which samplers send fragments to the learner, and the learner sends policy versions back."""

from __future__ import annotations

from collections.abc import Sequence

from raynforce.topologies.declaration import Blueprint, Kind, learner, samplers
from raynforce.topologies.loop import Learning, Loop, Sample


def learner_and_samplers(plan: Blueprint) -> list[Kind]:
    return [learner(plan), samplers(plan)]


class Stream(Loop):
    """Each fragment is learned from once. Between two rounds `settle` brings every sampler to a fragment's border."""

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
