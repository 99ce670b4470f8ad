"""What an algorithm declares of its replay buffer, and the limiter and the buffers that are made of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from raynforce.config import Config
from raynforce.experience.limiter import Limiter
from raynforce.experience.replay import Replay
from raynforce.experience.storage import Layout, estimate_bytes
from raynforce.spaces import EnvSpec
from raynforce.trees import Tree


@dataclass(frozen=True)
class ReplaySpec:
    """How an algorithm learns from replay, as data: topologies go by this, whatever its class."""

    buffer_size: int  # transitions kept in replay
    learning_starts: int  # environment steps gathered before the first update
    batch_size: int  # transitions per update
    samples_per_insert: float  # how often each transition is learned from on average
    divisible: bool = False  # its buffer is a `Replay` with these settings, not one of its own: shards can have it
    n_step: int = 1  # steps of real reward before bootstrapping
    gamma: float = 0.99
    prioritized: bool = False  # sample transitions in proportion to their error instead of uniformly
    priority_alpha: float = 0.6  # how strongly error counts in sampling
    sequence: int = 0  # for networks with memory: steps of the sequences that are sampled instead of transitions
    burn_in: int = 0  # steps before these that only bring the state up to date

    @property
    def draws(self) -> int:
        """What is drawn for an update: transitions, or sequences of as many together."""
        return self.batch_size // max(1, self.sequence)

    @property
    def window(self) -> int:
        """Rows of the buffer that one of them is made of."""
        return self.burn_in + self.sequence + self.n_step - 1 if self.sequence else self.n_step


def make_limiter(config: Config, spec: ReplaySpec) -> Limiter:
    sampling = config.sampling
    ahead = 2 * sampling.samplers * sampling.envs * sampling.fragment * spec.samples_per_insert
    return Limiter(spec.samples_per_insert, spec.batch_size, spec.learning_starts, slack=ahead)


def make_replay(
    config: Config, spec: ReplaySpec, env: EnvSpec, states: Mapping[str, int], shard: int | None = None
) -> Replay:
    """The whole buffer, or a shard's part; `states` are the sizes of the network's recurrent states."""
    return Replay(
        env.obs,
        env.action,
        **_shape(config, spec, shard),
        prioritized=spec.prioritized,
        n_step=spec.n_step,
        gamma=spec.gamma,
        alpha=spec.priority_alpha,
        compress=config.replay.compress,
        sequence=spec.sequence,
        burn_in=spec.burn_in,
        states=states,
    )


def replay_bytes(config: Config, spec: ReplaySpec, env: EnvSpec, shard: int | None = None) -> int:
    layout, compress = Layout.of(**_shape(config, spec, shard)), config.replay.compress
    return estimate_bytes(env.obs, env.action, layout, prioritized=spec.prioritized, compress=compress)


def _shape(config: Config, spec: ReplaySpec, shard: int | None) -> dict[str, int]:
    sampling, shards = config.sampling, 1 if shard is None else config.replay.shards
    samplers = len(range(shard or 0, sampling.samplers, shards))
    return {"capacity": spec.buffer_size // shards, "lanes": sampling.envs, "samplers": samplers}


def least_buffer(config: Config, spec: ReplaySpec, width: int) -> int:
    """Transitions that a buffer of `width` environments has to hold: a fragment, and a batch."""
    return max((config.sampling.fragment + 2) * width, spec.batch_size + (spec.window + 1) * width)


def with_limiter(learner: Tree, limiter: Limiter) -> Tree:
    """A learner's state with a limiter that counts for it, where an algorithm that counts for itself has its own."""
    counts = {"limiter": limiter.state()}
    return {**learner, "algo": learner["algo"] | counts} if "limiter" in learner["algo"] else learner | counts


def load_limiter(learner: Tree, limiter: Limiter) -> None:
    """Let a limiter go on from a learner's state, which may hold counts of another kind."""
    algo: Tree = learner["algo"]
    if found := algo.get("limiter", learner.get("limiter")):
        limiter.load(found)
    elif "due" in algo:  # before there was a limiter
        sampled = round(limiter.ratio * max(0, algo["inserted"] - limiter.starts) - algo["due"] * limiter.batch)
        limiter.inserted, limiter.sampled = algo["inserted"], sampled
    else:  # nobody counted: it counts from here on
        limiter.inserted, limiter.sampled = min(int(learner["steps"]), limiter.starts), 0
