"""The receipt: what the driver is told of a fragment, which itself goes to the learner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from raynforce.experience.fragment import Fragment
from raynforce.infos import NOTHING, Values

NONE = np.zeros(0)


class Arrival(NamedTuple):
    """What is counted of a fragment that has come to where it is learned from."""

    sampler: int
    sequence: int
    steps: int
    """Environment steps in it: valid rows."""
    returns: np.ndarray
    """Returns `[E]` of the episodes that ended in it."""
    lengths: np.ndarray
    """Their lengths `[E]`."""
    info: Values = NOTHING
    """Numbers in `info` at their ends."""

    @staticmethod
    def of(fragment: Fragment) -> Arrival:
        episodes = fragment["episode/return"], fragment["episode/length"]
        return Arrival(fragment.sampler, fragment.sequence, fragment.steps, *episodes, fragment.info())


class Receipt(NamedTuple):
    """Travels beside a fragment, to the driver."""

    sampler: int
    sequence: int
    """Of the fragment; together with the sampler its name in the ledger."""
    steps: int
    """Environment steps in it: valid rows."""
    seconds: Mapping[str, float]
    """Where its time went: `env`, `policy`, `other`, and a worker's `gradients`; they add up to the whole call."""
    faults: Sequence[Mapping[str, Any]] = ()
    """Environments that broke and were restarted on the way: `EnvFault.facts()` of each."""
    size: int = 0
    """Bytes of the fragment, or of a worker's gradients."""
    memory: int = 0
    """Bytes that the sampler's process has in memory."""
    returns: np.ndarray = NONE
    """Returns `[E]` of the episodes that ended in the fragment."""
    lengths: np.ndarray = NONE
    """Their lengths `[E]`."""
    info: Values = NOTHING
    """Numbers in `info` at their ends."""
    kept: int = 0
    """Transitions in the sampler's own replay buffer, if it has one."""
    envs: Mapping[str, float] = {}
    """Where the time of all environments went, in seconds, if they go their own pace: `busy` stepping, and what they
    waited for: `policy`, `wire`, `learner`, `restart`."""
    served: Sequence[int] = ()
    """Env hosts whose environments took steps since the last one."""
    silent: Sequence[int] = ()
    """Env hosts that do not answer any more."""
    flying: int = 0
    """Environment steps that are still to become part of a fragment."""

    @property
    def arrival(self) -> Arrival:
        """What is counted of its fragment."""
        return Arrival(self.sampler, self.sequence, self.steps, self.returns, self.lengths, self.info)
