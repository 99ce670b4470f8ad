"""Advantages and running returns: known answers, and equality with the definition written as plain loops."""

from __future__ import annotations

import numpy as np
import pytest
from columns import NONE, at, column

from raynforce.experience.advantages import Steps, discounted, final_values, gae
from raynforce.experience.fragment import Fragment


# gamma 0.5, lambda 0.5, rewards 1 2 3, values 4 5 6 7:
# TD errors 1 + 2.5 - 4 = -0.5, 2 + 3 - 5 = 0, 3 + 3.5 - 6 = 0.5, chained with 0.25
@pytest.mark.parametrize(
    ("terminated", "truncated", "expected"),
    [
        (NONE, NONE, [-0.5 + 0.25 * 0.125, 0.25 * 0.5, 0.5]),
        (at(1), NONE, [-0.5 + 0.25 * -3.0, 2.0 - 5.0, 0.5]),
        (NONE, at(1), [-0.5 + 0.25 * 2.0, 2.0 + 0.5 * 10.0 - 5.0, 0.5]),
        (NONE, at(2), [-0.5 + 0.25 * 0.5, 0.25 * 2.0, 3.0 + 0.5 * 10.0 - 6.0]),
        (at(2), at(2), [-0.5 + 0.25 * -0.75, 0.25 * -3.0, 3.0 - 6.0]),  # both at once: terminated
    ],
)
def test_known_answers(terminated: np.ndarray, truncated: np.ndarray, expected: list[float]) -> None:
    ended = terminated | truncated
    final_value = np.where(ended, 10.0, np.nan)  # looked at only where an episode ended
    advantage, returns = gae(Steps(column(1, 2, 3), column(4, 5, 6, 7), terminated, truncated, final_value), 0.5, 0.5)
    assert advantage.dtype == returns.dtype == np.float32
    np.testing.assert_allclose(advantage[:, 0], expected)
    np.testing.assert_allclose(returns[:, 0], np.add(expected, [4, 5, 6]))


def test_one_step() -> None:
    advantage, _ = gae(Steps(column(1), column(2, 4), NONE[:1], NONE[:1], column(0)), 0.5, 0.9)
    assert advantage.tolist() == [[1.0]]


def by_definition(reward, value, terminated, truncated, final_value, gamma, gae_lambda):
    steps, lanes = reward.shape
    advantage = np.zeros((steps, lanes))
    for b in range(lanes):
        for t in range(steps):
            weight = 1.0
            for k in range(t, steps):
                after = 0.0 if terminated[k, b] else final_value[k, b] if truncated[k, b] else value[k + 1, b]
                advantage[t, b] += weight * (reward[k, b] + gamma * after - value[k, b])
                if terminated[k, b] or truncated[k, b]:
                    break
                weight *= gamma * gae_lambda
    return advantage


@pytest.mark.parametrize("seed", range(20))
def test_equals_the_definition(seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps, lanes = int(rng.integers(1, 20)), int(rng.integers(1, 5))
    reward, final_value = rng.normal(size=(2, steps, lanes)).astype(np.float32)
    value = rng.normal(size=(steps + 1, lanes)).astype(np.float32)
    terminated, truncated = rng.random((2, steps, lanes)) < 0.2
    inputs = (reward, value, terminated, truncated, final_value)
    before = [array.copy() for array in inputs]
    gamma, gae_lambda = rng.random(2)
    advantage, returns = gae(Steps(*inputs), gamma, gae_lambda)
    expected = by_definition(*inputs, gamma, gae_lambda)
    np.testing.assert_allclose(advantage, expected, atol=1e-5)
    np.testing.assert_allclose(returns, expected + value[:-1], atol=1e-5)
    for array, copy in zip(inputs, before, strict=True):  # received fragments are read-only
        np.testing.assert_array_equal(array, copy)


def test_final_values_prefers_the_listed_observations() -> None:
    value = np.arange(8.0).reshape(4, 2)  # T = 3, B = 2
    fragment = Fragment({"final/index": np.array([3, 4])}, version=0, sampler=0, sequence=0)  # (1, 1) and (2, 0)
    values = final_values(fragment, value, np.array([50.0, 60.0]))
    assert values.dtype == np.float32
    assert values.tolist() == [[2, 3], [4, 50], [60, 7]]
    assert value[2, 1] == 5  # the argument is left alone


def test_discounted_known_answer() -> None:
    reward = np.array([[1, 1], [2, 1], [3, 1]], np.float32)
    first = np.array([[False, True], [False, True], [True, False]])
    start = np.array([4.0, 9.0])
    so_far, carry = discounted(reward, first, np.ones((3, 2), bool), 0.5, start)
    assert so_far.tolist() == [[3.0, 1.0], [3.5, 1.0], [3.0, 1.5]]
    assert carry.tolist() == [3.0, 1.5]
    assert start.tolist() == [4.0, 9.0]


def test_discounted_begins_anew_after_the_border() -> None:
    valid = np.ones((1, 1), bool)
    found, carry = discounted(np.ones((1, 1)), valid, valid, 0.9, np.array([7.0]))
    assert found.tolist() == [[1.0]]
    assert carry.tolist() == [1.0]


def test_discounted_passes_over_rows_that_are_not_valid() -> None:
    """A lane with fewer rows than others goes on with the next fragment, undiscounted and not begun anew."""
    reward, no = np.array([[1.0], [5.0], [1.0]]), np.zeros((3, 1), bool)
    found, carry = discounted(reward, no, np.array([[True], [False], [True]]), 0.5, np.array([2.0]))
    assert found.tolist() == [[2.0], [2.0], [2.0]]
    assert carry.tolist() == [2.0]


def test_discounted_in_two_pieces_equals_one() -> None:
    rng = np.random.default_rng(0)
    reward, begins, valid = rng.normal(size=(20, 3)), rng.random((20, 3)) < 0.2, rng.random((20, 3)) < 0.8
    whole, end = discounted(reward, begins, valid, 0.97, np.zeros(3))
    first, carry = discounted(reward[:7], begins[:7], valid[:7], 0.97, np.zeros(3))
    second, carry = discounted(reward[7:], begins[7:], valid[7:], 0.97, carry)
    np.testing.assert_array_equal(whole, np.concatenate([first, second]))
    np.testing.assert_array_equal(end, carry)
