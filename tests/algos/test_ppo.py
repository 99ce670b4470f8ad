"""PPO: the loss against numbers worked out by hand, and tiny environments learned in seconds."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from nets import ACTIONS, BOX, FixedNet, at_random
from running import solve

import raynforce
from raynforce.algos.base import LearningRound, annealed, shuffled
from raynforce.algos.ppo import PPO, PPOConfig
from raynforce.config import Config
from raynforce.envs.tiny import IdentityBox
from raynforce.errors import UsageError
from raynforce.experience.advantages import Steps, gae, vtrace
from raynforce.experience.fragment import Fragment
from raynforce.experiment import resolve
from raynforce.policies.numpy_net import NumpyNet
from raynforce.policies.torch_distributions import logp_entropy
from raynforce.policies.torch_net import SpecNet
from raynforce.spaces import ActionSpec, EnvSpec

ENV = EnvSpec("test", (BOX,), ActionSpec("discrete", (), "int64", sizes=(2,), start=(0,)))


def ppo(**hp: Any) -> PPO:
    return PPO(Config(env="test", algorithm=PPOConfig(**hp)), ENV)


def minibatch(**columns: list[float]) -> dict[str, torch.Tensor]:
    batch = {k: torch.tensor(v, dtype=torch.float64) for k, v in columns.items()}
    return {"obs": torch.zeros(len(batch["advantage"]), 1), **batch, "action": batch["action"].long()}


def two_steps(old_probability: float, advantage: tuple[float, float] = (2.0, -1.0)) -> dict[str, torch.Tensor]:
    return minibatch(
        action=[0, 1],
        logp=[math.log(old_probability), math.log(old_probability)],
        advantage=list(advantage),
        floor=[-math.inf if a > 0 else 0.8 for a in advantage],
        ceiling=[1.2 if a > 0 else math.inf for a in advantage],
        returns=[1.0, 0.0],
        value=[0.5, 0.5],
    )


def fair_coin(value: list[float]) -> FixedNet:
    return FixedNet(
        policy=torch.zeros(2, 2, dtype=torch.float64), value=torch.tensor(value, dtype=torch.float64)[:, None]
    )


def test_clipped_objective_value_loss_and_entropy() -> None:
    # The new policy takes both actions with 0.5, the old one did with 0.25: the ratio is 2, clipped to 1.2.
    loss = ppo(value_coef=0.5, entropy_coef=0.1).loss(fair_coin([0.0, 3.0]), two_steps(0.25))
    policy = -(min(2 * 2.0, 1.2 * 2.0) + min(2 * -1.0, 1.2 * -1.0)) / 2
    value = 0.5 * ((0 - 1) ** 2 + (3 - 0) ** 2) / 2
    entropy = math.log(2)
    assert loss.metrics["policy_loss"].item() == pytest.approx(policy)
    assert loss.metrics["value_loss"].item() == pytest.approx(value)
    assert loss.metrics["entropy"].item() == pytest.approx(entropy)
    assert loss.total.item() == pytest.approx(policy + 0.5 * value - 0.1 * entropy)
    assert loss.metrics["approx_kl"].item() == pytest.approx(2 - 1 - math.log(2))
    assert loss.metrics["clipfrac"].item() == 1.0


def test_value_clipping_takes_the_worse_of_clipped_and_plain() -> None:
    loss = ppo(clip_value=0.2).loss(fair_coin([0.0, 3.0]), two_steps(0.5))
    # Values 0 and 3 were 0.5: clipped to 0.3 and 0.7. Errors against 1 and 0: plain 1, 9; clipped 0.49, 0.49.
    assert loss.metrics["value_loss"].item() == pytest.approx(0.5 * (1 + 9) / 2)
    loss = ppo(clip_value=0.2).loss(fair_coin([1.0, 0.0]), two_steps(0.5))
    # Plain errors 0, 0; clipped to 0.7 and 0.3: 0.09, 0.09.
    assert loss.metrics["value_loss"].item() == pytest.approx(0.5 * 0.09)


def test_no_gradient_beyond_the_clip() -> None:
    both_gain = two_steps(0.25, advantage=(2.0, 1.0))  # and both are beyond the clip
    gradients = ppo().loss(fair_coin([0.0, 0.0]), both_gain).gradients
    assert gradients is not None
    assert torch.all(gradients["policy"] == 0)


@pytest.mark.parametrize("kind", ACTIONS)
@pytest.mark.parametrize("hp", [{}, {"entropy_coef": 0.3}, {"clip_value": 0.2, "value_coef": 0.7}])
def test_derivatives_beside_the_terms_are_those_of_the_papers_objective(kind: str, hp: dict[str, float]) -> None:
    action, count = ACTIONS[kind], 200
    algo = PPO(Config(env="test", algorithm=PPOConfig(**hp)), EnvSpec("test", (BOX,), action))
    torch.manual_seed(0)
    out, actions = at_random(algo.heads(), action, count)
    logp, entropy = logp_entropy(action, out, actions)
    advantage, returns, old = torch.randn(3, count, dtype=torch.float64)
    old_logp = logp.detach() + 0.3 * torch.randn(count, dtype=torch.float64)  # ratios on both sides of the clip

    ratio = (logp - old_logp).exp()
    policy = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    value = out["value"].squeeze(1)
    squared = (value - returns).square()
    if algo.hp.clip_value is not None:
        near = old + (value - old).clamp(-algo.hp.clip_value, algo.hp.clip_value)
        squared = torch.maximum(squared, (near - returns).square())
    total = policy + algo.hp.value_coef * 0.5 * squared.mean() - algo.hp.entropy_coef * entropy.mean()
    expected = torch.autograd.grad(total, list(out.values()))

    batch = {"obs": torch.zeros(count, 1), "action": actions, "logp": old_logp, "advantage": advantage}
    batch |= {"returns": returns, "value": old}
    batch["floor"] = torch.where(advantage > 0, -math.inf, 0.8)
    batch["ceiling"] = torch.where(advantage > 0, 1.2, math.inf)
    loss = algo.loss(FixedNet(**{k: v.detach() for k, v in out.items()}), batch)
    assert loss.total.item() == pytest.approx(total.item())
    assert loss.gradients is not None
    for name, gradient in zip(out, expected, strict=True):
        torch.testing.assert_close(loss.gradients[name], gradient)


def test_target_kl_stops_the_epochs() -> None:
    algo = ppo(epochs=10, minibatch_size=2, target_kl=0.01)
    count = 0
    for part in algo.minibatches(two_steps(0.25), np.random.default_rng(0)):
        algo.loss(fair_coin([0.0, 0.0]), part)
        count += 1
    assert count == 1
    near = two_steps(0.499)
    assert (
        sum(algo.loss(fair_coin([0, 0]), x) is not None for x in algo.minibatches(near, np.random.default_rng(0))) == 10
    )


@pytest.mark.parametrize(("rows", "size", "parts"), [(1000, 256, 4), (10, 256, 1), (512, 256, 2), (1023, 256, 4)])
def test_every_row_is_used_once_per_epoch(rows: int, size: int, parts: int) -> None:
    batch = {"a": torch.arange(rows), "b": torch.arange(rows) * 2}
    seen = list(shuffled(batch, size, np.random.default_rng(0)))
    assert len(seen) == parts
    assert torch.equal(torch.cat([p["a"] for p in seen]).sort().values, batch["a"])
    assert all(torch.equal(p["b"], p["a"] * 2) for p in seen)
    assert max(len(p["a"]) for p in seen) - min(len(p["a"]) for p in seen) <= 1


def test_learning_rate_annealing() -> None:
    algo = ppo(learning_rate=0.1, anneal_learning_rate=True)
    assert algo.schedules(0.0)["learning_rate"] == pytest.approx(0.1)
    assert algo.schedules(0.75)["learning_rate"] == pytest.approx(0.025)
    assert ppo(learning_rate=0.1).schedules(0.75)["learning_rate"] == pytest.approx(0.1)


def test_a_cosine_is_slow_at_both_ends_and_true_is_linear() -> None:
    config = resolve({"env": "CartPole-v1", "algorithm": {"anneal_learning_rate": True}})[0]
    assert config.algorithm.anneal_learning_rate == "linear"  # as runs have it that were made before
    shares = [annealed("cosine", progress) for progress in (0.0, 0.25, 0.5, 1.0)]
    assert shares == pytest.approx([1.0, 0.5 + 0.5 * math.sqrt(0.5), 0.5, 0.0])
    with pytest.raises(UsageError, match="anneal_learning_rate = 'cosin' is not one of: no, linear, cosine"):
        resolve({"env": "CartPole-v1", "algorithm": {"anneal_learning_rate": "cosin"}})


def test_the_clip_is_annealed_and_a_constant_one_is_no_schedule() -> None:
    assert "clip" not in ppo().schedules(0.5)
    algo = ppo(clip=0.4, anneal_clip="linear")
    assert algo.schedules(0.75)["clip"] == pytest.approx(0.1)
    algo.round.scheduled = algo.schedules(0.75)
    assert algo._clip == pytest.approx(0.1)


QUICK = {"algorithm.learning_rate": 3e-3, "sampling.fragment": 32, "eval.every": 1000, "eval.final_episodes": 0}


@pytest.mark.parametrize(
    ("env", "target", "steps", "more"),
    [
        ("Identity", 1.0, 20_000, {}),
        ("MultiIdentity", 1.0, 20_000, {}),
        ("DictIdentity", 1.0, 20_000, {}),
        ("IdentityBox", -0.01, 40_000, {}),
        ("Corridor", 0.93, 20_000, {}),
    ],
)
def test_tiny_environments_are_learned(
    env: str, target: float, steps: int, more: dict[str, Any], tmp_path: Path
) -> None:
    solve(f"raynforce.envs.tiny:{env}", "ppo", tmp_path / "run", steps=steps, target=target, settings=QUICK | more)


class OtherUnits(IdentityBox):
    """`IdentityBox` in thousands, far from zero: the best return is 0, that of standing still about -1,300."""

    def __init__(self) -> None:
        super().__init__(length=4)
        self.observation_space = spaces.Box(-np.inf, np.inf, (1,))

    def draw(self) -> np.ndarray:
        self.truth = super().draw()
        return 5000 + 1000 * self.truth

    def score(self, action: np.ndarray) -> float:
        return -1000 * float(np.sum((action - self.truth) ** 2))


def test_the_defaults_learn_in_any_units(tmp_path: Path) -> None:
    settings = {"eval.every": 2_000, "eval.final_episodes": 0}
    solve(f"{__name__}:OtherUnits", "ppo", tmp_path / "run", steps=20_000, target=-100, settings=settings)


def test_values_are_bootstrapped_through_time_limits(tmp_path: Path) -> None:
    """Reward 1 for ever, cut every 10 steps: the value is 1 / (1 - gamma), not the return of ten steps."""
    settings = QUICK | {"algorithm.gamma": 0.9, "algorithm.gae_lambda": 0.9, "algorithm.learning_rate": 1e-2}
    settings |= {"algorithm.minibatch_size": 256}
    settings |= {"learner.scale_rewards": False, "network.normalize_obs": False}  # values in the reward's own unit
    run = raynforce.train(
        "raynforce.envs.tiny:Endless", "ppo", steps=40_000, settings=settings, out=tmp_path / "run", progress="quiet"
    )
    policy = raynforce.load(run.path, "last")
    net = NumpyNet(policy.spec.network)
    net.load(policy.version.params)
    leaf = policy.spec.env.obs[0]
    values = net({leaf.path: np.ones((1, *leaf.shape), leaf.dtype)})["value"].ravel().tolist()
    assert values == pytest.approx([10.0], rel=0.1)


def test_settings_reach_the_algorithm() -> None:
    assert ppo(clip=0.3).hp.clip == 0.3


def random_fragment(rng: np.random.Generator) -> Fragment:
    shape = (16, 4)
    columns = {
        "obs": rng.normal(size=(17, 4, 1)).astype(np.float32),
        "action": rng.integers(2, size=shape),
        "reward": rng.normal(size=shape).astype(np.float32),
        "terminated": rng.random(shape) < 0.1,
        "truncated": np.zeros(shape, bool),
        "valid": np.ones(shape, bool),
        "logp": np.full(shape, math.log(0.5), np.float32),
        "final/index": np.zeros(0, np.int64),
        "final/obs": np.zeros((0, 1), np.float32),
    }
    return Fragment(columns, version=0, sampler=0, sequence=0)


def test_the_one_sided_clip_is_the_papers_minimum() -> None:
    algo, rng = ppo(clip=0.2), np.random.default_rng(0)
    fragment = random_fragment(rng)
    net = SpecNet(algo.network(), algo.network().initial(rng), torch.device("cpu"))
    batch = algo.prepare(net, [fragment])
    ratio = rng.uniform(0.5, 1.5, size=64).astype(np.float32)
    advantage = batch["advantage"]
    paper = np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage)
    assert np.clip(ratio, batch["floor"], batch["ceiling"]) * advantage == pytest.approx(paper)
    assert advantage.mean() == pytest.approx(0, abs=1e-5)
    assert advantage.std() == pytest.approx(1, abs=1e-3)


def test_fresh_fragments_get_gae_and_stale_ones_vtrace() -> None:
    algo, rng = ppo(gamma=0.9, gae_lambda=0.8, normalize_advantage=False), np.random.default_rng(0)
    fragment = random_fragment(rng)
    start = algo.network().initial(rng)
    moved = start + rng.normal(0, 0.3, start.shape).astype(np.float32)
    net = SpecNet(algo.network(), moved, torch.device("cpu"))
    out = net.predict({"obs": fragment["obs"].reshape(-1, 1)})
    value = out["value"].reshape(17, 4)
    logs = out["policy"][:64] - np.log(np.exp(out["policy"][:64]).sum(1, keepdims=True))
    log_ratio = logs[np.arange(64), fragment["action"].ravel()].reshape(16, 4) - fragment["logp"]
    assert np.abs(log_ratio).max() > 0.1
    inputs = (fragment["reward"], value, fragment["terminated"], fragment["truncated"], value[1:])

    algo.round = LearningRound(version=0)
    fresh = algo.prepare(net, [fragment])
    for name, expected in zip(("advantage", "returns"), gae(Steps(*inputs), 0.9, 0.8), strict=True):
        np.testing.assert_array_equal(fresh[name], expected.ravel())  # to the last bit
    net._own.layers["policy"][0] = None  # type: ignore[call-overload]  # only stale ones need it
    np.testing.assert_array_equal(algo.prepare(net, [fragment])["value"], fresh["value"])
    net = SpecNet(algo.network(), moved, torch.device("cpu"))

    algo.round = LearningRound(version=3)
    stale = algo.prepare(net, [fragment])
    for name, expected in zip(("advantage", "returns"), vtrace(Steps(*inputs), log_ratio, 0.9, 0.8), strict=True):
        np.testing.assert_allclose(stale[name], expected.ravel(), atol=1e-5)
    np.testing.assert_array_equal(stale["logp"], fragment["logp"].ravel())  # the ratio is to the policy that acted
    np.testing.assert_array_equal(stale["value"], fresh["value"])
    assert np.abs(stale["advantage"] - fresh["advantage"]).max() > 0.1
