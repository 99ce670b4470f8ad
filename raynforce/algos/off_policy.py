"""What algorithms share that learn from replay: the buffer, how often it is sampled, and its priorities."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, TypeVar, cast

import numpy as np

from raynforce.algos.augment import Augment
from raynforce.algos.base import Algorithm, Arrays, Batch, Loss
from raynforce.config import AlgorithmConfig, Config
from raynforce.errors import UsageError
from raynforce.experience.fragment import Fragment
from raynforce.experience.limiter import Limiter
from raynforce.experience.replay_spec import ReplaySpec, least_buffer, load_limiter, make_limiter, make_replay
from raynforce.experience.storage import observation_bytes, require_images
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
REPLAY_SETTINGS = tuple(f.name for f in fields(ReplaySpec) if f.name not in ("divisible", "sequence", "burn_in"))


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
    augment: Augment = "no"
    """Learn from images that are shifted by up to a 21st of their side, anew each time: shift (DrQ), or no."""


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
    limiter: Limiter

    def __init__(self, config: Config, env: EnvSpec) -> None:
        super().__init__(config, env)
        spec = self.replay_spec(config)
        _check_sizes(config, spec)
        if config.replay.compress:
            require_images(env.obs)
        self.limiter = make_limiter(config, spec)
        self._draws = spec.draws
        # Minibatches drawn in one go cost a tenth of each alone; with priorities, whose newest count, it is one.
        most = AT_ONCE_BYTES // (2 * observation_bytes(env.obs) * spec.batch_size)
        self._at_once = 1 if spec.prioritized else max(1, min(AT_ONCE, most))

    @classmethod
    def replay_spec(cls, config: Config) -> ReplaySpec:
        try:
            return ReplaySpec(divisible=True, **{name: getattr(config.algorithm, name) for name in REPLAY_SETTINGS})
        except AttributeError as error:
            lacks = f"{cls.__name__} learns from replay, and its Settings have no {error.name!r}"
            raise UsageError(f"{lacks}: derive them from raynforce.OffPolicyConfig") from error

    @classmethod
    def per_worker_config(cls, config: Config) -> Config:
        """The settings of one worker of a shared agent, which has a replay buffer of its own."""
        hp, workers = cast(OffPolicyConfig, config.algorithm), config.sampling.samplers
        size, starts = hp.buffer_size // workers, hp.learning_starts // workers
        own = replace(hp, buffer_size=size, learning_starts=starts)
        return super().per_worker_config(replace(config, algorithm=own))

    def schedules(self, progress: float) -> dict[str, float]:
        beta = self.hp.priority_beta + progress * (1 - self.hp.priority_beta)
        return {**super().schedules(progress), "priority_beta": beta}

    def begin(self, net: Network) -> None:
        self._device = net.flat.device
        # None if others have it: shards, or workers.
        spec = self.replay_spec(self.config)
        states = self.network().states if spec.sequence else {}
        self.replay = make_replay(self.config, spec, self.env, states) if self.has_buffer else None

    def prepare(self, net: Network, fragments: Sequence[Fragment]) -> Arrays:
        if self.replay is not None:
            steps = sum(self.replay.insert(fragment) for fragment in fragments)
            if self.round.due is None:
                self.limiter.insert(steps)
        return {}

    def minibatches(self, batch: Batch, rng: np.random.Generator) -> Iterator[Mapping[str, Tensor | np.ndarray]]:
        replay, size, made = self.replay, self._draws, 0
        assert replay is not None
        while len(replay) >= size:
            due = self.limiter.updates() if self.round.due is None else self.round.due - made
            count = min(due, self._at_once)
            if not count:
                return
            if self.round.due is None:
                self.limiter.sample(count * self.hp.batch_size)
            made += count
            drawn = replay.sample(size, rng, self.scheduled["priority_beta"], count)
            columns = [torch.split(torch.from_numpy(column).to(self._device), size) for column in drawn.values()]
            for minibatch in zip(*columns, strict=True):
                yield dict(zip(drawn, minibatch, strict=True))

    def after_update(self, net: Network, minibatch: Batch, loss: Loss) -> None:
        if self.hp.prioritized and loss.per_sample is not None and self.replay is not None:
            self.replay.update_priorities(minibatch["index"].cpu().numpy(), loss.per_sample.cpu().numpy())

    def start_fresh(self, attempt: int) -> None:
        if self.replay is not None:
            self.replay.start_fresh(attempt)

    def stored(self) -> int:
        return 0 if self.replay is None else self.replay.resident

    def metrics(self) -> dict[str, float]:
        return {} if self.replay is None else self.replay.metrics()

    def state(self) -> Tree:
        tree: Tree = {"limiter": self.limiter.state()}
        return tree if self.replay is None else {**tree, "replay": self.replay.state(self.round.known)}

    def load(self, tree: Tree) -> None:
        if self.replay is not None:
            self.replay.load(tree["replay"])
        load_limiter({"algo": tree}, self.limiter)


def _check_sizes(config: Config, spec: ReplaySpec) -> None:
    sampling, shards = config.sampling, max(1, config.replay.shards)
    width = -(-sampling.samplers // shards) * shards * sampling.envs  # as if all shards were as wide as the widest
    needed = least_buffer(config, spec, width)
    if spec.buffer_size < needed:
        small = f"algorithm.buffer_size = {spec.buffer_size} cannot hold a fragment and a batch"
        sizes = f"sampling.fragment = {sampling.fragment} and algorithm.batch_size = {spec.batch_size}"
        raise UsageError(f"{small}: with {width} envs, {sizes} it takes {needed}")
