"""A topology in one file: samplers take turns, and the learner learns from one fragment at a time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from raynforce.algos.base import Algorithm
from raynforce.config import Config
from raynforce.errors import UsageError
from raynforce.spaces import EnvSpec
from raynforce.topologies.declaration import Setup, Topology, learner_and_samplers
from raynforce.topologies.loop import LoopRound, Stream


class RoundRobin(Stream):
    def rounds(self) -> Iterator[LoopRound]:
        while True:
            began = time.monotonic()
            turn = self._samplers[self._number % len(self._samplers)]
            fragments = self._take_held() or self._arrived([self._sample(turn)])
            sampled = time.monotonic()
            learning = self._learn(fragments)
            self._until([learning.job])
            yield self._round(learning, sampled - began, time.monotonic() - sampled)


def _require(config: Config, algorithm: type[Algorithm[Any]], env: EnvSpec) -> None:
    if config.sampling.samplers < 2:
        raise UsageError("topology 'round robin' needs --samplers 2 or more")


ROUND_ROBIN = Topology(
    "round robin",
    learner_and_samplers,
    lambda setup: RoundRobin(setup.roles, setup.start),
    _require,
    overlaps=False,
    lags=False,
)
NOT_ONE = Setup
