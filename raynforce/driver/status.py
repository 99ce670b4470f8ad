"""What a run counts and tells: its status to callbacks while it lasts, its result when it has ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from raynforce.config import Config
from raynforce.errors import UsageError
from raynforce.experience.counts import Counts, Record
from raynforce.policy import Policy
from raynforce.roles.learned import Learned
from raynforce.trees import Tree

_KEPT = ("updates", "best_eval", "last_eval", "solved_at", "solved_steps")  # of a status, in checkpoints


@dataclass
class Status:
    """Where a run stands: what callbacks see after every round of learning."""

    config: Config
    steps: int = 0
    episodes: int = 0
    updates: int = 0
    best_eval: float | None = None  # best mean return of an evaluation so far
    last_eval: float | None = None  # mean return of the newest evaluation
    solved_at: float | None = None  # seconds of the run, over all its processes, until an evaluation met the target
    solved_steps: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)  # the newest value of everything that is measured, by name
    stop_reason: str | None = None
    path: Path = Path()  # the run's directory; of a run at a URL, the working copy on this machine
    make_policy: Callable[[], Policy] | None = field(default=None, repr=False)
    play_last: bool = True  # whether a run that ends is evaluated once more
    save_now: Callable[[], None] | None = field(default=None, repr=False)
    count_idle: Callable[[float], None] | None = field(default=None, repr=False)

    def policy(self) -> Policy:
        """The newest version of the policy, ready to act. It is made when it is asked for, once for each version."""
        if self.make_policy is None:
            raise UsageError("there is no policy yet: ask for it in a callback")
        return self.make_policy()

    def stop(self, reason: str = "a callback asked for it", *, evaluate: bool = True) -> None:
        """End the run after this round, with a checkpoint; without `evaluate` at once, as a signal does."""
        self.stop_reason, self.play_last = reason, evaluate

    def save(self) -> None:
        """Write a checkpoint, and wait until it is on the disk; in `on_round` alone."""
        if self.save_now is None:
            raise UsageError("there is nothing to save yet: call it in on_round of a callback")
        self.save_now()

    def idle(self, seconds: float) -> None:
        """A callback has kept the run waiting for so long, which is not to count as time of the run."""
        if self.count_idle is not None:
            self.count_idle(seconds)


class Tally:
    """What a run counts, over all the processes that it was resumed in."""

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
        self._ended: list[Record] = []  # with episodes that have ended since the last report

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
            if len(record.returns):
                self._ended.append(record)
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

    @property
    def has_unreported(self) -> bool:
        """Whether steps have gone by since the last line of metrics, which the end of a run tells of, too."""
        return self._unreported > 0

    def episodes(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns and lengths `[E]` of the episodes that have ended since this was asked before."""
        ended, self._ended = self._ended, []
        if not ended:
            return np.zeros(0, np.float32), np.zeros(0, np.int64)
        return np.concatenate([each.returns for each in ended]), np.concatenate([each.lengths for each in ended])

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


class Callback:
    """Looks on, and may end the run with `status.stop()`. Override what you need."""

    def on_round(self, status: Status) -> None:
        """After every round of learning, and the report and evaluation that are due with it."""

    def on_evaluation(self, status: Status, returns: np.ndarray) -> None:
        """After every evaluation, with the return of each episode."""

    def on_end(self, status: Status) -> None:
        """Once, when the run has ended and its last checkpoint is written."""


@dataclass(frozen=True)
class Result:
    """How a run ended; the keys of `--json`."""

    run: str
    algo: str
    env: str
    runtime: str
    topology: str
    seed: int
    steps: int
    episodes: int
    updates: int
    seconds: float
    startup_seconds: float | None
    steps_per_second: float | None
    return_mean: float | None
    eval_return: float | None
    solved_at: float | None
    solved_steps: int | None
    restarts: int
    dropped_steps: int
    weights_sha256: str
    stopped: str
    env_restarts: int = 0  # environments that broke and were replaced
    recycled: int = 0  # simulator processes that were replaced as `sims` says
    recycle_cuts: int = 0  # episodes that were cut for that
    redone_updates: int = 0  # optimiser steps taken again because the learner had died; `updates` counts them once
    lost_steps: int = 0  # steps at most of fragments that were lost with a sampler and not redone
    abandoned_episodes: int = 0  # episodes in flight that resuming could not go on with
    evaluations: int = 0  # that came to their end in this process, the last one included
    skipped_evaluations: int = 0  # that were due and not played, or failed
    eval_seconds: float = 0.0  # seconds that this process has waited for evaluations

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
