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
    head_size,
    policy_distribution,
)
from raynforce.policies.torch_distributions import logp_entropy
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
    "distribution", [Categorical((3,)), MultiCategorical((2, 3), (2,)), Gaussian((2,)), EpsilonGreedy((3,))]
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
