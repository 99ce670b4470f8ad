"""Which loop a topology is, and which algorithms it suits."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping
from typing import Any

from raynforce.algos import BUILT_IN, algorithm_class
from raynforce.algos.base import Algorithm
from raynforce.config import Config
from raynforce.errors import UsageError
from raynforce.experience.memory import require_memory
from raynforce.experience.replay_spec import ReplaySpec, least_buffer, load_limiter, make_limiter, replay_bytes
from raynforce.experience.storage import observation_bytes
from raynforce.spaces import EnvSpec
from raynforce.topologies.central import Central
from raynforce.topologies.loop import Loop, Roles, Start
from raynforce.topologies.replay import Pace, Replay, Sharded
from raynforce.topologies.shared import SharedAgent
from raynforce.topologies.stream import Stream
from raynforce.trees import Tree

MAX_UPDATES_PER_VERSION = 64
MAX_DRAW_BYTES = 32_000_000  # that shards draw for them at once
OTHER_BYTES = 48  # of a transition, beside its observations
GATHERED_COPIES = 4  # of all rows on topology central: filling, complete, cut to a fragment, in flight
MAX_MEMORY_SHARE = 0.8  # of this machine's free memory, for all roles together


def make_loop(
    config: Config,
    env: EnvSpec,
    crew: Roles,
    start: Start,
    saved: Mapping[str, Tree] | None,
    sizes: MutableMapping[int, int],
) -> Loop:
    """The loop of a run; `saved` is the checkpoint it goes on from."""
    if config.topology == "replay":
        spec = _replay_spec(config, algorithm_class(config.algo))
        pace = _pace(config, spec, env, saved)
        if not crew.shards:
            return Replay(crew, start, pace)
        return Sharded(crew, start, pace, sizes=sizes, seed=config.seed, prioritized=spec.prioritized)
    if config.topology == "shared-agent":
        return SharedAgent(crew, start)
    max_lag = _max_lag(config, algorithm_class(config.algo))
    if config.topology == "central":
        return Central(crew, start, max_lag=max_lag)
    return Stream(crew, start, preset=config.topology, batch=config.stream.batch, max_lag=max_lag)


def require_topology(config: Config, algorithm: type[Algorithm[Any]], env: EnvSpec) -> None:
    """Refuse a topology that the algorithm cannot learn in."""
    topology = config.topology
    if config.replay.shards and topology != "replay":
        raise UsageError(
            f"replay.shards = {config.replay.shards} divides the buffer of topology replay, and this is "
            f"{topology!r}: use --topology replay, or leave it out"
        )
    if topology == "replay":
        if algorithm.consumes != "replay":
            raise UsageError(
                f"topology = 'replay' needs an algorithm that learns from replay, such as {_which('consumes')}, and "
                f"{config.algo} learns from each fragment once: use --topology sync, or train {_which('consumes')}"
            )
        _check_replay(config, _replay_spec(config, algorithm), env)
    elif topology == "shared-agent":
        if not algorithm.shares_gradients:
            raise UsageError(
                f"topology = 'shared-agent' needs an algorithm whose gradients can be applied one after another, such "
                f"as {_which('shares_gradients')}; those of {config.algo} cannot: use --topology sync"
            )
        _check_shared(config, algorithm, env)
    else:
        _max_lag(config, algorithm)
        if topology == "central":
            _check_central(config, algorithm, env)


def _which(trait: str) -> str:
    """The built-in algorithms that can."""
    wanted = {"consumes": "replay", "shares_gradients": True}[trait]
    return " or ".join(name for name in BUILT_IN if getattr(algorithm_class(name), trait) == wanted)


def _max_lag(config: Config, algorithm: type[Algorithm[Any]]) -> int:
    """How old fragments may be; refuses a topology whose fragments are older than the algorithm can learn from."""
    tolerated = algorithm.max_lag
    if config.topology != "sync" and tolerated == 0:
        raise UsageError(
            f"topology = {config.topology!r} learns from older policy versions, and {config.algo} from the newest "
            "alone (its max_lag is 0): use --topology sync"
        )
    return config.stream.max_lag if tolerated is None else min(tolerated, config.stream.max_lag)


def _replay_spec(config: Config, algorithm: type[Algorithm[Any]]) -> ReplaySpec:
    """How the algorithm learns from replay; refuses one that does not say, or whose buffer cannot be divided."""
    spec, shards = algorithm.replay_spec(config), config.replay.shards
    if spec is None:
        raise UsageError(
            f"topology = 'replay' holds the ratio of samples to inserts, and {config.algo} does not declare one: "
            "define replay_spec, or use --topology async"
        )
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
    row = 2 * observation_bytes(env.obs) + OTHER_BYTES
    most = math.ceil(fragment * spec.samples_per_insert / spec.batch_size)
    if config.replay.shards:
        most = min(most, MAX_DRAW_BYTES // (spec.batch_size * row))
    return Pace(limiter, max(1, min(MAX_UPDATES_PER_VERSION, most)), fragment, row)


def _check_replay(config: Config, spec: ReplaySpec, env: EnvSpec) -> None:
    shards, samplers = config.replay.shards, config.sampling.samplers
    updates = spec.samples_per_insert * (config.steps - spec.learning_starts) / spec.batch_size
    if updates < 1:
        raise UsageError(
            f"algorithm.samples_per_insert = {spec.samples_per_insert:g} cannot be met: in {config.steps:,} steps of "
            f"which the first {spec.learning_starts:,} (algorithm.learning_starts) are only gathered it is not one "
            f"batch of {spec.batch_size}: raise it or --steps, or lower algorithm.learning_starts"
        )
    if shards > samplers:
        raise UsageError(
            f"replay.shards = {shards} is more than there are samplers ({samplers}), and each sends all it samples to "
            f"one of them: use --samplers {shards} or replay.shards={samplers}"
        )
    if shards and (config.network.normalize_obs or config.learner.scale_rewards):
        what = "network.normalize_obs" if config.network.normalize_obs else "learner.scale_rewards"
        raise UsageError(
            f"{what} = true takes statistics of all that is sampled, which the learner does not see with "
            f"replay.shards = {shards}: leave one of them out"
        )
    if shards and _all_here(config):
        needed = sum(replay_bytes(config, spec, env, shard) for shard in range(shards))
        require_memory(
            needed, MAX_MEMORY_SHARE, f"replay: a buffer of {spec.buffer_size:,} transitions in {shards} shards"
        )


def _check_shared(config: Config, algorithm: type[Algorithm[Any]], env: EnvSpec) -> None:
    sampling, max_lag = config.sampling, config.stream.max_lag
    samplers = sampling.samplers
    if max_lag < samplers - 1:
        raise UsageError(
            f"stream.max_lag = {max_lag} refuses most gradients of {samplers} samplers, as each that is applied makes "
            f"those of the others a version older: use --set stream.max_lag={4 * samplers}, or fewer --samplers"
        )
    if config.learner.scale_rewards:
        raise UsageError(
            "learner.scale_rewards = true takes statistics of all that is sampled, which workers of topology "
            "'shared-agent' do not see: leave one of them out"
        )
    own_config = algorithm.per_worker_config(config)
    spec, own = algorithm.replay_spec(config), algorithm.replay_spec(own_config)
    if spec is not None and own is not None and own.divisible:  # the size of others is not known
        needed = least_buffer(config, spec, sampling.envs)
        if own.buffer_size < needed:
            raise UsageError(
                f"algorithm.buffer_size = {spec.buffer_size} gives each of {samplers} workers {own.buffer_size}, too "
                f"few for a fragment and a batch: with {sampling.envs} envs, sampling.fragment = {sampling.fragment} "
                f"and algorithm.batch_size = {spec.batch_size} it takes {needed * samplers}"
            )
        if _all_here(config):
            size, what = samplers * replay_bytes(own_config, own, env), f"{spec.buffer_size:,} transitions"
            require_memory(size, MAX_MEMORY_SHARE, f"replay: a buffer of {what} in {samplers} workers")


def _check_central(config: Config, algorithm: type[Algorithm[Any]], env: EnvSpec) -> None:
    if algorithm.consumes != "stream":
        raise UsageError(
            f"topology = 'central' needs an algorithm that learns from each step once, such as ppo or impala, and "
            f"{config.algo} learns from replay: use --topology replay"
        )
    sampling = config.sampling
    lanes = sampling.samplers * sampling.envs
    least = config.central.batch_min
    if least > lanes:
        raise UsageError(
            f"central.batch_min = {least} is more than there are environments ({lanes}): lower it, or raise --envs"
        )
    row = observation_bytes(env.obs) + OTHER_BYTES
    needed = GATHERED_COPIES * lanes * (sampling.fragment + 1) * row
    what = f"central: gathering {sampling.fragment} steps of each of {lanes:,} environments"
    require_memory(needed, MAX_MEMORY_SHARE, what, fix="lower --envs or sampling.fragment")


def _all_here(config: Config) -> bool:
    """Whether all roles are on this machine."""
    return config.runtime != "ray" or config.ray.address in (None, "local")
