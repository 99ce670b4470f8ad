"""IMPALA: the loss against numbers worked out by hand, tiny environments, and fragments of policies long gone."""

from __future__ import annotations

import math
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nets import ACTIONS, BOX, FixedNet, at_random
from running import solve

from raynforce.algos.base import advantages, corrected
from raynforce.algos.impala import IMPALA, IMPALAConfig
from raynforce.config import Config
from raynforce.envs.vector import EnvArgs, probe
from raynforce.experience.gae import Steps, final_values
from raynforce.experience.vtrace import vtrace
from raynforce.experiment import resolve
from raynforce.policies.torch_distributions import logp_entropy
from raynforce.policies.torch_net import tensor
from raynforce.roles.evaluator import Evaluator
from raynforce.roles.learner import Learner
from raynforce.roles.sampler import Sampler
from raynforce.spaces import EnvSpec


def impala(kind: str = "discrete", **hp: Any) -> IMPALA:
    return IMPALA(Config(env="test", algorithm=IMPALAConfig(**hp)), EnvSpec("test", (BOX,), ACTIONS[kind]))


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# -- the loss -------------------------------------------------------------------------------------------------


def test_policy_gradient_value_loss_and_entropy_by_hand() -> None:
    # Three fair choices; the older policy took the first with 1/6 and the second with 2/3: ratios 2 and 0.5.
    batch = {
        "obs": torch.zeros(2, 1),
        "action": torch.tensor([0, 1]),
        "logp": doubles(1 / 6, 2 / 3).log(),
        "advantage": doubles(2.0, -1.0),
        "targets": doubles(1.0, 0.0),
    }
    net = FixedNet(policy=torch.zeros(2, 3, dtype=torch.float64), value=doubles(0.0, 3.0)[:, None])
    for clip, rho in ((1.0, (1.0, 0.5)), (1.5, (1.5, 0.5)), (4.0, (2.0, 0.5))):
        loss = impala(rho_clip=clip, value_coef=0.5, entropy_coef=0.1).loss(net, batch)
        policy = -(rho[0] * 2.0 + rho[1] * -1.0) * math.log(1 / 3) / 2
        value = 0.5 * (1.0**2 + 3.0**2) / 2
        assert loss.metrics["policy_loss"].item() == pytest.approx(policy)
        assert loss.metrics["value_loss"].item() == pytest.approx(value)
        assert loss.metrics["entropy"].item() == pytest.approx(math.log(3))
        assert loss.metrics["rho"].item() == pytest.approx(sum(rho) / 2)
        assert loss.total.item() == pytest.approx(policy + 0.5 * value - 0.1 * math.log(3))


@pytest.mark.parametrize("kind", ACTIONS)
@pytest.mark.parametrize("hp", [{}, {"entropy_coef": 0.0}, {"rho_clip": 1.3, "value_coef": 0.7, "entropy_coef": 0.3}])
def test_derivatives_beside_the_terms_are_those_of_the_papers_objective(kind: str, hp: dict[str, float]) -> None:
    algo, action, count = impala(kind, **hp), ACTIONS[kind], 200
    torch.manual_seed(0)
    out, actions = at_random(algo.heads(), action, count)
    logp, entropy = logp_entropy(action, out, actions)
    advantage, targets, noise = torch.randn(3, count, dtype=torch.float64)
    older = logp.detach() + 0.5 * noise  # ratios on both sides of the clip

    rho = (logp - older).exp().clamp(max=algo.hp.rho_clip).detach()
    value = 0.5 * (out["value"].squeeze(1) - targets).square().mean()
    total = algo.hp.value_coef * value - (rho * logp * advantage).mean() - algo.hp.entropy_coef * entropy.mean()
    expected = torch.autograd.grad(total, list(out.values()))

    batch = {"obs": torch.zeros(count, 1), "action": actions, "logp": older, "advantage": advantage, "targets": targets}
    loss = algo.loss(FixedNet(**{k: v.detach() for k, v in out.items()}), batch)
    assert loss.total.item() == pytest.approx(total.item())
    assert loss.gradients is not None
    for name, gradient in zip(out, expected, strict=True):
        torch.testing.assert_close(loss.gradients[name], gradient)


@pytest.mark.parametrize(("size", "parts"), [(None, [100]), (1000, [100]), (50, [50, 50])])
def test_one_pass_over_the_batch(size: int | None, parts: list[int]) -> None:
    batch = {"advantage": torch.arange(100)}
    seen = [
        torch.as_tensor(p["advantage"]) for p in impala(minibatch_size=size).minibatches(batch, np.random.default_rng())
    ]
    assert [len(p) for p in seen] == parts
    assert torch.equal(torch.cat(seen).sort().values, batch["advantage"])


# -- fragments of older policies ------------------------------------------------------------------------------


class Lagged:
    """A learner and a sampler that acts with the version of `lag` rounds ago."""

    def __init__(self, env: str, algo: str = "impala", lag: int = 0, **more: Any) -> None:
        name = f"raynforce.envs.tiny:{env}"
        config = resolve({"env": name, "algo": algo, "sampling": {"envs": 16, "fragment": 20}}, more)[0]
        self.learner = Learner(config, probe(name, {}))
        self.acting = self.learner._algo.acting()
        self.sampler = Sampler(self.acting, EnvArgs(name, config.sampling.envs, 0), config.sampling.fragment)
        self.versions = deque([self.learner.publish()], maxlen=lag + 1)

    def rounds(self, count: int) -> None:
        for _ in range(count):
            self.learner.learn(self.sampler.sample(self.versions[0]))
            self.versions.append(self.learner.publish())

    def score(self) -> float:
        evaluator = Evaluator(self.acting, EnvArgs(self.acting.env.env, 20, seed=1))
        evaluator.begin(self.versions[-1], episodes=20)
        returns = evaluator.advance().returns
        evaluator.close()
        return float(returns.mean())


KINDS = ["Corridor", "MultiIdentity", "IdentityBox"]


@pytest.mark.parametrize("env", KINDS)
def test_advantages_of_a_fresh_fragment_are_those_of_gae(env: str) -> None:
    roles = Lagged(env)
    roles.rounds(3)
    fragment = roles.sampler.sample(roles.versions[-1])
    scales = {"reward_scale": 0.5, "gamma": 0.9}
    found = corrected(roles.learner._net, fragment, roles.acting.env.action, **scales, vtrace_lambda=0.8)
    expected = advantages(roles.learner._net, fragment, **scales, gae_lambda=0.8)
    for array, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(array, other, atol=1e-5)


@pytest.mark.parametrize("env", KINDS)
def test_prepare_weighs_the_newest_policy_against_the_one_that_acted(env: str) -> None:
    clips = {"vtrace_lambda": 0.8, "rho_clip": 1.5, "c_clip": 1.2}
    roles = Lagged(env, lag=10, algorithm={"learning_rate": 0.02, "gamma": 0.9, **clips})
    roles.rounds(10)
    net, action, cpu = roles.learner._net, roles.acting.env.action, torch.device("cpu")
    fragment = roles.sampler.sample(roles.versions[0])
    with torch.no_grad():
        out = net({k: tensor(v.reshape(-1, *v.shape[2:]), cpu) for k, v in fragment.obs().items()})
        final = net({k: tensor(v, cpu) for k, v in fragment.final_obs().items()})["value"].numpy()
        steps = out | {"policy": out["policy"][:320]}  # without the row that begins the next fragment
        logp, _ = logp_entropy(action, steps, tensor(fragment["action"].reshape(320, *action.shape), cpu))
    value = out["value"].numpy().reshape(21, 16)
    log_ratio = logp.numpy().reshape(20, 16) - fragment["logp"]
    assert np.abs(log_ratio).max() > 0.1  # the policy has moved
    ends = final_values(fragment, value, final[:, 0])
    flags = (fragment["terminated"], fragment["truncated"])
    expected = vtrace(Steps(fragment["reward"], value, *flags, ends), log_ratio, 0.9, 0.8, 1.5, 1.2)
    batch = roles.learner._algo.prepare(net, [fragment])
    for name, column in zip(("advantage", "targets", "logp"), (*expected, fragment["logp"]), strict=True):
        np.testing.assert_allclose(batch[name], column[fragment["valid"]], atol=1e-4)


@pytest.mark.parametrize("algo", ["impala", "ppo"])
@pytest.mark.parametrize(
    ("env", "target", "rounds"), [("Corridor", 0.93, 40), ("IdentityBox", -0.15, 60)]
)  # best 0.93, 0
def test_learns_from_versions_long_gone(algo: str, env: str, target: float, rounds: int) -> None:
    roles = Lagged(env, algo, lag=8, algorithm={"learning_rate": 3e-3, "minibatch_size": 64})
    roles.rounds(rounds)
    assert roles.versions[-1].number - roles.versions[0].number == 8
    assert roles.score() >= target


@pytest.mark.parametrize(("algo", "hp"), [("impala", {}), ("ppo", {"clip": 10.0})])
def test_values_are_the_new_policys_not_those_of_the_one_that_acted(algo: str, hp: dict[str, float]) -> None:
    """All fragments are of version 0, which guesses one of four numbers: its value is 0.25, the new policy's near 1."""
    roles = Lagged("Identity", algo, lag=50, algorithm={"learning_rate": 3e-3, "minibatch_size": 64, **hp})
    roles.rounds(50)
    assert roles.versions[0].number == 0
    assert roles.score() == 1.0
    values = roles.learner._net.predict({"obs": np.arange(4)})["value"]
    assert values.min() > 0.8


# -- whole runs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "target", "steps"),
    [
        ("Identity", 1.0, 20_000),
        ("MultiIdentity", 1.0, 20_000),
        ("DictIdentity", 1.0, 20_000),
        ("IdentityBox", -0.01, 40_000),
        ("Corridor", 0.93, 20_000),
    ],
)
def test_tiny_environments_are_learned(env: str, target: float, steps: int, tmp_path: Path) -> None:
    settings = {"algorithm.minibatch_size": 64, "eval.every": 1000, "eval.final_episodes": 0}
    solve(f"raynforce.envs.tiny:{env}", "impala", tmp_path / "run", steps=steps, target=target, settings=settings)


def test_values_are_bootstrapped_through_time_limits() -> None:
    """Reward 1 for ever, cut every 10 steps: the value is 1 / (1 - gamma), not the return of ten steps."""
    roles = Lagged("Endless", algorithm={"gamma": 0.9, "learning_rate": 1e-2})
    roles.rounds(100)
    values = roles.learner._net.predict({"obs": np.ones((1, 1), np.float32)})["value"]
    assert values.ravel().tolist() == pytest.approx([10.0], rel=0.1)
