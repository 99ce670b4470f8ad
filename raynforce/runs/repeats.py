"""Equal events that repeat: counted, and written down only now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

FIRST = 10
"""Of equal events, the first so many are each worth a line; then the 20th to 100th by tens, by hundreds, and so on."""
EVERY_SECONDS = 60.0  # beside these, a line at most this often, so that a crash loses the count of a minute at most

K = TypeVar("K", bound=Hashable)


@dataclass
class _Count:
    total: int = 0
    untold: int = 0
    told_at: float = 0.0


class Repeats(Generic[K]):
    """How often each event has happened, and how many of them the next line about it stands for."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: dict[K, _Count] = {}

    def add(self, key: K, *, due: bool = False) -> int:
        """Count one more. How many a line written now stands for; 0 if none is, unless asked for, `due`."""
        count = self._counts.setdefault(key, _Count())
        count.total += 1
        count.untold += 1
        now = self._clock()
        if not (due or _is_worth_a_line(count.total) or now - count.told_at >= EVERY_SECONDS):
            return 0
        untold, count.untold, count.told_at = count.untold, 0, now
        return untold

    def total(self, key: K) -> int:
        return self._counts[key].total if key in self._counts else 0

    def rest(self) -> Iterator[tuple[K, int]]:
        """Those that no line stands for yet."""
        for key, count in self._counts.items():
            if count.untold:
                untold, count.untold = count.untold, 0
                yield key, untold


def _is_worth_a_line(total: int) -> bool:
    while total > FIRST and total % 10 == 0:
        total //= 10
    return total <= FIRST
