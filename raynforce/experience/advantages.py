"""Advantages and returns of a fragment: GAE, V-trace, and running discounted returns."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from raynforce.experience.fragment import Fragment
from raynforce.experience.trajectories import in_turn


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
    rows, weights = list(advantage), list(chain)  # views
    for now, later, weight in zip(rows[-2::-1], rows[:0:-1], weights[-2::-1], strict=True):
        weight *= later
        now += weight
    return advantage, advantage + np.asarray(steps.value[:-1], np.float32)


def vtrace(
    steps: Steps, log_ratio: np.ndarray, gamma: float, vtrace_lambda: float = 1, rho_clip: float = 1, c_clip: float = 1
) -> tuple[np.ndarray, np.ndarray]:
    """V-trace (Espeholt et al. 2018, arXiv 1802.01561); returns `(advantage, targets)`, both `[T, B]` float32.

    `log_ratio` `[T, B]` is each action's log-probability by the policy of `value` minus that by the policy which chose
    it. `targets` are the paper's v_s (equation 1). `advantage` is r + gamma v_s+1 - V(x_s), with the lambda-weighted
    mean of v_s+1 and V(x_s+1) for v_s+1, still to be weighted with rho_s. Where every ratio is 1 and no clip is lower,
    both are those of `gae`.
    """
    error = steps.errors(gamma)
    # Clipped before exp, which cannot overflow then.
    rho, c = (np.exp(np.minimum(log_ratio, np.log(clip))).astype(np.float32) for clip in (rho_clip, c_clip))  # [T, B]
    chain = ~(steps.terminated | steps.truncated) * np.float32(gamma * vtrace_lambda)  # [T, B]
    trace = chain * c
    correction = rho * error  # v_s - V(x_s), once the later steps are in it
    for t in range(len(error) - 2, -1, -1):
        correction[t] += trace[t] * correction[t + 1]
    advantage = error
    advantage[:-1] += chain[:-1] * correction[1:]
    return advantage, np.asarray(steps.value[:-1], np.float32) + correction


def final_values(fragment: Fragment, value: np.ndarray, final_value: np.ndarray) -> np.ndarray:
    """The value of the true last observation at every end, `[T, B]`; those of `final/obs` are `final_value` `[K]`."""
    values = np.array(value[1:], np.float32, order="C")  # a copy
    values.reshape(-1)[fragment["final/index"]] = final_value
    return values


def discounted(
    reward: np.ndarray, first: np.ndarray, valid: np.ndarray, gamma: float, carry: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Each lane's discounted return so far, `[T, B]`, and what to `carry` `[B]` to the next fragment; float64.

    It begins anew in `first` rows, and stays as it is in rows that are not `valid`: a lane that is truncated because
    others have more rows goes on.
    """
    so_far = np.empty(reward.shape, np.float64)
    carry = np.array(carry, np.float64)  # a copy: the caller's is left alone
    kept, earned = np.where(valid, gamma * ~first, 1.0), reward * valid  # [T, B]
    for t in range(len(so_far)):
        carry *= kept[t]
        carry += earned[t]
        so_far[t] = carry
    return so_far, carry


def running_returns(
    fragment: Fragment, reward: np.ndarray, first: np.ndarray, gamma: float, running: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """`discounted` of a fragment, whose lanes may be any of the sampler's, in turn: `running` `[N]` has all of them."""
    lanes = fragment.columns.get("lane", np.arange(fragment.lanes))
    running = np.pad(running, (0, max(0, int(lanes.max()) + 1 - len(running))))
    returns, valid = np.empty(reward.shape), fragment["valid"]
    for some in in_turn(lanes):
        before = running[lanes[some]]
        found = discounted(reward[:, some], first[:, some], valid[:, some], gamma, before)
        returns[:, some], running[lanes[some]] = found
    return returns, running
