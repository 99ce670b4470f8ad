"""What the shared agent counts of all its workers, in one place."""

from __future__ import annotations

from collections import deque

import numpy as np

from raynforce.experience.receipt import Arrival
from raynforce.trees import Tree

RECENT = 100  # episodes whose returns are kept


class Counters:
    """Episodes and environment steps of all workers, and how these episodes went."""

    def __init__(self) -> None:
        self.episodes = 0
        self.steps = 0
        self.refused = 0
        """Contributions whose gradients were too old to be applied."""
        self.best_return: float | None = None
        self.recent: deque[float] = deque(maxlen=RECENT)
        """Returns of the last episodes."""

    def add(self, arrival: Arrival) -> None:
        """Count a fragment that was learned from."""
        self.steps += arrival.steps
        self.episodes += len(arrival.returns)
        if len(arrival.returns):
            best = float(arrival.returns.max())
            self.best_return = best if self.best_return is None else max(self.best_return, best)
            self.recent.extend(arrival.returns.tolist())

    def metrics(self) -> dict[str, float]:
        found = {name: float(getattr(self, name)) for name in ("episodes", "steps", "refused")}
        if self.best_return is not None:
            found |= {"best_return": self.best_return, "recent_return": sum(self.recent) / len(self.recent)}
        return {f"agent/{name}": value for name, value in found.items()}

    def state(self) -> Tree:
        counts = {name: getattr(self, name) for name in ("episodes", "steps", "refused", "best_return")}
        return {**counts, "recent": np.asarray(self.recent, np.float64)}

    def load(self, tree: Tree) -> None:
        self.episodes, self.steps, self.refused = tree["episodes"], tree["steps"], tree["refused"]
        self.best_return = tree["best_return"]
        self.recent = deque(tree["recent"].tolist(), maxlen=RECENT)
