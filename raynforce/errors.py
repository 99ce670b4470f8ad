"""The errors a user may see: each is one line that says what, the value, what is allowed, and the fix."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


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
    """Return `" (did you mean 'x'?)"` if a known word is spelled almost like `word`, or an empty string.

    Almost: but for case and hyphens; with one letter wrong, missing, too many or swapped with the next, two in words of
    more than five; or a beginning of it. Anything further away would be a guess at what was meant.
    """
    from difflib import SequenceMatcher

    section, _, leaf = word.rpartition(".")
    plain = _plain(leaf)
    mistakes = 0 if len(plain) < 3 else 1 if len(plain) <= 5 else 2
    found = []
    for name in known:
        there, _, end = name.rpartition(".")  # a forgotten or wrong section is forgiven: 'gamma' for 'algorithm.gamma'
        letters = _plain(end)
        wrong = _edits(plain, letters, mistakes)
        if wrong > mistakes and len(plain) >= 3 and letters.startswith(plain):
            wrong = mistakes + 1
        elif wrong > mistakes:
            continue
        alike = SequenceMatcher(None, plain, letters).ratio()  # one letter missing is likelier than a wrong one
        found.append((there == section or not section, -wrong, alike, name))
    return f" (did you mean {max(found)[-1]!r}?)" if found else ""


def _plain(word: str) -> str:
    return word.lower().replace("-", "").replace("_", "")


def _edits(a: str, b: str, most: int) -> int:
    """Letters to change, add, leave out or swap with the next to make one word the other; no more than `most + 1`."""
    if abs(len(a) - len(b)) > most:
        return most + 1
    before, row = [0] * (len(b) + 1), list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        older, before, row = before, row, [i]
        for j, y in enumerate(b, 1):
            row.append(min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (x != y)))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                row[j] = min(row[j], older[j - 2] + 1)
    return min(row[-1], most + 1)


def said_elsewhere(word: str, table: Mapping[str, T]) -> T | None:
    """The row of a table of `synonyms` that `word` is in."""
    plain = _plain(word)
    return next((row for words, row in table.items() if plain in map(_plain, words.split())), None)


def summary(error: BaseException) -> str:
    """Describe any exception in one line: its type and the first line of its message, or the assertion that failed."""
    said = str(error).strip().splitlines()[:1]
    if not said and isinstance(error, AssertionError) and error.__traceback__ is not None:
        from traceback import extract_tb  # only once there is a mistake

        said = [line] if (line := extract_tb(error.__traceback__)[-1].line) else []
    return ": ".join([type(error).__name__, *said])


def reason(error: BaseException) -> str:
    """What to tell of an error: ours say it all, of others the summary."""
    return str(error) if isinstance(error, RaynforceError) else summary(error)


def how_it_ended(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}" if code else "ended before it had answered"
