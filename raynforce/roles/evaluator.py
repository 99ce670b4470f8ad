"""The evaluator: greedy episodes of one policy version on fresh seeds."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from raynforce.envs.vector import VectorEnv, derive_seed, make_vector, require_finite
from raynforce.errors import EnvError
from raynforce.policies.acting import ActingSpec, Actor, PolicyVersion
from raynforce.roles.sampler import EnvArgs

EVALUATION_STREAM = 1 << 20  # apart from every sampler's index, so that evaluation never repeats training episodes

CUTS_IN_A_ROW = 100
"""How often a lane's env may break before an episode of it is over."""


class Evaluation(NamedTuple):
    """How far an evaluation has come."""

    over: bool
    returns: np.ndarray
    """Returns of the episodes that have ended."""
    faults: Sequence[Mapping[str, Any]] = ()
    """Environments that broke since this was last asked, and were made anew: `EnvFault.facts()` of each."""


class Evaluator:
    """Plays greedy episodes. What it plays follows from what it is given, so it needs no saving."""

    def __init__(self, acting: ActingSpec, envs: EnvArgs) -> None:
        self._args = envs
        self._actor = Actor(acting)
        self._envs: VectorEnv | None = None
        self._playing: tuple[int, ...] | None = None

    def begin(self, version: PolicyVersion, episodes: int, max_length: int = 100_000, purpose: int = 0) -> None:
        """Start an evaluation of `episodes` greedy episodes; one that is still going on is given up.

        Each lane plays a number of episodes fixed beforehand: taking whichever end first would favour short ones.
        An episode longer than `max_length` is counted as it stands, and its lane plays no further one. Seeds derive
        from the run's seed, the version's number and `purpose`: each version plays other episodes, the same version
        the same ones, however often the run was stopped. An episode whose env breaks is not counted: its lane plays
        another one.
        """
        self._actor.load(version)
        self._max_length = max_length
        envs = self._vector()
        lanes = envs.num_envs
        self._quota = np.full(lanes, episodes // lanes) + (np.arange(lanes) < episodes % lanes)
        envs.take_faults()  # of an earlier evaluation, if nobody asked
        self._obs = envs.reset(seed=derive_seed(self._args.seed, EVALUATION_STREAM, version.number, purpose))
        self._returns: list[float] = []
        self._running, self._length = np.zeros(lanes), np.zeros(lanes, np.int64)
        self._cuts = np.zeros(lanes, np.int64)  # since the lane's last episode was over

    def advance(self, seconds: float = float("inf")) -> Evaluation:
        """Play on, for so long at most."""
        envs, quota, running, length = self._vector(), self._quota, self._running, self._length
        until = time.monotonic() + seconds
        while quota.any() and time.monotonic() < until:
            step = envs.step(self._actor.greedy(self._obs))
            self._obs = step.obs
            seen = {"reward": step.reward, **step.obs}
            require_finite(self._args.env, seen, ("in evaluation, lane",), self._args.args)
            running += step.reward * step.valid
            length += step.valid
            if len(step.cut):
                running[step.cut], length[step.cut] = 0.0, 0
                self._count(step.cut)
            endless = length >= self._max_length
            for lane in np.flatnonzero(step.terminated | step.truncated | endless):
                if quota[lane]:
                    quota[lane] = 0 if endless[lane] else quota[lane] - 1
                    self._returns.append(float(running[lane]))
                running[lane], length[lane], self._cuts[lane] = 0.0, 0, 0
        faults = [fault.facts() for fault in envs.take_faults()]
        return Evaluation(not quota.any(), np.asarray(self._returns), faults)

    def play(
        self,
        version: PolicyVersion,
        episodes: int,
        max_length: int = 100_000,
        purpose: int = 0,
        seconds: float = float("inf"),
    ) -> Evaluation:
        """`begin` and `advance` in one: asked again for the same version and purpose, it goes on where it was."""
        what = (version.number, episodes, max_length, purpose)
        if self._playing != what:
            self.begin(version, episodes, max_length, purpose)
            self._playing = what
        so_far = self.advance(seconds)
        if so_far.over:
            self._playing = None
        return so_far

    def _count(self, cut: np.ndarray) -> None:
        """An episode that breaks every time would be played for ever."""
        self._cuts[cut] += 1
        hopeless = cut[(self._cuts[cut] > CUTS_IN_A_ROW) & (self._quota[cut] > 0)]
        if not len(hopeless):
            return
        lane = hopeless[0]
        last = [fault for fault in self._vector().take_faults() if fault.lane == lane][-1]
        often = f"env {self._args.env!r} broke in {self._cuts[lane]} evaluation episodes in a row, in lane {lane}"
        error = EnvError(f"{often} (episode seed {last.seed}, step {last.step}): {last.cause}")
        error.facts = last.facts()
        raise error

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
                parallel=a.parallel,
            )
        return self._envs

    def close(self) -> None:
        if self._envs is not None:
            self._envs.close()
