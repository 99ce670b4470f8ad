"""Asynchronous successive halving (ASHA, 1810.05934), the rule that stops: at each rung, the best third goes on.

Ray Tune's own scheduler keeps its rungs under ids that change when a search is resumed, and does not count a trial that
met its target before a rung. Here rungs are made from what the trials have reported, which is in our files.
"""

from __future__ import annotations

from collections.abc import Sequence

REDUCTION = 3
SMALLEST = 1 / 27  # of the budget, before anything is stopped


class Rungs:
    """Who was how good after how much of the budget."""

    def __init__(self, budget: int, every: int = 1, reduction: int = REDUCTION, smallest: float = SMALLEST) -> None:
        """Rungs are where trials are evaluated, which is `every` so many steps."""
        marks, share = [], 1.0 / reduction
        while share >= smallest * (1 - 1e-9):
            marks.append(max(every, int(budget * share) // every * every))
            share /= reduction
        self._rungs: dict[int, dict[int, float]] = {mark: {} for mark in sorted(marks)}
        self._reduction = reduction

    def report(self, trial: int, steps: int, score: float, *, ended: bool = False) -> bool:
        """Take a score; whether the trial is to be stopped. One that has `ended` well counts at all rungs to come."""
        stop = False
        for mark, scores in self._rungs.items():
            if trial in scores or (steps < mark and not ended):
                continue
            stop = stop or (not ended and score < self._cutoff(list(scores.values())))
            scores[trial] = score
        return stop

    def _cutoff(self, scores: Sequence[float]) -> float:
        """What the best third of those before has at least."""
        if len(scores) < self._reduction - 1:
            return float("-inf")
        ranked = sorted(scores, reverse=True)
        return ranked[max(1, round(len(ranked) / self._reduction)) - 1]
