"""The errors a user may see: each is one line that says what, the value, what is allowed, and the fix."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from typing import Any


class RaynforceError(Exception):
    """Something went wrong while running; the command line prints it as one line and exits with 1."""

    exit_code = 1
    trace: str | None = None
    """Where it was raised, if that was in another process."""
    role: str | None = None
    """Name of the role that it happened in, such as `sampler 3`."""
    said: str = ""
    """The last lines that this role has printed, if it is gone."""
    facts: Mapping[str, Any] = {}
    """What is known of it beyond its text, as JSON: for an environment's, those of `EnvFault`."""


class UsageError(RaynforceError, ValueError):
    """Raynforce was asked for something it cannot do; nothing was changed. Exit code 2."""

    exit_code = 2


class EnvError(RaynforceError):
    """The user's environment broke its contract while running."""


class ContractError(EnvError):
    """It broke it from the start, so trying again is of no use."""


class AlgorithmError(RaynforceError):
    """The user's algorithm raised, or returned what is not wanted of it."""


class CheckpointError(RaynforceError):
    """A checkpoint is missing, torn, or does not fit what it is loaded into. Exit code 2."""

    exit_code = 2


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `" (did you mean 'x'?)"` for the known word closest to `word`, or an empty string."""
    import difflib

    names = list(known)
    # A letter wrong in the right section.
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.85) if "." in word else []
    # Then forgive case, and a forgotten or wrong section: 'gamma' for 'algorithm.gamma'.
    close = close or [n for n in names if n.lower() == word.lower() or n.rpartition(".")[2] == word.rpartition(".")[2]]
    close = close or difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else ""


def summary(error: BaseException) -> str:
    """Describe any exception in one line: its type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def how_it_ended(code: int) -> str:
    """A process, by its exit code."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}" if code else "ended before it had answered"
