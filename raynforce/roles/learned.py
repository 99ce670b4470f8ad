"""What a round of learning tells the driver: numbers only, in a file that imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from raynforce.experience.record import Record


class Learned(NamedTuple):
    """What one round of learning gave; the policy version it led to is published apart."""

    number: int
    """Of that policy version."""
    schedules: Mapping[str, float]
    """Its schedules: values that follow the run's progress."""
    metrics: dict[str, float]
    updates: int
    """Optimiser steps taken in this round."""
    trained: Sequence[Record] = ()
    """Of each fragment that was learned from."""
    dropped: Sequence[Record] = ()
    """Of each that was refused."""
    seconds: Mapping[str, float] = {}
    """Where the learner's time went: `prepare` (advantages, replay) and `learn`."""
    notes: Sequence[str] = ()
    """What the user should know of the algorithm; most often nothing."""

    @property
    def steps(self) -> int:
        """Environment steps learned from."""
        return sum(record.steps for record in self.trained)
