"""Shared agent: workers compute gradients with their copies of the network, one agent (the learner) applies them all,
in order of arrival, each once, and refuses old ones (A3C, arXiv 1602.01783; Gorila, 1507.04296). A worker waits for the
version that its own gradients have led to."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from raynforce.algos.base import Algorithm
from raynforce.config import Config
from raynforce.errors import UsageError
from raynforce.experience.replay_spec import least_buffer, replay_bytes
from raynforce.memory import require_memory
from raynforce.roles.learned import Learned
from raynforce.runtimes.member import Job, Member
from raynforce.spaces import EnvSpec
from raynforce.topologies import declaration
from raynforce.topologies.declaration import MEMORY, Blueprint, Kind, Setup, Topology, gradient_workers, learner
from raynforce.topologies.loop import Asked, Learning, Loop, LoopRound, Sample


class SharedAgent(Loop):
    """The loop of workers and the agent they share; what is held are contributions."""

    work = "work"

    def rounds(self) -> Iterator[LoopRound]:
        began = sampled = time.monotonic()
        while True:
            for worker in self._idle():
                self._ask(worker)
            if self._learning is None and self._held:
                sampled = time.monotonic()
                held, self._held = self._held, []
                self._apply(held)
            learning = self._next()
            if learning is not None:
                now = time.monotonic()
                yield self._round(learning, sampled - began, now - sampled)
                began = now

    def _idle(self) -> list[Member]:
        """Workers without a contribution that is under way."""
        taken = self._learning.fragments if self._learning else ()
        busy = {sample.record.sampler for sample in (*self._held, *taken)}
        return [worker for worker in super()._idle() if worker.index not in busy]

    def _arrived(self, asked: Sequence[Asked]) -> list[Sample]:
        return sorted(super()._arrived(asked), key=lambda s: s.source.answered if isinstance(s.source, Job) else 0.0)

    def _apply(self, contributions: Sequence[Sample]) -> Learning:
        return self._update("apply_contributions", *(each.source for each in contributions), fragments=contributions)

    def _again(self, learning: Learning) -> Learning:
        return self._apply(self._without_lost(learning.fragments))

    def _learned(self, job: Job, learned: Learned) -> None:
        super()._learned(job, learned)
        for refused in learned.dropped:
            self._ledger.drop(refused)


def _kinds(plan: Blueprint) -> list[Kind]:
    return [learner(plan, "apply_contributions", gathers_gradients=True), gradient_workers(plan)]


def _require(config: Config, algorithm: type[Algorithm[Any]], env: EnvSpec) -> None:
    if not algorithm.shares_gradients:
        able = declaration.algorithms_that(lambda found: found.shares_gradients)
        problem = "topology = 'shared-agent' needs an algorithm whose gradients can be applied one after another"
        raise UsageError(f"{problem}, such as {able}; those of {config.algo} cannot: use --topology sync")
    sampling, max_lag = config.sampling, config.stream.max_lag
    samplers = sampling.samplers
    if max_lag < samplers - 1:
        why = "as each that is applied makes those of the others a version older"
        fix = f"use --set stream.max_lag={4 * samplers}, or fewer --samplers"
        raise UsageError(f"stream.max_lag = {max_lag} refuses most gradients of {samplers} samplers, {why}: {fix}")
    if config.learner.scale_rewards:
        problem = "learner.scale_rewards = true takes statistics of all that is sampled"
        raise UsageError(f"{problem}, which workers of topology 'shared-agent' do not see: leave one of them out")
    own_config = algorithm.per_worker_config(config)
    spec, own = algorithm.replay_spec(config), algorithm.replay_spec(own_config)
    if spec is not None and own is not None and own.divisible:  # the size of others is not known
        needed = least_buffer(config, spec, sampling.envs)
        if own.buffer_size < needed:
            gives = f"gives each of {samplers} workers {own.buffer_size}, too few for a fragment and a batch"
            sizes = f"{sampling.envs} envs, sampling.fragment = {sampling.fragment}"
            takes = f"with {sizes} and algorithm.batch_size = {spec.batch_size} it takes {needed * samplers}"
            raise UsageError(f"algorithm.buffer_size = {spec.buffer_size} {gives}: {takes}")
        if declaration.all_here(config):
            size, what = samplers * replay_bytes(own_config, own, env), f"{spec.buffer_size:,} transitions"
            require_memory(size, MEMORY, f"replay: a buffer of {what} in {samplers} workers")


def _loop(setup: Setup) -> SharedAgent:
    return SharedAgent(setup.roles, setup.start)


SHARED_AGENT = Topology("shared-agent", _kinds, _loop, _require, lags=False, gathers_gradients=True)
