"""V-trace: advantages and value targets from steps that an older policy chose (Espeholt et al. 2018)."""

from __future__ import annotations

import numpy as np

from raynforce.experience.gae import Steps


def vtrace(
    steps: Steps, log_ratio: np.ndarray, gamma: float, vtrace_lambda: float = 1, rho_clip: float = 1, c_clip: float = 1
) -> tuple[np.ndarray, np.ndarray]:
    """V-trace (arXiv 1802.01561); returns `(advantage, targets)`, both `[T, B]` float32.

    `log_ratio` `[T, B]` is each action's log-probability by the policy of `value` minus that
    by the policy which chose it. `targets` are the paper's v_s (equation 1). `advantage` is r + gamma v_s+1 - V(x_s),
    with the lambda-weighted mean of v_s+1 and V(x_s+1) for v_s+1, still to be weighted with rho_s. Where every ratio is
    1 and no clip is lower, both are those of `gae`.
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
