"""What a round of learning tells the driver: numbers only, in a file that imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from raynforce.infos import NOTHING, Values


class Learned(NamedTuple):
    """What one round of learning gave; the policy version it led to is published apart."""

    number: int
    """Of that policy version."""
    schedules: Mapping[str, float]
    """Its schedules: values that follow the run's progress."""
    metrics: dict[str, float]
    updates: int
    """Optimiser steps taken in this round."""
    steps: int
    """Environment steps learned from."""
    returns: np.ndarray
    """Returns `[E]` of the episodes that ended in its fragments."""
    lengths: np.ndarray
    """Their lengths `[E]`."""
    trained: Sequence[tuple[int, int, int]] = ()
    """Sampler, sequence number and steps of each fragment that was learned from."""
    dropped: Sequence[tuple[int, int, int]] = ()
    """The same of each that was refused."""
    info: Values = NOTHING
    """Numbers in `info` at their ends, by name, of the episodes that had them."""
    seconds: Mapping[str, float] = {}
    """Where the learner's time went: `prepare` (advantages, replay) and `learn`."""
    notes: Sequence[str] = ()
    """What the user should know of the algorithm; most often nothing."""
