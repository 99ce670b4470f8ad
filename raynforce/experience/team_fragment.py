"""What several policies did in the same environments at the same time: a fragment of each that learns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from raynforce.experience.counts import Record
from raynforce.experience.fragment import Fragment
from raynforce.trees import Tree


@dataclass(frozen=True)
class TeamFragment(Fragment):
    """Fragments by policy; it has no columns of its own. Its steps and episodes are those of all parts."""

    parts: Mapping[str, Fragment] = field(default_factory=dict)

    @staticmethod
    def of(parts: Mapping[str, Fragment], version: int, sampler: int, sequence: int) -> TeamFragment:
        return TeamFragment({}, version, sampler, sequence, parts)

    @property
    def steps(self) -> int:
        return sum(part.steps for part in self.parts.values())

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    @property
    def record(self) -> Record:
        records = [part.record for part in self.parts.values()]
        returns, lengths = (np.concatenate([getattr(r, name) for r in records]) for name in ("returns", "lengths"))
        return Record(self.sampler, self.sequence, self.steps, returns, lengths)

    def state(self) -> Tree:
        named = {"version": self.version, "sampler": self.sampler, "sequence": self.sequence}
        return {**named, "parts": {name: part.state() for name, part in self.parts.items()}}

    @staticmethod
    def of_state(tree: Tree) -> TeamFragment:
        parts = {name: Fragment.from_state(part) for name, part in tree["parts"].items()}
        return TeamFragment.of(parts, tree["version"], tree["sampler"], tree["sequence"])
