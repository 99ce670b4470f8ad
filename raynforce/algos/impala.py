"""IMPALA: actor-critic learning from fragments of older policies (Espeholt et al. 2018, arXiv 1802.01561).

Defaults are the paper's for Atari where they carry over. The learning rate is not: losses are means here, not sums, and
Adam takes the place of RMSProp.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np

from raynforce.algos.base import Algorithm, Arrays, Batch, Loss, concatenate, corrected, observations, rows, shuffled
from raynforce.config import AlgorithmConfig, SequenceConfig
from raynforce.experience.fragment import Fragment
from raynforce.policies.distributions import head_size
from raynforce.policies.spec import NetworkSpec
from raynforce.policies.torch_distributions import allowed, exp, taken
from raynforce.settings import Range

if TYPE_CHECKING:
    from torch import Tensor

    from raynforce.policies.torch_net import Network


@dataclass(frozen=True)
class IMPALAConfig(SequenceConfig):
    """Settings of IMPALA."""

    learning_rate: Annotated[float, Range(0, 10)] = 3e-3
    """Adam's step size."""
    adam_epsilon: Annotated[float, Range(1e-12, 1)] = 1e-5
    """Adam's term against division by zero."""
    rho_clip: Annotated[float, Range(1e-6, 1e6)] = 1.0
    """Upper limit of a step's probability ratio; higher ones bring values nearer the newest policy's, and vary more."""
    c_clip: Annotated[float, Range(1e-6, 1e6)] = 1.0
    """Upper limit of the ratios that carry later rewards back; higher ones learn from more of them, and vary more."""
    vtrace_lambda: Annotated[float, Range(0, 1)] = 1.0
    """Towards 0 targets have more bias, towards 1 more variance."""
    value_coef: Annotated[float, Range(0)] = 0.5
    """Weight of the value loss."""
    entropy_coef: Annotated[float, Range(0)] = 0.01
    """Weight of the entropy bonus."""
    minibatch_size: Annotated[int, Range(1, 1e9)] | None = 320
    """Samples per optimiser step, in one pass: more samplers mean more steps, not longer ones. Null takes the whole
    batch in one step, as the paper does."""
    log_std_init: float = 0.0
    """Initial log standard deviation of continuous actions."""


class IMPALA(Algorithm[IMPALAConfig]):
    """Policy gradient with V-trace, in one pass, for discrete, multi-discrete and continuous actions."""

    Settings: ClassVar[type[AlgorithmConfig]] = IMPALAConfig
    defaults: ClassVar[Mapping[str, Any]] = {"sampling.envs": 16, "sampling.fragment": 20}
    memory_defaults: ClassVar[Mapping[str, Any]] = {"learner.scale_rewards": True}  # docs/algorithms/memory.md says why
    max_lag = None
    recurrent = True

    def heads(self) -> dict[str, int]:
        return {"policy": head_size(self.env.action), "value": 1}

    def network(self) -> NetworkSpec:
        return self.actor_critic(self.hp.log_std_init)

    def prepare(self, net: Network, fragments: Sequence[Fragment]) -> Arrays:
        """Section 4.1: values by the newest network, and with them V-trace targets."""
        hp, parts = self.hp, []
        scales: dict[str, Any] = {
            "reward_scale": self.reward_scale,
            "gamma": hp.gamma,
            "vtrace_lambda": hp.vtrace_lambda,
        }
        clips: dict[str, Any] = {"rho_clip": hp.rho_clip, "c_clip": hp.c_clip}
        for fragment in fragments:
            advantage, targets, _ = corrected(net, fragment, self.env.action, **scales, **clips)
            parts.append(rows(fragment, {"logp": fragment["logp"], "advantage": advantage, "targets": targets}))
        return concatenate(parts)

    def minibatches(self, batch: Batch, rng: np.random.Generator) -> Iterator[Mapping[str, Tensor | np.ndarray]]:
        size = self.hp.minibatch_size
        return super().minibatches(batch, rng) if size is None else shuffled(batch, size, rng)

    def loss(self, net: Network, minibatch: Batch) -> Loss:
        """Section 4.2: the three terms, each with its derivative, which halves the time autograd takes."""
        hp, count = self.hp, len(minibatch["advantage"])
        out = net.record(observations(minibatch))
        policy = taken(self.env.action, out, minibatch["action"], allowed(minibatch))

        rho = exp((policy.logp - minibatch["logp"]).clamp(max=math.log(hp.rho_clip)))
        weight = rho * minibatch["advantage"]  # a constant: no derivative runs through rho
        policy_loss = -(weight * policy.logp).mean()
        d_logp = weight / -count

        error = out["value"].squeeze(1) - minibatch["targets"]
        value_loss = 0.5 * error.square().mean()
        d_value = error * (hp.value_coef / count)

        entropy = policy.entropy.mean()
        total = policy_loss + hp.value_coef * value_loss - hp.entropy_coef * entropy
        gradients = policy.backward(d_logp, -hp.entropy_coef / count) | {"value": d_value.unsqueeze(1)}
        # The mean of rho tells how far fragments lag: clipped at 1, it is 1 minus the total variation distance.
        metrics = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy, "rho": rho.mean()}
        return Loss(total, metrics, gradients=gradients)
