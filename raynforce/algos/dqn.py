"""Deep Q-learning (Mnih et al. 2015) with the parts of Rainbow that pay for themselves (arXiv 1710.02298).

Double Q-learning (arXiv 1509.06461), dueling heads (1511.06581), n-step returns and prioritised replay
(1511.05952), each a setting. With memory it learns from sequences, as R2D2 does (Kapturowski et al. 2019).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

from raynforce.algos.augment import shifted
from raynforce.algos.base import Batch, Loss, observations
from raynforce.algos.off_policy import Fraction, OffPolicy, OffPolicyConfig
from raynforce.algos.sequences import has_memory, sequence_length
from raynforce.config import AlgorithmConfig, Config, SequenceConfig
from raynforce.errors import UsageError
from raynforce.experience.builder import STATE
from raynforce.experience.replay_spec import ReplaySpec
from raynforce.lazy import LazyModule
from raynforce.policies.acting import ActingSpec
from raynforce.policies.spec import Linear, NetworkSpec, Tower, mlp
from raynforce.policies.torch_distributions import allowed, masked
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
class DQNConfig(OffPolicyConfig, SequenceConfig):
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
    burn_in: Annotated[int, Range(0, 1_000_000)] = 0
    """With network.memory: steps before each sequence that only bring the stored state up to date."""


class DQN(OffPolicy[DQNConfig]):
    """Value learning from replay, for discrete actions."""

    Settings: ClassVar[type[AlgorithmConfig]] = DQNConfig
    recurrent = True
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

    @classmethod
    def replay_spec(cls, config: Config) -> ReplaySpec:
        hp, spec = cast(DQNConfig, config.algorithm), super().replay_spec(config)
        if not has_memory(config):
            if hp.burn_in:
                what = f"algorithm.burn_in = {hp.burn_in} is for networks with memory"
                raise UsageError(f"{what}: set network.memory=lstm or gru, or leave it out")
            return spec
        length, fragment = sequence_length(config), config.sampling.fragment
        if fragment < 2:  # as on shared-agent, unless the user says otherwise
            short = f"sampling.fragment = {fragment} is too short for network.memory = {config.network.memory!r}"
            raise UsageError(f"{short}, where dqn learns from sequences of two steps or more: set sampling.fragment=8")
        if length < 2 or fragment % length or hp.batch_size % length:
            wanted = "with network.memory dqn learns from sequences of two steps or more, which divide"
            both = f"sampling.fragment = {fragment} and algorithm.batch_size = {hp.batch_size}: change one of these"
            raise UsageError(f"algorithm.sequence = {length} is not possible: {wanted} {both}")
        return replace(spec, sequence=length, burn_in=hp.burn_in)

    def heads(self) -> dict[str, int]:
        (actions,) = self.env.action.sizes
        return {"value": 1, "advantage": actions} if self.hp.dueling else {"q": actions}

    def network(self) -> NetworkSpec:
        torso = Tower("torso", self.remembering() or mlp(self.config.network.hidden, self.config.network.activation))
        heads = (Tower(name, (Linear(size, gain=1.0),), source="torso") for name, size in self.heads().items())
        return self.spec(torso, *heads)

    def acting(self) -> ActingSpec:
        hp, config = self.hp, self.config
        ladder = LADDERS.get(config.topology, 1.0) if hp.epsilon_ladder is None else hp.epsilon_ladder
        # Samplers know rewards in their own units, and of sequences the learner finds the errors.
        priorities = hp.prioritized and not config.learner.scale_rewards and not has_memory(config)
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
        if "first" in minibatch:  # of sequences
            return self._sequence_loss(net, minibatch)
        goal = self._goal(net, minibatch)
        values = self._values(net.record(self.seen(minibatch)))
        return self._huber(values, goal, minibatch["action"], minibatch["weight"])

    def _goal(self, net: Network, minibatch: Batch) -> Tensor:
        """What the value of each action should be, `[N]`."""
        hp, next_obs, mask = self.hp, self.seen(minibatch, "next_"), allowed(minibatch, "next_")
        with torch.no_grad():
            judged = self._values(net(next_obs, params=self.target))  # [N, A]
            compared = self._values(net(next_obs)) if hp.double else judged
            if mask is not None:
                compared = masked(compared, mask)
            if hp.double:
                future = judged.gather(1, compared.argmax(1, keepdim=True)).squeeze(1)
            else:
                future = compared.amax(1)
            reward = minibatch["reward"] if self.reward_scale == 1.0 else minibatch["reward"] * self.reward_scale
            return reward + minibatch["discount"] * future

    def _huber(self, values: Tensor, goal: Tensor, action: Tensor, weight: Tensor) -> Loss:
        hp, column = self.hp, action.unsqueeze(1)
        value = values.gather(1, column).squeeze(1)
        error = value - goal
        cut = error.clamp(-hp.huber_delta, hp.huber_delta)
        weighted = weight * cut
        total = (weighted * (error - 0.5 * cut)).mean()  # the Huber loss
        d_value = weighted / len(cut)
        d_values = torch.zeros_like(values).scatter_(1, column, d_value.unsqueeze(1))
        size = error.abs()
        metrics = {"td_loss": total, "q_values": value, "td_error": size}
        return Loss(total, metrics, per_sample=size, gradients=self._d_outputs(d_values))

    def _sequence_loss(self, net: Network, minibatch: Batch) -> Loss:
        """The same over sequences from replay (Kapturowski et al. 2019, R2D2): states are carried from the stored ones
        through the burn-in, without gradient, by the network and its target each for itself."""
        each = ("weight", "index", "shard")  # [S], as states are; all else is [S, R, ...] or [S, L, ...]
        over = {k: v if k in each or k.startswith(STATE) else v.transpose(0, 1) for k, v in minibatch.items()}
        for name in [f"{prefix}{path}" for prefix in ("", "next_") for path in self._augmented]:
            moved = shifted({name: over[name].flatten(0, 1)}, {name: self._augmented[name.removeprefix("next_")]})
            over[name] = moved[name].view(over[name].shape)
        burn_in, length, width = self.hp.burn_in, len(over["reward"]), over["reward"].shape[1]
        judged, _ = self._following(net, over, self.target)  # [R, S, A]
        own, after = self._following(net, over, None)
        compared, mask = own if self.hp.double else judged, allowed(over, "next_")
        chosen = (compared if mask is None else masked(compared, mask)).argmax(2, keepdim=True)
        future = judged.gather(2, chosen).squeeze(2).gather(0, over["last"])  # [L, S]
        goal = over["reward"] * self.reward_scale + over["discount"] * future

        rows = slice(burn_in, burn_in + length)
        learned = {k: v[rows].flatten(0, 1) for k, v in observations(over).items() if k.startswith("obs")}
        states = {k: v[burn_in - 1] for k, v in after.items()} if burn_in else {k: over[STATE + k] for k in after}
        learned |= {"first": over["first"][rows], **{STATE + k: v for k, v in states.items()}}
        weight = (over["weight"] * over["valid"]).flatten()  # a row that is no step counts nothing
        found = self._huber(self._values(net.record(learned)), goal.flatten(), over["action"].flatten(), weight)
        assert found.per_sample is not None
        size = found.per_sample.view(length, width) * over["valid"]
        return found._replace(per_sample=0.9 * size.amax(0) + 0.1 * size.mean(0))  # of each sequence, section 2.3

    def _following(self, net: Network, over: Batch, params: Tensor | None) -> tuple[Tensor, Outputs]:
        """Action values `[R, S, A]` of what comes after each row, and the states after it, without gradients."""
        seen = {k: v if k == "first" or k.startswith(STATE) else v.flatten(0, 1) for k, v in observations(over).items()}
        _, after = net.unroll(seen, params)
        there = {k: v.flatten(0, 1) for k, v in observations(over, "next_").items()}
        there |= {STATE + name: state.flatten(0, 1) for name, state in after.items()}
        values = self._values(net.unroll(there, params)[0])
        return values.view(*over["first"].shape, -1), after

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
