"""The learner of several policies: a `Learner` for each that learns, published together with those that do not."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from raynforce.config import Config
from raynforce.experience.counts import Counts
from raynforce.experience.team_fragment import TeamFragment
from raynforce.policies.acting import PolicyVersion
from raynforce.policies.team import TeamVersion
from raynforce.roles.learned import Learned
from raynforce.roles.learner import Learner
from raynforce.roles.team import Plan
from raynforce.trees import Tree

DRAW = 7  # the stream by which older versions are drawn


@dataclass
class _Part:
    learner: Learner
    counts: Counts
    older: deque[PolicyVersion]  # versions to play against, the oldest first
    every: int


class TeamLearner:
    """Has the learners of all policies in one process. Each learns from its own part of every fragment."""

    def __init__(self, config: Config, plans: Mapping[str, Plan]) -> None:
        self._seed, self._number, self._steps = config.seed, 0, 0
        self._frozen = {name: plan.frozen for name, plan in plans.items() if plan.frozen is not None}
        self._order = list(plans)
        self._parts = {
            name: _Part(Learner(plan.config, plan.env), Counts(), deque(maxlen=plan.opponents), plan.every)
            for name, plan in plans.items()
            if plan.frozen is None
        }
        self._remember()

    def learn(self, *received: TeamFragment) -> Learned:
        fragments = sorted(received, key=lambda f: (f.sampler, f.sequence))
        found: dict[str, Learned] = {}
        self._steps += sum(f.steps for f in fragments)
        for name, part in self._parts.items():
            for fragment in fragments:
                part.counts.add(fragment.parts[name].record)
            found[name] = part.learner.learn(*(fragment.parts[name] for fragment in fragments))
            part.learner.count_all(self._steps)
        self._number += 1
        self._remember()
        metrics = {f"{name}/{key}": value for name, each in found.items() for key, value in each.metrics.items()}
        for name, part in self._parts.items():
            if part.counts.return_mean is not None:
                metrics[f"{name}/charts/episodic_return"] = part.counts.return_mean
        schedules = {f"{name}/{key}": value for name, each in found.items() for key, value in each.schedules.items()}
        seconds = {key: sum(each.seconds[key] for each in found.values()) for key in ("prepare", "learn")}
        notes = [f"policy {name!r}: {note}" for name, each in found.items() for note in each.notes]
        updates = sum(each.updates for each in found.values())
        return Learned(self._number, schedules, metrics, updates, [f.record for f in fragments], (), seconds, notes)

    def _remember(self) -> None:
        """Keep this version to play against, if it is its turn."""
        for part in self._parts.values():
            if part.older.maxlen and self._number % part.every == 0:
                part.older.append(part.learner.publish())

    def publish(self) -> TeamVersion:
        learned = {name: part.learner.publish() for name, part in self._parts.items()}
        policies = {name: learned[name] if name in learned else self._frozen[name] for name in self._order}
        rng = np.random.default_rng([self._seed, self._number, DRAW])  # no state of its own: a resumed run draws alike
        older = {n: part.older[int(rng.integers(len(part.older)))] for n, part in self._parts.items() if part.older}
        return TeamVersion.of(self._number, policies, learned, older)

    def state(self, known: Sequence[str] = ()) -> Tree:
        parts: Tree = {}
        for name, part in self._parts.items():
            parts[name] = {"learner": part.learner.state(known), "counts": part.counts.state()}
            parts[name]["older"] = {str(i): version.state() for i, version in enumerate(part.older)}
        return {"number": self._number, "steps": self._steps, "policies": parts}

    def load(self, tree: Tree) -> list[str]:
        self._number, self._steps = tree["number"], tree["steps"]
        notes: list[str] = []
        for name, part in self._parts.items():
            saved = tree["policies"][name]
            notes += part.learner.load(saved["learner"])
            part.learner.count_all(self._steps)
            part.counts.load(saved["counts"])
            older = saved.get("older", {})
            part.older.clear()
            part.older.extend(PolicyVersion.from_state(older[str(i)]) for i in range(len(older)))
        return notes
