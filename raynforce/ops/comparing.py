"""Whether one policy is better than another, by the returns of their episodes.

Returns are seldom normal: many have a ceiling, some are of two values. So the p-value comes from a permutation test,
with Welch's t as its statistic, which holds for unequal spreads too (Janssen 1997), and the interval
from the bootstrap.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

LEVEL = 0.05
DRAWS = 10_000
TEST = "one-sided permutation test of Welch's t"


@dataclass(frozen=True)
class Comparison:
    """How a candidate did beside the champion."""

    mean: float
    deviation: float
    episodes: int
    champion_mean: float
    champion_deviation: float
    champion_episodes: int
    difference: float
    low: float
    """The difference of the means lies from here …"""
    high: float
    """… to here, with a confidence of 1 - 2 * `level`: it is above zero about where the test says better."""
    p: float
    """How often chance alone gives such a difference, or a larger one."""
    level: float
    better: bool

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "test": TEST}

    def __str__(self) -> str:
        confidence = f"{100 * (1 - 2 * self.level):g} %"
        both = f"{self.mean:.6g} against {self.champion_mean:.6g}"
        return (
            f"{both} over {self.episodes} and {self.champion_episodes} episodes:"
            f" {self.difference:+.4g} ({confidence}: {self.low:+.4g} to {self.high:+.4g}), p = {self.p:.2g}"
        )


def compare(candidate: np.ndarray, champion: np.ndarray, level: float = LEVEL) -> Comparison:
    """Compare the returns `[E]` of both; equal ones give equal answers, whenever asked."""
    rng = np.random.default_rng(11)
    both, count = np.concatenate([candidate, champion]).astype(np.float64), len(candidate)
    drawn = rng.permuted(np.broadcast_to(both, (DRAWS, len(both))), axis=1)
    statistics = _welch(drawn[:, :count], drawn[:, count:])
    found = _welch(both[None, :count], both[None, count:])[0]
    p = float((1 + (statistics >= found - 1e-9 * abs(found)).sum()) / (1 + DRAWS))
    again = [rng.choice(x, (DRAWS, len(x))).mean(axis=1) for x in (both[:count], both[count:])]
    low, high = np.quantile(again[0] - again[1], [level, 1 - level])
    means, deviations = [(f(both[:count]), f(both[count:])) for f in (np.mean, np.std)]
    figures = [float(x) for x in (means[0], deviations[0], count, means[1], deviations[1])]
    difference = float(means[0] - means[1])
    mean, deviation, _, champion_mean, champion_deviation = figures
    facts = (mean, deviation, count, champion_mean, champion_deviation, len(champion), difference)
    return Comparison(*facts, float(low), float(high), p, level, better=difference > 0 and p < level)


def _welch(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Welch's t for each row; very large where there is a difference and no spread."""
    spread = a.var(axis=1, ddof=1) / a.shape[1] + b.var(axis=1, ddof=1) / b.shape[1]
    found: np.ndarray = (a.mean(axis=1) - b.mean(axis=1)) / np.sqrt(spread + 1e-18)
    return found
