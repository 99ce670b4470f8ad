"""The learner of several policies: a `Learner` for each that learns, published together with those that do not."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from raynforce.algos import algorithm_class
from raynforce.config import Config
from raynforce.experience.counts import Counts
from raynforce.experience.replay_spec import replay_bytes
from raynforce.experience.team_fragment import TeamFragment
from raynforce.memory import require_memory
from raynforce.policies.acting import PolicyVersion
from raynforce.policies.team import TeamVersion
from raynforce.roles.learned import Learned
from raynforce.roles.learner import Learner
from raynforce.roles.team import Plan
from raynforce.trees import Tree, renamed

DRAW = 7  # the stream by which older versions are drawn
MEMORY = 0.8  # share of this machine's free memory that replay buffers may take together


@dataclass
class _Part:
    name: str
    learner: Learner
    counts: Counts
    older: deque[PolicyVersion]  # versions to play against, the oldest first
    every: int

    def state(self, known: Sequence[str]) -> Tree:
        """Segments of its replay buffer have its name in front: each policy numbers its own alike."""
        prefix = f"{self.name}-"
        own = [name.removeprefix(prefix) for name in known if name.startswith(prefix)]
        older = {str(i): version.state() for i, version in enumerate(self.older)}
        learner = renamed(self.learner.state(own), lambda name: prefix + name)
        return {"learner": learner, "counts": self.counts.state(), "older": older}

    def load(self, tree: Tree) -> list[str]:
        notes = self.learner.load(renamed(tree["learner"], lambda name: name.removeprefix(f"{self.name}-")))
        self.counts.load(tree["counts"])
        older = tree.get("older", {})
        self.older.clear()
        self.older.extend(PolicyVersion.from_state(older[str(i)]) for i in range(len(older)))
        return notes


class TeamLearner:
    """Has the learners of all policies in one process. Each learns from its own part of every fragment, or puts it into
    a replay buffer of its own."""

    def __init__(self, config: Config, plans: Mapping[str, Plan]) -> None:
        _require_memory([plan for plan in plans.values() if plan.frozen is None])
        self._seed, self._number, self._steps = config.seed, 0, 0
        self._frozen = {name: plan.frozen for name, plan in plans.items() if plan.frozen is not None}
        self._order = list(plans)
        self._parts = {
            name: _Part(name, Learner(plan.config, plan.env), Counts(), deque(maxlen=plan.opponents), plan.every)
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
        parts = {name: part.state(known) for name, part in self._parts.items()}
        return {"number": self._number, "steps": self._steps, "policies": parts}

    def load(self, tree: Tree) -> list[str]:
        self._number, self._steps = tree["number"], tree["steps"]
        notes: list[str] = []
        for name, part in self._parts.items():
            notes += part.load(tree["policies"][name])
            part.learner.count_all(self._steps)
        return notes


def _require_memory(plans: Sequence[Plan]) -> None:
    """Buffers take their memory as they fill: each alone may seem to fit where all together do not."""
    asked = [(plan, algorithm_class(plan.config.algo).replay_spec(plan.config)) for plan in plans]
    sizes = [replay_bytes(plan.config, spec, plan.env) for plan, spec in asked if spec is not None and spec.divisible]
    if len(sizes) > 1:
        require_memory(sum(sizes), MEMORY, f"replay: the buffers of {len(sizes)} policies")
