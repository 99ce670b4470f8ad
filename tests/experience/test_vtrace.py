"""V-trace: a worked example, the paper's sums written out term by term, and GAE where nothing lags."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from columns import NONE, at, column

from raynforce.experience.gae import Steps, gae
from raynforce.experience.vtrace import vtrace


# gamma 0.5, rewards 1 2 3, values 4 5 6 7, ratios 0.5 4 2, clipped at rho 0.5 2 2 and c 0.5 1 1.
# TD errors: 1 + 2.5 - 4 = -0.5, 2 + 3 - 5 = 0, 3 + 3.5 - 6 = 0.5; weighted with rho: -0.25, 0, 1.
# v - V, backwards: 1; 0 + 0.5 * 1 * 1 = 0.5; -0.25 + 0.5 * 0.5 * 0.5 = -0.125.
# Advantages: 0.5; 0 + 0.5 * 1 = 0.5; -0.5 + 0.5 * 0.5 = -0.25.
@pytest.mark.parametrize(
    ("terminated", "truncated", "vtrace_lambda", "targets", "advantage"),
    [
        (NONE, NONE, 1.0, [4 - 0.125, 5 + 0.5, 6 + 1.0], [-0.25, 0.5, 0.5]),
        # lambda 0.5 halves what is carried: v - V = 1; 0.25 * 1 = 0.25; -0.25 + 0.25 * 0.5 * 0.25.
        (NONE, NONE, 0.5, [4 - 0.25 + 0.03125, 5 + 0.25, 6 + 1.0], [-0.5 + 0.25 * 0.25, 0.25, 0.5]),
        # Terminated at 1: TD error 2 - 5 = -3, twice that in the target.
        (at(1), NONE, 1.0, [4 - 0.25 + 0.25 * -6, 5 - 6.0, 6 + 1.0], [-0.5 + 0.5 * -6, -3.0, 0.5]),
        # Truncated at 1 with a final value of 10: TD error 2 + 5 - 5 = 2.
        (NONE, at(1), 1.0, [4 - 0.25 + 0.25 * 4, 5 + 4.0, 6 + 1.0], [-0.5 + 0.5 * 4, 2.0, 0.5]),
        # Both at once is terminated; at the border nothing but the reward is left: 3 - 6 = -3.
        (at(2), at(2), 1.0, [4 - 0.25 + 0.25 * -3, 5 - 3.0, 6 - 6.0], [-0.5 + 0.5 * -3, -3.0, -3.0]),
    ],
)
def test_known_answers(
    terminated: np.ndarray, truncated: np.ndarray, vtrace_lambda: float, targets: list[float], advantage: list[float]
) -> None:
    final_value = np.where(terminated | truncated, 10.0, np.nan)  # looked at only where an episode ended
    found = vtrace(
        Steps(column(1, 2, 3), column(4, 5, 6, 7), terminated, truncated, final_value),
        np.log(column(0.5, 4, 2)),
        gamma=0.5,
        vtrace_lambda=vtrace_lambda,
        rho_clip=2.0,
        c_clip=1.0,
    )
    assert all(array.dtype == np.float32 for array in found)
    np.testing.assert_allclose(found[0][:, 0], advantage, rtol=1e-6)
    np.testing.assert_allclose(found[1][:, 0], targets, rtol=1e-6)


def by_the_paper(
    reward: Any, value: Any, terminated: Any, truncated: Any, final_value: Any, log_ratio: Any, gamma: float, lag: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Equation 1 with remark 2, in float64: v_s = V_s + sum over t of gamma^(t-s) (c_s ... c_t-1) rho_t delta_t."""
    (steps, lanes), (vtrace_lambda, rho_clip, c_clip) = reward.shape, lag
    targets, advantage = np.zeros((2, steps, lanes))
    for b in range(lanes):
        value_b = [float(v) for v in value[:, b]]
        rho = [min(rho_clip, math.exp(x)) for x in log_ratio[:, b]]
        c = [vtrace_lambda * min(c_clip, math.exp(x)) for x in log_ratio[:, b]]
        ended = [bool(x) for x in terminated[:, b] | truncated[:, b]]
        after = [
            0.0 if terminated[t, b] else float(final_value[t, b]) if truncated[t, b] else value_b[t + 1]
            for t in range(steps)
        ]
        for s in range(steps):
            last = next((t for t in range(s, steps) if ended[t]), steps - 1)  # of this episode, in this fragment
            targets[s, b] = value_b[s] + sum(
                gamma ** (t - s) * math.prod(c[s:t]) * rho[t] * (reward[t, b] + gamma * after[t] - value_b[t])
                for t in range(s, last + 1)
            )
        for s in range(steps):
            inside = s + 1 < steps and not ended[s]
            then = vtrace_lambda * targets[s + 1, b] + (1 - vtrace_lambda) * value_b[s + 1] if inside else after[s]
            advantage[s, b] = reward[s, b] + gamma * then - value_b[s]
    return advantage, targets


def random_inputs(seed: int) -> tuple[tuple[np.ndarray, ...], np.ndarray, float, tuple[float, float, float]]:
    rng = np.random.default_rng(seed)
    steps, lanes = int(rng.integers(1, 20)), int(rng.integers(1, 5))
    reward, final_value, log_ratio = rng.normal(size=(3, steps, lanes)).astype(np.float32)
    value = rng.normal(size=(steps + 1, lanes)).astype(np.float32)
    terminated, truncated = rng.random((2, steps, lanes)) < 0.15
    lag = (1.0 if seed % 2 else float(rng.random()), *rng.uniform(0.5, 2.0, 2).tolist())
    return (reward, value, terminated, truncated, final_value), log_ratio, float(rng.random()), lag


@pytest.mark.parametrize("seed", range(20))
def test_equals_the_papers_sums(seed: int) -> None:
    inputs, log_ratio, gamma, lag = random_inputs(seed)
    before = [array.copy() for array in inputs]
    found = vtrace(Steps(*inputs), log_ratio, gamma, *lag)
    expected = by_the_paper(*inputs, log_ratio, gamma, lag)
    np.testing.assert_allclose(found[0], expected[0], atol=1e-5)
    np.testing.assert_allclose(found[1], expected[1], atol=1e-5)
    for array, copy in zip(inputs, before, strict=True):  # received fragments are read-only
        np.testing.assert_array_equal(array, copy)


@pytest.mark.parametrize("clip", [1.0, 3.0])
@pytest.mark.parametrize("seed", range(5))
def test_is_gae_where_nothing_lags(seed: int, clip: float) -> None:
    inputs, log_ratio, gamma, (vtrace_lambda, *_) = random_inputs(seed)
    found = vtrace(Steps(*inputs), np.zeros_like(log_ratio), gamma, vtrace_lambda, clip, clip)
    advantage, returns = gae(Steps(*inputs), gamma, vtrace_lambda)
    np.testing.assert_allclose(found[0], advantage, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found[1], returns, rtol=1e-6, atol=1e-6)


def test_values_settle_where_the_paper_says() -> None:
    """A bandit that pays 1 for the second of two arms: the policy takes it with 0.9, the older one did with 0.5."""
    reward = np.array([[0.0] * 5 + [1.0] * 5], np.float32)  # one step of ten lanes: exactly as the older one acts
    log_ratio = np.log(np.where(reward > 0, 0.9 / 0.5, 0.1 / 0.5))
    ends, unused = np.ones((1, 10), bool), np.zeros((1, 10))

    def mean_change(value: float, clip: float) -> float:
        values = np.full((2, 10), value, np.float32)
        _, targets = vtrace(Steps(reward, values, ends, ~ends, unused), log_ratio, 0.99, rho_clip=clip)
        return float(np.mean(targets - value))

    assert mean_change(0.9, clip=2.0) == pytest.approx(0, abs=1e-6)  # no ratio is clipped: the policy's own value
    # Equation 3: clipped at 1, it is that of the policy in proportion to min(1 * older, newer): 0.5 / (0.1 + 0.5).
    assert mean_change(0.5 / 0.6, clip=1.0) == pytest.approx(0, abs=1e-6)
    assert mean_change(0.5, clip=1.0) > 0.1  # and not the older policy's


def test_a_row_that_only_reset_reaches_no_other() -> None:
    """Episode end at row 0, its true last observation in row 1, which is not valid: its numbers do not matter."""
    found = []
    for junk in (0.0, 1e6):
        reward, value = column(1, junk, 2), column(1, 5, 3, 4)
        log_ratio = column(0.1, junk, -0.1)
        found.append(vtrace(Steps(reward, value, NONE, at(0), value[1:]), log_ratio, 0.9, 0.9))
    for array, other in zip(*found, strict=True):
        np.testing.assert_array_equal(array[[0, 2]], other[[0, 2]])


def test_the_largest_ratios_do_not_overflow() -> None:
    with np.errstate(over="raise"):
        advantage, targets = vtrace(Steps(column(1), column(2, 4), NONE[:1], NONE[:1], column(0)), column(1e4), 0.5)
    assert advantage.tolist() == [[1.0]]
    assert targets.tolist() == [[3.0]]
