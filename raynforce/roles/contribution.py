"""What a worker sends to the shared agent: gradients, and what is counted of the fragment that they are of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from raynforce import infos
from raynforce.experience.record import Record
from raynforce.trees import Tree


@dataclass(frozen=True)
class Contribution:
    """The gradients that one fragment led to, all of them at the weights of one policy version."""

    gradients: np.ndarray
    """`[K, P]` float32, to be applied one after another; none while a replay buffer is being filled."""
    version: int  # number of the policy version
    record: Record
    metrics: Mapping[str, float]  # what there is to report, by full name
    buffer: Mapping[str, float]  # the same of the worker's replay buffer, if it has one
    moments: Tree | None = None  # of its observations, if the network normalises them: the state of a `RunningStats`
    notes: Sequence[str] = ()  # what the user should know of the algorithm; most often nothing

    def state(self) -> Tree:
        record = self.record._asdict() | {"info": infos.to_tree(self.record.info)}
        tree: Tree = {"gradients": self.gradients, "version": self.version, "arrival": record}
        tree |= {"metrics": dict(self.metrics), "buffer": dict(self.buffer)}
        return tree if self.moments is None else {**tree, "moments": self.moments}

    @staticmethod
    def from_state(tree: Tree) -> Contribution:
        told = tree["metrics"], tree["buffer"], tree.get("moments")
        record = Record(**tree["arrival"] | {"info": infos.from_tree(tree["arrival"].get("info"))})
        return Contribution(tree["gradients"], tree["version"], record, *told)
