"""The algorithms of RLlib by name, and their settings. Nothing here needs RLlib."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

from raynforce import topologies
from raynforce.algos import BUILT_IN, algorithm_class
from raynforce.algos.off_policy import Fraction, OffPolicyConfig
from raynforce.config import AlgorithmConfig
from raynforce.errors import UsageError, nearest
from raynforce.settings import Range


@dataclass(frozen=True)
class APPOConfig(AlgorithmConfig):
    """Settings of APPO, with RLlib's own defaults."""

    learning_rate: Annotated[float, Range(0, 10)] = 5e-4
    """Adam's step size."""
    max_grad_norm: Annotated[float, Range(1e-9)] | None = 40.0
    """Gradients longer than this are scaled down to it; null switches that off."""
    clip: Annotated[float, Range(0.001, 10)] = 0.4
    """How far the new policy's probability ratio may move before its gradient is cut."""
    value_coef: Annotated[float, Range(0)] = 1.0
    """Weight of the value loss."""
    entropy_coef: Annotated[float, Range(0)] = 0.01
    """Weight of the entropy bonus."""


@dataclass(frozen=True)
class SACConfig(OffPolicyConfig):
    """Settings of SAC."""

    max_grad_norm: Annotated[float, Range(1e-9)] | None = None
    """Gradients longer than this are scaled down to it; null switches that off."""
    batch_size: Annotated[int, Range(1, 1e6)] = 256
    """Transitions per update."""
    samples_per_insert: Annotated[float, Range(1e-6, 1e6)] = 256.0
    """How often each transition is learned from on average; with a batch of 256, 256 is an update each step."""
    n_step: Annotated[int, Range(1, 1000)] = 1
    """Steps of real reward before bootstrapping."""
    target_tau: Fraction = 0.005
    """Share of the way that the target networks move at each update."""
    initial_alpha: Annotated[float, Range(1e-9, 1e6)] = 1.0
    """Temperature at the start: the weight of the entropy."""
    target_entropy: float | None = None
    """The entropy that the temperature aims at; null is minus the number of action dimensions."""


@dataclass(frozen=True)
class OtherConfig(AlgorithmConfig):
    """What all of RLlib's algorithms have; null leaves RLlib's own default. The rest is `rllib.training.*`."""

    learning_rate: Annotated[float, Range(0, 10)] | None = None  # type: ignore[assignment]
    """The optimiser's step size."""
    max_grad_norm: Annotated[float, Range(1e-9)] | None = None
    """Gradients longer than this are scaled down to it."""
    gamma: Fraction | None = None  # type: ignore[assignment]
    """Discount of future rewards."""


class Described(NamedTuple):
    """An algorithm as a config needs it: what `algos.base.Algorithm` declares of itself, without the algorithm."""

    Settings: type[AlgorithmConfig]
    defaults: Mapping[str, Any] = {}
    topology_defaults: Mapping[str, Mapping[str, Any]] = {}
    memory_defaults: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Known:
    """What is known of one of RLlib's algorithms."""

    name: str
    """As RLlib's registry has it."""
    module: str
    """Where its config class is, below `ray.rllib.algorithms`."""
    topology: Literal["sync", "async"] = "sync"
    """The one of ours that its way of sampling and learning is."""
    learns: Literal["stream", "replay", "data"] = "stream"
    """From each fragment once, from a replay buffer, or from recorded data."""
    described: Described = field(default_factory=lambda: Described(OtherConfig))

    @property
    def overlaps(self) -> bool:
        """Whether env runners sample while the learner learns."""
        return topologies.topology(self.topology).overlaps

    @property
    def key(self) -> str:
        """What to type for it."""
        return self.name.lower() if self.name.lower() in OURS else self.name

    @property
    def config_class(self) -> str:
        return f"{self.name}Config"


_ASYNC = {"sampling.envs": 8, "sampling.fragment": 50}
_SAC = {"sampling.envs": 1, "sampling.fragment": 1, "network.hidden": (256, 256), "network.activation": "relu"}
OURS = {
    "ppo": Known("PPO", "ppo"),
    "impala": Known("IMPALA", "impala", "async"),
    "appo": Known("APPO", "appo", "async", described=Described(APPOConfig, _ASYNC)),
    "dqn": Known("DQN", "dqn", learns="replay"),
    "sac": Known("SAC", "sac", learns="replay", described=Described(SACConfig, _SAC)),
}
"""Algorithms by our names."""
OTHERS = {
    "BC": Known("BC", "bc", learns="data"),
    "MARWIL": Known("MARWIL", "marwil", learns="data"),
    "CQL": Known("CQL", "cql", learns="data"),
    "IQL": Known("IQL", "iql", learns="data"),
    "TQC": Known("TQC", "tqc", learns="replay"),
    "DreamerV3": Known("DreamerV3", "dreamerv3", learns="replay"),
}
"""Those that go by RLlib's own names."""
REMOVED = ("a3c", "a2c", "td3", "ddpg", "apex", "r2d2", "qmix", "maddpg", "es", "ars", "alphazero", "slateq")


def known(algo: str) -> Known:
    """The algorithm that a name stands for; case makes no difference."""
    every = {name.lower(): found for name, found in (OURS | OTHERS).items()}
    if (found := every.get(algo.lower())) is not None:
        return found
    has = f"RLlib 2.60 has {', '.join(OURS)} by our names, and {', '.join(OTHERS)}"
    if algo.lower() in REMOVED:
        raise UsageError(f"algo = {algo!r} was removed from RLlib: {has}; --engine native has {', '.join(BUILT_IN)}")
    raise UsageError(f"RLlib has no algorithm {algo!r}{nearest(algo, (*OURS, *OTHERS))}: {has}")


def described(algo: str) -> Described:
    """Settings and defaults of an algorithm: ours where we have it too, so that a config means the same experiment; but
    for SAC, whose settings RLlib has others of."""
    found = known(algo)
    if algo.lower() in OURS and found.described.Settings is OtherConfig:
        kind = algorithm_class(algo.lower())
        return Described(kind.Settings, kind.defaults, kind.topology_defaults, kind.memory_defaults)
    return found.described
