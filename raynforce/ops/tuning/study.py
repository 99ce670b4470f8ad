"""A search for settings on disk: what was asked for, and what became of each trial. These files decide what a resume
does; what Tune writes is thrown away."""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from raynforce.errors import RaynforceError, UsageError
from raynforce.ops.tuning.space import Domain, Space
from raynforce.runs.disk import is_full

SCHEMA = 1
Objective = Literal["return", "steps", "seconds"]
Scheduler = Literal["asha", "pbt", "optuna", "random", "grid"]
OBJECTIVES: tuple[str, ...] = get_args(Objective)
SCHEDULERS: tuple[str, ...] = get_args(Scheduler)
PLAN, TRIALS, BASE = "tune.json", "trials.json", "base.yaml"
OVER = ("stopped", "done", "failed")  # what a resume leaves as it is


@dataclass(frozen=True)
class Plan:
    """What was asked for: `tune.json`."""

    algorithm: str
    env: str
    objective: Objective
    search: Space
    scheduler: Scheduler
    seeds: tuple[int, ...]
    trials: int
    seed: int
    steps: int
    """Of each run, at most."""
    target: float | None
    cpus: float
    """That each trial asks for."""
    gpus: float
    created: float

    @property
    def mode(self) -> str:
        return "max" if self.objective == "return" else "min"

    def to_json(self) -> dict[str, Any]:
        search = {key: domain.to_json() for key, domain in self.search.items()}
        facts = {**asdict(self), "search": search, "seeds": list(self.seeds), "mode": self.mode}
        return {"schema": SCHEMA, **facts}

    @staticmethod
    def from_json(facts: Mapping[str, Any]) -> Plan:
        names = set(Plan.__dataclass_fields__)
        known = {name: value for name, value in facts.items() if name in names}
        search = {key: Domain.from_json(value) for key, value in facts["search"].items()}
        return Plan(**{**known, "search": search, "seeds": tuple(facts["seeds"])})


@dataclass
class SeedState:
    """Where the run of one seed stands."""

    seed: int
    run: str
    """Its directory, relative to that of the search."""
    steps: int = 0
    seconds: float = 0.0
    evaluated: int = 0
    """Steps at the newest evaluation."""
    last: float | None = None
    """The newest evaluation's mean return."""
    final: float | None = None
    """Mean return of the best policy on fresh episodes, once the run has ended."""
    solved_steps: int | None = None
    solved_at: float | None = None
    ended: bool = False

    @property
    def value(self) -> float | None:
        return self.last if self.final is None else self.final

    def merit(self, plan: Plan) -> float | None:
        """One figure by which trials are compared, the more the better: the return, and for those that met the target
        something above it that is the higher the sooner that was."""
        if plan.objective == "return" or plan.target is None:
            return self.value
        scale = max(1.0, abs(plan.target))
        if plan.objective == "steps" and self.solved_steps is not None:
            return plan.target + scale * (1 + max(0.0, 1 - self.solved_steps / plan.steps))
        if plan.objective == "seconds" and self.solved_at is not None:
            return plan.target + scale * (1 + 1 / (1 + self.solved_at))
        return None if self.value is None else min(self.value, plan.target)


@dataclass
class Trial:
    """One setting that is tried, with all of its seeds."""

    id: int
    config: dict[str, Any]
    status: str = "pending"
    seeds: list[SeedState] = field(default_factory=list)
    curve: list[tuple[int, float]] = field(default_factory=list)
    """Steps of each evaluation, and the median return of the seeds."""
    merits: list[tuple[int, float]] = field(default_factory=list)
    cause: str = ""
    """Why it failed."""
    why: str = ""
    """Why it was stopped before its end."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """With PBT: whose checkpoint it went on from, where, and with which settings."""

    @property
    def over(self) -> bool:
        return self.status in OVER

    @property
    def steps(self) -> int:
        return sum(seed.steps for seed in self.seeds)

    @property
    def seconds(self) -> float:
        return sum(seed.seconds for seed in self.seeds)

    @property
    def runs(self) -> list[str]:
        return [seed.run for seed in self.seeds]

    def merit(self, plan: Plan) -> float | None:
        """The median of its seeds: one seed finds luck."""
        return median([seed.merit(plan) for seed in self.seeds])

    def highest_merit(self, plan: Plan) -> float | None:
        """What it can still come to, if all seeds met the target right now; None if the objective is the return."""
        if plan.objective == "return" or plan.target is None:
            return None
        soonest = [
            replace(
                seed,
                solved_steps=seed.evaluated if seed.solved_steps is None else seed.solved_steps,
                solved_at=seed.seconds if seed.solved_at is None else seed.solved_at,
            )
            for seed in self.seeds
        ]
        return median([seed.merit(plan) for seed in soonest])

    def objective(self, plan: Plan) -> float | None:
        """The same in the units that were asked for; None if half of the seeds have not met the target."""
        if plan.objective == "return":
            return median([seed.value for seed in self.seeds])
        name = "solved_steps" if plan.objective == "steps" else "solved_at"
        values = [getattr(seed, name) for seed in self.seeds]
        found = statistics.median([math.inf if value is None else value for value in values]) if values else math.inf
        return found if math.isfinite(found) else None

    def to_json(self, plan: Plan) -> dict[str, Any]:
        facts = {name: getattr(self, name) for name in ("id", "config", "status")}
        facts |= {"objective": self.objective(plan), "steps": self.steps, "seconds": round(self.seconds, 3)}
        facts |= {"runs": self.runs, "curve": self.curve, "merits": self.merits}
        facts |= {"seeds": [asdict(seed) for seed in self.seeds]}
        facts |= {name: value for name in ("cause", "why", "history") if (value := getattr(self, name))}
        return facts

    @staticmethod
    def from_json(facts: Mapping[str, Any]) -> Trial:
        names = set(Trial.__dataclass_fields__)
        known = {name: value for name, value in facts.items() if name in names}
        pairs = {name: [(int(at), float(value)) for at, value in facts.get(name, ())] for name in ("curve", "merits")}
        return Trial(**{**known, **pairs, "seeds": [SeedState(**seed) for seed in facts.get("seeds", ())]})


def median(values: Sequence[float | None]) -> float | None:
    """Of all seeds; None as long as one has no value."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known and len(known) == len(values) else None


class Study:
    """The directory of a search."""

    def __init__(self, path: Path, plan: Plan, trials: list[Trial]) -> None:
        self.path, self.plan, self.trials = path, plan, trials

    @staticmethod
    def create(path: Path, plan: Plan, base: str, trials: list[Trial]) -> Study:
        study = Study(path, plan, trials)
        write(path / BASE, base)
        study.save()
        write(path / PLAN, json.dumps(plan.to_json(), indent=1))  # last: with it, it is a search
        return study

    @staticmethod
    def open(path: str | Path) -> Study:
        folder = Path(path).expanduser()
        if not (folder / PLAN).is_file():
            what = "there is no such directory" if not folder.is_dir() else f"it has no {PLAN}"
            raise UsageError(f"{path} is no search of raynforce tune ({what}): name the DIR that one has printed")
        try:
            facts = json.loads((folder / PLAN).read_text())
            if facts.get("schema") != SCHEMA:
                raise UsageError(f"{folder / PLAN} has schema {facts.get('schema')!r}, and this release reads {SCHEMA}")
            found = json.loads((folder / TRIALS).read_text())
            return Study(folder, Plan.from_json(facts), [Trial.from_json(trial) for trial in found])
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UsageError(f"{folder} cannot be resumed: {PLAN} or {TRIALS} is damaged ({error})") from None

    def save(self) -> None:
        write(self.path / TRIALS, json.dumps([trial.to_json(self.plan) for trial in self.trials]))

    def trial(self, id: int) -> Trial:
        return self.trials[id]

    def ranked(self) -> list[Trial]:
        """The best first: those that came to their end before those that were stopped on the way."""

        def key(trial: Trial) -> tuple[bool, bool, float]:
            merit = trial.merit(self.plan)
            return trial.status == "done", merit is not None, -math.inf if merit is None else merit

        return sorted((trial for trial in self.trials if trial.status != "failed"), key=key, reverse=True)

    def best(self) -> Trial | None:
        ranked = self.ranked()
        return ranked[0] if ranked and ranked[0].merit(self.plan) is not None else None


def write(path: Path, text: str) -> None:
    """In one step: whoever reads sees the old or the new."""
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except OSError as error:
        with contextlib.suppress(OSError, UnboundLocalError):
            os.unlink(name)
        kind = RaynforceError if is_full(str(error)) else UsageError
        raise kind(f"cannot write {path}: {error.strerror}") from None
