"""How an env host's `serve` ended; light, because the driver reads it in every run."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Outcome(Enum):
    """Why a host serves no more."""

    JOINED = "joined"  # it does: the policy lives in the same process, and asks for what it wants
    ENDED = "ended"  # the policy hung up, or was not found
    GROWN = "grown"  # its process has too much memory: it is to be replaced


class Served(NamedTuple):
    """What `serve` answers."""

    outcome: Outcome
    reason: str = ""
