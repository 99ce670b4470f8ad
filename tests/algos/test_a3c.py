"""A3C: the loss against numbers worked out by hand and against autograd, n-step returns, tiny environments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nets import ACTIONS, BOX, FixedNet, at_random
from running import solve

from raynforce.algos.a3c import A3C, A3CConfig
from raynforce.config import Config
from raynforce.experience.fragment import Fragment
from raynforce.policies.torch_distributions import logp_entropy
from raynforce.spaces import EnvSpec


def a3c(kind: str = "discrete", **hp: Any) -> A3C:
    return A3C(Config(env="test", algorithm=A3CConfig(**hp)), EnvSpec("test", (BOX,), ACTIONS[kind]))


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_policy_gradient_value_loss_and_entropy_by_hand() -> None:
    batch = {
        "obs": torch.zeros(2, 1),
        "action": torch.tensor([0, 1]),
        "advantage": doubles(2.0, -1.0),
        "returns": doubles(1.0, 0.0),
    }
    net = FixedNet(policy=torch.zeros(2, 3, dtype=torch.float64), value=doubles(0.0, 3.0)[:, None])
    loss = a3c(value_coef=0.5, entropy_coef=0.1).loss(net, batch)
    policy = -(2.0 - 1.0) * math.log(1 / 3) / 2
    value = 0.5 * (1.0**2 + 3.0**2) / 2
    assert loss.metrics["policy_loss"].item() == pytest.approx(policy)
    assert loss.metrics["value_loss"].item() == pytest.approx(value)
    assert loss.metrics["entropy"].item() == pytest.approx(math.log(3))
    assert loss.total.item() == pytest.approx(policy + 0.5 * value - 0.1 * math.log(3))


@pytest.mark.parametrize("kind", ACTIONS)
@pytest.mark.parametrize("hp", [{}, {"entropy_coef": 0.0}, {"value_coef": 0.7, "entropy_coef": 0.3}])
def test_derivatives_beside_the_terms_are_those_of_the_objective(kind: str, hp: dict[str, float]) -> None:
    algo, action, count = a3c(kind, **hp), ACTIONS[kind], 200
    torch.manual_seed(0)
    out, actions = at_random(algo.heads(), action, count)
    logp, entropy = logp_entropy(action, out, actions)
    advantage, returns = torch.randn(2, count, dtype=torch.float64)

    value = 0.5 * (out["value"].squeeze(1) - returns).square().mean()
    total = algo.hp.value_coef * value - (logp * advantage).mean() - algo.hp.entropy_coef * entropy.mean()
    expected = torch.autograd.grad(total, list(out.values()))

    batch = {"obs": torch.zeros(count, 1), "action": actions, "advantage": advantage, "returns": returns}
    loss = algo.loss(FixedNet(**{k: v.detach() for k, v in out.items()}), batch)
    assert loss.total.item() == pytest.approx(total.item())
    assert loss.gradients is not None
    for name, gradient in zip(out, expected, strict=True):
        torch.testing.assert_close(loss.gradients[name], gradient)


class Ten:
    """A network that thinks that everything is worth 10."""

    def predict(self, obs: dict[str, np.ndarray], only: Sequence[str] = ()) -> dict[str, np.ndarray]:
        return {"value": np.full((len(obs["obs"]), 1), 10.0, np.float32)}


def test_returns_have_as_many_steps_as_a_fragment_has() -> None:
    """Three steps of reward 1, then the value of where they end; the second lane terminates in its second step."""
    columns = {
        "obs": np.zeros((4, 2, 1), np.float32),
        "action": np.zeros((3, 2), np.int64),
        "reward": np.ones((3, 2), np.float32),
        "terminated": np.array([[False, False], [False, True], [False, False]]),
        "truncated": np.zeros((3, 2), bool),
        "valid": np.ones((3, 2), bool),
        "final/index": np.array([3]),
        "final/obs": np.zeros((1, 1), np.float32),
    }
    algo: Any = a3c(gamma=0.5)
    batch = algo.prepare(Ten(), [Fragment(columns, 0, 0, 0)])
    expected = [[1.75 + 10 / 8, 1.5], [1.5 + 10 / 4, 1.0], [1.0 + 10 / 2, 1.0 + 10 / 2]]
    np.testing.assert_allclose(batch["returns"].reshape(3, 2), expected)
    np.testing.assert_allclose(batch["advantage"], batch["returns"] - 10)


@pytest.mark.parametrize("topology", ["sync", "shared-agent"])
@pytest.mark.parametrize(
    ("env", "target"), [("Identity", 1.0), ("MultiIdentity", 1.0), ("IdentityBox", -0.02), ("Corridor", 0.93)]
)
def test_tiny_environments_are_learned(env: str, target: float, topology: str, tmp_path: Path) -> None:
    settings = {"eval.every": 1000, "eval.final_episodes": 0, "sampling.samplers": 2, "algorithm.learning_rate": 5e-3}
    how: dict[str, Any] = {"runtime": "inline", "topology": topology, "settings": settings}
    solve(f"raynforce.envs.tiny:{env}", "a3c", tmp_path / "run", steps=60_000, target=target, **how)
