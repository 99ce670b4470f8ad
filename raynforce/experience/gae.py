"""Advantages and returns of a fragment: generalised advantage estimation and running discounted returns."""

from __future__ import annotations

import numpy as np

from raynforce.experience.fragment import Fragment


def gae(
    reward: np.ndarray,
    value: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    final_value: np.ndarray,
    gamma: float,
    gae_lambda: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Generalised advantage estimation (Schulman et al. 2016); returns `(advantage, returns)`, both `[T, B]` float32.

    `value` is `[T+1, B]`; `final_value` `[T, B]` is read where an episode ended (see `final_values`). A terminated step
    is worth its reward alone, a truncated one is bootstrapped with `final_value`; both end the chain of lambda. Rows
    that are not valid get numbers too: mask them with the fragment's `valid`.
    """
    value = np.asarray(value, np.float32)
    next_value = np.where(truncated, final_value, value[1:])  # [T, B]
    next_value = np.where(terminated, 0.0, next_value)
    advantage = (reward + np.float32(gamma) * next_value - value[:-1]).astype(np.float32)  # the TD errors, so far
    chain = ~(terminated | truncated) * np.float32(gamma * gae_lambda)  # [T, B]
    for t in range(len(advantage) - 2, -1, -1):
        chain[t] *= advantage[t + 1]
        advantage[t] += chain[t]
    return advantage, advantage + value[:-1]


def final_values(fragment: Fragment, value: np.ndarray, final_value: np.ndarray) -> np.ndarray:
    """The value of the true last observation at every episode end, `[T, B]` float32, as `gae` wants it.

    `value` `[T+1, B]` belongs to the fragment's observations, `final_value` `[K]` to `final/obs`; an end that is not in
    `final/index` has its last observation in the next row.
    """
    values = np.array(value[1:], np.float32, order="C")  # a copy
    values.reshape(-1)[fragment["final/index"]] = final_value
    return values


def discounted(reward: np.ndarray, done: np.ndarray, gamma: float, carry: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each lane's discounted return so far, `[T, B]`, and what to `carry` `[B]` to the next fragment; float64."""
    so_far = np.empty(reward.shape, np.float64)
    carry = np.array(carry, np.float64)  # a copy: the caller's is left alone
    alive = ~done  # [T, B]
    for t in range(len(so_far)):
        carry *= gamma
        carry += reward[t]
        so_far[t] = carry
        carry *= alive[t]
    return so_far, carry
