"""How an env host's `serve` ended; light, because the driver reads it in every run."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Outcome(Enum):
    """Why a host serves no more."""

    JOINED = "joined"
    """It does: the policy lives in the same process, and asks for what it wants."""
    ENDED = "ended"
    """The policy hung up, or was not found."""
    GROWN = "grown"
    """Its process has too much memory: it is to be replaced."""


class Served(NamedTuple):
    """What `serve` answers."""

    outcome: Outcome
    reason: str = ""
