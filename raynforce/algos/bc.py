"""Behaviour cloning: the actions of recorded episodes, learned by maximum likelihood (Pomerleau 1991), and their value.

The value is of no use to a clone; PPO that goes on from it (`--from`) has a critic then. Networks, normalised
observations and rewards are PPO's for that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np

from raynforce.algos.base import Algorithm, Arrays, Batch, Loss, advantages, concatenate, observations, rows, shuffled
from raynforce.algos.twin_critics import require_bounded_box
from raynforce.config import AlgorithmConfig, Config
from raynforce.errors import UsageError
from raynforce.experience.fragment import Fragment
from raynforce.policies.acting import ActingSpec
from raynforce.policies.distributions import head_size
from raynforce.policies.spec import Linear, NetworkSpec, Tower, mlp
from raynforce.policies.torch_distributions import allowed, squashed_taken, taken
from raynforce.settings import Range
from raynforce.spaces import EnvSpec

if TYPE_CHECKING:
    from torch import Tensor

    from raynforce.policies.torch_net import Network

LOG_STD_RANGE = (-20.0, 2.0)  # SAC's


@dataclass(frozen=True)
class BCConfig(AlgorithmConfig):
    """Settings of behaviour cloning."""

    learning_rate: Annotated[float, Range(0, 10)] = 1e-3
    """Adam's step size."""
    minibatch_size: Annotated[int, Range(1, 1e9)] = 64
    """Steps per optimiser step."""
    value_coef: Annotated[float, Range(0)] = 0.5
    """Weight of the value loss; 0 leaves the critic as it began."""
    entropy_coef: Annotated[float, Range(0)] = 0.0
    """Weight of the entropy bonus, which keeps a clone from being too sure."""
    gaussian: Literal["free", "squashed"] = "free"
    """Of continuous actions: free, one deviation for all observations as PPO has it; squashed, SAC's actor."""
    log_std_init: float = 0.0
    """Initial log standard deviation of continuous actions that are not squashed."""
    log_std_min: float = -2.0
    """Continuous actions are learned to this log standard deviation and no further: else those that are easy to tell
    drown all others, and nothing is left for PPO to explore with."""


class BC(Algorithm[BCConfig]):
    """Maximum likelihood of recorded actions of every kind, and the value of what they led to."""

    Settings: ClassVar[type[AlgorithmConfig]] = BCConfig
    defaults: ClassVar[Mapping[str, Any]] = {
        "sampling.envs": 32,
        "sampling.fragment": 64,
        "network.normalize_obs": True,
        "learner.scale_rewards": True,
    }
    consumes = "data"
    max_lag = None

    def __init__(self, config: Config, env: EnvSpec) -> None:
        super().__init__(config, env)
        self._squashed = self.hp.gaussian == "squashed"
        if self._squashed and env.action.kind != "box":
            what = f"algorithm.gaussian = 'squashed' is for continuous actions, and those of {env.env} are not"
            raise UsageError(f"{what}: leave it out")
        if self._squashed:
            require_bounded_box("algorithm.gaussian = 'squashed'", env)

    def heads(self) -> dict[str, int]:
        return {"policy": head_size(self.env.action) * (2 if self._squashed else 1), "value": 1}

    def network(self) -> NetworkSpec:
        if not self._squashed:
            return self.actor_critic(self.hp.log_std_init)
        hidden = mlp(self.config.network.hidden, self.config.network.activation)
        policy = Tower("policy", (*hidden, Linear(2 * math.prod(self.env.action.shape), gain=0.01)))
        return self.spec(policy, Tower("value", (*hidden, Linear(1, gain=1.0))))

    def acting(self) -> ActingSpec:
        acting = replace(super().acting(), record=())
        return replace(acting, gaussian="squashed", log_std_range=LOG_STD_RANGE) if self._squashed else acting

    def prepare(self, net: Network, fragments: Sequence[Fragment]) -> Arrays:
        """Returns to the end of a fragment, then the value of where it ends."""
        how = {"reward_scale": self.reward_scale, "gamma": self.hp.gamma, "gae_lambda": 1.0}
        return concatenate([rows(f, {"returns": advantages(net, f, **how)[1]}) for f in fragments])

    def minibatches(self, batch: Batch, rng: np.random.Generator) -> Iterator[Mapping[str, Tensor | np.ndarray]]:
        return shuffled(batch, self.hp.minibatch_size, rng)

    def loss(self, net: Network, minibatch: Batch) -> Loss:
        """Each term with its derivative by the network's outputs."""
        hp, count = self.hp, len(minibatch["returns"])
        out = net.record(observations(minibatch))
        if self._squashed:
            policy = squashed_taken(out["policy"], minibatch["action"], (hp.log_std_min, LOG_STD_RANGE[1]))
        else:
            policy = taken(self.env.action, out, minibatch["action"], allowed(minibatch))
        nll = -policy.logp.mean()
        entropy = policy.entropy.mean()
        gradients = policy.backward(policy.logp.new_full((count,), -1 / count), -hp.entropy_coef / count)
        if "log_std" in gradients:
            lower = (out["log_std"] <= hp.log_std_min) & (gradients["log_std"] > 0)  # a step would take it below
            gradients["log_std"] = gradients["log_std"].masked_fill(lower, 0.0)

        error = out["value"].squeeze(1) - minibatch["returns"]
        value_loss = 0.5 * error.square().mean()
        gradients["value"] = (error * (hp.value_coef / count)).unsqueeze(1)

        total = nll + hp.value_coef * value_loss - hp.entropy_coef * entropy
        return Loss(total, {"nll": nll, "value_loss": value_loss, "entropy": entropy}, gradients=gradients)
