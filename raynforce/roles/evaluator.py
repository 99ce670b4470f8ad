"""The evaluator: greedy episodes of one policy version on fresh seeds."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from raynforce.envs.vector import VectorEnv, derive_seed, make_vector, require_finite
from raynforce.policies.acting import ActingSpec, Actor, PolicyVersion
from raynforce.roles.sampler import EnvArgs

EVALUATION_STREAM = 1 << 20  # apart from every sampler's index, so that evaluation never repeats training episodes


class Evaluator:
    """Plays greedy episodes. It has no state: what it plays follows from what it is given."""

    def __init__(self, acting: ActingSpec, envs: EnvArgs) -> None:
        self._args = envs
        self._actor = Actor(acting)
        self._envs: VectorEnv | None = None

    def evaluate(
        self,
        version: PolicyVersion,
        episodes: int,
        max_length: int = 100_000,
        *,
        purpose: int = 0,
        watch: Callable[[int], bool] | None = None,
    ) -> np.ndarray | None:
        """Returns of `episodes` greedy episodes.

        Each lane plays a number of episodes fixed beforehand: taking whichever end first would favour short ones.
        An episode longer than `max_length` is counted as it stands, and its lane plays no further one. Seeds derive
        from the run's seed, the version's number and `purpose`: each version plays other episodes, the same version
        the same ones, however often the run was stopped. `watch` is told several times a second how many episodes are
        over; when it says False the evaluation is given up, and None returned.
        """
        self._actor.load(version)
        envs = self._vector()
        lanes = envs.num_envs
        quota = np.full(lanes, episodes // lanes) + (np.arange(lanes) < episodes % lanes)
        obs = envs.reset(seed=derive_seed(self._args.seed, EVALUATION_STREAM, version.number, purpose))
        returns: list[float] = []
        running, length = np.zeros(lanes), np.zeros(lanes, np.int64)
        told = time.monotonic()
        while quota.any():
            if watch and time.monotonic() - told > 0.25:
                told = time.monotonic()
                if not watch(len(returns)):
                    return None
            step = envs.step(self._actor.greedy(obs))
            obs = step.obs
            require_finite(self._args.env, {"reward": step.reward, **obs}, ("in evaluation, lane",))
            running += step.reward * step.valid
            length += step.valid
            endless = length >= max_length
            for lane in np.flatnonzero(step.terminated | step.truncated | endless):
                if quota[lane]:
                    quota[lane] = 0 if endless[lane] else quota[lane] - 1
                    returns.append(float(running[lane]))
                running[lane], length[lane] = 0.0, 0
        return np.asarray(returns)

    def _vector(self) -> VectorEnv:
        if self._envs is None:
            a = self._args
            self._envs = make_vector(
                a.env,
                a.args,
                a.num_envs,
                seed=a.seed,
                sampler=EVALUATION_STREAM,
                exact_resume=a.exact_resume,  # the same implementation as the samplers'
                record=False,
            )
        return self._envs

    def close(self) -> None:
        if self._envs is not None:
            self._envs.close()
