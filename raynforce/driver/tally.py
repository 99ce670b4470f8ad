"""What a run counts: steps, episodes and recent returns, over all the processes that it was resumed in."""

from __future__ import annotations

import time

from raynforce.config import Config
from raynforce.driver.status import Status
from raynforce.experience.counts import Counts
from raynforce.roles.learned import Learned
from raynforce.trees import Tree

_KEPT = ("updates", "best_eval", "last_eval", "solved_at", "solved_steps")


class Tally:
    def __init__(self, config: Config, began: float) -> None:
        self.status = Status(config)
        self.began = began  # when this process was started for the run, on the monotonic clock
        self.evaluated = -1  # number of the policy version that was evaluated last
        self.trained_here = 0  # environment steps that this process has trained on
        self.abandoned_episodes = 0  # episodes in flight that no resume could go on with
        self._log_every = config.log_every
        self._unreported = 0  # environment steps since the last line of metrics
        self._seconds_before = 0.0  # of training before this process
        self.counts = Counts()

    @property
    def seconds(self) -> float:
        """How long the run has lasted, in this process and those it was resumed from."""
        return self._seconds_before + time.monotonic() - self.began

    def add(self, learned: Learned) -> None:
        status, counts = self.status, self.counts
        for record in learned.trained:
            counts.add(record)
            self.trained_here += record.steps
            self._unreported += record.steps
        status.steps, status.episodes = counts.steps, counts.episodes
        status.updates += learned.updates
        status.metrics |= {name: float(value) for name, value in learned.metrics.items()}
        status.metrics |= {f"charts/{k}": v for k, v in learned.schedules.items()}
        status.metrics |= {f"charts/info/{name}": mean for name, mean in counts.info_means.items()}
        if counts.return_mean is not None and counts.length_mean is not None:
            status.metrics |= {"charts/episodic_return": counts.return_mean}
            status.metrics |= {"charts/episodic_length": counts.length_mean}

    def report_is_due(self) -> bool:
        """Whether enough steps have gone by for a line of metrics; asking begins a new count then."""
        due = self._unreported >= self._log_every
        self._unreported = 0 if due else self._unreported
        return due

    def state(self) -> Tree:
        status = self.status
        return {
            **{name: getattr(status, name) for name in _KEPT},
            **self.counts.state(),
            "evaluated": self.evaluated,
            "seconds": self.seconds,
            "unreported": self._unreported,
            "abandoned_episodes": self.abandoned_episodes,
            "metrics": {name: float(value) for name, value in status.metrics.items()},
        }

    def load(self, tree: Tree) -> None:
        for name in _KEPT:
            setattr(self.status, name, tree[name])
        self.status.metrics.update(tree["metrics"])
        self.evaluated, self._unreported = tree["evaluated"], tree["unreported"]
        self.abandoned_episodes = tree.get("abandoned_episodes", 0)
        self._seconds_before = tree["seconds"]
        self.counts.load(tree)
        self.status.steps, self.status.episodes = self.counts.steps, self.counts.episodes
