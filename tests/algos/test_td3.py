"""TD3: its derivatives are autograd's, its delay and noises are the paper's, tiny environments are learned."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from critic_nets import ROWS, batch, gradient, made
from running import solve

import raynforce
from raynforce.algos.base import LearningRound
from raynforce.roles.learner import Learner


def autograds(algo: Any, net: Any, columns: dict[str, torch.Tensor], *, improves: bool) -> torch.Tensor:
    torch.manual_seed(3)
    obs, later = {"obs": columns["obs"]}, {"obs": columns["next_obs"]}
    with torch.no_grad():
        action = net(later, params=algo.target)["policy"]
        noise = (0.2 * torch.randn(ROWS, 2)).clamp(-0.3, 0.3)
        judged = net(later, params=algo.target, action=(action + noise).clamp(-1, 1))
        goal = columns["reward"] + columns["discount"] * torch.minimum(judged["q1"], judged["q2"]).squeeze(1)
    out = net(obs, action=columns["action"].clamp(-1, 1))
    errors = [(out[name].squeeze(1) - goal).square() * columns["weight"] for name in ("q1", "q2")]
    total = 0.5 * (errors[0] + errors[1]).mean()
    if improves:
        total = total - net(obs, params=net.flat.detach().clone(), action=out["policy"])["q1"].mean()
    found: torch.Tensor = net.gradient(total)
    return found


@pytest.mark.parametrize("activation", ["relu", "silu"])  # silu's backward pass is autograd's
@pytest.mark.parametrize("updates", [0, 1])
def test_the_derivatives_are_those_of_the_losses(updates: int, activation: str) -> None:
    algo, net = made("td3", network={"activation": activation}, target_noise_clip=0.3)
    algo.round = LearningRound(updates=updates, scheduled=algo.schedules(0.0))
    columns = batch(3 * torch.randn(ROWS, 2))  # actions are recorded before they are clipped
    loss, found = gradient(algo, net, columns)
    expected = autograds(algo, net, columns, improves=updates == 1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert found[net.parts["policy.0.weight"]].any() == (updates == 1)
    assert loss.frozen == (() if updates else ("actor",))


def test_actor_and_target_wait_for_the_critics() -> None:
    algo, net = made("td3", policy_delay=3, target_tau=0.5)
    before, followed = algo.target.clone(), []
    for count in range(1, 7):
        algo.round = LearningRound(updates=count)
        algo.after_update(net, {}, raynforce.Loss(torch.zeros(()), {}))
        followed.append(not torch.equal(before, algo.target))
        before = algo.target.clone()
    assert followed == [False, False, True, False, False, True]


def test_a_frozen_actor_does_not_move_by_its_momentum() -> None:
    algo, _ = made("td3", batch_size=16, policy_delay=2)
    learner = Learner(replace(algo.config, runtime="inline", topology="sync"), algo.env)
    net, columns = learner._net, {k: v[:16] for k, v in batch(torch.zeros(ROWS, 2)).items()}
    part, moved = net.parts["policy.0.weight"], []
    learner._begin_round()
    for _ in range(6):
        before = net.flat[part].clone()
        learner._step({}, learner._algo.loss(net, columns))
        moved.append(not torch.equal(before, net.flat[part]))
    assert moved == [False, True] * 3


def test_it_explores_widely_until_it_learns() -> None:
    algo, net = made("td3", exploration_noise=0.3)
    fresh = algo.network().initial(np.random.default_rng(0))
    assert fresh[net.parts["log_std"]].tolist() == [0.0, 0.0]
    algo.after_update(net, {}, raynforce.Loss(torch.zeros(()), {}))
    assert net.flat[net.parts["log_std"]].tolist() == pytest.approx([math.log(0.3)] * 2)


QUICK = {
    "eval.every": 500,
    "eval.final_episodes": 0,
    "algorithm.learning_starts": 200,
    "algorithm.learning_rate": 2e-3,
    "algorithm.batch_size": 64,
    "algorithm.samples_per_insert": 32,
    "network.hidden": [32, 32],
}


@pytest.mark.parametrize("more", [{}, {"algorithm.prioritized": True, "algorithm.n_step": 3}])
def test_tiny_environments_are_learned(more: dict[str, Any], tmp_path: Path) -> None:
    env = "raynforce.envs.tiny:IdentityBox"
    solve(env, "td3", tmp_path / "run", steps=8_000, target=-0.1, settings=QUICK | more)
