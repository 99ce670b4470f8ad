"""Twin delayed deep deterministic policy gradient (Fujimoto et al. 2018, arXiv 1802.09477).

Defaults are the paper's, with a step size of 3e-4, a batch of 256 and networks of 256 by 256, as its authors' own code
has since.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar

from raynforce.algos.base import Batch, Loss
from raynforce.algos.twin_critics import (
    CRITICS,
    TwinCritics,
    TwinCriticsConfig,
    critic_loss,
    least,
    require_bounded_box,
)
from raynforce.config import AlgorithmConfig, Config
from raynforce.lazy import LazyModule
from raynforce.policies.acting import ActingSpec
from raynforce.policies.groups import Group
from raynforce.policies.spec import Activation, Free, NetworkSpec
from raynforce.settings import Range
from raynforce.spaces import EnvSpec

if TYPE_CHECKING:
    import torch

    from raynforce.policies.torch_net import Network
else:
    torch = LazyModule("torch")

FIRST_NOISE = 1.0  # what it explores with before it learns


@dataclass(frozen=True)
class TD3Config(TwinCriticsConfig):
    """Settings of TD3."""

    policy_delay: Annotated[int, Range(1, 1000)] = 2
    """Updates of the critics for each of the actor and the target."""
    exploration_noise: Annotated[float, Range(1e-6, 10)] = 0.1
    """Deviation of the noise on the actions that are tried, of which -1 and 1 are the bounds."""
    target_noise: Annotated[float, Range(0, 10)] = 0.2
    """Deviation of the noise on the target's actions, over which the critics' values are smoothed."""
    target_noise_clip: Annotated[float, Range(0, 10)] = 0.5
    """Where this noise is cut off."""


class TD3(TwinCritics[TD3Config]):
    """A deterministic actor with noise on its actions, for continuous actions."""

    Settings: ClassVar[type[AlgorithmConfig]] = TD3Config
    forgets = ("_actor_loss",)

    def __init__(self, config: Config, env: EnvSpec) -> None:
        super().__init__(config, env)
        require_bounded_box("td3", env)

    def heads(self) -> dict[str, int]:
        return {"policy": math.prod(self.env.action.shape), "q1": 1, "q2": 1}

    def network(self) -> NetworkSpec:
        size = self.heads()["policy"]
        noise = Free("log_std", size, math.log(FIRST_NOISE))  # no loss depends on it
        return self.spec(self.actor(size, Activation("tanh")), *self.critics(), free=[noise])

    def groups(self) -> Mapping[str, Group]:
        rate = self.hp.learning_rate if self.hp.actor_learning_rate is None else self.hp.actor_learning_rate
        return {"actor": Group("policy", rate, self.hp.max_grad_norm)}

    def acting(self) -> ActingSpec:
        return replace(super().acting(), record=())

    def begin(self, net: Network) -> None:
        super().begin(net)
        self._actor_loss = net.flat.new_zeros(())

    def loss(self, net: Network, minibatch: Batch) -> Loss:
        """Algorithm 1: both critics each time, the actor every `policy_delay` updates."""
        hp, count = self.hp, len(minibatch["reward"])
        obs, later, tried = self.seen(minibatch), self.seen(minibatch, "next_"), minibatch["action"].clamp(-1, 1)
        improves = (self.updates + 1) % hp.policy_delay == 0
        out = net.record(obs, only=("policy", *CRITICS) if improves else CRITICS, action=tried)
        with torch.no_grad():
            action = net(later, params=self.target, only=("policy",))["policy"]
            noise = (hp.target_noise * torch.randn_like(action)).clamp(-hp.target_noise_clip, hp.target_noise_clip)
            judged = net(later, params=self.target, only=CRITICS, action=(action + noise).clamp(-1, 1))
            goal = self.goal(minibatch, least(judged))
            critics, gradients, error = critic_loss(out, goal, minibatch["weight"])
            if improves:
                judged, back = net.through("action", obs, ("q1",), action=out["policy"])
                self._actor_loss = -judged["q1"].mean()
                gradients["policy"] = back({"q1": torch.full_like(judged["q1"], -1 / count)})
        metrics = {"critic_loss": critics, "actor_loss": self._actor_loss}
        metrics |= {"q_values": out["q1"].squeeze(1), "td_error": error}
        frozen = () if improves else ("actor",)
        return Loss(critics + self._actor_loss, metrics, per_sample=error, gradients=gradients, frozen=frozen)

    def after_update(self, net: Network, minibatch: Batch, loss: Loss) -> None:
        super().after_update(net, minibatch, loss)
        net.flat[net.parts["log_std"]] = math.log(self.hp.exploration_noise)
        if self.updates % self.hp.policy_delay == 0:
            self.follow(net)
