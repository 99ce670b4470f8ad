"""The batch former: for whom the policy chooses next, and when."""

from __future__ import annotations

import math

import numpy as np


class BatchFormer:
    """Lanes that wait for an action; a batch is due with `least` of them, after `wait` seconds, or if no other
    comes."""

    def __init__(self, lanes: int, least: int, most: int | None, wait: float) -> None:
        self.least, self.most, self.wait = least, lanes if most is None else most, wait
        self._lanes = np.zeros(lanes, np.int64)
        self._since = np.zeros(lanes, np.float64)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, lanes: np.ndarray, now: float) -> None:
        """These are ready, each at most once until it is taken."""
        until = self._count + len(lanes)
        self._lanes[self._count : until] = lanes
        self._since[self._count : until] = now
        self._count = until

    def remove(self, lanes: np.ndarray) -> int:
        """These are not ready any more; returns how many of them were."""
        keep = ~np.isin(self._lanes[: self._count], lanes)
        count = int(np.count_nonzero(keep))
        self._lanes[:count] = self._lanes[: self._count][keep]
        self._since[:count] = self._since[: self._count][keep]
        removed, self._count = self._count - count, count
        return removed

    def due_in(self, now: float, coming: int) -> float:
        """Seconds until a batch is due, infinite while nobody waits; `coming` may still join it."""
        if not self._count:
            return math.inf
        if self._count >= min(self.least, self._count + coming):
            return 0.0
        return max(0.0, self._since[0] + self.wait - now)

    def next_batch(self) -> tuple[np.ndarray, np.ndarray]:
        """The next batch, and since when each of them has waited."""
        count = min(self._count, self.most)
        lanes, since = self._lanes[:count].copy(), self._since[:count].copy()
        left = self._count - count
        self._lanes[:left] = self._lanes[count : self._count]
        self._since[:left] = self._since[count : self._count]
        self._count = left
        return lanes, since
