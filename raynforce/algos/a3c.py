"""Asynchronous advantage actor-critic, A3C (Mnih et al. 2016, arXiv 1602.01783); with all in step, it is A2C.

Defaults are the paper's where they carry over. A worker has several environments here, losses are means, not sums, and
Adam takes the place of RMSProp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from raynforce.algos.base import Algorithm, Arrays, Batch, Loss, advantages, concatenate, observations, rows
from raynforce.config import AlgorithmConfig, SequenceConfig
from raynforce.experience.fragment import Fragment
from raynforce.policies.acting import ActingSpec
from raynforce.policies.distributions import head_size
from raynforce.policies.spec import NetworkSpec
from raynforce.policies.torch_distributions import allowed, taken
from raynforce.settings import Range

if TYPE_CHECKING:
    from raynforce.policies.torch_net import Network


@dataclass(frozen=True)
class A3CConfig(SequenceConfig):
    """Settings of A3C."""

    learning_rate: Annotated[float, Range(0, 10)] = 2e-3
    """Adam's step size."""
    adam_epsilon: Annotated[float, Range(1e-12, 1)] = 1e-5
    """Adam's term against division by zero."""
    gae_lambda: Annotated[float, Range(0, 1)] = 1.0
    """Towards 0 advantages have more bias, towards 1 more variance; 1 is the paper's n-step return."""
    value_coef: Annotated[float, Range(0)] = 0.5
    """Weight of the value loss."""
    entropy_coef: Annotated[float, Range(0)] = 0.01
    """Weight of the entropy bonus."""
    log_std_init: float = 0.0
    """Initial log standard deviation of continuous actions."""


class A3C(Algorithm[A3CConfig]):
    """Policy gradient with n-step returns, one gradient for each fragment, for every kind of action."""

    Settings: ClassVar[type[AlgorithmConfig]] = A3CConfig
    defaults: ClassVar[Mapping[str, Any]] = {"sampling.fragment": 20}
    memory_defaults: ClassVar[Mapping[str, Any]] = {"learner.scale_rewards": True}  # docs/algorithms/memory.md says why
    topology_defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {"shared-agent": {"learner.scale_rewards": False}}
    max_lag = 0
    shares_gradients = True
    recurrent = True

    def heads(self) -> dict[str, int]:
        return {"policy": head_size(self.env.action), "value": 1}

    def network(self) -> NetworkSpec:
        return self.actor_critic(self.hp.log_std_init)

    def acting(self) -> ActingSpec:
        return replace(super().acting(), record=())  # every fragment is of the newest policy: nothing to correct

    def prepare(self, net: Network, fragments: Sequence[Fragment]) -> Arrays:
        """Section 4: returns of up to as many steps as a fragment has, then the value of where it ends."""
        scales = {"reward_scale": self.reward_scale, "gamma": self.hp.gamma, "gae_lambda": self.hp.gae_lambda}
        parts = []
        for fragment in fragments:
            advantage, returns, _ = advantages(net, fragment, **scales)
            parts.append(rows(fragment, {"advantage": advantage, "returns": returns}))
        return concatenate(parts)

    def loss(self, net: Network, minibatch: Batch) -> Loss:
        """Algorithm S3: the three terms, each with its derivative, which halves the time autograd takes."""
        hp, count = self.hp, len(minibatch["advantage"])
        out = net.record(observations(minibatch))
        policy = taken(self.env.action, out, minibatch["action"], allowed(minibatch))

        policy_loss = -(minibatch["advantage"] * policy.logp).mean()
        d_logp = minibatch["advantage"] / -count

        error = out["value"].squeeze(1) - minibatch["returns"]
        value_loss = 0.5 * error.square().mean()
        d_value = error * (hp.value_coef / count)

        entropy = policy.entropy.mean()
        total = policy_loss + hp.value_coef * value_loss - hp.entropy_coef * entropy
        gradients = policy.backward(d_logp, -hp.entropy_coef / count) | {"value": d_value.unsqueeze(1)}
        metrics = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
        return Loss(total, metrics, gradients=gradients)
