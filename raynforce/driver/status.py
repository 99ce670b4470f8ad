"""What a run tells: its status to callbacks while it lasts, its result when it has ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from raynforce.config import Config
from raynforce.errors import UsageError
from raynforce.policy import Policy


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

    def policy(self) -> Policy:
        """The newest version of the policy, ready to act. It is made when it is asked for, once for each version."""
        if self.make_policy is None:
            raise UsageError("there is no policy yet: ask for it in a callback")
        return self.make_policy()

    def stop(self, reason: str = "a callback asked for it") -> None:
        """End the run after this round, with a checkpoint."""
        self.stop_reason = reason


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
    env_restarts: int = 0  # environments that broke and were made anew
    redone_updates: int = 0  # optimiser steps taken again because the learner had died; `updates` counts them once
    lost_steps: int = 0  # steps at most of fragments that were lost with a sampler and not redone
    abandoned_episodes: int = 0  # episodes in flight that resuming could not go on with
    evaluations: int = 0  # that came to their end in this process, the last one included
    skipped_evaluations: int = 0  # that were due and not played, or in vain
    eval_seconds: float = 0.0  # seconds that this process has waited for evaluations

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
