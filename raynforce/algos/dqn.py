"""Deep Q-learning (Mnih et al. 2015) with the parts of Rainbow that pay for themselves (arXiv 1710.02298).

Double Q-learning (arXiv 1509.06461), dueling heads (1511.06581), n-step returns and prioritised replay
(1511.05952), each a setting.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from raynforce.algos.base import Batch, Loss, observations
from raynforce.algos.off_policy import Fraction, OffPolicy, OffPolicyConfig
from raynforce.config import AlgorithmConfig, Config
from raynforce.errors import UsageError
from raynforce.lazy import LazyModule
from raynforce.policies.acting import ActingSpec
from raynforce.policies.spec import Linear, NetworkSpec, Tower, mlp
from raynforce.settings import Range
from raynforce.spaces import EnvSpec
from raynforce.trees import Tree

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from raynforce.policies.torch_net import Network, Outputs
else:
    torch = LazyModule("torch")

_KINDS = {"box": "continuous", "multidiscrete": "several at once"}
LADDERS: Mapping[str, float] = {"replay": 3.0}  # what `epsilon_ladder: null` means, by topology; 1 on all others


@dataclass(frozen=True)
class DQNConfig(OffPolicyConfig):
    """Settings of DQN."""

    learning_rate: Annotated[float, Range(0, 10)] = 1e-3
    """Adam's step size."""
    max_grad_norm: Annotated[float, Range(1e-9)] | None = 10.0
    """Gradients longer than this are scaled down to it; null switches that off."""
    double: bool = True
    """Let the online network choose the next action and the target network judge it."""
    dueling: bool = False
    """Split the value of a state from the advantage of each action."""
    target_update: Literal["hard", "soft"] = "hard"
    """Copy the network into its target now and then, or let the target follow slowly."""
    target_every: Annotated[int, Range(1, 1e9)] = 250
    """Updates between hard copies."""
    target_tau: Fraction = 0.005
    """Share of the way that a soft target moves at each update."""
    epsilon_start: Fraction = 1.0
    """Chance of a random action at the start."""
    epsilon_end: Fraction = 0.05
    """Chance of a random action once exploration has been annealed."""
    epsilon_fraction: Fraction = 0.2
    """Share of the run over which epsilon falls linearly."""
    epsilon_ladder: Annotated[float, Range(1, 100)] | None = None
    """Environments explore with epsilon to powers from 1/this to this, evenly in between whatever the number of
    samplers; 1 lets all explore alike, and null means 3 on topology replay and 1 elsewhere."""
    huber_delta: Annotated[float, Range(1e-6)] = 1.0
    """Errors beyond this count linearly."""


class DQN(OffPolicy[DQNConfig]):
    """Value learning from replay, for discrete actions."""

    Settings: ClassVar[type[AlgorithmConfig]] = DQNConfig
    defaults: ClassVar[Mapping[str, Any]] = {"sampling.fragment": 16, "network.activation": "relu"}
    topology_defaults: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        # All gradients that a fragment leads to are at equal weights, and those of others come in between: with longer
        # fragments or steps they overshoot.
        "shared-agent": {"sampling.fragment": 1, "algorithm.learning_rate": 5e-4}
    }

    def __init__(self, config: Config, env: EnvSpec) -> None:
        super().__init__(config, env)
        if env.action.kind != "discrete":
            kind = _KINDS[env.action.kind]
            raise UsageError(f"dqn needs discrete actions, and those of {env.env} are {kind}: use ppo")
        self._followed = 0  # updates that the target network has seen

    def heads(self) -> dict[str, int]:
        (actions,) = self.env.action.sizes
        return {"value": 1, "advantage": actions} if self.hp.dueling else {"q": actions}

    def network(self) -> NetworkSpec:
        torso = Tower("torso", mlp(self.config.network.hidden, self.config.network.activation))
        heads = (Tower(name, (Linear(size, gain=1.0),), source="torso") for name, size in self.heads().items())
        return self.spec(torso, *heads)

    def acting(self) -> ActingSpec:
        hp, config = self.hp, self.config
        ladder = LADDERS.get(config.topology, 1.0) if hp.epsilon_ladder is None else hp.epsilon_ladder
        priorities = hp.prioritized and not config.learner.scale_rewards  # samplers know rewards in their own units
        values, state_value = ("advantage", "value") if hp.dueling else ("q", None)  # the best has most advantage
        acting = replace(super().acting(), exploration="epsilon", values=values, state_value=state_value)
        return replace(acting, record=("priority",) if priorities else (), gamma=hp.gamma, ladder=ladder)

    def schedules(self, progress: float) -> dict[str, float]:
        hp = self.hp
        share = min(1.0, progress / hp.epsilon_fraction) if hp.epsilon_fraction else 1.0
        epsilon = hp.epsilon_start + share * (hp.epsilon_end - hp.epsilon_start)
        return {**super().schedules(progress), "epsilon": epsilon}

    def begin(self, net: Network) -> None:
        super().begin(net)
        self.target = net.flat.clone()

    def _values(self, out: Outputs) -> Tensor:
        if not self.hp.dueling:
            return out["q"]
        return out["value"] + out["advantage"] - out["advantage"].mean(1, keepdim=True)

    def _d_outputs(self, d_values: Tensor) -> dict[str, Tensor]:
        if not self.hp.dueling:
            return {"q": d_values}
        return {"value": d_values.sum(1, keepdim=True), "advantage": d_values - d_values.mean(1, keepdim=True)}

    def loss(self, net: Network, minibatch: Batch) -> Loss:
        """Huber loss of the temporal-difference error, with its derivative by the network's outputs."""
        hp, next_obs = self.hp, observations(minibatch, "next_")
        with torch.no_grad():
            judged = self._values(net(next_obs, params=self.target))  # [N, A]
            if hp.double:
                chosen = self._values(net(next_obs)).argmax(1, keepdim=True)
                future = judged.gather(1, chosen).squeeze(1)
            else:
                future = judged.amax(1)
            reward = minibatch["reward"] if self.reward_scale == 1.0 else minibatch["reward"] * self.reward_scale
            goal = reward + minibatch["discount"] * future

        column = minibatch["action"].unsqueeze(1)
        values = self._values(net.record(observations(minibatch)))
        value = values.gather(1, column).squeeze(1)
        error = value - goal
        cut = error.clamp(-hp.huber_delta, hp.huber_delta)
        weighted = minibatch["weight"] * cut
        total = (weighted * (error - 0.5 * cut)).mean()  # the Huber loss
        d_value = weighted / len(cut)
        d_values = torch.zeros_like(values).scatter_(1, column, d_value.unsqueeze(1))
        size = error.abs()
        metrics = {"td_loss": total, "q_values": value, "td_error": size}
        return Loss(total, metrics, per_sample=size, gradients=self._d_outputs(d_values))

    def after_update(self, net: Network, minibatch: Batch, loss: Loss) -> None:
        super().after_update(net, minibatch, loss)
        before, self._followed = self._followed, self.updates
        if self.hp.target_update == "soft":
            self.target.lerp_(net.flat, 1 - (1 - self.hp.target_tau) ** (self.updates - before))
        elif self.updates // self.hp.target_every != before // self.hp.target_every:
            self.target.copy_(net.flat)

    def state(self) -> Tree:
        return {**super().state(), "target": self.target.cpu().numpy().copy(), "updates": self._followed}

    def load(self, tree: Tree) -> None:
        super().load(tree)
        self.target.copy_(torch.tensor(tree["target"]))
        self._followed = tree["updates"]
