"""The receipt: what the driver is told of a fragment, which itself goes to the learner."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Receipt(NamedTuple):
    """Travels beside a fragment, to the driver."""

    sampler: int
    sequence: int
    """Of the fragment; together with the sampler its name in the ledger."""
    steps: int
    """Environment steps in it: valid rows."""
    seconds: Mapping[str, float]
    """Where the sampler's time went: `env`, `policy`, `other`; they add up to the whole call."""
    faults: Sequence[Mapping[str, Any]] = ()
    """Environments that broke and were restarted on the way: `EnvFault.facts()` of each."""
    size: int = 0
    """Bytes of the fragment."""
    memory: int = 0
    """Bytes that the sampler's process has in memory."""


def resident_bytes() -> int:
    """What this process has in memory; 0 where that cannot be read."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
