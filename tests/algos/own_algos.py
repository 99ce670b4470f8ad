"""Algorithms as users write them: right ones, and ones with a mistake each."""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from raynforce.algos.base import Algorithm, Loss, advantages, concatenate, observations, rows, shuffled
from raynforce.algos.dqn import DQN
from raynforce.config import AlgorithmConfig
from raynforce.errors import UsageError
from raynforce.experience.replay import Replay
from raynforce.experience.replay_spec import ReplaySpec
from raynforce.policies.distributions import head_size
from raynforce.policies.groups import Group
from raynforce.policies.torch_distributions import logp_entropy


class Plain(Algorithm[AlgorithmConfig]):
    """An actor-critic in two updates a round; what others are derived from."""

    max_lag = None
    shares_gradients = True

    def heads(self) -> Any:
        return {"policy": head_size(self.env.action), "value": 1}

    def network(self) -> Any:
        return self.actor_critic()

    def prepare(self, net: Any, fragments: Any) -> Any:
        return concatenate([self.one(net, fragment) for fragment in fragments])

    def one(self, net: Any, fragment: Any) -> Any:
        found = advantages(net, fragment, reward_scale=1.0, gamma=self.hp.gamma, gae_lambda=0.9)
        return rows(fragment, {"advantage": found[0], "returns": found[1]})

    def minibatches(self, batch: Any, rng: np.random.Generator) -> Any:
        return shuffled(batch, len(batch["advantage"]) // 2, rng)

    def loss(self, net: Any, minibatch: Any) -> Any:
        out = net(observations(minibatch))
        logp, _ = logp_entropy(self.env.action, out, minibatch["action"])
        error = out["value"].squeeze(1) - minibatch["returns"]
        total = error.square().mean() - (logp * (minibatch["advantage"] + self.bonus(minibatch))).mean()
        return Loss(total, {"value_loss": error.square().mean()})

    def bonus(self, minibatch: Any) -> Any:
        """Something of its own that the updates depend on."""
        return 0.0


class Curious(Plain):
    """A model of its own predicts the returns; its error is a bonus. Nothing of it is declared."""

    def begin(self, net: Any) -> None:
        self.model = nn.Linear(1, 1)
        self.slow = copy.deepcopy(self.model)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.noise = np.random.default_rng([self.config.seed, 11])
        self.scale = torch.ones(())
        self.seen = 0
        self.recent: deque[float] = deque(maxlen=4)
        self.means: list[np.ndarray] = [np.zeros(2), np.zeros(2)]
        self.constant = torch.arange(3.0)
        self.frozen = nn.Linear(2, 2)

    def bonus(self, minibatch: Any) -> Any:
        returns = minibatch["returns"].unsqueeze(1)
        found = (self.model(returns) - returns.square() + float(self.noise.normal()) / 10).square()
        self.optimizer.zero_grad()
        found.mean().backward()
        self.optimizer.step()
        with torch.no_grad():
            self.scale.lerp_(found.mean(), 0.1)
            for old, new in zip(self.slow.parameters(), self.model.parameters(), strict=True):
                old.lerp_(new, 0.1)
            guess = self.slow(returns).squeeze(1)
        self.seen += len(returns)
        self.recent.append(float(self.scale))
        self.means[0] += guess.mean().item()
        more = sum(self.recent) + self.seen / 1000 + float(self.means[0].sum()) + torch.rand(())
        return (0.1 * guess + 0.1 * more).detach()


OWN = ("model", "slow", "optimizer", "noise", "scale", "seen", "recent", "means")


class Declared(Curious):
    keeps = OWN


class Remembers(Curious):
    """The same, saved by hand: nothing is to be said of it."""

    def state(self) -> Any:
        moments = self.optimizer.state_dict()["state"]
        return {
            "model": _arrays(self.model.state_dict()),
            "copy": _arrays(self.slow.state_dict()),  # under other names, with the same content
            "optimizer": {str(i): _arrays(each) for i, each in moments.items()},
            "stream": dict(self.noise.bit_generator.state),
            "s": self.scale.numpy(),
            "count": self.seen,
            "recent": list(self.recent),
            "means": {str(i): each for i, each in enumerate(self.means)},
        }


class CopiesLate(Plain):
    """A target network that is copied every fifth update, and saved nowhere."""

    def begin(self, net: Any) -> None:
        self.target = net.flat.clone()

    def after_update(self, net: Any, minibatch: Any, loss: Any) -> None:
        if self.updates % 5 == 0:
            self.target.copy_(net.flat)

    def loss(self, net: Any, minibatch: Any) -> Any:
        with torch.no_grad():
            old = net(observations(minibatch), params=self.target)["value"].squeeze(1)
        found = super().loss(net, minibatch)
        value = net(observations(minibatch))["value"].squeeze(1)
        return Loss(found.total + (value - old).square().mean(), found.metrics)


class Demonstrations(DQN):
    """A second replay buffer, which is kept."""

    keeps = ("demos",)

    def begin(self, net: Any) -> None:
        super().begin(net)
        self.demos = Replay(self.env.obs, self.env.action, capacity=400, lanes=self.config.sampling.envs)

    def prepare(self, net: Any, fragments: Any) -> Any:
        for fragment in fragments:
            self.demos.insert(fragment)
        return super().prepare(net, fragments)


class HalfDead(Plain):
    """The policy is given to a second call of the network as a choice, which has no derivative."""

    def loss(self, net: Any, minibatch: Any) -> Any:
        first = net(observations(minibatch))
        again = net({"obs": (first["policy"] > 0).float()})
        return Loss(again["value"].mean(), {})


class InfiniteGradient(Plain):
    """The loss is finite, and the derivative of its root at zero is not."""

    def __init__(self, config: Any, env: Any) -> None:
        super().__init__(config, env)
        if env.action.kind != "box":
            raise UsageError("for continuous actions")

    def loss(self, net: Any, minibatch: Any) -> Any:
        out = net(observations(minibatch))
        return Loss(out["policy"].square().mean() + out["log_std"].sum().abs().sqrt(), {})


class Detached(Plain):
    def begin(self, net: Any) -> None:
        self.weight = nn.Parameter(torch.ones(()))

    def loss(self, net: Any, minibatch: Any) -> Any:
        out = net(observations(minibatch))
        return Loss(self.weight * out["value"].detach().mean(), {})


class TimesZero(Plain):
    def loss(self, net: Any, minibatch: Any) -> Any:
        return Loss(0 * net(observations(minibatch))["value"].mean(), {})


class Frozen(Plain):
    """An optimiser that is never asked for a step."""

    keeps = ("model", "optimizer")

    def begin(self, net: Any) -> None:
        self.model = nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)


class Unseeded(Plain):
    def bonus(self, minibatch: Any) -> Any:
        return float(np.random.random())  # noqa: NPY002


# -- mistakes ----------------------------------------------------------------------------------------------------------


class NoLoss(Algorithm[AlgorithmConfig]):
    def heads(self) -> Any:
        return {"value": 1}

    def prepare(self, net: Any, fragments: Any) -> Any:
        return {}


class NoPrepare(Algorithm[AlgorithmConfig]):
    def heads(self) -> Any:
        return {"value": 1}

    def loss(self, net: Any, minibatch: Any) -> Any:
        return None


class Raises(Plain):
    def loss(self, net: Any, minibatch: Any) -> Any:
        return self.helper(minibatch)

    def helper(self, minibatch: Any) -> Any:
        return minibatch["advantages"]  # the line that is named


class RaisesInTorch(Plain):
    def loss(self, net: Any, minibatch: Any) -> Any:
        return torch.cat([minibatch["advantage"], minibatch["obs"].unsqueeze(1)])


class ShortTarget(Plain):
    def loss(self, net: Any, minibatch: Any) -> Any:
        return net(observations(minibatch), params=net.flat[:3])


class UnknownInput(Plain):
    def loss(self, net: Any, minibatch: Any) -> Any:
        return net(observations(minibatch), action=minibatch["action"])


class WrongGroups(Plain):
    def groups(self) -> Any:
        return {"critic": ("value",)}


class UnknownGroup(Plain):
    def groups(self) -> Any:
        return {"critic": Group("q", 1e-3)}


class DoubleGroup(Plain):
    def groups(self) -> Any:
        return {"critic": Group("value", 1e-3), "outputs": Group(("policy", "value"), 1e-3)}


class RaisesAtFirst(Plain):
    def __init__(self, config: Any, env: Any) -> None:
        super().__init__(config, env)
        self.width = env.obs[7].shape


class TensorAsLoss(Plain):
    def loss(self, net: Any, minibatch: Any) -> Any:
        return super().loss(net, minibatch).total


class VectorAsLoss(Plain):
    def loss(self, net: Any, minibatch: Any) -> Any:
        return Loss(net(observations(minibatch))["value"], {})


class ConstantAsLoss(Plain):
    def loss(self, net: Any, minibatch: Any) -> Any:
        return Loss(minibatch["returns"].mean(), {})


class FloatAsMetric(Plain):
    def loss(self, net: Any, minibatch: Any) -> Any:
        return Loss(super().loss(net, minibatch).total, {"speed": 3.0})  # type: ignore[dict-item]


class NaNAsLoss(Plain):
    def loss(self, net: Any, minibatch: Any) -> Any:
        found = super().loss(net, minibatch)
        return Loss(found.total / 0 * 0, found.metrics)


class NothingPrepared(Plain):
    def prepare(self, net: Any, fragments: Any) -> Any:
        self.one(net, fragments[0])


class EmptyPrepared(Plain):
    minibatches = Algorithm.minibatches

    def prepare(self, net: Any, fragments: Any) -> Any:
        return {}


class ListAsMinibatch(Plain):
    def minibatches(self, batch: Any, rng: np.random.Generator) -> Any:
        yield list(batch.values())


class NumberInMinibatch(Plain):
    def minibatches(self, batch: Any, rng: np.random.Generator) -> Any:
        yield {**batch, "epoch": 3}


class ListAsHeads(Plain):
    def heads(self) -> Any:
        return ["policy", "value"]

    def network(self) -> Any:
        return self.spec()

    def acting(self) -> Any:
        return None


class NoRate(Plain):
    def schedules(self, progress: float) -> Any:
        return {"temperature": 1.0}


class TensorAsState(Plain):
    def state(self) -> Any:
        return {"target": torch.zeros(3)}


class KeepsNothing(Plain):
    keeps = ("critic",)


class KeepsText(Plain):
    keeps = "model"  # type: ignore[assignment]


class KeepsObject(Plain):
    keeps = ("thing",)

    def begin(self, net: Any) -> None:
        self.thing = object()


def _arrays(tree: Any) -> dict[str, Any]:
    return {k: v.numpy() if isinstance(v, torch.Tensor) else v for k, v in tree.items()}


class OwnBuffer(Algorithm[AlgorithmConfig]):
    """Q-learning from a buffer of its own making, which no topology knows but by what is declared."""

    consumes = "replay"
    max_lag = None
    shares_gradients = True
    keeps = ("memory",)

    @classmethod
    def replay_spec(cls, config: Any) -> ReplaySpec:
        return ReplaySpec(buffer_size=640, learning_starts=32, batch_size=16, samples_per_insert=2.0)

    def heads(self) -> Any:
        return {"q": self.env.action.sizes[0]}

    def acting(self) -> Any:
        return replace(super().acting(), exploration="epsilon", values="q", record=())

    def schedules(self, progress: float) -> Any:
        return {**super().schedules(progress), "epsilon": 0.2}

    def begin(self, net: Any) -> None:
        self.memory: list[dict[str, np.ndarray]] = []

    def prepare(self, net: Any, fragments: Any) -> Any:
        new = [{k: v.copy() for k, v in rows(f, {"reward": f["reward"]}).items()} for f in fragments]
        self.memory = [*self.memory, *new][-10:]
        return {}

    def minibatches(self, batch: Any, rng: np.random.Generator) -> Any:
        for _ in range(2 if self.round.due is None else self.round.due):
            old = self.memory[rng.integers(len(self.memory))]
            some = rng.integers(len(old["reward"]), size=16)
            yield {name: column[some] for name, column in old.items()}

    def loss(self, net: Any, minibatch: Any) -> Any:
        value = net(observations(minibatch))["q"].gather(1, minibatch["action"].unsqueeze(1)).squeeze(1)
        return Loss((value - minibatch["reward"]).square().mean(), {})


class OwnBufferWithoutSpec(OwnBuffer):
    @classmethod
    def replay_spec(cls, config: Any) -> Any:
        return None


class TooYoung(OwnBuffer):
    max_lag = 0


class StreamsReplay(OwnBuffer):
    consumes = "stream"


class ConsumesNothing(Plain):
    consumes = "nothing"  # type: ignore[assignment]


class LagsHalf(Plain):
    max_lag = 0.5  # type: ignore[assignment]


class SharesMaybe(Plain):
    shares_gradients = "maybe"  # type: ignore[assignment]


class KeepsAndForgets(Plain):
    keeps = ("seen",)
    forgets = ("seen",)


class PlainSettings(DQN):
    Settings = AlgorithmConfig
