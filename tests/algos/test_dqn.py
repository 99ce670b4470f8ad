"""DQN: targets, loss, epsilon and target updates against numbers worked out by hand; tiny environments learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nets import BOX, FixedNet
from running import solve

import raynforce
from raynforce.algos.base import LearningRound
from raynforce.algos.dqn import DQN, DQNConfig
from raynforce.config import Config, SamplingConfig
from raynforce.errors import UsageError
from raynforce.experience.fragment import Fragment
from raynforce.spaces import ActionSpec, EnvSpec

ENV = EnvSpec("test", (BOX,), ActionSpec("discrete", (), "int64", sizes=(3,), start=(0,)))


class TableNet:
    """Action values by a table over the observation 0, 1, …; `params` is such a table too."""

    def __init__(self, table: list[list[float]]) -> None:
        self.flat = torch.tensor(table)

    def __call__(self, obs: Any, params: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        table = self.flat if params is None else params
        return {"q": table[obs["obs"][:, 0].long()]}

    def record(self, obs: Any) -> dict[str, torch.Tensor]:
        return self(obs)


def dqn(lanes: int = 2, fragment: int = 4, **hp: Any) -> DQN:
    sampling = SamplingConfig(envs=lanes, fragment=fragment)
    return DQN(Config(env="test", algorithm=DQNConfig(**hp), sampling=sampling), ENV)


def batch(**columns: Any) -> dict[str, torch.Tensor]:
    return {k: torch.as_tensor(v) for k, v in columns.items()}


ONE = batch(obs=[[0.0]], action=[1], reward=[1.0], discount=[0.9], next_obs=[[1.0]], weight=[1.0], index=[0])


@pytest.mark.parametrize(("double", "future"), [(True, 5.0), (False, 9.0)])
def test_target_uses_the_online_choice_only_if_double(double: bool, future: float) -> None:
    algo = dqn(double=double)
    net = TableNet([[0.0, 2.0, 0.0], [7.0, 1.0, 2.0]])  # online prefers action 0 in the next state
    algo.target = torch.tensor([[0.0, 0.0, 0.0], [5.0, 9.0, 0.0]])  # the target prefers action 1
    loss = algo.loss(net, ONE)
    error = abs(2.0 - (1.0 + 0.9 * future))
    assert loss.per_sample is not None
    assert loss.per_sample.item() == pytest.approx(error)
    assert loss.total.item() == pytest.approx(error - 0.5)  # Huber beyond 1


def test_huber_is_quadratic_near_zero_and_weights_count() -> None:
    algo = dqn()
    net = TableNet([[0.0, 1.5, 0.0], [0.0, 0.0, 0.0]])
    algo.target = torch.zeros(2, 3)
    twice = {k: v.repeat(2, *[1] * (v.ndim - 1)) for k, v in ONE.items()} | {"weight": torch.tensor([1.0, 0.5])}
    assert algo.loss(net, twice).total.item() == pytest.approx((0.5 * 0.25 + 0.5 * 0.5 * 0.25) / 2)


def test_terminal_states_have_no_future() -> None:
    algo = dqn()
    net = TableNet([[0.0, 1.0, 0.0], [7.0, 7.0, 7.0]])
    algo.target = torch.full((2, 3), 7.0)
    assert algo.loss(net, ONE | {"discount": torch.zeros(1)}).total.item() == 0.0


def test_dueling_values_are_value_plus_centred_advantage() -> None:
    out = {"value": torch.tensor([[10.0]]), "advantage": torch.tensor([[1.0, 2.0, 6.0]])}
    assert dqn(dueling=True)._values(out).tolist() == [[8.0, 9.0, 13.0]]


@pytest.mark.parametrize("dueling", [False, True])
def test_the_derivative_is_that_of_the_huber_loss(dueling: bool) -> None:
    algo = dqn(dueling=dueling, huber_delta=0.7)
    torch.manual_seed(0)
    out = {k: torch.randn(50, n, requires_grad=True) for k, n in algo.heads().items()}
    net = FixedNet(**{k: v.detach() for k, v in out.items()})
    algo.target = torch.zeros(1)
    columns = batch(
        action=torch.randint(3, (50,)), reward=torch.randn(50), discount=torch.rand(50), weight=torch.rand(50)
    )
    columns |= {"obs": torch.zeros(50, 1), "next_obs": torch.zeros(50, 1)}
    loss = algo.loss(net, columns)

    values = algo._values(out)
    best = values.max(1).values.detach()
    value = values.gather(1, columns["action"][:, None])[:, 0]
    goal = columns["reward"] + columns["discount"] * best
    huber = torch.nn.functional.huber_loss(value, goal, reduction="none", delta=0.7)
    total = (columns["weight"] * huber).mean()
    assert loss.total.item() == pytest.approx(total.item(), rel=1e-5)
    assert loss.gradients is not None
    for name, gradient in zip(out, torch.autograd.grad(total, list(out.values())), strict=True):
        torch.testing.assert_close(loss.gradients[name], gradient)


def test_epsilon_falls_linearly_then_stays() -> None:
    algo = dqn(epsilon_start=1.0, epsilon_end=0.1, epsilon_fraction=0.5)
    for progress, epsilon in ((0.0, 1.0), (0.25, 0.55), (0.5, 0.1), (1.0, 0.1)):
        assert algo.schedules(progress)["epsilon"] == pytest.approx(epsilon)
    assert dqn(epsilon_fraction=0.0, epsilon_end=0.2).schedules(0.0)["epsilon"] == pytest.approx(0.2)


def test_hard_and_soft_target_updates() -> None:
    loss = raynforce.Loss(torch.zeros(()), {})
    net = TableNet([[1.0]])
    hard = dqn(target_every=3)
    hard.target = torch.zeros(1, 1)
    seen = []
    for count in range(1, 5):
        hard.round = LearningRound(updates=count)
        hard.after_update(net, {}, loss)
        seen.append(hard.target.item())
    assert seen == [0.0, 0.0, 1.0, 1.0]
    soft = dqn(target_update="soft", target_tau=0.5)
    soft.target = torch.zeros(1, 1)
    soft.round = LearningRound(updates=1)
    soft.after_update(net, {}, loss)
    assert soft.target.item() == pytest.approx(0.5)
    soft.round = LearningRound(updates=3)  # two were made elsewhere
    soft.after_update(net, {}, loss)
    assert soft.target.item() == pytest.approx(0.875)


def fragment(sequence: int, steps: int = 4, lanes: int = 2) -> Fragment:
    shape = (steps, lanes)
    columns = {
        "obs": np.zeros((steps + 1, lanes, 1), np.float32),
        "action": np.zeros(shape, np.int64),
        "reward": np.ones(shape, np.float32),
        "valid": np.ones(shape, bool),
        "terminated": np.zeros(shape, bool),
        "truncated": np.zeros(shape, bool),
        "final/index": np.zeros(0, np.int64),
        "final/obs": np.zeros((0, 1), np.float32),
    }
    return Fragment(columns, 0, 0, sequence)


def test_samples_per_insert_is_kept_exactly() -> None:
    algo = dqn(samples_per_insert=3.0, batch_size=10, learning_starts=16, buffer_size=1000)
    net = TableNet([[0.0]])
    algo.begin(net)
    algo.round = LearningRound(scheduled=algo.schedules(0.0))
    updates = 0
    for sequence in range(50):
        algo.prepare(net, [fragment(sequence)])
        for _ in algo.minibatches({}, np.random.default_rng(0)):
            algo.after_update(net, {}, raynforce.Loss(torch.zeros(()), {}))
            updates += 1
    assert updates == pytest.approx((50 * 8 - 16) * 3.0 / 10, abs=1)


def test_its_state_loads_into_another_number_of_lanes() -> None:
    net = TableNet([[0.0]])
    one, two = dqn(buffer_size=1000), dqn(lanes=3, buffer_size=500)
    for algo in (one, two):
        algo.begin(net)
    for sequence in range(40):
        one.prepare(net, [fragment(sequence)])
    one.target = torch.tensor([[5.0]])
    two.load(one.state())
    assert two.replay.resident == 40 * 4 * 2
    assert (two.target.item(), two.limiter.state()) == (5.0, one.limiter.state())
    two.prepare(net, [fragment(0, lanes=3)])
    assert two.replay.resident == 40 * 4 * 2 + 12


def test_continuous_actions_are_refused() -> None:
    env = EnvSpec("Arm-v0", (BOX,), ActionSpec("box", (2,), "float32", low=(-1.0, -1.0), high=(1.0, 1.0)))
    with pytest.raises(UsageError, match="dqn needs discrete actions, and those of Arm-v0 are continuous"):
        DQN(Config(env="Arm-v0", algorithm=DQNConfig()), env)


def test_a_buffer_that_cannot_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"GB.*algorithm\.buffer_size"):
        raynforce.train("CartPole-v1", "dqn", out=tmp_path / "run", settings={"algorithm.buffer_size": 1e11})
    assert not (tmp_path / "run").exists()


QUICK = {
    "eval.every": 1000,
    "eval.final_episodes": 0,
    "algorithm.learning_starts": 200,
    "algorithm.learning_rate": 2e-3,
}


@pytest.mark.parametrize(
    ("env", "target", "more"),
    [
        ("Identity", 1.0, {}),
        ("DictIdentity", 1.0, {"algorithm.prioritized": True}),
        ("Corridor", 0.93, {"algorithm.n_step": 3, "algorithm.dueling": True, "algorithm.target_update": "soft"}),
        ("Corridor", 0.93, {"algorithm.prioritized": True, "algorithm.target_every": 50}),
    ],
)
def test_tiny_environments_are_learned(env: str, target: float, more: dict[str, Any], tmp_path: Path) -> None:
    solve(f"raynforce.envs.tiny:{env}", "dqn", tmp_path / "run", steps=12_000, target=target, settings=QUICK | more)


def test_values_are_bootstrapped_through_time_limits(tmp_path: Path) -> None:
    """Reward 1 for ever, cut every 10 steps: every action is worth 1 / (1 - gamma)."""
    settings = QUICK | {"algorithm.gamma": 0.9, "algorithm.target_every": 20, "algorithm.n_step": 3}
    run = raynforce.train(
        "raynforce.envs.tiny:Endless", "dqn", steps=8_000, settings=settings, out=tmp_path / "run", progress="quiet"
    )
    policy = raynforce.load(run.path, "last")
    values = policy._actor.outputs({"obs": np.ones((1, 1), np.float32)})["q"]
    assert values == pytest.approx(np.full((1, 2), 10.0), rel=0.1)
