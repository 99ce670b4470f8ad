"""What is counted of a fragment, wherever it goes, and the receipt that tells the driver of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from raynforce.infos import NOTHING, Values

Key = tuple[int, int]  # sampler and sequence number: a fragment's name


class Record(NamedTuple):
    sampler: int
    sequence: int
    steps: int  # environment steps in it: valid rows
    returns: np.ndarray = np.zeros(0, np.float32)  # returns `[E]` of the episodes that ended in it
    lengths: np.ndarray = np.zeros(0, np.int64)  # their lengths `[E]`
    info: Values = NOTHING  # numbers in `info` at their ends

    @property
    def key(self) -> Key:
        return self[:2]


class Receipt(NamedTuple):
    """What the driver gets of a fragment, which itself goes to the learner."""

    record: Record
    seconds: Mapping[str, float]  # of the whole call: `env`, `policy`, `other`, and a worker's `gradients`
    faults: Sequence[Mapping[str, Any]] = ()  # `EnvFault.facts()` of environments that broke and were restarted
    size: int = 0  # bytes of the fragment, or of a worker's gradients
    memory: int = 0  # bytes that the sampler's process has in memory
    kept: int = 0  # transitions in the sampler's own replay buffer, if it has one
    envs: Mapping[str, float] = {}
    """Seconds of environments that go their own pace: `busy`, or waiting for `policy`, `wire`, `learner`, `restart`."""
    served: Sequence[int] = ()  # env hosts whose environments took steps since the last one
    silent: Sequence[int] = ()  # env hosts that do not answer any more
    flying: int = 0  # environment steps that are still to become part of a fragment
