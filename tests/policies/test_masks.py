"""A forbidden action has probability zero, exactly: it is never sampled, never best, and no derivative reaches it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from raynforce.policies.distributions import Categorical, EpsilonGreedy, MaskedEpsilonGreedy, MultiCategorical, masked
from raynforce.policies.torch_distributions import allowed, logp_entropy, taken
from raynforce.spaces import MASK, ActionSpec

ONE = ActionSpec("discrete", (), "int64", (4,), (0,))
TWO = ActionSpec("multidiscrete", (2,), "int64", (3, 2), (0, 0))


def some(spec: ActionSpec, rows: int = 400) -> tuple[np.ndarray, np.ndarray]:
    """Logits and masks `[N, n]`, of which each part allows something."""
    rng = np.random.default_rng(0)
    mask = rng.random((rows, sum(spec.sizes))) < 0.5
    begin = 0
    for size in spec.sizes:
        mask[np.arange(rows), begin + rng.integers(size, size=rows)] = True
        begin += size
    return rng.normal(0, 3, mask.shape).astype(np.float32), mask


@pytest.mark.parametrize("spec", [ONE, TWO])
def test_samples_and_modes_are_allowed_and_their_probabilities_are_those_of_the_rest(spec: ActionSpec) -> None:
    logits, mask = some(spec)
    distribution = Categorical(spec.sizes) if spec is ONE else MultiCategorical(spec.sizes, spec.shape)
    out = {"policy": masked(logits, mask.astype(np.int8))}
    noise = distribution.noise(np.random.default_rng(1), 1, len(logits))[0]
    starts = np.cumsum((0, *spec.sizes[:-1]))
    for action in (distribution.sample(out, noise, {}), distribution.mode(out)):
        choices = action.reshape(len(action), -1) + starts
        assert np.take_along_axis(mask, choices, 1).all()
        expected = np.zeros(len(action))
        for part, choice in zip(np.split(np.arange(mask.shape[1]), starts[1:]), choices.T, strict=True):
            chances = np.exp(logits[:, part].astype(np.float64)) * mask[:, part]
            expected += np.log(chances[np.arange(len(action)), choice - part[0]] / chances.sum(1))
        np.testing.assert_allclose(distribution.logp(out, action), expected, rtol=1e-4, atol=1e-5)
        found = taken(spec, {"policy": torch.tensor(logits)}, torch.tensor(action), torch.tensor(mask))
        np.testing.assert_allclose(found.logp.numpy(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spec", [ONE, TWO])
def test_the_derivative_is_autograds_and_zero_where_forbidden(spec: ActionSpec) -> None:
    logits, mask = some(spec)
    distribution = Categorical(spec.sizes) if spec is ONE else MultiCategorical(spec.sizes, spec.shape)
    action = torch.tensor(distribution.mode({"policy": masked(logits, mask)}))
    policy, weight = torch.tensor(logits, requires_grad=True), torch.randn(len(logits))
    logp, entropy = logp_entropy(spec, {"policy": policy}, action, torch.tensor(mask))
    (weight * logp + 0.3 * entropy).sum().backward()
    found = taken(spec, {"policy": policy.detach()}, action, torch.tensor(mask))
    gradient = found.backward(weight, 0.3)["policy"]
    assert policy.grad is not None
    torch.testing.assert_close(gradient, policy.grad, rtol=1e-4, atol=1e-5)
    assert not gradient[~torch.tensor(mask)].any()
    assert not policy.grad[~torch.tensor(mask)].any()
    assert found.entropy.isfinite().all()


def test_the_entropy_is_that_of_the_allowed_ones() -> None:
    mask = torch.tensor([[True, True, False, False], [True, False, False, False]])
    found = taken(ONE, {"policy": torch.zeros(2, 4)}, torch.zeros(2, dtype=torch.long), mask)
    torch.testing.assert_close(found.entropy, torch.tensor([np.log(2.0), 0.0], dtype=torch.float32))
    torch.testing.assert_close(found.logp, torch.tensor([-np.log(2.0), 0.0], dtype=torch.float32))


def test_random_choices_are_uniform_among_the_allowed_ones() -> None:
    rows = 30_000
    mask = np.tile(np.array([[1, 0, 1, 1, 0]], np.int8), (rows, 1))
    greedy = MaskedEpsilonGreedy([5])
    values = np.tile(np.array([[0, 9, 1, 0, 9]], np.float32), (rows, 1))
    noise = greedy.noise(np.random.default_rng(0), 1, rows)[0]
    chosen = greedy.sample({"q": masked(values, mask)}, noise, {"epsilon": 0.6})
    shares = np.bincount(chosen, minlength=5) / rows
    np.testing.assert_allclose(shares, [0.2, 0, 0.6, 0.2, 0], atol=0.01)
    assert shares[[1, 4]].tolist() == [0, 0]
    assert (greedy.mode({"q": masked(values, mask)}) == 2).all()


def test_without_masks_the_random_stream_is_as_ever() -> None:
    chance, choice = EpsilonGreedy([5]).noise(np.random.default_rng(0), 1, 3)[0]
    rng = np.random.default_rng(0)
    assert np.array_equal(chance, rng.random((1, 3))[0])
    assert np.array_equal(choice, rng.integers(5, size=(1, 3))[0])


def test_a_mask_after_the_end_allows_all_because_nothing_is_chosen() -> None:
    mask = allowed({f"next_{MASK}": torch.tensor([[0, 0], [0, 1]], dtype=torch.int8)}, "next_")
    assert mask is not None
    assert mask.tolist() == [[True, True], [False, True]]
    assert allowed({}) is None
