"""Advantages and returns of a fragment: generalised advantage estimation and running discounted returns."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from raynforce.experience.fragment import Fragment


class Steps(NamedTuple):
    """What advantages are made of, each `[T, B]`, but for `value`."""

    reward: np.ndarray
    value: np.ndarray  # [T+1, B]
    terminated: np.ndarray
    truncated: np.ndarray
    final_value: np.ndarray  # read where an episode ended (see `final_values`)

    def errors(self, gamma: float) -> np.ndarray:
        """TD errors: a terminated step is worth its reward, a truncated one is bootstrapped with `final_value`."""
        value = np.asarray(self.value, np.float32)
        following = np.where(self.terminated, 0.0, np.where(self.truncated, self.final_value, value[1:]))
        return (self.reward + np.float32(gamma) * following - value[:-1]).astype(np.float32)


def gae(steps: Steps, gamma: float, gae_lambda: float) -> tuple[np.ndarray, np.ndarray]:
    """GAE (Schulman et al. 2016): `(advantage, returns)`, both `[T, B]` float32, also of rows that are not valid."""
    advantage = steps.errors(gamma)  # so far
    chain = ~(steps.terminated | steps.truncated) * np.float32(gamma * gae_lambda)  # [T, B]
    for t in range(len(advantage) - 2, -1, -1):
        chain[t] *= advantage[t + 1]
        advantage[t] += chain[t]
    return advantage, advantage + np.asarray(steps.value[:-1], np.float32)


def final_values(fragment: Fragment, value: np.ndarray, final_value: np.ndarray) -> np.ndarray:
    """The value of the true last observation at every end, `[T, B]`; those of `final/obs` are `final_value` `[K]`."""
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
