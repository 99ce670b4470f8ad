"""DDPG (Lillicrap et al. 2016) with the two critics and the smoothed target of TD3 (Fujimoto et al. 2018), as your own.

    raynforce doctor examples.own_off_policy:DDPG
    raynforce train examples.own_off_policy:DDPG Pendulum-v1 --steps 20000 --target -200

What acts is the network: its one output is the action. The critics are torch modules of its own with an optimiser of
their own; `keeps` names them, so they are saved, loaded and put on the learner's device. Replay, its ratio of samples
to inserts and its checkpoints are those of `OffPolicy`. docs/algorithms.md explains it line by line.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from torch import Tensor, nn

from raynforce.algos.base import Batch, Loss, observations
from raynforce.algos.off_policy import Fraction, OffPolicy, OffPolicyConfig
from raynforce.config import AlgorithmConfig, Config
from raynforce.errors import UsageError
from raynforce.policies.acting import ActingSpec
from raynforce.policies.distributions import head_size
from raynforce.policies.spec import Activation, Free, Linear, NetworkSpec, Tower, mlp
from raynforce.settings import Range
from raynforce.spaces import EnvSpec

if TYPE_CHECKING:
    from raynforce.policies.torch_net import Network


@dataclass(frozen=True)
class DDPGConfig(OffPolicyConfig):
    """Settings of DDPG; each can be changed with `--set algorithm.NAME=VALUE`."""

    learning_rate: Annotated[float, Range(0, 10)] = 1e-3
    """Adam's step size, of the actor."""
    critic_rate: Annotated[float, Range(0, 10)] = 1e-3
    """Adam's step size, of the critics."""
    max_grad_norm: Annotated[float, Range(1e-9)] | None = None
    """Gradients longer than this are scaled down to it; null switches that off."""
    batch_size: Annotated[int, Range(1, 1e6)] = 128
    """Transitions per update."""
    samples_per_insert: Annotated[float, Range(1e-6, 1e6)] = 128.0
    """How often each transition is learned from on average; with a batch of 128, 128 is an update every step."""
    n_step: Annotated[int, Range(1, 1000)] = 1
    """Steps of real reward before bootstrapping."""
    exploration: Annotated[float, Range(1e-6, 10)] = 0.2
    """Deviation of the noise on actions, where -1 and 1 are their bounds."""
    smoothing: Annotated[float, Range(0, 10)] = 0.2
    """Deviation of the noise on the target's actions."""
    target_tau: Fraction = 0.005
    """Share of the way that targets move at each update."""


class Critics(nn.Module):
    """Two values of an action in a state, `[2, N]`."""

    def __init__(self, inputs: int, hidden: tuple[int, ...]) -> None:
        super().__init__()
        self.both = nn.ModuleList([_mlp(inputs, hidden), _mlp(inputs, hidden)])

    def forward(self, obs: Tensor, action: Tensor) -> Tensor:
        x = torch.cat([obs.flatten(1), action], dim=1)
        return torch.cat([one(x) for one in self.both], dim=1).T


def _mlp(inputs: int, hidden: tuple[int, ...]) -> nn.Module:
    sizes = [inputs, *hidden]
    layers = [x for a, b in pairwise(sizes) for x in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 1))


class DDPG(OffPolicy[DDPGConfig]):
    """Deterministic policy gradient from replay, for continuous actions."""

    Settings: ClassVar[type[AlgorithmConfig]] = DDPGConfig
    defaults: ClassVar[Mapping[str, Any]] = {
        "sampling.envs": 4,
        "sampling.fragment": 4,
        "network.hidden": (128, 128),
        "network.activation": "relu",
    }
    keeps = ("critics", "target_critics", "target_actor", "critic_optimizer")
    shares_gradients = False  # critics learn where the loss is: workers of a shared agent would have one each

    def __init__(self, config: Config, env: EnvSpec) -> None:
        super().__init__(config, env)
        if env.action.kind != "box" or len(env.obs) != 1 or env.obs[0].kind != "box":
            raise UsageError(f"this DDPG is for vectors as observations and continuous actions, not for {env.env}")

    def heads(self) -> dict[str, int]:
        return {"policy": head_size(self.env.action)}

    def network(self) -> NetworkSpec:
        """The actor: actions between -1 and 1, and the noise to explore with, which has no gradient and so stays."""
        size, config = self.heads()["policy"], self.config.network
        layers = (*mlp(config.hidden, config.activation), Linear(size, gain=0.01), Activation("tanh"))
        return self.spec(Tower("policy", layers), free=[Free("log_std", size, math.log(self.hp.exploration))])

    def acting(self) -> ActingSpec:
        return replace(super().acting(), record=())  # replay has no use for log-probabilities

    def begin(self, net: Network) -> None:
        super().begin(net)  # makes the replay buffer
        inputs = math.prod(self.env.obs[0].shape) + self.heads()["policy"]
        self.critics = Critics(inputs, self.config.network.hidden)
        self.target_critics = copy.deepcopy(self.critics).requires_grad_(False)
        self.target_actor = net.flat.clone()
        self.critic_optimizer = torch.optim.Adam(self.critics.parameters(), lr=self.hp.critic_rate)

    def loss(self, net: Network, minibatch: Batch) -> Loss:
        """Let the critics take a step of their own, then ask them how good the actor's actions are."""
        metrics, error = self.improve_critics(net, minibatch)
        action = net(observations(minibatch))["policy"]
        total = -self.critics(minibatch["obs"], action)[0].mean()
        return Loss(total, {"actor_loss": total, **metrics}, per_sample=error)

    def improve_critics(self, net: Network, minibatch: Batch) -> tuple[dict[str, Tensor], Tensor]:
        """One step of the critics towards reward and future; returns what to report, and the errors `[N]`."""
        with torch.no_grad():
            goal = self.reward_scale * minibatch["reward"] + minibatch["discount"] * self.future(net, minibatch)
        taken = minibatch["action"].flatten(1).clamp(-1, 1)  # as recorded it may lie beyond the bounds
        values = self.critics(minibatch["obs"], taken)  # [2, N]
        errors = values - goal
        loss = (minibatch["weight"] * errors.square()).mean()
        self.critic_optimizer.zero_grad()
        loss.backward()
        self.critic_optimizer.step()
        return {"critic_loss": loss, "q_values": values[0]}, errors[0].detach().abs()

    def future(self, net: Network, minibatch: Batch) -> Tensor:
        """The value `[N]` of the next state: the smaller of both targets', for the target's action and some noise."""
        action = net(observations(minibatch, "next_"), params=self.target_actor)["policy"]
        noise = (torch.randn_like(action) * self.hp.smoothing).clamp(-0.5, 0.5)
        future: Tensor = self.target_critics(minibatch["next_obs"], (action + noise).clamp(-1, 1)).amin(0)
        return future

    def after_update(self, net: Network, minibatch: Batch, loss: Loss) -> None:
        super().after_update(net, minibatch, loss)  # tells replay the errors
        self.target_actor.lerp_(net.flat, self.hp.target_tau)
        for target, now in zip(self.target_critics.parameters(), self.critics.parameters(), strict=True):
            target.lerp_(now, self.hp.target_tau)
