"""Replay: samplers and learner go their own pace, and a limiter holds the ratio of what is sampled to what is inserted.

The buffer is in the learner's process, or divided among shards with processes of their own (Ape-X, arXiv 1803.00933);
the driver decides how many transitions come from which shard.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from raynforce.algos.base import Algorithm
from raynforce.config import Config
from raynforce.errors import UsageError
from raynforce.experience.limiter import Limiter
from raynforce.experience.replay_spec import ReplaySpec, load_limiter, make_limiter, replay_bytes, with_limiter
from raynforce.experience.sharding import joint_metrics, portions
from raynforce.experience.storage import observation_bytes
from raynforce.memory import require_memory
from raynforce.roles.learned import Learned
from raynforce.runtimes.member import Job, Member
from raynforce.spaces import EnvSpec
from raynforce.topologies import declaration
from raynforce.topologies.declaration import MEMORY, ROW_BYTES, Blueprint, Kind, Setup, Topology
from raynforce.topologies.loop import Learning, Loop, LoopRound, Roles, Start
from raynforce.trees import Tree

MAX_UPDATES_PER_VERSION = 64
MAX_DRAW_BYTES = 32_000_000  # that shards draw for these at once


class Pace(NamedTuple):
    limiter: Limiter
    most: int  # updates between two policy versions
    fragment: int  # environment steps of one fragment
    draws: int  # transitions, or sequences, that are drawn for an update
    row: int = 0  # bytes of one of them


class ReplayLoop(Loop):
    """The loop where the buffer is in the learner's process."""

    def __init__(self, roles: Roles, start: Start, pace: Pace) -> None:
        super().__init__(roles, start)
        self._pace = pace
        self._limiter = pace.limiter
        self._asked = 0  # updates of the round that is under way
        self._starved = False  # updates are due, but there is not enough to draw from yet

    def rounds(self) -> Iterator[LoopRound]:
        began = sampled = time.monotonic()
        while True:
            for sampler in self._idle():  # without getting too far ahead of the learner
                coming = len(self._coming) * self._pace.fragment + sum(sample.record.steps for sample in self._held)
                if self._limiter.room(coming) or (self._starved and not coming):
                    self._ask(sampler)
            if self._learning is None:
                sampled = time.monotonic()
                self._begin()
            learning = self._next(self._awaited())
            if learning is not None:
                now = time.monotonic()
                round_ = self._round(learning, sampled - began, now - sampled)
                if not self._pool.runtime.has_processes:  # nobody works meanwhile; and then checkpoints change nothing
                    self._rest()
                yield round_
                began = now

    def _idle(self) -> list[Member]:
        idle = super()._idle()
        if self._pool.runtime.has_processes:
            return idle
        count = len(self._samplers)  # by turns that follow from the version: a resumed run goes on alike
        return sorted(idle, key=lambda sampler: (sampler.index - self._number) % count)

    def _begin(self) -> None:
        """Let the learner take what has come, and make the updates that are due."""
        self._limiter.insert(sum(sample.record.steps for sample in self._held))
        self._asked = min(self._pace.most, self._limiter.updates())
        if not self._held and (self._starved or not self._asked):
            return
        held, self._held = self._held, []
        self._update("learn_some", self._asked, *(sample.source for sample in held), fragments=held)

    def _awaited(self) -> Sequence[Job]:
        return ()  # beside samplers, what an update waits for

    def _learned(self, job: Job, learned: Learned) -> None:
        super()._learned(job, learned)
        self._limiter.sample(learned.updates * self._limiter.batch)
        self._starved = learned.updates == 0 < self._asked

    def _again(self, learning: Learning) -> Learning:
        left = self._without_lost(learning.fragments)
        self._limiter.insert(-sum(sample.record.steps for sample in learning.fragments if sample not in left))
        return self._update("learn_some", self._asked, *(sample.source for sample in left), fragments=left)

    def with_counts(self, learner: Tree) -> Tree:
        return with_limiter(learner, self._limiter)

    def metrics(self) -> dict[str, float]:
        measured = self._limiter.measured
        return {} if measured is None else {"replay/samples_per_insert": measured}


class Sharded(ReplayLoop):
    """The loop where shards have the buffer. What the next update needs is drawn while the learner makes this one."""

    def __init__(
        self, roles: Roles, start: Start, pace: Pace, *, sizes: MutableMapping[int, int], seed: int, prioritized: bool
    ) -> None:
        """`sizes` is kept up to date with how many transitions each shard has."""
        super().__init__(roles, start, pace)
        self._shards, self._sizes, self._seed, self._prioritized = roles.shards, sizes, seed, prioritized
        self._masses = np.zeros(len(roles.shards))  # of what can be drawn, as far as we know
        self._metrics: dict[int, dict[str, float]] = {}  # by shard
        self._telling: list[Job] = []  # whose answers tell more of that
        self._draws: dict[int, Job] = {}  # by shard, for the next update
        self._counts = np.zeros((0, len(roles.shards)), np.int64)  # [updates, shards] of these
        self._lost = 0

    def rounds(self) -> Iterator[LoopRound]:
        self._telling = [self._pool.submit(shard, "told") for shard in self._shards]  # after a resume they have some
        self._until(self._telling)
        return super().rounds()

    def _rest(self) -> None:
        """Wait until nothing is being sampled, and let what was drawn ahead be: a resumed run would not have it."""
        super()._rest()
        self._until(self._telling)
        self._listen()
        self._limiter.sample(-len(self._counts) * self._limiter.batch)
        self._draws, self._counts = {}, self._counts[:0]

    def _awaited(self) -> Sequence[Job]:
        return [job for job in self._telling if not job.settled]

    def _begin(self) -> None:
        self._listen()
        if any(not job.settled for job in self._draws.values()):
            return
        if not self._draws and self._draw():  # nothing was drawn ahead
            return
        held, self._held = self._held, []
        for sample in held:
            shard = self._shards[sample.record.sampler % len(self._shards)]
            self._telling.append(self._pool.submit(shard, "insert", sample.source, weight=sample.size))
        self._limiter.insert(sum(sample.record.steps for sample in held))
        drawn = {index: job for index, job in self._draws.items() if job.fault is None}
        if held or drawn:
            self._asked = len(self._counts)
            records = [sample.record for sample in held]
            size = int(self._counts.sum()) * self._pace.row
            self._update("learn_drawn", records, self._counts, list(drawn), *drawn.values(), parts=2, size=size)
        self._draws, self._counts = {}, self._counts[:0]
        if self._pool.runtime.has_processes:
            self._draw()

    def _draw(self) -> bool:
        updates = min(self._pace.most, self._limiter.updates())
        if not (updates and self._masses.any()):
            return False
        rng = np.random.default_rng([self._seed, self._number, 4])  # no state of its own: a resumed run goes on alike
        self._counts = portions(self._masses, self._pace.draws, updates, rng)
        self._limiter.sample(updates * self._limiter.batch)
        for index in np.flatnonzero(self._counts.any(axis=0)).tolist():
            counts, mass = self._counts[:, index], self._masses[index]
            size = int(counts.sum()) * self._pace.row  # answers are kept, in case that they have to be given again
            self._draws[index] = self._pool.submit(self._shards[index], "draw", counts, mass, parts=2, weight=size)
        self._telling += self._draws.values()
        return True

    def _listen(self) -> None:
        for job in [job for job in self._telling if job.settled]:
            self._telling.remove(job)
            index = job.member.index
            if job.fault is None:
                self._masses[index], told = job.result()
                self._metrics[index] = self._metrics.get(index, {}) | told  # age is not always among it
                self._sizes[index] = int(told["replay/size"])
            elif job.method == "insert":
                self._lost += self._pace.fragment
        self._starved = not self._masses.any()

    def _learned(self, job: Job, learned: Learned) -> None:
        Loop._learned(self, job, learned)
        missing = self._asked - learned.updates
        self._limiter.sample(-missing * self._limiter.batch)  # the others were counted when they were drawn
        if self._prioritized and learned.updates:
            self._telling += [self._pool.submit(shard, "update", job) for shard in self._shards]

    def _again(self, learning: Learning) -> Learning:
        """The draws are lost; what has arrived is counted nevertheless."""
        records, counts, _ = learning.job.args[:3]
        return self._update("learn_drawn", records, counts[:0], [], parts=2)

    def metrics(self) -> dict[str, float]:
        return super().metrics() | joint_metrics(list(self._metrics.values())) | {"replay/lost": float(self._lost)}


def _kinds(plan: Blueprint) -> list[Kind]:
    if not plan.config.replay.shards:
        return [declaration.learner(plan, "learn_some"), declaration.samplers(plan)]
    return [declaration.learner(plan, "learn_drawn"), declaration.replay_shards(plan), declaration.samplers(plan)]


def _loop(setup: Setup) -> ReplayLoop:
    config, roles, start = setup.config, setup.roles, setup.start
    spec = _replay_spec(config, setup.algorithm)
    pace = _pace(config, spec, setup.env, setup.saved)
    if not config.replay.shards:
        return ReplayLoop(roles, start, pace)
    return Sharded(roles, start, pace, sizes=setup.sizes, seed=config.seed, prioritized=spec.prioritized)


def _replay_spec(config: Config, algorithm: type[Algorithm[Any]]) -> ReplaySpec:
    """How the algorithm learns from replay; refuses one that does not say, or whose buffer cannot be divided."""
    spec, shards = algorithm.replay_spec(config), config.replay.shards
    if spec is None:
        problem = f"topology = 'replay' holds the ratio of samples to inserts, and {config.algo} does not declare one"
        raise UsageError(f"{problem}: define replay_spec, or use --topology async")
    if shards and not spec.divisible:
        raise UsageError(
            f"replay.shards = {shards} divides a buffer that raynforce makes, and {config.algo} has one of its own: "
            "leave it out, or extend raynforce.OffPolicy"
        )
    return spec


def _pace(config: Config, spec: ReplaySpec, env: EnvSpec, saved: Mapping[str, Tree] | None) -> Pace:
    limiter = make_limiter(config, spec)
    if saved is not None:
        load_limiter(saved["learner"], limiter)
    fragment = config.sampling.fragment * config.sampling.envs
    row = (2 * observation_bytes(env.obs) + ROW_BYTES) * (spec.window if spec.sequence else 1)
    most = math.ceil(fragment * spec.samples_per_insert / spec.batch_size)
    if config.replay.shards:
        most = min(most, MAX_DRAW_BYTES // (spec.draws * row))
    return Pace(limiter, max(1, min(MAX_UPDATES_PER_VERSION, most)), fragment, spec.draws, row)


def _require(config: Config, algorithm: type[Algorithm[Any]], env: EnvSpec) -> None:
    if algorithm.consumes != "replay":
        able = declaration.algorithms_that(lambda found: found.consumes == "replay")
        problem = f"topology = 'replay' needs an algorithm that learns from replay, such as {able}"
        fix = f"use --topology sync, or train {able}"
        raise UsageError(f"{problem}, and {config.algo} learns from each fragment once: {fix}")
    spec = _replay_spec(config, algorithm)
    shards, samplers = config.replay.shards, config.sampling.samplers
    updates = spec.samples_per_insert * (config.steps - spec.learning_starts) / spec.batch_size
    if updates < 1:
        gathered = f"the first {spec.learning_starts:,} (algorithm.learning_starts) are only gathered"
        problem = f"in {config.steps:,} steps of which {gathered} it is not one batch of {spec.batch_size}"
        fix = "raise it or --steps, or lower algorithm.learning_starts"
        raise UsageError(f"algorithm.samples_per_insert = {spec.samples_per_insert:g} cannot be met: {problem}: {fix}")
    if shards > samplers:
        problem = f"replay.shards = {shards} is more than there are samplers ({samplers})"
        fix = f"use --samplers {shards} or replay.shards={samplers}"
        raise UsageError(f"{problem}, and each sends all it samples to one of them: {fix}")
    if shards and (config.network.normalize_obs or config.learner.scale_rewards):
        what = "network.normalize_obs" if config.network.normalize_obs else "learner.scale_rewards"
        problem = f"{what} = true takes statistics of all that is sampled, which the learner does not see"
        raise UsageError(f"{problem} with replay.shards = {shards}: leave one of them out")
    if shards and declaration.all_here(config):
        needed = sum(replay_bytes(config, spec, env, shard) for shard in range(shards))
        require_memory(needed, MEMORY, f"replay: a buffer of {spec.buffer_size:,} transitions in {shards} shards")


REPLAY = Topology("replay", _kinds, _loop, _require, lags=False, shards=True)
