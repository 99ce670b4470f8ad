"""Soft actor-critic (Haarnoja et al. 2018, arXiv 1812.05905), and for discrete actions Christodoulou's (1910.07207).

Critics, actor and temperature take one step together, all from the parameters before it. Defaults are the paper's
where it has them; docs/algorithms/sac.md names the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar

from raynforce.algos.base import Batch, Loss
from raynforce.algos.gsde import GSDEConfig, check_gsde
from raynforce.algos.twin_critics import (
    CRITICS,
    TwinCritics,
    TwinCriticsConfig,
    critic_loss,
    least,
    require_bounded_box,
)
from raynforce.config import AlgorithmConfig, Config
from raynforce.errors import UsageError
from raynforce.lazy import LazyModule
from raynforce.policies.acting import ActingSpec
from raynforce.policies.groups import Group
from raynforce.policies.spec import Free, NetworkSpec, Tower
from raynforce.policies.torch_distributions import Drawn, DrawnSDE, allowed, exp, masked, sde_drawn, squashed_drawn
from raynforce.settings import Range
from raynforce.spaces import EnvSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from raynforce.policies.torch_net import Network, Outputs
else:
    torch = LazyModule("torch")

SDE = ("policy", "latent", "log_std")
LOG_STD_RANGE = (-20.0, 2.0)
DISCRETE_ENTROPY = 0.89  # of the highest there can be, as in CleanRL: the paper's 0.98 leaves little but noise


@dataclass(frozen=True)
class SACConfig(TwinCriticsConfig, GSDEConfig):
    """Settings of SAC."""

    initial_alpha: Annotated[float, Range(1e-9, 1e6)] = 1.0
    """Temperature, the weight of the policy's entropy: at the start, or throughout if it is not learned."""
    learn_alpha: bool = True
    """Let the temperature go wherever the policy has the target entropy."""
    target_entropy: float | None = None
    """Entropy that a learned temperature leads to; null is -1 for each number of an action, or 0.89 of the highest
    there can be for discrete ones."""
    discrete: bool = False
    """Take an environment with discrete actions."""
    log_std_init: float = -3.0
    """With gsde: initial log standard deviation of the elements of its matrices."""


class SAC(TwinCritics[SACConfig]):
    """A stochastic actor that is paid for its entropy, for continuous actions, and if asked for discrete ones."""

    Settings: ClassVar[type[AlgorithmConfig]] = SACConfig

    def __init__(self, config: Config, env: EnvSpec) -> None:
        super().__init__(config, env)
        if self.hp.discrete and env.action.kind != "discrete":
            several = env.action.kind == "multidiscrete"
            those = f"those of {env.env} are {'several choices: use ppo' if several else 'continuous: leave it out'}"
            raise UsageError(f"algorithm.discrete = true is for one discrete choice, and {those}")
        if not self.hp.discrete:
            require_bounded_box("sac", env, "use dqn, or sac with --set algorithm.discrete=true")
        check_gsde(self.hp, config, env)
        count = env.action.sizes[0] if self.hp.discrete else math.prod(env.action.shape)
        usual = DISCRETE_ENTROPY * math.log(count) if self.hp.discrete else -float(count)
        self._entropy = usual if self.hp.target_entropy is None else self.hp.target_entropy

    def heads(self) -> dict[str, int]:
        if self.hp.discrete:
            return dict.fromkeys(("policy", *CRITICS), self.env.action.sizes[0])
        return {"policy": (1 if self.hp.gsde else 2) * math.prod(self.env.action.shape), "q1": 1, "q2": 1}

    def network(self) -> NetworkSpec:
        size, *_ = sizes = list(self.heads().values())
        critics = self.critics(sizes[1], "input") if self.hp.discrete else self.critics()
        free = [Free("log_alpha", 1, math.log(self.hp.initial_alpha))]
        if not self.hp.gsde:
            return self.spec(self.actor(size), *critics, free=free)
        hidden = self.actor(size).layers
        free.append(Free("log_std", self.config.network.hidden[-1] * size, self.hp.log_std_init))
        actor = Tower("latent", hidden[:-1]), Tower("policy", hidden[-1:], source="latent")
        return self.spec(*actor, *critics, free=free)

    def groups(self) -> Mapping[str, Group]:
        groups = super().groups()
        members = ("latent", "policy", "log_std")
        return {name: replace(group, members=members) for name, group in groups.items()} if self.hp.gsde else groups

    def acting(self) -> ActingSpec:
        acting = replace(super().acting(), record=())
        if self.hp.gsde:
            return replace(acting, gaussian="squashed-sde", sde_every=self.hp.gsde_every)
        return acting if self.hp.discrete else replace(acting, gaussian="squashed", log_std_range=LOG_STD_RANGE)

    def loss(self, net: Network, minibatch: Batch) -> Loss:
        """The three losses, each with its derivative by the network's outputs."""
        return self._of_choices(net, minibatch) if self.hp.discrete else self._of_numbers(net, minibatch)

    def _of_numbers(self, net: Network, minibatch: Batch) -> Loss:
        obs, later, count = self.seen(minibatch), self.seen(minibatch, "next_"), len(minibatch["reward"])
        everything = (*net.spec.outputs, "latent") if self.hp.gsde else ()
        out = net.record(obs, everything, action=minibatch["action"])
        alpha = exp(out["log_alpha"])
        with torch.no_grad():
            then = self._drawn(net(later, only=SDE if self.hp.gsde else ("policy",)))
            judged = net(later, params=self.target, only=CRITICS, action=then.action)
            goal = self.goal(minibatch, least(judged) - alpha * then.logp)  # equation 6's target
            critics, gradients, error = critic_loss(out, goal, minibatch["weight"])

            now = self._drawn(out)
            judged, back = net.through("action", obs, CRITICS, action=now.action)
            actor = (alpha * now.logp - least(judged)).mean()  # equation 9
            first = judged["q1"] <= judged["q2"]
            d_least = {"q1": first / -count, "q2": ~first / -count}
            found = now.backward(back(d_least), alpha / count)
            gradients |= {"policy": found} if isinstance(found, torch.Tensor) else found
            entropy = -now.logp.mean()
        return self._joined(critics, actor, entropy, alpha, gradients, out["q1"], error, self._entropy)

    def _drawn(self, out: Outputs) -> Drawn | DrawnSDE:
        policy = out["policy"]
        if self.hp.gsde:
            return sde_drawn(policy, out["latent"], out["log_std"], torch.randn_like(policy))
        noise = torch.randn(len(policy), policy.shape[1] // 2, device=policy.device)
        return squashed_drawn(policy, noise, LOG_STD_RANGE)

    def _of_choices(self, net: Network, minibatch: Batch) -> Loss:
        """The same, with expectations over all actions where the other has samples."""
        obs, later, count = self.seen(minibatch), self.seen(minibatch, "next_"), len(minibatch["reward"])
        out = net.record(obs)
        alpha = exp(out["log_alpha"])
        with torch.no_grad():
            logs = _logs(net(later, only=("policy",))["policy"], allowed(minibatch, "next_"))  # [N, A]
            judged = net(later, params=self.target, only=CRITICS)
            soft = torch.minimum(judged["q1"], judged["q2"]) - alpha * logs
            goal = self.goal(minibatch, (exp(logs) * soft).sum(1))
            column = minibatch["action"].unsqueeze(1)
            taken = {name: out[name].gather(1, column) for name in CRITICS}
            critics, d_taken, error = critic_loss(taken, goal, minibatch["weight"])
            gradients = {name: torch.zeros_like(out[name]).scatter_(1, column, d_taken[name]) for name in CRITICS}

            mask = allowed(minibatch)
            logs = _logs(out["policy"], mask)
            chances = exp(logs)
            cost = alpha * logs - torch.minimum(out["q1"], out["q2"])
            mean = (chances * cost).sum(1, keepdim=True)
            gradients["policy"] = chances * (cost - mean) / count
            entropy = -(chances * logs).sum(1).mean()
            goal_entropy: Tensor | float = self._entropy
            if mask is not None and self.hp.target_entropy is None:  # of the highest that allowed actions can have
                goal_entropy = DISCRETE_ENTROPY * mask.sum(1).log().mean()
        return self._joined(critics, mean.mean(), entropy, alpha, gradients, taken["q1"], error, goal_entropy)

    def _joined(
        self,
        critics: Tensor,
        actor: Tensor,
        entropy: Tensor,
        alpha: Tensor,
        gradients: dict[str, Tensor],
        value: Tensor,
        error: Tensor,
        goal_entropy: Tensor | float,
    ) -> Loss:
        if self.hp.learn_alpha:  # of equation 18 with log alpha for alpha
            gradients["log_alpha"] = (entropy - goal_entropy).reshape(1)
        metrics = {"critic_loss": critics, "actor_loss": actor, "entropy": entropy, "alpha": alpha.squeeze(0)}
        metrics |= {"q_values": value.squeeze(1), "td_error": error}
        return Loss(critics + actor, metrics, per_sample=error, gradients=gradients)

    def after_update(self, net: Network, minibatch: Batch, loss: Loss) -> None:
        super().after_update(net, minibatch, loss)
        self.follow(net)


def _logs(policy: Tensor, mask: Tensor | None) -> Tensor:
    """Log-probabilities `[N, A]`; of actions that `mask` forbids so low that they have no part in an expectation."""
    return torch.log_softmax(policy if mask is None else masked(policy, mask), dim=1)
