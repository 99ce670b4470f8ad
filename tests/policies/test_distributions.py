"""Distributions: numpy acts, torch learns, and both are what torch.distributions says they are."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributions as reference

from raynforce.errors import UsageError
from raynforce.policies.acting import action_map
from raynforce.policies.distributions import (
    Categorical,
    Distribution,
    EpsilonGreedy,
    Gaussian,
    MultiCategorical,
    SquashedGaussian,
    WideGaussian,
    head_size,
    policy_distribution,
)
from raynforce.policies.torch_distributions import logp_entropy, squashed_logp, squashed_sample, wide_logp_entropy
from raynforce.spaces import ActionSpec

INF = math.inf
DISCRETE = ActionSpec("discrete", (), "int64", sizes=(5,), start=(0,))
MULTI = ActionSpec("multidiscrete", (2, 2), "int64", sizes=(2, 3, 4, 1), start=(0, 0, 0, 0))
BOX = ActionSpec("box", (3, 1), "float32", low=(-INF,) * 3, high=(INF,) * 3)


def random_outputs(spec: ActionSpec, rng: np.random.Generator, rows: int, spread: float) -> dict[str, np.ndarray]:
    out = {"policy": rng.standard_normal((rows, head_size(spec)), dtype=np.float32) * np.float32(spread)}
    if spec.kind == "box":
        out["log_std"] = rng.standard_normal(head_size(spec), dtype=np.float32)
    return out


def by_torch(spec: ActionSpec, out: Mapping[str, torch.Tensor], action: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Log-probability and entropy `[N]` according to torch.distributions."""
    parts: list[reference.Distribution]
    if spec.kind == "box":
        parts = [reference.Independent(reference.Normal(out["policy"], out["log_std"].exp()), 1)]
        actions = [action.flatten(1)]
    else:
        parts = [reference.Categorical(logits=x) for x in torch.split(out["policy"], list(spec.sizes), 1)]
        actions = list(action.reshape(len(action), -1).unbind(1))
    logp = sum(d.log_prob(a) for d, a in zip(parts, actions, strict=True))
    entropy = sum(d.entropy() for d in parts)
    assert isinstance(logp, torch.Tensor)
    assert isinstance(entropy, torch.Tensor)
    return logp.numpy(), entropy.numpy()


@pytest.mark.parametrize("spec", [DISCRETE, MULTI, BOX], ids=lambda s: s.kind)
@settings(deadline=None, max_examples=25, derandomize=True)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 6), spread=st.sampled_from([0.01, 1.0, 30.0]))
def test_logp_and_entropy(spec: ActionSpec, seed: int, rows: int, spread: float) -> None:
    rng = np.random.default_rng(seed)
    distribution = policy_distribution(spec)
    out = random_outputs(spec, rng, rows, spread)
    assert set(out) == set(distribution.outputs)
    (noise,) = distribution.noise(rng, 1, rows)
    action = distribution.sample(out, noise, {})
    assert action.shape == (rows, *spec.shape)
    tensors = {k: torch.from_numpy(v) for k, v in out.items()}
    expected_logp, expected_entropy = by_torch(spec, tensors, torch.from_numpy(action))
    logp, entropy = logp_entropy(spec, tensors, torch.from_numpy(action))
    for found, expected in (
        (distribution.logp(out, action), expected_logp),
        (logp.numpy(), expected_logp),
        (np.broadcast_to(entropy.numpy(), (rows,)), expected_entropy),
    ):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


def normals(policy: torch.Tensor, bounds: tuple[float, float]) -> reference.Independent:
    mean, log_std = policy.chunk(2, 1)
    return reference.Independent(reference.Normal(mean, log_std.clamp(*bounds).exp()), 1)


@settings(deadline=None, max_examples=25, derandomize=True)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 6), spread=st.sampled_from([0.1, 1.0, 5.0]))
def test_wide_and_squashed_logp(seed: int, rows: int, spread: float) -> None:
    rng, bounds = np.random.default_rng(seed), (-3.0, 1.0)
    policy = (rng.standard_normal((rows, 6)) * spread).astype(np.float32)
    policy[:, 3:] = rng.uniform(-5, 3, (rows, 3))  # beyond the bounds too
    tensor = torch.from_numpy(policy)
    for made in (WideGaussian((3, 1), bounds), SquashedGaussian((3, 1), bounds)):
        assert made.outputs == ("policy",)
        (noise,) = made.noise(rng, 1, rows)
        action = made.sample({"policy": policy}, noise, {})
        assert action.shape == (rows, 3, 1)
        assert action.dtype == np.float32
        expected: reference.Distribution = normals(tensor.double(), bounds)
        taken = torch.from_numpy(action).flatten(1).double()
        if isinstance(made, SquashedGaussian):
            action = action.clip(-0.9999, 0.9999)  # float32 knows little of what is closer to 1
            taken = torch.from_numpy(action).flatten(1).double()
            tanh = reference.TanhTransform()
            logp = (expected.log_prob(taken.atanh()) - tanh.log_abs_det_jacobian(taken.atanh(), taken).sum(1)).numpy()
            found = squashed_logp(tensor, torch.from_numpy(action), bounds)
        else:
            logp = expected.log_prob(taken).numpy()
            found, entropy = wide_logp_entropy(tensor, torch.from_numpy(action), bounds)
            np.testing.assert_allclose(entropy, expected.entropy(), rtol=1e-5, atol=1e-5)
        size = 1e-5 * np.abs(logp).max() + 1e-3 * isinstance(made, SquashedGaussian) * np.abs(logp).max()
        np.testing.assert_allclose(made.logp({"policy": policy}, action), logp, rtol=2e-5, atol=size + 1e-4)
        np.testing.assert_allclose(found, logp, rtol=2e-5, atol=size + 1e-4)


def test_squashed_samples_carry_gradients_and_their_logp() -> None:
    torch.manual_seed(0)
    policy = torch.randn(50, 4, dtype=torch.float64).requires_grad_()
    noise, bounds = torch.randn(50, 2, dtype=torch.float64), (-5.0, 2.0)
    action, logp = squashed_sample(policy, noise, bounds)
    out = {"policy": policy.detach().numpy()}
    np.testing.assert_allclose(action.detach(), SquashedGaussian((2,), bounds).sample(out, noise.numpy(), {}))
    inside = (action.detach().abs() < 1 - 1e-6).all(1)
    assert inside.sum() > 30
    again = squashed_logp(policy.detach(), action.detach(), bounds)
    np.testing.assert_allclose(logp.detach()[inside], again[inside], rtol=1e-6)
    assert torch.autograd.gradcheck(lambda x: squashed_sample(x, noise, bounds), policy)


def test_squashed_actions_on_the_bounds_have_a_logp() -> None:
    out = {"policy": np.array([[30, -30, 0, 0]], np.float32)}
    made = SquashedGaussian((2,), (-5.0, 2.0))
    mode = made.mode(out)
    assert mode.tolist() == [[1, -1]]
    assert np.isfinite(made.logp(out, mode)).all()


def test_squashed_frequencies_are_the_density() -> None:
    made, count = SquashedGaussian((1,), (-5.0, 2.0)), 20_000
    out = {"policy": np.tile(np.array([0.3, -0.2], np.float32), (count, 1))}
    action = made.sample(out, made.noise(np.random.default_rng(0), 1, count)[0], {})
    edges = np.linspace(-1, 1, 9)
    fine = ((edges[:-1, None] + (np.arange(500) + 0.5) * (0.25 / 500)).reshape(-1, 1)).astype(np.float32)
    chances = np.exp(made.logp({"policy": out["policy"][:1]}, fine)).reshape(8, 500).mean(1) * 0.25
    assert abs(chances.sum() - 1) < 1e-3
    frequencies_match(np.histogram(action, edges)[0], chances)


def test_logits_of_any_size_give_finite_logp() -> None:
    out = {"policy": np.array([[1e4, 0, -1e4]], np.float32)}
    assert Categorical((3,)).logp(out, np.array([2])).tolist() == [-2e4]
    assert Categorical((3,)).logp(out, np.array([0])).tolist() == [0]


def frequencies_match(counts: np.ndarray, probabilities: np.ndarray) -> None:
    """Each count within five standard deviations of a binomial: fails by chance once in a million."""
    total = counts.sum()
    deviation = np.sqrt(total * probabilities * (1 - probabilities))
    assert (np.abs(counts - total * probabilities) < 5 * deviation + 1e-9).all(), (counts / total, probabilities)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return np.asarray(e / e.sum())


def test_categorical_frequencies() -> None:
    logits = np.array([1.0, -1.0, 0.0, 2.0, -30.0], np.float32)
    noise = Categorical((5,)).noise(np.random.default_rng(0), 1, 20_000)[0]
    action = Categorical((5,)).sample({"policy": np.tile(logits, (20_000, 1))}, noise, {})
    frequencies_match(np.bincount(action, minlength=5), softmax(logits))


def test_multi_categorical_frequencies() -> None:
    logits = np.array([0.5, -0.5, 1.0, 0.0, -1.0], np.float32)
    distribution = MultiCategorical((2, 3), (2,))
    noise = distribution.noise(np.random.default_rng(0), 1, 20_000)[0]
    action = distribution.sample({"policy": np.tile(logits, (20_000, 1))}, noise, {})
    joint = np.outer(softmax(logits[:2]), softmax(logits[2:])).reshape(-1)  # the choices are independent
    frequencies_match(np.bincount(action[:, 0] * 3 + action[:, 1], minlength=6), joint)


def test_gaussian_moments() -> None:
    distribution = Gaussian((2,))
    out = {"policy": np.tile(np.array([1, -2], np.float32), (20_000, 1)), "log_std": np.log([0.5, 3]).astype("f")}
    action = distribution.sample(out, distribution.noise(np.random.default_rng(0), 1, 20_000)[0], {})
    assert action.dtype == np.float32
    deviation = np.array([0.5, 3])
    assert (np.abs(action.mean(0) - [1, -2]) < 5 * deviation / math.sqrt(20_000)).all()
    assert (np.abs(action.std(0) / deviation - 1) < 5 / math.sqrt(2 * 20_000)).all()
    assert abs(np.corrcoef(action.T)[0, 1]) < 5 / math.sqrt(20_000)


@pytest.mark.parametrize(
    "distribution",
    [
        Categorical((3,)),
        MultiCategorical((2, 3), (2,)),
        Gaussian((2,)),
        WideGaussian((2,), (-1.0, 1.0)),
        EpsilonGreedy((3,)),
    ],
)
def test_noise_has_a_part_for_every_step(distribution: Distribution) -> None:
    first, again = (distribution.noise(np.random.default_rng(1), 4, 2) for _ in range(2))
    assert len(first) == 4
    for one, same, other in zip(first, again, [*first[1:], first[0]], strict=True):
        np.testing.assert_array_equal(one, same)
        assert not np.array_equal(one, other)


def test_modes() -> None:
    logits = np.array([[0, 2, 1], [5, 4, 3]], np.float32)
    assert Categorical((3,)).mode({"policy": logits}).tolist() == [1, 0]
    assert EpsilonGreedy((3,), "q").mode({"q": logits}).tolist() == [1, 0]
    wide = np.array([[0, 1, 9, 8, 7], [1, 0, 1, 3, 2]], np.float32)
    assert MultiCategorical((2, 3), (2,)).mode({"policy": wide}).tolist() == [[1, 0], [0, 1]]
    assert MultiCategorical((2, 3), (1, 2)).mode({"policy": wide}).shape == (2, 1, 2)
    mean = np.arange(8, dtype=np.float32).reshape(2, 4)
    found = Gaussian((2, 2)).mode({"policy": mean, "log_std": np.zeros(4, np.float32)})
    np.testing.assert_array_equal(found, mean.reshape(2, 2, 2))


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_epsilon_greedy_frequencies(epsilon: float) -> None:
    distribution = EpsilonGreedy((4,), "advantage")
    out = {"advantage": np.tile(np.array([0, 0, 9, 0], np.float32), (20_000, 1))}
    noise = distribution.noise(np.random.default_rng(0), 1, 20_000)[0]
    action = distribution.sample(out, noise, {"epsilon": epsilon})
    expected = np.full(4, epsilon / 4)
    expected[2] += 1 - epsilon
    frequencies_match(np.bincount(action, minlength=4), expected)


def test_each_lane_explores_with_epsilon_to_its_own_power() -> None:
    exponents = np.array([0.5, 1.0, 3.0])
    distribution = EpsilonGreedy((4,), exponent=exponents)
    out = {"q": np.tile(np.array([0, 0, 9, 0], np.float32), (3, 1))}
    for epsilon in (0.0, 0.3, 1.0):
        noise = distribution.noise(np.random.default_rng(0), 5000, 3)
        action = np.stack([distribution.sample(out, n, {"epsilon": epsilon}) for n in noise])
        for lane, exponent in enumerate(exponents):
            share = epsilon**exponent
            expected = np.full(4, share / 4)
            expected[2] += 1 - share
            frequencies_match(np.bincount(action[:, lane], minlength=4), expected)


def test_at_epsilon_1_every_lane_is_random_whatever_its_power() -> None:
    distribution = EpsilonGreedy((4,), exponent=np.geomspace(0.01, 100, 50))
    out = {"q": np.tile(np.array([0, 0, 9, 0], np.float32), (50, 1))}
    for chance, choice in distribution.noise(np.random.default_rng(0), 100, 50):
        assert np.array_equal(distribution.sample(out, (chance, choice), {"epsilon": 1.0}), choice)


def test_the_power_1_is_epsilon_itself() -> None:
    distribution, out = EpsilonGreedy((2,)), {"q": np.array([[1, 0]], np.float32)}
    for epsilon in np.random.default_rng(0).random(1000).tolist():
        below, at = (
            distribution.sample(out, (x, [1]), {"epsilon": epsilon}) for x in (np.nextafter(epsilon, 0), epsilon)
        )
        assert (below[0], at[0]) == (1, 0)


def test_epsilon_greedy_has_no_logp() -> None:
    with pytest.raises(UsageError, match="log-probabilities"):
        EpsilonGreedy((2,)).logp({"q": np.zeros((1, 2))}, np.zeros(1, int))


@pytest.mark.parametrize(
    ("spec", "kind", "size"),
    [(DISCRETE, Categorical, 5), (MULTI, MultiCategorical, 10), (BOX, Gaussian, 3)],
    ids=["discrete", "multidiscrete", "box"],
)
def test_which_distribution(spec: ActionSpec, kind: type, size: int) -> None:
    assert type(policy_distribution(spec)) is kind
    assert head_size(spec) == size


# -- from recorded actions to the environment's ----------------------------------------------------------------


def test_discrete_actions_are_shifted() -> None:
    plain = action_map(DISCRETE)(np.array([0, 4]))
    assert plain.tolist() == [0, 4]
    shifted = action_map(ActionSpec("discrete", (), "int64", sizes=(3,), start=(-1,)))(np.array([0, 1, 2]))
    assert shifted.tolist() == [-1, 0, 1]
    assert shifted.dtype == np.int64
    several = ActionSpec("multidiscrete", (2, 2), "int64", sizes=(2, 2, 2, 2), start=(0, 10, 20, -3))
    assert action_map(several)(np.ones((1, 2, 2), np.int64)).tolist() == [[[1, 11], [21, -2]]]


def test_bounded_actions_are_scaled_and_clipped() -> None:
    to_env = action_map(ActionSpec("box", (2,), "float32", low=(-2.0, 0.0), high=(2.0, 10.0)))
    actions = np.array([[0, 0], [1, 1], [-1, -1], [0.5, -0.5], [7, -7]], np.float32)
    found = to_env(actions)
    assert found.dtype == np.float32
    assert found.tolist() == [[0, 5], [2, 10], [-2, 0], [1, 2.5], [2, 0]]


def test_unbounded_actions_are_taken_as_they_are() -> None:
    actions = np.array([[0.5, -300, 7]], np.float32)
    assert action_map(BOX)(actions.reshape(1, 3, 1)).reshape(-1).tolist() == [0.5, -300, 7]
    half = ActionSpec("box", (3,), "float32", low=(0.0, -INF, -1.0), high=(INF, INF, 1.0))  # any bound still holds
    assert action_map(half)(actions).tolist() == [[0.5, -300, 1]]
    assert action_map(half)(-actions).tolist() == [[0, 300, -1]]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_widest_bounds() -> None:
    widest = float(np.finfo(np.float32).max)
    to_env = action_map(ActionSpec("box", (1,), "float32", low=(-widest,), high=(widest,)))
    assert to_env(np.array([[0], [1]], np.float32)).tolist() == [[0], [widest]]
