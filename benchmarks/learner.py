"""Where the time of PPO goes: one minibatch of 256 beside plain eager torch, and one vector step of 8 CartPoles.

Learning: milliseconds per minibatch (forward, loss with its metrics, backward, clipping, Adam) on separate 64-64 tanh
networks. Eager torch is `nn.Sequential`, the same objective and metrics for autograd, `torch.optim.Adam` and
`clip_grad_norm_`; it starts from the same parameters, sees the same minibatches, and its first gradient is checked
against Raynforce's.
Cutting minibatches is not counted. The parts are measured in turns of their own, with a clock around each.

Sampling: microseconds per step of all eight environments, with a clock around each part. The policy's is the network,
the choice of actions and their form for the environment; the rest is what remains of `Sampler.sample`: recording,
log-probabilities, episodes, and the clocks (about a microsecond).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.measure import Stopwatch, Table, command, parts, pinned, ratio, row, take_turns
from raynforce.algos.base import Batch
from raynforce.algos.ppo import PPO, PPOConfig
from raynforce.config import Config
from raynforce.envs.vector import EnvArgs, probe
from raynforce.experiment import resolve
from raynforce.policies.torch_net import SpecNet
from raynforce.roles.learner import Learner
from raynforce.roles.sampler import Sampler
from raynforce.spaces import EnvSpec

ENV, ENVS, FRAGMENT, ROWS, MINIBATCH = "CartPole-v1", 8, 128, 1024, 256


def measure(repeats: int = 30, rounds: int = 5) -> list[Table]:
    """Measure in turns of `rounds` rounds, a round being one fragment sampled or its 16 minibatches learned from."""
    layers = {
        "env": ENV,
        "algo": "ppo",
        "preset": "none",
        "sampling": {"envs": ENVS, "fragment": FRAGMENT},
        "algorithm": {"epochs": 4, "minibatch_size": MINIBATCH},
        "network": {"hidden": [64, 64], "activation": "tanh", "normalize_obs": False},
        "learner": {"device": "cpu", "threads": 1, "scale_rewards": False},
    }
    config, env = resolve(layers)[0], probe(ENV)
    with pinned():
        return [*_learning(config, env, repeats, rounds), _sampling(config, env, repeats, rounds)]


# -- learning ---------------------------------------------------------------------------------------------


class Ours:
    """Raynforce's learner, one minibatch at a time; every turn begins from the same state."""

    def __init__(self, config: Config, env: EnvSpec) -> None:
        self.learner = Learner(config, env)
        algo, net = self.learner._algo, self.learner._net
        assert isinstance(algo, PPO)
        assert isinstance(net, SpecNet)
        self.algo, self.net = algo, net
        self._start = self.learner.state()
        self._rng = np.random.default_rng(0)
        longer = FRAGMENT + FRAGMENT // 4  # some steps only reset an environment and are left out
        sampler = Sampler(algo.acting(), EnvArgs(ENV, ENVS, config.seed), longer)
        prepared = algo.prepare(net, [sampler.sample(self.learner.publish())])
        sampler.close()
        self._batch = {k: torch.from_numpy(v[:ROWS]) for k, v in prepared.items()}

    def minibatches(self, rounds: int) -> list[Batch]:
        cut: list[Any] = [m for _ in range(rounds) for m in self.algo.minibatches(self._batch, self._rng)]
        return cut

    def begin(self) -> None:
        self.learner.load(self._start)

    def step(self, minibatch: Batch) -> Tensor:
        gradient = self.learner.gradients(self.algo.loss(self.net, minibatch))
        return self.learner.apply(gradient, self.algo.hp.learning_rate)

    def parts(self, minibatches: list[Batch]) -> dict[str, float]:
        """Milliseconds per minibatch of each part."""
        watch, algo, learner = Stopwatch(), self.algo, self.learner
        loss_of = watch.timed("loss", algo.loss)
        gradients = watch.timed("network backward", learner.gradients)
        apply = watch.timed("clip and Adam", learner.apply)
        with mock.patch.object(self.net, "record", watch.timed("network forward", self.net.record)):
            for minibatch in minibatches:
                apply(gradients(loss_of(self.net, minibatch)), algo.hp.learning_rate)
        spent = watch.seconds
        found = {
            "network forward": spent["network forward"],
            "loss and its derivatives": spent["loss"] - spent["network forward"],
            "network backward": spent["network backward"],
            "clip and Adam": spent["clip and Adam"],
        }
        return {name: seconds / len(minibatches) * 1e3 for name, seconds in found.items()}


class Eager:
    """The same learning as it is commonly written in torch."""

    def __init__(self, ours: Ours) -> None:
        self._ours = ours
        hp: PPOConfig = ours.algo.hp
        self._max_norm = hp.max_grad_norm or math.inf
        self._towers = nn.ModuleDict({name: _mlp(size) for name, size in ours.algo.heads().items()})
        self._start = {p.name: p.view(ours.net.flat).clone() for p in ours.net.spec.params()}
        self._make_adam: Callable[[], torch.optim.Adam] = lambda: torch.optim.Adam(
            self._towers.parameters(), lr=hp.learning_rate, eps=hp.adam_epsilon
        )
        self.begin()

    def begin(self) -> None:
        with torch.no_grad():
            for name, parameter in self._towers.named_parameters():
                start = self._start[name]
                parameter.copy_(start.t() if start.ndim == 2 else start)  # Raynforce keeps weights as [in, out]
        self._adam = self._make_adam()

    def step(self, minibatch: Batch) -> Tensor:
        total = self._loss(minibatch)
        self._adam.zero_grad()
        total.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self._towers.parameters(), self._max_norm)
        self._adam.step()
        return norm

    def _loss(self, minibatch: Batch) -> Tensor:
        hp, advantage = self._ours.algo.hp, minibatch["advantage"]
        logs = torch.log_softmax(self._towers["policy"](minibatch["obs"]), dim=1)
        logp = logs.gather(1, minibatch["action"].unsqueeze(1)).squeeze(1)
        log_ratio = logp - minibatch["logp"]
        ratio = log_ratio.exp()
        policy = -torch.min(ratio * advantage, ratio.clamp(1 - hp.clip, 1 + hp.clip) * advantage).mean()
        value = 0.5 * nn.functional.mse_loss(self._towers["value"](minibatch["obs"]).squeeze(1), minibatch["returns"])
        entropy = -(logs.exp() * logs).sum(1).mean()
        with torch.no_grad():
            metrics = ((ratio - 1 - log_ratio).mean(), ((ratio - 1).abs() > hp.clip).float().mean())
        del metrics
        return policy + hp.value_coef * value - hp.entropy_coef * entropy


def _mlp(size: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, size))


def _learning(config: Config, env: EnvSpec, repeats: int, rounds: int) -> list[Table]:
    ours = Ours(config, env)
    eager = Eager(ours)
    first = ours.minibatches(1)[0]
    torch.testing.assert_close(ours.step(first), eager.step(first), rtol=1e-4, atol=1e-6)

    def turn(side: Ours | Eager) -> float:
        side.begin()
        minibatches = ours.minibatches(rounds)
        began = time.monotonic()
        for minibatch in minibatches:
            side.step(minibatch)
        return (time.monotonic() - began) / len(minibatches) * 1e3

    def apart() -> dict[str, float]:
        ours.begin()
        return ours.parts(ours.minibatches(rounds))

    sides: tuple[Callable[[], Any], ...] = (lambda: turn(eager), lambda: turn(ours), apart)
    take_turns(1, *sides)
    theirs, own, taken_apart = take_turns(repeats, *sides, label="learning")
    side_by_side = [
        row("eager torch", "ms", theirs),
        row("Raynforce", "ms", own),
        ratio("eager torch / Raynforce", theirs, own),
    ]
    return [
        Table(f"One PPO minibatch of {MINIBATCH}, {repeats} turns each, one thread", side_by_side),
        Table("Where Raynforce's time goes in it", parts("ms", taken_apart, "sum")),
    ]


# -- sampling ---------------------------------------------------------------------------------------------


def _sampling(config: Config, env: EnvSpec, repeats: int, rounds: int) -> Table:
    learner = Learner(config, env)
    version = learner.publish()
    sampler = Sampler(learner._algo.acting(), EnvArgs(ENV, ENVS, config.seed), FRAGMENT)
    envs, actor = sampler._envs, sampler._actor

    def turn() -> dict[str, float]:
        watch = Stopwatch()
        sample = watch.timed("whole", sampler.sample)
        with ExitStack() as patches:
            patches.enter_context(mock.patch.object(envs, "step", watch.timed("environments", envs.step)))
            for method in ("outputs", "sample", "to_env"):
                timed = watch.timed("policy", getattr(actor, method))
                patches.enter_context(mock.patch.object(actor, method, timed))
            for _ in range(rounds):
                sample(version)
        spent = {name: seconds / (rounds * FRAGMENT) * 1e6 for name, seconds in watch.seconds.items()}
        rest = spent.pop("whole") - sum(spent.values())
        return {"environments": spent["environments"], "policy": spent["policy"], "rest": rest}

    take_turns(1, turn)
    (turns,) = take_turns(repeats, turn, label="sampling")
    sampler.close()
    return Table(f"One vector step of {ENVS} CartPoles, {repeats} turns", parts("µs", turns, "sum"))


if __name__ == "__main__":
    command(measure, __doc__ or "")
