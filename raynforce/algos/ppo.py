"""Proximal policy optimisation (Schulman et al. 2017, arXiv 1707.06347), with GAE (1506.02438) or V-trace (1802.01561).

Defaults are for tasks that nobody has tuned for: the paper's for continuous control (2,048 steps in ten epochs of
minibatches of 64, a step size of 3e-4), with normalised observations and rewards (docs/performance.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

import numpy as np

from raynforce.algos.augment import Augment
from raynforce.algos.base import (
    Algorithm,
    Arrays,
    Batch,
    Loss,
    advantages,
    annealed,
    concatenate,
    corrected,
    rows,
    shuffled,
)
from raynforce.algos.gsde import GSDEConfig, check_gsde
from raynforce.algos.rnd import Novelty
from raynforce.config import AlgorithmConfig, Anneal, Config, SequenceConfig
from raynforce.experience.fragment import Fragment
from raynforce.lazy import LazyModule
from raynforce.policies.acting import ActingSpec
from raynforce.policies.distributions import Gaussian, head_size
from raynforce.policies.spec import NetworkSpec
from raynforce.policies.torch_distributions import allowed, exp, sde_taken, taken
from raynforce.settings import Range
from raynforce.spaces import EnvSpec
from raynforce.trees import Tree

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from raynforce.policies.torch_net import Network
else:
    torch = LazyModule("torch")


@dataclass(frozen=True)
class PPOConfig(GSDEConfig, SequenceConfig):
    """Settings of PPO."""

    adam_epsilon: Annotated[float, Range(1e-12, 1)] = 1e-5
    """Adam's term against division by zero."""
    gae_lambda: Annotated[float, Range(0, 1)] = 0.95
    """Towards 0 advantages have more bias, towards 1 more variance."""
    epochs: Annotated[int, Range(1, 1000)] = 10
    """Passes over each batch."""
    minibatch_size: Annotated[int, Range(1, 1e9)] = 64
    """Samples per optimiser step."""
    clip: Annotated[float, Range(0.001, 10)] = 0.2
    """How far the new policy's probability ratio may move before its gradient is cut."""
    anneal_clip: Anneal = "no"
    """Let the clip fall to zero over the run, as `anneal_learning_rate` does the step size."""
    clip_value: Annotated[float, Range(0)] | None = None
    """Keep new values within this distance of the old ones; null switches that off."""
    value_coef: Annotated[float, Range(0)] = 0.5
    """Weight of the value loss."""
    entropy_coef: Annotated[float, Range(0)] = 0.0
    """Weight of the entropy bonus."""
    normalize_advantage: bool = True
    """Give the advantages of each batch zero mean and unit deviation."""
    target_kl: Annotated[float, Range(0)] | None = None
    """Stop a round's epochs once the policy has moved this far; null never stops early."""
    log_std_init: float = 0.0
    """Initial log standard deviation of continuous actions; with gsde, of the elements of its matrices."""
    rnd_coef: Annotated[float, Range(0)] = 0.0
    """Weight of a bonus for observations that are new (RND), in units of the deviation of its discounted sums; 0 is
    none. Rewards of the environment are scaled as `learner.scale_rewards` says, beside it."""
    augment: Augment = "no"
    """Learn from images that are shifted by up to a 21st of their side, anew each time: shift (DrQ), or no."""
    central_critic: bool = False
    """For several agents (MAPPO): values are of what the agent sees and of the global state, which is the environment's
    state() or, without one, all that all agents see; actions are chosen by what the agent sees alone."""


class PPO(Algorithm[PPOConfig]):
    """Clipped policy gradient, for all kinds of action, by GAE for the newest policy version and V-trace for older."""

    Settings: ClassVar[type[AlgorithmConfig]] = PPOConfig
    defaults: ClassVar[Mapping[str, Any]] = {
        "sampling.fragment": 256,
        "network.normalize_obs": True,
        "learner.scale_rewards": True,
    }
    memory_defaults: ClassVar[Mapping[str, Any]] = {"learner.scale_rewards": True}  # docs/algorithms/memory.md says why
    max_lag = None
    recurrent = True
    forgets = ("_divergence",)  # of one epoch

    def __init__(self, config: Config, env: EnvSpec) -> None:
        super().__init__(config, env)
        self._divergence: list[Tensor] = []
        check_gsde(self.hp, config, env)
        self._sde = cast(Gaussian, self.acting().distribution()) if self.hp.gsde else None
        self._novelty: Novelty | None = None

    def heads(self) -> dict[str, int]:
        return {"policy": head_size(self.env.action), "value": 1}

    def network(self) -> NetworkSpec:
        return self.actor_critic(self.hp.log_std_init, sde=self.hp.gsde, central=self.hp.central_critic)

    def acting(self) -> ActingSpec:
        acting = super().acting()
        return replace(acting, gaussian="sde", sde_every=self.hp.gsde_every) if self.hp.gsde else acting

    def begin(self, net: Network) -> None:
        if self.hp.rnd_coef:
            self._novelty = Novelty(self.env.obs, self.config, net.device)

    def schedules(self, progress: float) -> dict[str, float]:
        found = super().schedules(progress)
        if self.hp.anneal_clip != "no":
            found["clip"] = self.hp.clip * annealed(self.hp.anneal_clip, progress)
        return found

    @property
    def _clip(self) -> float:
        """In this round."""
        return self.scheduled.get("clip", self.hp.clip)

    def prepare(self, net: Network, fragments: Sequence[Fragment]) -> Arrays:
        if self._novelty is not None:
            fragments = self._novelty.rewarded(fragments, self.hp.rnd_coef / self.reward_scale)
        batch = concatenate([self._advantages(net, f) for f in fragments])
        if self.hp.normalize_advantage and len(batch["advantage"]) > 1:
            advantage = batch["advantage"]
            batch["advantage"] = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        # min(r A, clip(r) A) cuts the ratio r on one side only, and the sign of A says on which.
        gain = batch["advantage"] > 0
        batch["floor"] = np.where(gain, -np.inf, 1 - self._clip).astype(np.float32)
        batch["ceiling"] = np.where(gain, 1 + self._clip, np.inf).astype(np.float32)
        return batch

    def _advantages(self, net: Network, fragment: Fragment) -> Arrays:
        hp, scales = self.hp, {"reward_scale": self.reward_scale, "gamma": self.hp.gamma}
        if fragment.version == self.version:
            found = advantages(net, fragment, **scales, gae_lambda=hp.gae_lambda)
        else:
            how: dict[str, Any] = {**scales, "vtrace_lambda": hp.gae_lambda, "distribution": self._sde}
            found = corrected(net, fragment, self.env.action, **how)
        learned = dict(zip(("advantage", "returns", "value"), found, strict=True))
        return rows(fragment, {"logp": fragment["logp"]} | learned)

    def minibatches(self, batch: Batch, rng: np.random.Generator) -> Iterator[Mapping[str, Tensor | np.ndarray]]:
        for _ in range(self.hp.epochs):
            self._divergence.clear()
            yield from shuffled(batch, self.hp.minibatch_size, rng)
            # The one read that must wait for the device, and only if it is asked for.
            limit, seen = self.hp.target_kl, self._divergence
            if limit is not None and seen and torch.stack(seen).mean().item() > limit:
                break

    def loss(self, net: Network, minibatch: Batch) -> Loss:
        """The clipped objective; each term's derivative stands beside it, which halves the time autograd takes."""
        hp, advantage, count = self.hp, minibatch["advantage"], len(minibatch["advantage"])
        named = {"global_state": minibatch["global_state"]} if hp.central_critic else {}
        if self._sde is None:
            out = net.record(self.seen(minibatch), **named)
            policy = taken(self.env.action, out, minibatch["action"], allowed(minibatch))
        else:
            out = net.record(self.seen(minibatch), (*self._sde.outputs, "value"), **named)
            policy = sde_taken(out["policy"], out["latent"], out["log_std"], minibatch["action"])

        log_ratio = policy.logp - minibatch["logp"]
        ratio = exp(log_ratio)
        cut = ratio.clamp(minibatch["floor"], minibatch["ceiling"])
        gain = cut * advantage
        policy_loss = -gain.mean()
        d_logp = torch.where(cut == ratio, gain, 0.0) / -count  # the derivative of r is r; none where it was cut

        value, old, returns = out["value"].squeeze(1), minibatch["value"], minibatch["returns"]
        error = value - returns
        squared, d_value = error.square(), error * (hp.value_coef / count)
        if hp.clip_value is not None:
            near_error = old + (value - old).clamp(-hp.clip_value, hp.clip_value) - returns
            worse = near_error.square() > squared  # then the value was clipped, and its derivative is zero
            squared, d_value = squared.where(~worse, near_error.square()), d_value.masked_fill(worse, 0.0)
        value_loss = 0.5 * squared.mean()

        entropy = policy.entropy.mean()
        total = policy_loss.add(value_loss, alpha=hp.value_coef).sub(entropy, alpha=hp.entropy_coef)
        gradients = policy.backward(d_logp, -hp.entropy_coef / count) | {"value": d_value.unsqueeze(1)}

        moved = ratio - 1
        divergence = (moved - log_ratio).mean()  # Schulman's k3 estimator of KL(old, new)
        self._divergence.append(divergence)
        metrics = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
        metrics |= {"approx_kl": divergence, "clipfrac": (moved.abs() > self._clip).float().mean()}
        return Loss(total, metrics, gradients=gradients)

    def metrics(self) -> dict[str, float]:
        return {} if self._novelty is None else {"charts/rnd_bonus": self._novelty.bonus}

    def state(self) -> Tree:
        return {} if self._novelty is None else {"novelty": self._novelty.state()}

    def load(self, tree: Tree) -> None:
        if self._novelty is not None and "novelty" in tree:  # else it begins afresh
            self._novelty.load(tree["novelty"])
