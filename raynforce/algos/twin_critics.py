"""What SAC and TD3 share: an actor and two critics in one network, and a target that follows it slowly."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from raynforce.algos.base import Batch
from raynforce.algos.off_policy import Fraction, OffPolicy, OffPolicyConfig
from raynforce.config import AlgorithmConfig
from raynforce.errors import UsageError
from raynforce.lazy import LazyModule
from raynforce.policies.groups import Group
from raynforce.policies.spec import Activation, Layer, Linear, Tower, mlp
from raynforce.settings import Range
from raynforce.spaces import EnvSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from raynforce.policies.torch_net import Network, Outputs
else:
    torch = LazyModule("torch")

CRITICS = ("q1", "q2")


@dataclass(frozen=True)
class TwinCriticsConfig(OffPolicyConfig):
    """Settings of what has an actor and two critics."""

    learning_rate: Annotated[float, Range(0, 10)] = 3e-4
    """Adam's step size."""
    actor_learning_rate: Annotated[float, Range(0, 10)] | None = None
    """Adam's step size for the actor, if it is not `learning_rate` too."""
    max_grad_norm: Annotated[float, Range(1e-9)] | None = None
    """Gradients of the actor, and of all else, longer than this are scaled down to it; null switches that off."""
    buffer_size: Annotated[int, Range(1, 1e12)] = 1_000_000
    """Transitions kept in replay."""
    batch_size: Annotated[int, Range(1, 1e6)] = 256
    """Transitions per update."""
    samples_per_insert: Annotated[float, Range(1e-6, 1e6)] = 256.0
    """How often each transition is learned from on average; with a batch of 256, 256 is an update for every step."""
    n_step: Annotated[int, Range(1, 1000)] = 1
    """Steps of real reward before bootstrapping."""
    target_tau: Fraction = 0.005
    """Share of the way that the target moves at each of its updates."""


H = TypeVar("H", bound=TwinCriticsConfig)


class TwinCritics(OffPolicy[H]):
    """An output `policy`, and `q1` and `q2` which read the action too; `target` is a copy of all parameters."""

    Settings: ClassVar[type[AlgorithmConfig]] = TwinCriticsConfig
    defaults: ClassVar[Mapping[str, Any]] = {
        "sampling.envs": 4,
        "sampling.fragment": 8,
        "network.hidden": (256, 256),
        "network.activation": "relu",
    }
    shares_gradients = False
    keeps = ("target",)

    def actor(self, size: int, *last: Activation) -> Tower:
        return Tower("policy", (*self._hidden(), Linear(size, uniform=True), *last))

    def critics(self, size: int = 1, source: str | tuple[str, ...] = ("input", "action")) -> list[Tower]:
        return [Tower(name, (*self._hidden(), Linear(size, uniform=True)), source=source) for name in CRITICS]

    def _hidden(self) -> tuple[Layer, ...]:
        # With orthogonal weights SAC had half the return on HalfCheetah-v5 after 50,000 steps (docs/performance.md).
        return mlp(self.config.network.hidden, self.config.network.activation, uniform=True)

    def groups(self) -> Mapping[str, Group]:
        """The actor apart, where it makes a difference: one group is one kernel."""
        rate = self.hp.learning_rate if self.hp.actor_learning_rate is None else self.hp.actor_learning_rate
        if rate == self.hp.learning_rate and self.hp.max_grad_norm is None:
            return {}
        return {"actor": Group("policy", rate, self.hp.max_grad_norm)}

    def begin(self, net: Network) -> None:
        super().begin(net)
        self.target = net.flat.clone()

    def goal(self, minibatch: Batch, future: Tensor) -> Tensor:
        """What the critics are to say `[N]`, given the value `[N]` of what comes after."""
        reward = minibatch["reward"] if self.reward_scale == 1.0 else minibatch["reward"] * self.reward_scale
        return reward + minibatch["discount"] * future

    def follow(self, net: Network) -> None:
        self.target.lerp_(net.flat, self.hp.target_tau)


def least(out: Outputs) -> Tensor:
    """The lower one `[N]` of what both critics say."""
    return torch.minimum(out["q1"], out["q2"]).squeeze(1)


def critic_loss(out: Outputs, goal: Tensor, weight: Tensor) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """Half the squared errors of both, with the derivative by each; and their mean size `[N]`, for replay."""
    errors = torch.cat([out[name].t() for name in CRITICS]) - goal  # [2, N]
    d_values = errors * (weight / len(goal))
    total = 0.5 * (d_values * errors).sum()
    return total, {name: d.unsqueeze(1) for name, d in zip(CRITICS, d_values, strict=True)}, errors.abs().mean(0)


def require_bounded_box(algo: str, env: EnvSpec, instead: str = "use dqn") -> None:
    """Refuse actions that are not numbers between bounds; `instead` is for one choice of several."""
    action = env.action
    if action.kind == "discrete":
        raise UsageError(f"{algo} needs continuous actions, and those of {env.env} are discrete: {instead}")
    if action.kind == "multidiscrete":
        raise UsageError(f"{algo} needs continuous actions, and those of {env.env} are several choices: use ppo")
    if not all(map(math.isfinite, (*action.low, *action.high))):
        reach = f"reach from {min(action.low):g} to {max(action.high):g}"
        fix = "give its action space finite bounds (gymnasium.wrappers.TransformAction), or use ppo"
        raise UsageError(f"{algo} needs bounded actions, and those of {env.env} {reach}: {fix}")
