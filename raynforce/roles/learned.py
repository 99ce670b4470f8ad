"""What roles answer: of learning, of gradients, of serving. Numbers only, in a file that imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np

from raynforce import infos
from raynforce.experience.counts import Record
from raynforce.trees import Tree


class Learned(NamedTuple):
    """What one round of learning gave; the policy version it led to is published apart."""

    number: int  # of that policy version
    schedules: Mapping[str, float]  # its schedules: values that follow the run's progress
    metrics: dict[str, float]
    updates: int  # optimiser steps taken in this round
    trained: Sequence[Record] = ()  # of each fragment that was learned from
    dropped: Sequence[Record] = ()  # of each that was refused
    seconds: Mapping[str, float] = {}  # where the learner's time went: `prepare` (advantages, replay) and `learn`
    notes: Sequence[str] = ()  # what the user should know of the algorithm; most often nothing

    @property
    def steps(self) -> int:
        return sum(record.steps for record in self.trained)


@dataclass(frozen=True)
class Contribution:
    """The gradients that one fragment led to, all of them at the weights of one policy version."""

    gradients: np.ndarray  # [K, P] float32, to be applied in this order; none while a replay buffer is being filled
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


class ServeOutcome(Enum):
    """Why a host serves no more."""

    JOINED = "joined"  # it does: the policy lives in the same process, and asks for what it wants
    ENDED = "ended"  # the policy hung up, or was not found
    GROWN = "grown"  # its process has too much memory: it is to be replaced


class Served(NamedTuple):
    outcome: ServeOutcome
    reason: str = ""
