"""What algorithms share that learn from replay: the buffer, how often it is sampled, and its priorities."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, TypeVar

import numpy as np

from raynforce.algos.base import Algorithm, Arrays, Batch, Loss
from raynforce.config import AlgorithmConfig, Config
from raynforce.errors import UsageError
from raynforce.experience.fragment import Fragment
from raynforce.experience.limiter import Limiter
from raynforce.experience.replay import Replay
from raynforce.experience.storage import estimate_bytes, observation_bytes, require_images
from raynforce.lazy import LazyModule
from raynforce.settings import Range
from raynforce.spaces import EnvSpec
from raynforce.trees import Tree

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from raynforce.policies.torch_net import Network
else:
    torch = LazyModule("torch")

Fraction = Annotated[float, Range(0, 1)]
AT_ONCE = 64  # minibatches drawn in one go at most
AT_ONCE_BYTES = 2**20  # of their observations


@dataclass(frozen=True)
class OffPolicyConfig(AlgorithmConfig):
    """Settings of what learns from replay."""

    buffer_size: Annotated[int, Range(1, 1e12)] = 100_000
    """Transitions kept in replay."""
    learning_starts: Annotated[int, Range(0, 1e12)] = 1_000
    """Environment steps gathered before the first update."""
    batch_size: Annotated[int, Range(1, 1e6)] = 64
    """Transitions per update."""
    samples_per_insert: Annotated[float, Range(1e-6, 1e6)] = 16.0
    """How often each transition is learned from on average; with a batch of 64, 16 is an update every 4 steps."""
    n_step: Annotated[int, Range(1, 1000)] = 3
    """Steps of real reward before bootstrapping."""
    prioritized: bool = False
    """Sample transitions in proportion to their error instead of uniformly."""
    priority_alpha: Fraction = 0.6
    """How strongly error counts in sampling; 0 is uniform."""
    priority_beta: Fraction = 0.4
    """How much of the sampling bias is corrected at the start; it rises to 1 over the run."""


H = TypeVar("H", bound=OffPolicyConfig)


class OffPolicy(Algorithm[H]):
    """Base of algorithms that learn from replay. Yours adds a network and a `loss` of the columns of `Replay.sample`.

    `loss` gives `per_sample` errors if transitions are to be sampled in proportion to them. Where you define `begin`,
    `after_update`, `state` or `load`, call those of this class too.
    """

    Settings: ClassVar[type[AlgorithmConfig]] = OffPolicyConfig
    consumes = "replay"
    max_lag = None
    shares_gradients = True

    def __init__(self, config: Config, env: EnvSpec) -> None:
        super().__init__(config, env)
        _check_sizes(config, self.hp)
        if config.replay.compress:
            require_images(env.obs)
        self.limiter = limiter(config, self.hp)
        """How many updates are due."""
        self._at_once = _drawn_at_once(self.hp, env)

    def schedules(self, progress: float) -> dict[str, float]:
        beta = self.hp.priority_beta + progress * (1 - self.hp.priority_beta)
        return {**super().schedules(progress), "priority_beta": beta}

    def begin(self, net: Network) -> None:
        self._device = net.flat.device
        self.replay = make_replay(self.config, self.hp, self.env) if self.has_buffer else None
        """The buffer; None if others have it: shards, or workers."""

    def prepare(self, net: Network, fragments: Sequence[Fragment]) -> Arrays:
        if self.replay is not None:
            for fragment in fragments:
                self.limiter.insert(self.replay.insert(fragment))
        return {}

    def minibatches(self, batch: Batch, rng: np.random.Generator) -> Iterator[Mapping[str, Tensor | np.ndarray]]:
        replay, size, made = self.replay, self.hp.batch_size, 0
        assert replay is not None
        while len(replay) >= size and (count := self._now_due(made)):
            self.limiter.sample(count * size)
            made += count
            drawn = replay.sample(size, rng, self.scheduled["priority_beta"], count)
            columns = [torch.split(torch.from_numpy(column).to(self._device), size) for column in drawn.values()]
            for minibatch in zip(*columns, strict=True):
                yield dict(zip(drawn, minibatch, strict=True))

    def _now_due(self, made: int) -> int:
        """How many minibatches to draw in one go, in a round that has made so many updates."""
        due = self.limiter.updates()
        if self.round.due is not None:
            due = min(due, self.round.due - made)
        return min(due, self._at_once)

    def after_update(self, net: Network, minibatch: Batch, loss: Loss) -> None:
        if self.replay is not None and self.hp.prioritized and loss.per_sample is not None:
            self.replay.update_priorities(minibatch["index"].cpu().numpy(), loss.per_sample.cpu().numpy())

    def metrics(self) -> dict[str, float]:
        return {} if self.replay is None else self.replay.metrics()

    def state(self) -> Tree:
        tree: Tree = {"limiter": self.limiter.state()}
        return tree if self.replay is None else {**tree, "replay": self.replay.state(self.round.known)}

    def load(self, tree: Tree) -> None:
        if self.replay is not None:
            self.replay.load(tree["replay"])
        self.limiter.load(saved_limiter(tree, self.limiter))


def limiter(config: Config, hp: OffPolicyConfig) -> Limiter:
    """What holds the ratio of samples to inserts."""
    sampling = config.sampling
    ahead = 2 * sampling.samplers * sampling.envs * sampling.fragment * hp.samples_per_insert
    return Limiter(hp.samples_per_insert, hp.batch_size, hp.learning_starts, slack=ahead)


def _drawn_at_once(hp: OffPolicyConfig, env: EnvSpec) -> int:
    """Minibatches drawn in one go, at a tenth of the cost of each alone; with priorities, whose newest count, one."""
    most = AT_ONCE_BYTES // (2 * observation_bytes(env.obs) * hp.batch_size)
    return 1 if hp.prioritized else max(1, min(AT_ONCE, most))


def saved_limiter(tree: Tree, now: Limiter) -> Tree:
    """The limiter's state in the state of an algorithm, which before there was one counted otherwise."""
    if "limiter" in tree:
        found: Tree = tree["limiter"]
        return found
    owed = tree["due"] * now.batch
    sampled = round(now.ratio * max(0, tree["inserted"] - now.starts) - owed)
    return {"inserted": tree["inserted"], "sampled": sampled, "ratio": now.ratio, "starts": now.starts}


def alone(config: Config) -> Config:
    """What the algorithm of one worker of a shared agent goes by: one sampler, and its share of the replay buffer."""
    algorithm, sampling = config.algorithm, config.sampling
    if isinstance(algorithm, OffPolicyConfig):
        size, starts = algorithm.buffer_size // sampling.samplers, algorithm.learning_starts // sampling.samplers
        algorithm = replace(algorithm, buffer_size=size, learning_starts=starts)
    return replace(config, topology="sync", algorithm=algorithm, sampling=replace(sampling, samplers=1))


def make_replay(config: Config, hp: OffPolicyConfig, env: EnvSpec, shard: int | None = None) -> Replay:
    """The whole buffer, or the part of it that one shard has."""
    return Replay(
        env.obs,
        env.action,
        **_shape(config, hp, shard),
        prioritized=hp.prioritized,
        n_step=hp.n_step,
        gamma=hp.gamma,
        alpha=hp.priority_alpha,
        compress=config.replay.compress,
    )


def replay_bytes(config: Config, hp: OffPolicyConfig, env: EnvSpec, shard: int | None = None) -> int:
    """What `make_replay` will take of the memory."""
    shape, compress = _shape(config, hp, shard), config.replay.compress
    return estimate_bytes(env.obs, env.action, **shape, prioritized=hp.prioritized, compress=compress)


def _shape(config: Config, hp: OffPolicyConfig, shard: int | None) -> dict[str, int]:
    sampling, shards = config.sampling, 1 if shard is None else config.replay.shards
    samplers = len(range(shard or 0, sampling.samplers, shards))
    return {"capacity": hp.buffer_size // shards, "lanes": sampling.envs, "samplers": samplers}


def least_buffer(config: Config, hp: OffPolicyConfig, width: int) -> int:
    """Transitions that a buffer of `width` environments has to hold: a fragment, and a batch."""
    return max((config.sampling.fragment + 2) * width, hp.batch_size + (hp.n_step + 1) * width)


def _check_sizes(config: Config, hp: OffPolicyConfig) -> None:
    sampling, shards = config.sampling, max(1, config.replay.shards)
    width = -(-sampling.samplers // shards) * shards * sampling.envs  # as if all shards were as wide as the widest
    needed = least_buffer(config, hp, width)
    if hp.buffer_size < needed:
        raise UsageError(
            f"algorithm.buffer_size = {hp.buffer_size} cannot hold a fragment and a batch: with {width} envs, "
            f"sampling.fragment = {sampling.fragment} and algorithm.batch_size = {hp.batch_size} it takes {needed}"
        )
