"""Behaviour cloning: the loss by hand and against autograd, and tiny environments from what was recorded there."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nets import ACTIONS, BOX, FixedNet, at_random
from running import solve

import raynforce
from raynforce.algos.bc import BC, BCConfig
from raynforce.config import Config
from raynforce.data.episodes import Episode, joined
from raynforce.data.parquet import ParquetWriter
from raynforce.envs.make import make_described
from raynforce.errors import UsageError
from raynforce.policies.torch_distributions import logp_entropy, squashed_logp, wide_logp_entropy
from raynforce.spaces import EnvSpec


def bc(kind: str = "discrete", **hp: Any) -> BC:
    return BC(Config(env="test", algorithm=BCConfig(**hp)), EnvSpec("test", (BOX,), ACTIONS[kind]))


def test_likelihood_value_and_entropy_by_hand() -> None:
    batch = {"obs": torch.zeros(2, 1), "action": torch.tensor([0, 1])}
    batch["returns"] = torch.tensor([1.0, 0.0], dtype=torch.float64)
    logits = torch.tensor([[0.0, 0.0, 0.0], [math.log(2.0), 0.0, 0.0]], dtype=torch.float64)
    net: Any = FixedNet(policy=logits, value=torch.tensor([[0.0], [3.0]], dtype=torch.float64))
    loss = bc(value_coef=0.5, entropy_coef=0.1).loss(net, batch)
    nll = (math.log(3) + math.log(4)) / 2
    entropy = (math.log(3) + 0.5 * math.log(2) + 0.5 * math.log(4)) / 2
    assert loss.metrics["nll"].item() == pytest.approx(nll)
    assert loss.metrics["entropy"].item() == pytest.approx(entropy)
    assert loss.metrics["value_loss"].item() == pytest.approx(0.5 * (1 + 9) / 2)
    assert loss.total.item() == pytest.approx(nll + 0.5 * 2.5 - 0.1 * entropy)


@pytest.mark.parametrize("kind", [*ACTIONS, "squashed"])
@pytest.mark.parametrize("hp", [{}, {"value_coef": 0.7, "entropy_coef": 0.3}])
def test_derivatives_beside_the_terms_are_those_of_the_objective(kind: str, hp: dict[str, float]) -> None:
    squashed = kind == "squashed"
    algo = bc("box" if squashed else kind, log_std_min=-9.0, gaussian="squashed" if squashed else "free", **hp)
    torch.manual_seed(0)
    out, actions = at_random(algo.heads(), algo.env.action, 200)
    if squashed:
        actions = torch.tanh(actions)
        del out["log_std"]
        logp = squashed_logp(out["policy"], actions, (-9.0, 2.0))
        entropy = wide_logp_entropy(out["policy"], actions, (-9.0, 2.0))[1]
    else:
        logp, entropy = logp_entropy(algo.env.action, out, actions)
    returns = torch.randn(200, dtype=torch.float64)
    value = 0.5 * (out["value"].squeeze(1) - returns).square().mean()
    total = algo.hp.value_coef * value - logp.mean() - algo.hp.entropy_coef * entropy.mean()
    expected = torch.autograd.grad(total, list(out.values()))
    net: Any = FixedNet(**{name: each.detach() for name, each in out.items()})
    loss = algo.loss(net, {"obs": torch.zeros(200, 1), "action": actions.detach(), "returns": returns})
    assert loss.total.item() == pytest.approx(total.item())
    assert loss.gradients is not None
    for name, wanted in zip(out, expected, strict=True):
        torch.testing.assert_close(loss.gradients[name], wanted)


@pytest.mark.parametrize("gaussian", ["free", "squashed"])
def test_deviations_are_learned_to_a_bound(gaussian: Any) -> None:
    """Actions that are all alike would else be told with ever less doubt."""
    algo = bc("box", gaussian=gaussian, log_std_min=-2.0)
    batch = {"obs": torch.zeros(8, 1), "action": torch.zeros(8, 2), "returns": torch.zeros(8)}
    for log_std, moves in ((-1.9, True), (-2.1, False)):
        spread = torch.full((8, 2), log_std)
        policy = torch.zeros(8, 2) if gaussian == "free" else torch.cat([torch.zeros(8, 2), spread], 1)
        free = {"log_std": spread[0]} if gaussian == "free" else {}
        net: Any = FixedNet(policy=policy, value=torch.zeros(8, 1), **free)
        gradients = algo.loss(net, batch).gradients
        assert gradients is not None
        found = gradients["log_std"] if gaussian == "free" else gradients["policy"][:, 2:]
        assert bool((found > 0).all()) == moves
        assert bool((found == 0).all()) != moves


def test_a_deviation_below_its_bound_may_rise() -> None:
    """PPO's presets begin with log_std_init = -2, the bound: what is far off is to be told with more doubt."""
    algo = bc("box", log_std_min=-2.0)
    batch = {"obs": torch.zeros(8, 1), "action": torch.ones(8, 2), "returns": torch.zeros(8)}
    net: Any = FixedNet(policy=torch.zeros(8, 2), value=torch.zeros(8, 1), log_std=torch.full((2,), -3.0))
    gradients = algo.loss(net, batch).gradients
    assert gradients is not None
    assert bool((gradients["log_std"] < 0).all())


def test_squashed_is_for_bounded_continuous_actions() -> None:
    with pytest.raises(UsageError, match="'squashed' is for continuous actions"):
        bc("discrete", gaussian="squashed")


def shown(env: str, args: dict[str, Any], path: Path, episodes: int = 40) -> Path:
    """Episodes of an environment whose observation is the right answer, played rightly."""
    made, spec = make_described(env, args)
    several = []
    for seed in range(episodes):
        obs, _ = made.reset(seed=seed)
        seen, actions, rewards, over = [obs], [], [], False
        while not over:
            answer = obs["target"] if isinstance(obs, dict) else obs
            actions.append(answer)
            obs, reward, over, *_ = made.step(answer)
            seen.append(obs)
            rewards.append(reward)
        columns = {}
        for leaf in spec.obs:
            key = leaf.path.partition("/")[2]
            columns[leaf.path] = np.array([one[key] if key else one for one in seen]).astype(leaf.dtype)
        kind = np.float32 if spec.action.kind == "box" else np.int64
        several.append(Episode(columns, np.array(actions, kind), np.array(rewards, np.float32), True, False))
    made.close()
    with ParquetWriter(path, spec, {}) as writer:
        writer.write(joined(several, spec))
    return path


TINY: dict[str, tuple[str, dict[str, Any], float, dict[str, Any]]] = {
    "discrete": ("Identity", {"length": 10}, 9.9, {}),
    "multidiscrete": ("MultiIdentity", {"length": 10}, 9.9, {}),
    "continuous": ("IdentityBox", {"length": 10}, -0.05, {}),
    "squashed": ("IdentityBox", {"length": 10}, -0.05, {"algorithm.gaussian": "squashed"}),
    "several leaves": ("DictIdentity", {"length": 10}, 9.9, {}),
}


@pytest.mark.parametrize("kind", TINY)
def test_what_was_shown_is_learned(kind: str, tmp_path: Path) -> None:
    name, args, target, settings = TINY[kind]
    env = f"raynforce.envs.tiny:{name}"
    data = shown(env, args, tmp_path / "shown.parquet")
    settings = {"env_args": args, "eval.every": 8192, **settings}
    run = solve(
        env, "bc", tmp_path / "run", steps=60_000, target=target, data=data, settings=settings, runtime="inline"
    )
    assert run.config.topology == "dataset"


def test_the_value_is_that_of_the_recorded_rewards(tmp_path: Path) -> None:
    """One for each step, cut off but never over: the value is 1 / (1 - gamma) wherever it is asked for."""
    data = tmp_path / "endless.parquet"
    raynforce.record("raynforce.envs.tiny:Endless", policy="random", episodes=5, out=data, seed=0)
    settings = {"learner.scale_rewards": False, "algorithm.gamma": 0.9, "network.normalize_obs": False}
    settings |= {"eval.final_episodes": 0, "eval.every": 0, "eval.episodes": 1}
    given: Any = {"data": data, "settings": settings, "runtime": "inline", "progress": "quiet"}
    run = raynforce.train("raynforce.envs.tiny:Endless", "bc", steps=60_000, out=tmp_path / "run", **given)
    from raynforce.policies.numpy_net import NumpyNet

    policy = run.policy("last")
    net = NumpyNet(policy.spec.network, ("value",))
    net.load(policy.version.params, None, None)
    assert net({"obs": np.ones((1, 1), np.float32)})["value"][0, 0] == pytest.approx(10.0, abs=0.5)
