"""The replay buffer alone: CartPole transitions inserted per second, and one prioritised batch sampled and updated.

Inserting: fragments of 32 steps of 64 environments, sampled once and then inserted over and over into a full buffer of
a million transitions, with 3-step returns. Beside it the same columns copied by numpy alone.

Sampling: milliseconds to sample 512 transitions in proportion to their priorities and to set 512 new ones, in full
buffers of both sizes. Beside it a single numpy call that takes 512 random rows out of as many observations.

Seconds are those of this process on its core, so that others who use the machine count less.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

import numpy as np

from benchmarks.measure import Table, command, pinned, ratio, row, take_turns
from benchmarks.runs import held
from raynforce.algos import algorithm_class
from raynforce.envs.vector import EnvArgs, probe
from raynforce.experience.fragment import Fragment
from raynforce.experience.replay import Replay
from raynforce.experiment import resolve
from raynforce.policies.acting import PolicyVersion
from raynforce.roles.sampler import Sampler
from raynforce.spaces import EnvSpec

ENV, LENGTH, LANES, FRAGMENTS = "CartPole-v1", 32, 64, 64
INSERTED, BATCH = 1e6, 512
SMALL, LARGE = 100_000, 10_000_000


def measure(repeats: int = 25, batches: int = 100) -> list[Table]:
    """A turn inserts 131,072 transitions, or samples and updates so many batches."""
    env = probe(ENV)
    with pinned():
        fragments = _sampled(env)
        return [_inserting(env, fragments, repeats), _sampling(env, fragments, repeats, batches)]


def _sampled(env: EnvSpec) -> list[Fragment]:
    config = resolve({"env": ENV, "algo": "dqn", "sampling": {"envs": LANES, "fragment": LENGTH}})[0]
    acting = algorithm_class("dqn")(config, env).acting()
    version = PolicyVersion(0, acting.network.initial(np.random.default_rng(0)), schedules={"epsilon": 1.0})
    sampler = Sampler(acting, EnvArgs(ENV, LANES, 0), LENGTH)
    fragments = [sampler.sample(version) for _ in range(FRAGMENTS)]
    sampler.close()
    return fragments


class Filled:
    """A full buffer, and fragments that join on to each other."""

    def __init__(self, env: EnvSpec, fragments: Sequence[Fragment], capacity: int, prioritized: bool) -> None:
        self.replay = Replay(env.obs, env.action, capacity=capacity, lanes=LANES, n_step=3, prioritized=prioritized)
        self._fragments, self._numbers, self._rng = fragments, count(), np.random.default_rng(0)
        for _ in range(-(-capacity // (LENGTH * LANES * FRAGMENTS))):
            self.insert()
        if prioritized:
            self.sample(100)

    def insert(self) -> float:
        """Transitions per second."""
        numbered = [replace(fragment, sequence=next(self._numbers)) for fragment in self._fragments]
        seconds = _seconds(lambda: [self.replay.insert(fragment) for fragment in numbered])
        return sum(fragment.steps for fragment in numbered) / seconds

    def sample(self, batches: int) -> float:
        """Milliseconds per batch."""
        errors = self._rng.random((batches, BATCH), np.float32)

        def work() -> None:
            for error in errors:
                self.replay.update_priorities(self.replay.sample(BATCH, self._rng)["index"], error)

        return _seconds(work) / batches * 1e3


def _seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def _inserting(env: EnvSpec, fragments: Sequence[Fragment], repeats: int) -> Table:
    uniform, prioritized = (Filled(env, fragments, 1_000_000, kind) for kind in (False, True))
    columns = [[np.ascontiguousarray(f[k]) for k in ("obs", "action", "reward", "terminated")] for f in fragments]
    copies = [np.empty_like(column) for column in columns[0]]
    each = sum(column.nbytes for column in copies) / (LENGTH * LANES)

    def copy() -> float:
        def work() -> None:
            for fragment in columns:
                for column, target in zip(fragment, copies, strict=True):
                    np.copyto(target, column)

        return FRAGMENTS * LENGTH * LANES / _seconds(work)

    sides = (uniform.insert, prioritized.insert, copy)
    take_turns(2, *sides)
    plain, ordered, copied = take_turns(repeats, *sides, label="inserting")
    rows = [
        held(row("uniform", "per s", plain), ("at least", INSERTED)),
        held(row("prioritised", "per s", ordered), ("at least", INSERTED)),
        row("numpy copies the same", "per s", copied, f"{np.median(copied) * each / 1e9:.1f} GB/s"),
    ]
    return Table(f"Transitions inserted in fragments of {LENGTH} x {LANES}, {repeats} turns", rows)


def _sampling(env: EnvSpec, fragments: Sequence[Fragment], repeats: int, batches: int) -> Table:
    small, large = (Filled(env, fragments, capacity, prioritized=True) for capacity in (SMALL, LARGE))
    rng = np.random.default_rng(0)

    def take(filled: Filled) -> float:
        observations, index = filled.replay._ring.flat["obs"], rng.integers(filled.replay.capacity, size=(100, BATCH))
        return _seconds(lambda: [observations.take(rows, axis=0) for rows in index]) / 100 * 1e3

    sides = (lambda: small.sample(batches), lambda: large.sample(batches), lambda: take(small), lambda: take(large))
    take_turns(2, *sides)
    few, many, take_few, take_many = take_turns(repeats, *sides, label="sampling")
    rows = [
        held(row(f"of {SMALL:,}", "ms", few), ("at most", 1.0)),
        row(f"of {LARGE:,}", "ms", many),
        ratio(f"of {LARGE:,} / of {SMALL:,}", many, few, bar=("at most", 2.0)),
        row(f"numpy takes {BATCH} of {SMALL:,} observations", "ms", take_few),
        row(f"numpy takes {BATCH} of {LARGE:,} observations", "ms", take_many),
    ]
    return Table(f"A prioritised batch of {BATCH} sampled and its priorities updated, {repeats} turns", rows)


if __name__ == "__main__":
    command(measure, __doc__ or "")
