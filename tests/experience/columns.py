"""Short columns of one lane to write by hand: numbers, and flags of three steps."""

from __future__ import annotations

import numpy as np

NONE = np.zeros((3, 1), bool)


def column(*values: float) -> np.ndarray:
    return np.array(values, np.float32)[:, None]  # [T, 1]


def at(t: int) -> np.ndarray:
    flags = NONE.copy()
    flags[t] = True
    return flags
