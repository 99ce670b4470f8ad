"""Which loop a topology is, and which algorithms it suits."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping
from typing import Any

from raynforce.algos import BUILT_IN, algorithm_class
from raynforce.algos.base import Algorithm
from raynforce.algos.off_policy import OffPolicyConfig, alone, least_buffer, limiter, replay_bytes, saved_limiter
from raynforce.config import Config
from raynforce.errors import UsageError
from raynforce.experience.storage import observation_bytes
from raynforce.memory import require_memory
from raynforce.spaces import EnvSpec
from raynforce.topologies.central import Central
from raynforce.topologies.loop import Loop, Roles, Start
from raynforce.topologies.replay import Pace, Replay, Sharded
from raynforce.topologies.shared import SharedAgent
from raynforce.topologies.stream import Stream
from raynforce.trees import Tree

LONGEST = 64  # updates between two policy versions at most
LARGEST = 32_000_000  # bytes that shards draw for them at once
REST = 48  # bytes of a transition beside its observations
COPIES = 4  # of all rows that are gathered: filling, complete, cut to a fragment, on the way
MEMORY = 0.8  # share of this machine's free memory that shards may take together


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
        pace, hp = _pace(config, env, saved), config.algorithm
        assert isinstance(hp, OffPolicyConfig)
        if not crew.shards:
            return Replay(crew, start, pace)
        return Sharded(crew, start, pace, sizes=sizes, seed=config.seed, prioritized=hp.prioritized)
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
        _check_replay(config, env)
    elif topology == "shared-agent":
        if not algorithm.shares_gradients:
            raise UsageError(
                f"topology = 'shared-agent' needs an algorithm whose gradients can be applied one after another, such "
                f"as {_which('shares_gradients')}; those of {config.algo} cannot: use --topology sync"
            )
        _check_shared(config, env)
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


def _pace(config: Config, env: EnvSpec, saved: Mapping[str, Tree] | None) -> Pace:
    hp, sampling = config.algorithm, config.sampling
    assert isinstance(hp, OffPolicyConfig)
    kept = limiter(config, hp)
    if saved is not None:  # the algorithm keeps the same counts
        kept.load(saved_limiter(saved["learner"]["algo"], kept))
    fragment = sampling.fragment * sampling.envs
    row = 2 * observation_bytes(env.obs) + REST
    most = math.ceil(fragment * hp.samples_per_insert / hp.batch_size)
    if config.replay.shards:
        most = min(most, LARGEST // (hp.batch_size * row))
    return Pace(kept, max(1, min(LONGEST, most)), fragment, row)


def _check_replay(config: Config, env: EnvSpec) -> None:
    hp, shards, samplers = config.algorithm, config.replay.shards, config.sampling.samplers
    assert isinstance(hp, OffPolicyConfig)
    updates = hp.samples_per_insert * (config.steps - hp.learning_starts) / hp.batch_size
    if updates < 1:
        raise UsageError(
            f"algorithm.samples_per_insert = {hp.samples_per_insert:g} cannot be met: in {config.steps:,} steps of "
            f"which the first {hp.learning_starts:,} (algorithm.learning_starts) are only gathered it is not one batch "
            f"of {hp.batch_size}: raise it or --steps, or lower algorithm.learning_starts"
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
        needed = sum(replay_bytes(config, hp, env, shard) for shard in range(shards))
        require_memory(needed, MEMORY, f"replay: a buffer of {hp.buffer_size:,} transitions in {shards} shards")


def _check_shared(config: Config, env: EnvSpec) -> None:
    hp, sampling, max_lag = config.algorithm, config.sampling, config.stream.max_lag
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
    if isinstance(hp, OffPolicyConfig):
        own = alone(config)
        assert isinstance(own.algorithm, OffPolicyConfig)
        each = own.algorithm.buffer_size
        needed = least_buffer(config, hp, sampling.envs)
        if each < needed:
            raise UsageError(
                f"algorithm.buffer_size = {hp.buffer_size} gives each of {samplers} workers {each}, too few for a "
                f"fragment and a batch: with {sampling.envs} envs, sampling.fragment = {sampling.fragment} and "
                f"algorithm.batch_size = {hp.batch_size} it takes {needed * samplers}"
            )
        if _all_here(config):
            size = samplers * replay_bytes(own, own.algorithm, env)
            require_memory(size, MEMORY, f"replay: a buffer of {hp.buffer_size:,} transitions in {samplers} workers")


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
    row = observation_bytes(env.obs) + REST
    needed = COPIES * lanes * (sampling.fragment + 1) * row
    what = f"central: gathering {sampling.fragment} steps of each of {lanes:,} environments"
    require_memory(needed, MEMORY, what, fix="lower --envs or sampling.fragment")


def _all_here(config: Config) -> bool:
    """Whether all roles are on this machine."""
    return config.runtime != "ray" or config.ray.address in (None, "local")
