"""How old experience is when it is learned from, in policy versions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from raynforce.experience.fragment import Fragment

EDGES = (0, 1, 2, 3, 5, 9, 17, 33)  # where the bins of the histogram begin
_NAMES = [f"lag/is_{a}" if b == a + 1 else f"lag/from_{a}_to_{b - 1}" for a, b in pairwise(EDGES)]
_NAMES.append(f"lag/from_{EDGES[-1]}")


def lags(number: int, fragments: Sequence[Fragment]) -> np.ndarray:
    """`[N]` how many versions before `number` each environment step was chosen."""
    steps = [f["version"][f["valid"]] if "version" in f.columns else np.full(f.steps, f.version) for f in fragments]
    return number - np.concatenate(steps) if steps else np.zeros(0, np.int64)


def lag_metrics(number: int, fragments: Sequence[Fragment]) -> dict[str, float]:
    """Mean and largest lag; if there is any, also a histogram: the share of steps in each bin, as `lag/from_3_to_4`."""
    ages = lags(number, fragments)
    if not len(ages):
        return {}
    found = {"lag/mean": float(ages.mean()), "lag/max": float(ages.max())}
    if ages.any():
        counts = np.histogram(ages, [*EDGES, np.inf])[0] / len(ages)
        found |= dict(zip(_NAMES, counts.tolist(), strict=True))
    return found
