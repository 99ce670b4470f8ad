"""gSDE: log-probabilities against Stable-Baselines3's formula written out, derivatives, streams and runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import raynforce
from raynforce.errors import UsageError
from raynforce.policies.distributions import StateDependent
from raynforce.policies.torch_distributions import sde_drawn, sde_taken

ROWS, FEATURES, SIZE = 5, 4, 2


def outputs(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"policy": (ROWS, SIZE), "latent": (ROWS, FEATURES), "log_std": (FEATURES * SIZE,)}
    return {name: rng.normal(scale=0.5, size=shape).astype(np.float32) for name, shape in shapes.items()}


def stable_baselines(out: dict[str, np.ndarray], action: np.ndarray, *, squashed: bool) -> np.ndarray:
    """`StateDependentNoiseDistribution.log_prob`: a Normal of variance `latent² · std² + 1e-6`, tanh corrected."""
    std = np.exp(out["log_std"].astype(np.float64)).reshape(FEATURES, SIZE)
    found = []
    for n in range(ROWS):
        total = 0.0
        for a in range(SIZE):
            variance = sum(float(out["latent"][n, f]) ** 2 * std[f, a] ** 2 for f in range(FEATURES)) + 1e-6
            raw = math.atanh(action[n, a]) if squashed else float(action[n, a])
            z = (raw - float(out["policy"][n, a])) / math.sqrt(variance)
            total += -0.5 * z * z - 0.5 * math.log(variance) - 0.5 * math.log(2 * math.pi)
            total -= math.log(1 - math.tanh(raw) ** 2) if squashed else 0.0
        found.append(total)
    return np.array(found)


@pytest.mark.parametrize("squashed", [False, True])
def test_log_probabilities_are_those_of_stable_baselines(squashed: bool) -> None:
    out, policy = outputs(), StateDependent((SIZE,), FEATURES, 3, squashed=squashed)
    noise = policy.noise(np.random.default_rng(1), 1, ROWS)[0]
    action = policy.sample(out, noise, {})
    assert policy.logp(out, action) == pytest.approx(stable_baselines(out, action, squashed=squashed), abs=2e-4)
    raw = np.arctanh(action) if squashed else action
    by_hand = [out["latent"][n] @ (np.exp(out["log_std"]).reshape(FEATURES, SIZE) * noise[n]) for n in range(ROWS)]
    assert raw - out["policy"] == pytest.approx(np.array(by_hand), abs=1e-4)


def test_what_is_learned_has_the_same_log_probability_and_autograds_derivatives() -> None:
    out = {name: torch.tensor(x, dtype=torch.float64, requires_grad=True) for name, x in outputs(2).items()}
    action = torch.tensor(outputs(3)["policy"], dtype=torch.float64)
    variance = out["latent"].detach().square() @ (2 * out["log_std"]).exp().view(FEATURES, SIZE) + 1e-6
    normal = torch.distributions.Normal(out["policy"], variance.sqrt())
    logp, entropy = normal.log_prob(action).sum(1), normal.entropy().sum(1)
    down = torch.linspace(-1, 1, ROWS, dtype=torch.float64)
    wanted = torch.autograd.grad((down * logp).sum() + 0.3 * entropy.sum(), [out["policy"], out["log_std"]])
    plain = {name: x.detach() for name, x in out.items()}
    found = sde_taken(plain["policy"], plain["latent"], plain["log_std"], action)
    assert torch.allclose(found.logp, logp)
    assert torch.allclose(found.entropy, entropy)
    back = found.backward(down, 0.3)
    assert torch.allclose(back["policy"], wanted[0])
    assert torch.allclose(back["log_std"], wanted[1])


def test_drawn_actions_have_autograds_derivatives_by_features_too() -> None:
    names = ("policy", "latent", "log_std")
    out = {name: torch.tensor(outputs(4)[name], dtype=torch.float64, requires_grad=True) for name in names}
    noise = torch.tensor(outputs(5)["policy"], dtype=torch.float64)
    variance = out["latent"].square() @ (2 * out["log_std"]).exp().view(FEATURES, SIZE) + 1e-6
    raw = out["policy"] + variance.sqrt() * noise
    logp = torch.distributions.Normal(out["policy"], variance.sqrt()).log_prob(raw) - (1 - raw.tanh().square()).log()
    slope = torch.tensor(outputs(6)["policy"], dtype=torch.float64)
    wanted = torch.autograd.grad((slope * raw.tanh()).sum() + 0.7 * logp.sum(), list(out.values()))
    found = sde_drawn(*(x.detach() for x in out.values()), noise)
    assert torch.allclose(found.logp, logp.sum(1))
    back = found.backward(slope, torch.tensor(0.7, dtype=torch.float64))
    for name, gradient in zip(names, wanted, strict=True):
        assert torch.allclose(back[name], gradient), name


def test_noise_is_kept_for_so_many_steps_and_goes_on_after_a_state() -> None:
    first, rng = StateDependent((SIZE,), FEATURES, 3, squashed=False), np.random.default_rng(0)
    drawn = [*first.noise(rng, 4, 2)]
    assert drawn[0] is drawn[2]
    assert drawn[2] is not drawn[3]
    other = StateDependent((SIZE,), FEATURES, 3, squashed=False)
    other.load(first.state())
    again = np.random.default_rng(0)
    again.bit_generator.state = rng.bit_generator.state
    for one, two in zip(first.noise(rng, 5, 2), other.noise(again, 5, 2), strict=True):
        assert (one == two).all()


QUICK: dict[str, dict[str, Any]] = {
    "ppo": {"sampling.envs": 2, "sampling.fragment": 20, "algorithm.gsde_every": 7},
    "sac": {"sampling.envs": 2, "algorithm.gsde_every": 7, "algorithm.learning_starts": 32, "network.hidden": [8, 8]},
}


def weights(out: Path, algo: str, steps: int = 240, **more: Any) -> np.ndarray:
    quiet = {"eval.episodes": 1, "eval.final_episodes": 0, "eval.every": 0, "algorithm.gsde": True}
    settings = QUICK[algo] | quiet | more.pop("settings", {})
    how = {"preset": "none", "algorithm": {"batch_size": 16, "samples_per_insert": 16} if algo == "sac" else {}}
    run = raynforce.train(
        "Pendulum-v1", algo, steps=steps, out=out, config=how, settings=settings, progress="quiet", **more
    )
    return raynforce.load(run.path, "last").version.params


@pytest.mark.parametrize("algo", ["ppo", "sac"])
def test_equal_seeds_give_equal_runs_and_resume_is_exact(tmp_path: Path, algo: str) -> None:
    whole = weights(tmp_path / "whole", algo, runtime="inline")
    assert (whole == weights(tmp_path / "again", algo, runtime="inline")).all()
    weights(tmp_path / "part", algo, steps=120, runtime="inline")
    run = raynforce.resume(tmp_path / "part", steps=240, progress="quiet")
    assert (raynforce.load(run.path, "last").version.params == whole).all()
    policy = raynforce.load(run.path, "last", seed=0)
    assert policy.act(np.zeros(3, np.float32), greedy=False).shape == (1,)


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["process", "ray"])
@pytest.mark.parametrize("algo", ["ppo", "sac"])
def test_runtimes_are_equal(tmp_path: Path, algo: str, runtime: str) -> None:
    inline = weights(tmp_path / "inline", algo, runtime="inline", topology="sync")
    assert (inline == weights(tmp_path / runtime, algo, runtime=runtime, topology="sync")).all()


def test_an_older_fragment_is_corrected_for(tmp_path: Path) -> None:
    assert np.isfinite(weights(tmp_path / "run", "ppo", runtime="inline", topology="overlap")).all()


@pytest.mark.parametrize(
    ("env", "settings", "said"),
    [
        ("CartPole-v1", {}, "algorithm.gsde = true is for continuous actions, and those of CartPole-v1 are not"),
        ("Pendulum-v1", {"network.hidden": []}, "needs a hidden layer for its features"),
        ("Pendulum-v1", {"network.memory": "lstm"}, "is not for network.memory = lstm"),
        ("Pendulum-v1", {"network.factory": "nets:make"}, "needs the features of a network of ours"),
        ("Pendulum-v1", {"algorithm.gsde_every": 0}, "gsde_every = 0 must be a whole number from 1"),
        ("Pendulum-v1", {"topology": "central"}, "which topology central has none of"),
    ],
)
def test_what_it_does_not_go_with_is_one_line(tmp_path: Path, env: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        raynforce.train(env, settings={"algorithm.gsde": True, "runtime": "inline", **settings}, out=tmp_path / "run")
