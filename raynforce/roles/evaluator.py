"""The evaluator: greedy episodes of one policy version on fresh seeds."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np

from raynforce.envs.vector import VectorEnv, derive_seed, make_vector, require_finite
from raynforce.policies.acting import ActingSpec, Actor, PolicyVersion
from raynforce.roles.sampler import EnvArgs

EVALUATION_STREAM = 1 << 20  # apart from every sampler's index, so that evaluation never repeats training episodes


class Evaluation(NamedTuple):
    """How far an evaluation has come."""

    over: bool
    returns: np.ndarray
    """Returns of the episodes that have ended."""


class Evaluator:
    """Plays greedy episodes. What it plays follows from what it is given, so it needs no saving."""

    def __init__(self, acting: ActingSpec, envs: EnvArgs) -> None:
        self._args = envs
        self._actor = Actor(acting)
        self._envs: VectorEnv | None = None

    def begin(self, version: PolicyVersion, episodes: int, max_length: int = 100_000, purpose: int = 0) -> None:
        """Start an evaluation of `episodes` greedy episodes; one that is still going on is given up.

        Each lane plays a number of episodes fixed beforehand: taking whichever end first would favour short ones.
        An episode longer than `max_length` is counted as it stands, and its lane plays no further one. Seeds derive
        from the run's seed, the version's number and `purpose`: each version plays other episodes, the same version
        the same ones, however often the run was stopped.
        """
        self._actor.load(version)
        self._max_length = max_length
        envs = self._vector()
        lanes = envs.num_envs
        self._quota = np.full(lanes, episodes // lanes) + (np.arange(lanes) < episodes % lanes)
        self._obs = envs.reset(seed=derive_seed(self._args.seed, EVALUATION_STREAM, version.number, purpose))
        self._returns: list[float] = []
        self._running, self._length = np.zeros(lanes), np.zeros(lanes, np.int64)

    def advance(self, seconds: float = float("inf")) -> Evaluation:
        """Play on, for so long at most."""
        envs, quota, running, length = self._vector(), self._quota, self._running, self._length
        until = time.monotonic() + seconds
        while quota.any() and time.monotonic() < until:
            step = envs.step(self._actor.greedy(self._obs))
            self._obs = step.obs
            require_finite(self._args.env, {"reward": step.reward, **step.obs}, ("in evaluation, lane",))
            running += step.reward * step.valid
            length += step.valid
            endless = length >= self._max_length
            for lane in np.flatnonzero(step.terminated | step.truncated | endless):
                if quota[lane]:
                    quota[lane] = 0 if endless[lane] else quota[lane] - 1
                    self._returns.append(float(running[lane]))
                running[lane], length[lane] = 0.0, 0
        return Evaluation(not quota.any(), np.asarray(self._returns))

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
