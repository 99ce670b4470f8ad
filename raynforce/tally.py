"""What a run counts: steps, episodes and recent returns, over all the processes that it was resumed in."""

from __future__ import annotations

import time
from collections import deque

import numpy as np

from raynforce import infos
from raynforce.config import Config
from raynforce.roles.learned import Learned
from raynforce.status import Status
from raynforce.trees import Tree

RECENT = 100  # episodes that `return_mean` is the mean of
_KEPT = ("steps", "episodes", "updates", "best_eval", "last_eval", "solved_at", "solved_steps")


class Tally:
    """The run's status, which callbacks see, and what it is made of."""

    def __init__(self, config: Config, began: float) -> None:
        self.status = Status(config)
        self.began = began
        """When this process was started for the run, on the monotonic clock."""
        self.evaluated = -1
        """Number of the policy version that was evaluated last."""
        self.trained_here = 0
        """Environment steps that this process has trained on."""
        self.abandoned_episodes = 0
        """Episodes in flight that no resume could go on with."""
        self._log_every = config.log_every
        self._unreported = 0  # environment steps since the last line of metrics
        self._seconds_before = 0.0  # of training before this process
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._lengths: deque[int] = deque(maxlen=RECENT)
        self._info: dict[str, deque[float]] = {}  # numbers in `info` of those that had them, by name

    @property
    def seconds(self) -> float:
        """How long the run has lasted, in this process and those it was resumed from."""
        return self._seconds_before + time.monotonic() - self.began

    @property
    def return_mean(self) -> float | None:
        """Of the last episodes."""
        return sum(self._recent) / len(self._recent) if self._recent else None

    def add(self, learned: Learned) -> None:
        """Count what the learner has learned from."""
        status = self.status
        status.steps += learned.steps
        status.episodes += len(learned.returns)
        status.updates += learned.updates
        self.trained_here += learned.steps
        self._unreported += learned.steps
        self._recent.extend(learned.returns.tolist())
        self._lengths.extend(learned.lengths.tolist())
        self._hear(learned.info)
        status.metrics |= {name: float(value) for name, value in learned.metrics.items()}
        status.metrics |= {f"charts/{k}": v for k, v in learned.schedules.items()}
        if self._recent:
            status.metrics["charts/episodic_return"] = sum(self._recent) / len(self._recent)
            status.metrics["charts/episodic_length"] = sum(self._lengths) / len(self._lengths)

    def _hear(self, told: infos.Values) -> None:
        """Numbers that environments put into `info` where an episode ended."""
        for name, values in told.items():
            if name in self._info or len(self._info) < infos.MOST:
                recent = self._info.setdefault(name, deque(maxlen=RECENT))
                recent.extend(values.tolist())
                if recent:
                    self.status.metrics[f"charts/info/{name}"] = sum(recent) / len(recent)

    def report_is_due(self) -> bool:
        """Whether enough steps have gone by for a line of metrics; asking begins a new count then."""
        due = self._unreported >= self._log_every
        self._unreported = 0 if due else self._unreported
        return due

    def state(self) -> Tree:
        status = self.status
        return {
            **{name: getattr(status, name) for name in _KEPT},
            "evaluated": self.evaluated,
            "seconds": self.seconds,
            "unreported": self._unreported,
            "abandoned_episodes": self.abandoned_episodes,
            "recent": np.asarray(self._recent, np.float64),
            "lengths": np.asarray(self._lengths, np.int64),
            "metrics": {name: float(value) for name, value in status.metrics.items()},
        } | self._info_state()

    def _info_state(self) -> Tree:
        told = {name: np.asarray(values, np.float64) for name, values in self._info.items()}
        return {"info": infos.to_tree(told)} if told else {}

    def load(self, tree: Tree) -> None:
        for name in _KEPT:
            setattr(self.status, name, tree[name])
        self.status.metrics.update(tree["metrics"])
        self.evaluated, self._unreported = tree["evaluated"], tree["unreported"]
        self.abandoned_episodes = tree.get("abandoned_episodes", 0)
        self._seconds_before = tree["seconds"]
        self._recent.extend(tree["recent"].tolist())
        self._lengths.extend(tree["lengths"].tolist())
        self._hear(infos.from_tree(tree.get("info")))
