"""A replay shard: a part of the replay buffer in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from raynforce.algos import algorithm_class
from raynforce.config import Config
from raynforce.experience.fragment import Fragment
from raynforce.experience.replay_spec import make_replay
from raynforce.spaces import EnvSpec
from raynforce.trees import Tree, load_rng, rng_state

Told = tuple[float, Mapping[str, float]]  # the mass of what can be drawn, and the buffer's metrics


class ReplayShard:
    """Has the fragments of every n-th sampler, of n shards."""

    def __init__(self, config: Config, env: EnvSpec, index: int) -> None:
        kind = algorithm_class(config.algo)
        spec = kind.replay_spec(config)
        assert spec is not None  # or else nobody would have started it
        states = kind(config, env).network().states if spec.sequence else {}
        self._index, self._shards = index, config.replay.shards
        self._prioritized = spec.prioritized
        self._replay = make_replay(config, spec, env, states, index)
        self._seeds = [config.seed, index, 3]
        self._rng = np.random.default_rng(self._seeds)

    def insert(self, fragment: Fragment) -> Told:
        self._replay.insert(replace(fragment, sampler=fragment.sampler // self._shards))
        return self.told()

    def draw(self, counts: np.ndarray, mass: float) -> tuple[dict[str, np.ndarray] | None, Told]:
        """Draw `counts[k]` transitions for minibatch k, chosen by a former `mass`; None if it started fresh since."""
        if not len(self._replay):
            return None, self.told()
        drawn = self._replay.draw(counts, self._rng)
        if self._prioritized:
            drawn["priority"] *= mass / self._replay.mass  # what is weighted is how likely they came to be chosen
        return drawn, self.told()

    def update(self, errors: Sequence[tuple[np.ndarray, np.ndarray]]) -> Told:
        """Take the errors of what was drawn of each shard, which set priorities."""
        if errors:
            self._replay.update_priorities(*errors[self._index])
        return self.told()

    def told(self) -> Told:
        return self._replay.mass, self._replay.metrics()

    def start_fresh(self, attempt: int) -> None:
        """Begin empty, with another random stream; `attempt` tells its segments apart from those in checkpoints."""
        self._rng = np.random.default_rng([*self._seeds, attempt])
        self._replay.start_fresh(attempt)

    def state(self, known: Sequence[str] = ()) -> Tree:
        return {"replay": self._replay.state(set(known)), "rng": rng_state(self._rng)}

    def load(self, tree: Tree) -> None:
        self._replay.load(tree["replay"])
        load_rng(self._rng, tree["rng"])
