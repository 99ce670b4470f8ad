"""What is counted of fragments: the record that goes with each, the receipt for the driver, and sums over them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from raynforce import infos
from raynforce.trees import Tree

RECENT = 100  # episodes that means are of
Key = tuple[int, int]  # sampler and sequence number: a fragment's name


class Record(NamedTuple):
    sampler: int
    sequence: int
    steps: int  # environment steps in it: valid rows
    returns: np.ndarray = np.zeros(0, np.float32)  # returns `[E]` of the episodes that ended in it
    lengths: np.ndarray = np.zeros(0, np.int64)  # their lengths `[E]`
    info: infos.Values = infos.NOTHING  # numbers in `info` at their ends

    @property
    def key(self) -> Key:
        return self[:2]


class Receipt(NamedTuple):
    """What the driver gets of a fragment, which itself goes to the learner."""

    record: Record
    seconds: Mapping[str, float]  # of the whole call: `env`, `policy`, `other`, and a worker's `gradients`
    faults: Sequence[Mapping[str, Any]] = ()  # `EnvFault.facts()` of environments that broke and were restarted
    size: int = 0  # bytes of the fragment, or of a worker's gradients
    memory: int = 0  # bytes that the sampler's process has in memory
    kept: int = 0  # transitions in the sampler's own replay buffer, if it has one
    envs: Mapping[str, float] = {}
    """Seconds of environments that go their own pace: `busy`, or waiting for `policy`, `wire`, `learner`, `restart`."""
    served: Sequence[int] = ()  # env hosts whose environments took steps since the last one
    silent: Sequence[int] = ()  # env hosts that do not answer any more
    flying: int = 0  # environment steps that are still to become part of a fragment
    skipped: int = 0  # environment steps that a simulator took while nobody asked for them
    lost: int = 0  # environment steps, at most, of fragments that ended with a simulator's process
    passes: int = 0  # of a policy that serves hosts: forward passes since the last one
    chosen: int = 0  # actions that these have chosen


class Counts:
    """Of the fragments that were learned from: the driver's for a run, a shared agent's for itself."""

    def __init__(self) -> None:
        self.steps = self.episodes = 0
        self.best_return: float | None = None
        self._returns: deque[float] = deque(maxlen=RECENT)
        self._lengths: deque[int] = deque(maxlen=RECENT)
        self._info: dict[str, deque[float]] = {}  # numbers in `info` of those that had them, by name

    @property
    def return_mean(self) -> float | None:
        return sum(self._returns) / len(self._returns) if self._returns else None

    @property
    def length_mean(self) -> float | None:
        return sum(self._lengths) / len(self._lengths) if self._lengths else None

    @property
    def info_means(self) -> dict[str, float]:
        return {name: sum(recent) / len(recent) for name, recent in self._info.items() if recent}

    def add(self, record: Record) -> None:
        self.steps += record.steps
        self.episodes += len(record.returns)
        if len(record.returns):
            best = float(record.returns.max())
            self.best_return = best if self.best_return is None else max(self.best_return, best)
            self._returns.extend(record.returns.tolist())
            self._lengths.extend(record.lengths.tolist())
            self._add_info(infos.joined([record.info]))

    def _add_info(self, told: infos.Values) -> None:
        for name, values in told.items():
            if name in self._info or len(self._info) < infos.MOST:
                self._info.setdefault(name, deque(maxlen=RECENT)).extend(values.tolist())

    def state(self) -> Tree:
        tree: Tree = {"steps": self.steps, "episodes": self.episodes, "best_return": self.best_return}
        tree |= {"recent": np.asarray(self._returns, np.float64), "lengths": np.asarray(self._lengths, np.int64)}
        told = {name: np.asarray(values, np.float64) for name, values in self._info.items()}
        return tree | ({"info": infos.to_tree(told)} if told else {})

    def load(self, tree: Tree) -> None:
        self.steps, self.episodes, self.best_return = tree["steps"], tree["episodes"], tree.get("best_return")
        self._returns = deque(tree["recent"].tolist(), maxlen=RECENT)
        self._lengths = deque(np.asarray(tree.get("lengths", ())).tolist(), maxlen=RECENT)
        self._info = {}
        self._add_info(infos.from_tree(tree.get("info")))
