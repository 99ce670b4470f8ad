"""SAC: its derivatives are autograd's, what it cannot take is refused, tiny environments and Pendulum are learned."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from critic_nets import ENV, ROWS, batch, gradient, made
from marks import slow
from nets import ACTIONS
from running import solve

import raynforce
from raynforce.algos.sac import LOG_STD_RANGE
from raynforce.errors import UsageError
from raynforce.policies.torch_distributions import squashed_drawn, squashed_sample

CHOICES = replace(ENV, action=ACTIONS["discrete"])


def autograds(algo: Any, net: Any, columns: dict[str, torch.Tensor]) -> torch.Tensor:
    """The gradient of the paper's three losses, by autograd through calls of the network."""
    torch.manual_seed(3)
    obs, later = {"obs": columns["obs"]}, {"obs": columns["next_obs"]}
    with torch.no_grad():
        alpha = net(obs)["log_alpha"].exp()
        policy = net(later)["policy"]
        action, logp = squashed_sample(policy, torch.randn(ROWS, 2), LOG_STD_RANGE)
        judged = net(later, params=algo.target, action=action)
        soft = torch.minimum(judged["q1"], judged["q2"]).squeeze(1) - alpha * logp
        goal = columns["reward"] + columns["discount"] * soft
    out = net(obs, action=columns["action"])
    errors = [(out[name].squeeze(1) - goal).square() * columns["weight"] for name in ("q1", "q2")]
    critics = 0.5 * (errors[0] + errors[1]).mean()
    action, logp = squashed_sample(out["policy"], torch.randn(ROWS, 2), LOG_STD_RANGE)
    judged = net(obs, params=net.flat.detach().clone(), action=action)
    actor = (alpha * logp - torch.minimum(judged["q1"], judged["q2"]).squeeze(1)).mean()
    temperature = -(out["log_alpha"] * (logp.detach() - 2.0)).mean()
    found: torch.Tensor = net.gradient(critics + actor + temperature)
    return found


def of_choices(algo: Any, net: Any, columns: dict[str, torch.Tensor]) -> torch.Tensor:
    obs, later = {"obs": columns["obs"]}, {"obs": columns["next_obs"]}
    with torch.no_grad():
        alpha = net(obs)["log_alpha"].exp()
        logs = net(later)["policy"].log_softmax(1)
        judged = net(later, params=algo.target)
        soft = (logs.exp() * (torch.minimum(judged["q1"], judged["q2"]) - alpha * logs)).sum(1)
        goal = columns["reward"] + columns["discount"] * soft
    out = net(obs)
    taken = [out[name].gather(1, columns["action"][:, None]).squeeze(1) for name in ("q1", "q2")]
    critics = 0.5 * sum(((value - goal).square() * columns["weight"]).mean() for value in taken)
    logs = out["policy"].log_softmax(1)
    least = torch.minimum(out["q1"], out["q2"]).detach()
    actor = (logs.exp() * (alpha * logs - least)).sum(1).mean()
    entropy = -(logs.exp() * logs).sum(1).detach()
    temperature = (out["log_alpha"] * (entropy - 0.89 * math.log(3))).mean()
    found: torch.Tensor = net.gradient(critics + actor + temperature)
    return found


@pytest.mark.parametrize("activation", ["relu", "tanh", "silu"])  # silu's backward pass is autograd's
def test_the_derivatives_are_those_of_the_losses(activation: str) -> None:
    algo, net = made("sac", network={"activation": activation})
    columns = batch(torch.rand(ROWS, 2) * 2 - 1)
    loss, found = gradient(algo, net, columns)
    expected = autograds(algo, net, columns)
    for name, part in net.parts.items():
        assert found[part].any(), name
        torch.testing.assert_close(found[part], expected[part], rtol=1e-4, atol=1e-6)
    assert loss.per_sample is not None
    assert loss.per_sample.shape == (ROWS,)


def test_those_of_choices_too() -> None:
    algo, net = made("sac", env=CHOICES, discrete=True)
    columns = batch(torch.randint(3, (ROWS,)))
    _, found = gradient(algo, net, columns)
    torch.testing.assert_close(found, of_choices(algo, net, columns).clone(), rtol=1e-4, atol=1e-6)


def test_drawn_actions_have_the_derivatives_of_sampled_ones() -> None:
    torch.manual_seed(0)
    policy = (4 * torch.randn(30, 6)).requires_grad_()  # some deviations are beyond the range
    noise, d_action = torch.randn(30, 3), torch.randn(30, 3)
    action, logp = squashed_sample(policy, noise, (-2.0, 1.0))
    (expected,) = torch.autograd.grad((action * d_action).sum() + 0.3 * logp.sum(), policy)
    drawn = squashed_drawn(policy.detach(), noise, (-2.0, 1.0))
    torch.testing.assert_close(drawn.action, action.detach())
    torch.testing.assert_close(drawn.logp, logp.detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(drawn.backward(d_action, torch.tensor(0.3)), expected, rtol=1e-4, atol=1e-5)


def test_a_fixed_temperature_stays() -> None:
    algo, net = made("sac", initial_alpha=0.2, learn_alpha=False)
    _, found = gradient(algo, net, batch(torch.zeros(ROWS, 2)))
    assert not found[net.parts["log_alpha"]].any()


def test_the_temperature_rises_while_entropy_is_too_low() -> None:
    low, net = made("sac", target_entropy=100.0)
    high, _ = made("sac", target_entropy=-100.0)
    signs = [gradient(algo, net, batch(torch.zeros(ROWS, 2)))[1][net.parts["log_alpha"]] for algo in (low, high)]
    assert signs[0] < 0 < signs[1]  # of a gradient that is descended


def test_the_target_follows_slowly() -> None:
    algo, net = made("sac", target_tau=0.25)
    algo.target.zero_()
    algo.after_update(net, {}, raynforce.Loss(torch.zeros(()), {}))
    torch.testing.assert_close(algo.target, 0.25 * net.flat)


def test_only_what_differs_is_a_group() -> None:
    """One group is one kernel."""
    assert not made("sac")[0].groups()
    (group,) = made("sac", actor_learning_rate=1e-4)[0].groups().values()
    assert (group.members, group.learning_rate) == ("policy", 1e-4)
    assert made("sac", max_grad_norm=1.0)[0].groups()["actor"].max_grad_norm == 1.0


BOUNDS = replace(ACTIONS["box"], low=(-math.inf, -1.0))
BAD = {
    "discrete": (CHOICES, "sac needs continuous actions, and those of test are discrete: use dqn, or sac with --set"),
    "several": (replace(ENV, action=ACTIONS["multidiscrete"]), "those of test are several choices: use ppo"),
    "unbounded": (replace(ENV, action=BOUNDS), "needs bounded actions, and those of test reach from -inf to 1: give"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("algo", ["sac", "td3"])
def test_what_it_cannot_take_is_refused_in_one_line(algo: str, case: str) -> None:
    env, line = BAD[case]
    if algo == "td3":
        line = line.replace("sac needs", "td3 needs").replace(", or sac with --set", "")
    with pytest.raises(UsageError, match=line) as caught:
        made(algo, env=env)
    assert "\n" not in str(caught.value)


def test_the_discrete_option_on_numbers_is_refused() -> None:
    refused = r"algorithm\.discrete = true is for one discrete choice, and those of test are "
    with pytest.raises(UsageError, match=f"{refused}continuous: leave it out"):
        made("sac", discrete=True)
    with pytest.raises(UsageError, match=f"{refused}several choices: use ppo"):
        made("sac", discrete=True, env=replace(ENV, action=ACTIONS["multidiscrete"]))


QUICK = {
    "eval.every": 500,
    "eval.final_episodes": 0,
    "algorithm.learning_starts": 200,
    "algorithm.learning_rate": 2e-3,
    "algorithm.batch_size": 64,
    "algorithm.samples_per_insert": 32,
    "network.hidden": [32, 32],
}


@pytest.mark.parametrize(
    ("env", "target", "more"),
    [
        ("IdentityBox", -0.1, {}),
        ("IdentityBox", -0.1, {"algorithm.prioritized": True, "algorithm.n_step": 3}),
        ("Corridor", 0.93, {"algorithm.discrete": True, "algorithm.n_step": 3, "algorithm.target_entropy": 0.2}),
    ],
)
def test_tiny_environments_are_learned(env: str, target: float, more: dict[str, Any], tmp_path: Path) -> None:
    solve(f"raynforce.envs.tiny:{env}", "sac", tmp_path / "run", steps=8_000, target=target, settings=QUICK | more)


@pytest.mark.parametrize(
    ("algo", "seed"), [("sac", 0), *(pytest.param(a, s, marks=slow) for a in ("sac", "td3") for s in (1, 2))]
)
def test_the_preset_learns_pendulum(algo: str, seed: int, tmp_path: Path) -> None:
    settings = {"eval.every": 500, "eval.episodes": 10, "eval.final_episodes": 20}
    run = solve("Pendulum-v1", algo, tmp_path / "run", steps=20_000, target=-180, seed=seed, settings=settings)
    assert run.result.eval_return is not None
    assert run.result.eval_return > -250
    policy = raynforce.load(run.path)
    obs = np.array([1.0, 0.0, 0.1], np.float32)
    out = policy._actor.outputs({"obs": obs[None]})["policy"]
    squashed = np.tanh(out[0, :1]) if algo == "sac" else out[0]
    np.testing.assert_allclose(policy.act(obs), 2 * squashed, rtol=1e-6)
