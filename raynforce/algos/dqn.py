"""Deep Q-learning (Mnih et al. 2015) with the parts of Rainbow that pay for themselves (arXiv 1710.02298).

Double Q-learning (arXiv 1509.06461), dueling heads (1511.06581), n-step returns and prioritised replay
(1511.05952), each a setting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np

from raynforce.algos.base import Algorithm, Arrays, Batch, Loss, observations
from raynforce.config import AlgorithmConfig, Config
from raynforce.errors import UsageError
from raynforce.experience.fragment import Fragment
from raynforce.experience.replay import Replay
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
Fraction = Annotated[float, Range(0, 1)]


@dataclass(frozen=True)
class DQNConfig(AlgorithmConfig):
    """Settings of DQN."""

    learning_rate: Annotated[float, Range(0, 10)] = 1e-3
    """Adam's step size."""
    max_grad_norm: Annotated[float, Range(1e-9)] | None = 10.0
    """Gradients longer than this are scaled down to it; null switches that off."""
    buffer_size: Annotated[int, Range(1, 1e12)] = 100_000
    """Transitions kept in replay."""
    learning_starts: Annotated[int, Range(0, 1e12)] = 1_000
    """Environment steps gathered before the first update."""
    batch_size: Annotated[int, Range(1, 1e6)] = 64
    """Transitions per update."""
    samples_per_insert: Annotated[float, Range(1e-6, 1e6)] = 16.0
    """How often each transition is learned from on average; with a batch of 64, 16 is an update every 4 steps."""
    double: bool = True
    """Let the online network choose the next action and the target network judge it."""
    dueling: bool = False
    """Split the value of a state from the advantage of each action."""
    n_step: Annotated[int, Range(1, 1000)] = 3
    """Steps of real reward before bootstrapping."""
    prioritized: bool = False
    """Sample transitions in proportion to their error instead of uniformly."""
    priority_alpha: Fraction = 0.6
    """How strongly error counts in sampling; 0 is uniform."""
    priority_beta: Fraction = 0.4
    """How much of the sampling bias is corrected at the start; it rises to 1 over the run."""
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
    huber_delta: Annotated[float, Range(1e-6)] = 1.0
    """Errors beyond this count linearly."""


class DQN(Algorithm[DQNConfig]):
    """Value learning from replay, for discrete actions."""

    Settings: ClassVar[type[AlgorithmConfig]] = DQNConfig
    defaults: ClassVar[Mapping[str, Any]] = {"sampling.fragment": 16, "network.activation": "relu"}
    consumes = "replay"
    max_lag = None

    def __init__(self, config: Config, env: EnvSpec) -> None:
        super().__init__(config, env)
        if env.action.kind != "discrete":
            raise UsageError(
                f"dqn needs discrete actions, and those of {env.env} are {_KINDS[env.action.kind]}: use ppo"
            )
        self._check_sizes()
        self._inserted = 0
        self._updates = 0
        self._due = 0.0  # updates that the samples-per-insert ratio still asks for

    def _check_sizes(self) -> None:
        hp, sampling = self.hp, self.config.sampling
        width = sampling.samplers * sampling.envs
        needed = max((sampling.fragment + 2) * width, hp.batch_size + (hp.n_step + 1) * width)
        if hp.buffer_size < needed:
            raise UsageError(
                f"algorithm.buffer_size = {hp.buffer_size} cannot hold a fragment and a batch: with {width} envs, "
                f"sampling.fragment = {sampling.fragment} and algorithm.batch_size = {hp.batch_size} it takes {needed}"
            )

    def heads(self) -> dict[str, int]:
        (actions,) = self.env.action.sizes
        return {"value": 1, "advantage": actions} if self.hp.dueling else {"q": actions}

    def network(self) -> NetworkSpec:
        torso = Tower("torso", mlp(self.config.network.hidden, self.config.network.activation))
        heads = (Tower(name, (Linear(size, gain=1.0),), source="torso") for name, size in self.heads().items())
        return self.spec(torso, *heads)

    def acting(self) -> ActingSpec:
        best = "advantage" if self.hp.dueling else "q"  # the best action has the greatest advantage
        factory = self.config.network.factory
        return ActingSpec(self.env, self.network(), self.heads(), factory, exploration="epsilon", values=best)

    def schedules(self, progress: float) -> dict[str, float]:
        hp = self.hp
        share = min(1.0, progress / hp.epsilon_fraction) if hp.epsilon_fraction else 1.0
        epsilon = hp.epsilon_start + share * (hp.epsilon_end - hp.epsilon_start)
        beta = hp.priority_beta + progress * (1 - hp.priority_beta)
        return {**super().schedules(progress), "epsilon": epsilon, "priority_beta": beta}

    def begin(self, net: Network) -> None:
        hp, sampling = self.hp, self.config.sampling
        self.target = net.flat.clone()
        self.replay = Replay(
            self.env.obs,
            self.env.action,
            capacity=hp.buffer_size,
            lanes=sampling.envs,
            samplers=sampling.samplers,
            n_step=hp.n_step,
            gamma=hp.gamma,
            prioritized=hp.prioritized,
            alpha=hp.priority_alpha,
        )

    def prepare(self, net: Network, fragments: Sequence[Fragment]) -> Arrays:
        before, hp = max(self._inserted, self.hp.learning_starts), self.hp
        self._inserted += sum(self.replay.insert(f) for f in fragments)
        self._due += max(0, self._inserted - before) * hp.samples_per_insert / hp.batch_size
        return {}

    def minibatches(self, batch: Batch, rng: np.random.Generator) -> Iterator[Mapping[str, Tensor | np.ndarray]]:
        while self._due >= 1 and len(self.replay) >= self.hp.batch_size:
            self._due -= 1
            yield self.replay.sample(self.hp.batch_size, rng, self.scheduled["priority_beta"])

    def _values(self, out: Outputs) -> Tensor:
        if not self.hp.dueling:
            return out["q"]
        return out["value"] + out["advantage"] - out["advantage"].mean(1, keepdim=True)

    def _d_outputs(self, d_values: Tensor) -> dict[str, Tensor]:
        """The derivative of `_values`, backwards."""
        if not self.hp.dueling:
            return {"q": d_values}
        return {"value": d_values.sum(1, keepdim=True), "advantage": d_values - d_values.mean(1, keepdim=True)}

    def loss(self, net: Network, minibatch: Batch) -> Loss:
        """Huber loss of the temporal-difference error, with its derivative by the network's outputs."""
        hp, next_obs = self.hp, observations(minibatch, "next_")
        with torch.no_grad():
            judged = self._values(net(next_obs, params=self.target))  # [N, A]
            chosen = self._values(net(next_obs)) if hp.double else judged
            future = judged.gather(1, chosen.argmax(1, keepdim=True)).squeeze(1)
            goal = minibatch["reward"] * self.reward_scale + minibatch["discount"] * future

        column = minibatch["action"].unsqueeze(1)
        values = self._values(net.record(observations(minibatch)))
        value = values.gather(1, column).squeeze(1)
        error = value - goal
        cut = error.clamp(-hp.huber_delta, hp.huber_delta)
        total = (minibatch["weight"] * cut * (error - 0.5 * cut)).mean()  # the Huber loss
        d_value = minibatch["weight"] * cut / len(cut)
        d_values = torch.zeros_like(values).scatter_(1, column, d_value.unsqueeze(1))
        metrics = {"td_loss": total, "q_values": value.mean(), "td_error": error.abs().mean()}
        return Loss(total, metrics, per_sample=error.abs(), gradients=self._d_outputs(d_values))

    def after_update(self, net: Network, minibatch: Batch, loss: Loss) -> None:
        self._updates += 1
        if self.hp.target_update == "soft":
            self.target.lerp_(net.flat, self.hp.target_tau)
        elif self._updates % self.hp.target_every == 0:
            self.target.copy_(net.flat)
        if self.hp.prioritized and loss.per_sample is not None:
            self.replay.update_priorities(minibatch["index"].cpu().numpy(), loss.per_sample.cpu().numpy())

    def metrics(self) -> dict[str, float]:
        fill = len(self.replay) / self.replay.capacity
        return {"replay/size": float(len(self.replay)), "replay/fill": fill, "replay/mb": self.replay.nbytes / 1e6}

    def state(self) -> Tree:
        counts = {"inserted": self._inserted, "updates": self._updates, "due": self._due}
        return {"target": self.target.cpu().numpy().copy(), "replay": self.replay.state(), **counts}

    def load(self, tree: Tree) -> None:
        self.target.copy_(torch.tensor(tree["target"]))
        self.replay.load(tree["replay"])
        self._inserted, self._updates, self._due = tree["inserted"], tree["updates"], tree["due"]
