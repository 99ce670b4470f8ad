"""What a round of learning tells the driver: numbers only, in a file that imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from raynforce.experience.record import Record


class Learned(NamedTuple):
    """What one round of learning gave; the policy version it led to is published apart."""

    number: int  # of that policy version
    schedules: Mapping[str, float]  # its schedules: values that follow the run's progress
    metrics: dict[str, float]
    updates: int  # optimiser steps taken in this round
    trained: Sequence[Record] = ()  # of each fragment that was learned from
    dropped: Sequence[Record] = ()  # of each that was refused
    seconds: Mapping[str, float] = {}  # where the learner's time went: `prepare` (advantages, replay) and `learn`
    notes: Sequence[str] = ()  # what the user should know of the algorithm; most often nothing

    @property
    def steps(self) -> int:
        """Environment steps learned from."""
        return sum(record.steps for record in self.trained)
