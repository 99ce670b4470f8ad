"""The samples-per-insert limiter: who has to wait, samplers or learner, so that their ratio is the one that was set."""

from __future__ import annotations

import math

from raynforce.errors import UsageError
from raynforce.trees import Tree


class Limiter:
    """Counts what is inserted into replay and what is sampled from it, and says who may go on.

    Beyond the first `starts` environment steps, each is to be sampled `ratio` times on average: never more often at any
    time, and less often by no more than `slack` samples and what one fragment adds.
    """

    def __init__(self, ratio: float, batch: int, starts: int, slack: float) -> None:
        """`slack`, which is raised to two batches if it is less, has to allow for one fragment at least."""
        if not 0 < ratio < math.inf:
            hint = "it is above 0 and finite; 16 with a batch of 64 is an update every 4 steps"
            raise UsageError(f"algorithm.samples_per_insert = {ratio} is not allowed: {hint}")
        self.ratio, self.batch, self.starts = ratio, batch, starts
        self.slack = max(slack, 2 * batch)
        self.inserted = 0  # environment steps
        self.sampled = 0  # transitions; one that was sampled twice counts twice

    def insert(self, steps: int) -> None:
        self.inserted += steps

    def sample(self, transitions: int) -> None:
        self.sampled += transitions

    def updates(self) -> int:
        return max(0, (self._allowed(self.inserted) - self.sampled) // self.batch)

    def room(self, coming: int = 0) -> bool:
        """Whether a sampler may be asked for more, while so many steps are being sampled already."""
        steps = self.inserted + coming
        return steps < self.starts or self._allowed(steps) - self.sampled < self.slack

    def _allowed(self, steps: int) -> int:
        """Samples that so many steps allow, in whole numbers: floating point would err once these are large."""
        numerator, denominator = self.ratio.as_integer_ratio()
        return numerator * max(0, steps - self.starts) // denominator

    @property
    def measured(self) -> float | None:
        return self.sampled / (self.inserted - self.starts) if self.inserted > self.starts else None

    def state(self) -> Tree:
        return {"inserted": self.inserted, "sampled": self.sampled, "ratio": self.ratio, "starts": self.starts}

    def load(self, tree: Tree) -> None:
        """Go on from `state`. Under another ratio or start it counts from here on: what was, was right then."""
        self.inserted, self.sampled = tree["inserted"], tree["sampled"]
        if (tree["ratio"], tree["starts"]) != (self.ratio, self.starts):
            self.inserted, self.sampled = min(self.inserted, self.starts), 0
