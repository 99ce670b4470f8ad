"""REINFORCE with a learned baseline (Williams 1992), as an algorithm of your own.

    raynforce train examples.own_algorithm:Reinforce CartPole-v1 --target 475

Every command that a built-in algorithm has works for it: resume, eval, `--set algorithm.entropy_coef=0.02`, and
`raynforce.load(run).act(obs)`. An algorithm says what its network puts out, turns fragments into arrays (numpy) and
arrays into a loss (torch). Sampling, optimising, checkpoints and metrics are the framework's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from raynforce.algos.base import Algorithm, Arrays, Batch, Loss, advantages, concatenate, observations, rows
from raynforce.config import AlgorithmConfig, Config
from raynforce.errors import UsageError
from raynforce.experience.fragment import Fragment
from raynforce.policies.distributions import head_size
from raynforce.policies.torch_distributions import logp_entropy
from raynforce.settings import Range
from raynforce.spaces import EnvSpec

if TYPE_CHECKING:  # it imports torch, which only the learner's process needs
    from raynforce.policies.torch_net import Network


@dataclass(frozen=True)
class ReinforceConfig(AlgorithmConfig):
    """Settings of REINFORCE; each can be changed with `--set algorithm.NAME=VALUE`."""

    learning_rate: Annotated[float, Range(0, 10)] = 3e-3
    """Adam's step size."""
    baseline_coef: Annotated[float, Range(0)] = 0.5
    """Weight of the baseline's squared error."""
    entropy_coef: Annotated[float, Range(0)] = 0.01
    """Weight of the bonus for staying random."""


class Reinforce(Algorithm[ReinforceConfig]):
    """One gradient step per batch of fresh fragments: log-probability times (return minus baseline)."""

    Settings: ClassVar[type[AlgorithmConfig]] = ReinforceConfig
    defaults: ClassVar[Mapping[str, Any]] = {"sampling.envs": 16, "sampling.fragment": 32}
    max_lag = 1  # a fragment may be one gradient step old, too little to correct for

    def __init__(self, config: Config, env: EnvSpec) -> None:
        super().__init__(config, env)
        if env.action.kind == "box":
            raise UsageError(f"this REINFORCE is for discrete actions, and {env.env} takes continuous ones")

    def heads(self) -> dict[str, int]:
        """The network's outputs; by default each gets a multi-layer perceptron of its own."""
        return {"policy": head_size(self.env.action), "value": 1}

    def prepare(self, net: Network, fragments: Sequence[Fragment]) -> Arrays:
        """Compute the return that followed each step, bootstrapped where a fragment or a time limit cuts it."""
        return concatenate([self._returns(net, fragment) for fragment in fragments])

    def _returns(self, net: Network, fragment: Fragment) -> Arrays:
        # With lambda 1 the advantage is the return minus the baseline.
        scales = {"reward_scale": self.reward_scale, "gamma": self.hp.gamma, "gae_lambda": 1.0}
        advantage, returns, _ = advantages(net, fragment, **scales)
        return rows(fragment, {"returns": returns, "advantage": advantage})

    def loss(self, net: Network, minibatch: Batch) -> Loss:
        """The policy gradient as a loss; `minibatches` yields the whole batch once unless you override it."""
        out = net(observations(minibatch))
        logp, entropy = logp_entropy(self.env.action, out, minibatch["action"])
        advantage = minibatch["advantage"]
        advantage = (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)
        policy = -(logp * advantage).mean()
        baseline = (out["value"].squeeze(1) - minibatch["returns"]).square().mean()
        bonus = entropy.mean()
        total = policy + self.hp.baseline_coef * baseline - self.hp.entropy_coef * bonus
        return Loss(total, {"policy_loss": policy, "baseline_loss": baseline, "entropy": bonus})
