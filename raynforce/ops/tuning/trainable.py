"""Trials as Ray Tune sees them: a class whose `step` trains all seeds of one setting until their next evaluation."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ray.tune import Trainable

from raynforce.config import Config
from raynforce.errors import UsageError, reason
from raynforce.experiment import resolve
from raynforce.given import unpack
from raynforce.kernels import pin
from raynforce.ops.tuning.study import Plan, SeedState, Study, median
from raynforce.ops.tuning.trial_runs import TrialRuns, taken_over
from raynforce.runs import disk
from raynforce.settings import dotted, nested
from raynforce.threads import cap_threads

ID = "trial"  # in Tune's config of a trial: which of ours it began as
WHOSE = "whose.json"  # in a checkpoint: which trial wrote it, and where it was
TIMES, TIMES_TO_TARGET, SAVES = 20, 40, 10  # evaluations and checkpoints of a run, if nothing else is set


@dataclass(frozen=True)
class Work:
    """What all trials have in common."""

    plan: Plan
    base: Mapping[str, Any]
    """Settings of all runs, nested."""
    folder: str | None
    """Of the search; None for a Tuner of the user's own, whose trials have folders of their own."""
    path: tuple[str, ...]
    """Where modules are, to be looked at before the worker's own places."""
    given: bytes
    """What the user's script defines."""


def trial_config(base: Mapping[str, Any], values: Mapping[str, Any], seed: int) -> Config:
    """What one run of a trial trains. All are evaluated at equal steps, whatever that costs."""
    config, _ = resolve({"preset": "none"}, base, nested(values), {"seed": seed})
    every = config.eval.every or evaluated_every(config)
    saves = min(config.checkpoint.every, max(1, config.steps // SAVES))
    return replace(
        config,
        eval=replace(config.eval, every=every),
        checkpoint=replace(config.checkpoint, every=saves),
    )


def evaluated_every(plan: Config | Plan) -> int:
    return max(1, plan.steps // (TIMES if plan.target is None else TIMES_TO_TARGET))


def name_of(trial: int) -> str:
    return f"trial_{trial:03d}"


def number_of(name: str) -> int:
    return int(name.rpartition("_")[2])


class Trials(Trainable):
    """Trains one setting with all of its seeds; an actor does so for one trial after the other."""

    def setup(self, config: dict[str, Any], work: Work) -> None:  # type: ignore[override]
        cap_threads()
        pin(work.base.get("kernels", "portable"))
        sys.path[:] = [*work.path, *(place for place in sys.path if place not in work.path)]
        unpack(work.given)
        self._work = work
        self._runs: TrialRuns | None = None
        self._values: dict[str, Any] = {}
        self.reset_config(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._end()
        values = dict(new_config)
        values.pop(ID, None)  # PBT puts another trial's there
        self._id = None if self._work.folder is None else number_of(self.trial_name)
        self._values = dotted(values)
        self._exploited: dict[str, Any] | None = None
        return True

    def _folder(self) -> Path:
        if self._work.folder is None:
            return Path(self.logdir)
        return Path(self._work.folder)

    def _states(self) -> list[SeedState]:
        """Where the runs of this trial stand, by what is on disk."""
        if self._work.folder is None or self._id is None:
            return [SeedState(seed, f"seed{seed}") for seed in self._work.plan.seeds]
        if known := Study.open(self._work.folder).trial(self._id).seeds:
            return known
        return [SeedState(seed, f"{name_of(self._id)}/seed{seed}") for seed in self._work.plan.seeds]

    def _open(self, states: list[SeedState]) -> TrialRuns:
        work = self._work
        configs = {state.seed: trial_config(work.base, self._values, state.seed) for state in states}
        return TrialRuns(self._folder(), states, configs)

    def step(self) -> dict[str, Any]:
        plan = self._work.plan
        try:
            if self._runs is None:
                self._runs = self._open(self._states())
            self._runs.advance()
        except Exception as error:
            if self._work.folder is None:
                raise
            # An error that our own code tells of comes again if it is tried again, but for a disk that is full.
            cause = "full" if disk.is_full(reason(error)) else "cause"
            return {"done": True, cause: reason(error), "states": self._told()}
        runs = self._runs
        found = {"done": runs.ended, "evaluated": runs.evaluated, "states": self._told()}
        figures = {
            "score": median([state.merit(plan) for state in runs.states]),
            "return": median([state.value for state in runs.states]),
            "steps": sum(state.steps for state in runs.states),
            "solved_steps": median([state.solved_steps for state in runs.states]),
            "solved_at": median([state.solved_at for state in runs.states]),
        }
        if self._exploited is not None:
            found["exploited"], self._exploited = self._exploited, None
        return found | {name: value for name, value in figures.items() if value is not None}

    def _told(self) -> str:
        """As text: Tune would flatten a list of mappings at every result."""
        return json.dumps([] if self._runs is None else [asdict(state) for state in self._runs.states])

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        folder = Path(checkpoint_dir)
        steps = 0
        if self._runs is not None:
            self._runs.copy_to(folder)
            steps = self._runs.evaluated
        (folder / WHOSE).write_text(json.dumps({"trial": self._who, "steps": steps}))

    def load_checkpoint(self, checkpoint_dir: Any) -> None:
        """Go on where another trial was; one's own runs know by themselves where they were."""
        folder = Path(checkpoint_dir)
        whose = json.loads((folder / WHOSE).read_text())
        states = self._states()
        own = whose["trial"] == self._who and all((self._folder() / state.run).exists() for state in states)
        self._end()
        if own or not any(folder.glob("seed*")):
            return
        facts = {"by": self._who, "of": whose["trial"], "steps": whose["steps"], "settings": self._values}
        self._exploited = facts
        self._runs = self._open(taken_over(folder, self._folder(), states, facts))
        disk.flush(self._folder())

    @property
    def _who(self) -> str:
        return str(self.trial_id if self._id is None else self._id)

    def _end(self) -> None:
        if getattr(self, "_runs", None) is not None:
            runs, self._runs = self._runs, None
            assert runs is not None
            runs.stop(f"tune: {self._why()}")

    def _why(self) -> str:
        """Why the runs of this trial are ended, as the search has noted it."""
        if self._work.folder is not None and self._id is not None:
            with contextlib.suppress(UsageError):
                trial = Study.open(self._work.folder).trial(self._id)
                return trial.why or (f"a seed failed ({trial.cause})" if trial.cause else "the search was stopped")
        return "the trial was stopped"

    def cleanup(self) -> None:
        self._end()


def search_path() -> tuple[str, ...]:
    return tuple(os.path.abspath(place) for place in sys.path)
