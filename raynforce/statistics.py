"""Statistics over few runs, as Agarwal et al. advise (2021, "Deep RL at the edge of the statistical precipice").

scores = [480.0, 500.0, 120.0, 500.0, 495.0]  # one for each seed
iqm(scores), bootstrap(scores)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from raynforce.errors import UsageError

REPEATS = 2000
LEVEL = 0.95


class Interval(NamedTuple):
    """An estimate, and where it would be expected with other seeds; arrays if there are several."""

    estimate: Any
    low: Any
    high: Any


def iqm(scores: Any, axis: int | None = None) -> Any:
    """The interquartile mean: of the middle half, so that one seed that fails or shines counts for little.

    A quarter of the scores, rounded down, is left out at each end: of fewer than four seeds it is the mean.
    """
    values = np.asarray(scores, np.float64)
    if axis is None:
        values, axis = values.reshape(-1), 0
    count = values.shape[axis]
    if not count:
        raise UsageError("iqm needs at least one score, and there are none")
    cut = count // 4
    middle = np.take(np.sort(values, axis), np.arange(cut, count - cut), axis)
    return middle.mean(axis)


def bootstrap(
    scores: Any,
    statistic: Callable[..., Any] = iqm,
    *,
    repeats: int = REPEATS,
    level: float = LEVEL,
    seed: int = 0,
) -> Interval:
    """An interval for a statistic over runs, by drawing the runs again with replacement.

    `scores` is `[runs]` or `[runs, …]`, of which each column has an interval of its own; `statistic` takes `axis`.
    """
    values = np.asarray(scores, np.float64)
    if not values.ndim or not len(values):
        raise UsageError("bootstrap needs at least one run, and there are none")
    chosen = np.random.default_rng(seed).integers(0, len(values), (repeats, len(values)))
    drawn = statistic(values[chosen], axis=1)  # [repeats, …]
    tail = (1 - level) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail], axis=0)
    return Interval(statistic(values, axis=0), low, high)


def probability_of_improvement(
    scores: Any, others: Any, *, repeats: int = REPEATS, level: float = LEVEL, seed: int = 0
) -> Interval:
    """How likely a run of `scores` is better than one of `others`, ties counted half; with its interval."""
    ours, theirs = np.asarray(scores, np.float64).reshape(-1), np.asarray(others, np.float64).reshape(-1)
    if not len(ours) or not len(theirs):
        raise UsageError("probability_of_improvement needs runs of both, and one has none")
    wins = np.greater.outer(ours, theirs) + 0.5 * np.equal.outer(ours, theirs)
    rng = np.random.default_rng(seed)
    rows, columns = (rng.integers(0, len(x), (repeats, len(x))) for x in (ours, theirs))
    drawn = wins[rows[:, :, None], columns[:, None, :]].mean((1, 2))
    tail = (1 - level) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail])
    return Interval(float(wins.mean()), float(low), float(high))
