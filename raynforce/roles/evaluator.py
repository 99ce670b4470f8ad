"""The evaluator: greedy episodes of one policy version on fresh seeds."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from raynforce.envs.faults import Unavailable
from raynforce.envs.lanes import ParallelVector
from raynforce.envs.local import LocalVector
from raynforce.envs.native import NativeVector
from raynforce.envs.vector import EnvArgs, VectorEnv, derive_seed, require_finite
from raynforce.envs.wrappers import for_evaluation
from raynforce.errors import EnvError
from raynforce.infos import NOTHING, Info, Values, values
from raynforce.policies.acting import ActingSpec, Actor, PolicyVersion, forget

EVALUATION_STREAM = 1 << 20  # apart from every sampler's index, so that evaluation never repeats training episodes
BREAKS = 5  # how often in a row the episodes of a lane may break before the evaluation is given up; `faults.restarts`


class Evaluation(NamedTuple):
    """How far an evaluation has come."""

    over: bool
    returns: np.ndarray  # returns of the episodes that have ended
    faults: Sequence[Mapping[str, Any]] = ()  # `EnvFault.facts()` of environments that broke since the last call
    steps: int = 0  # environment steps that were played for it so far
    lockstep: bool = False  # steps of an environment's own vector implementation, which cost a fraction of others
    failure: EnvError | None = None  # why it was given up: it is over, and has no outcome
    info: Values = NOTHING  # numbers in `info` at the ends of these episodes


class Evaluator:
    """Plays greedy episodes. What it plays follows from what it is given, so it needs no saving."""

    def __init__(
        self,
        acting: ActingSpec,
        envs: EnvArgs,
        breaks: int = BREAKS,
        hang_seconds: float = math.inf,
        vector: VectorEnv | None = None,
    ) -> None:
        """`breaks`: how often in a row a lane's episodes may break; `vector`: environments instead of `envs`."""
        self._args = replace(envs, args=for_evaluation(envs.args))
        self._breaks, self._hang_seconds = breaks, hang_seconds
        self._actor = Actor(acting)
        self._envs = vector
        self._playing: tuple[int, ...] | None = None

    def begin(self, version: PolicyVersion, episodes: int, max_length: int = 100_000, purpose: int = 0) -> None:
        """Start an evaluation of greedy episodes; one that is still running is given up.

        The number of episodes of each lane is fixed beforehand: taking whichever end first would favour short ones. One
        longer than `max_length` counts as it stands, and ends its lane. Seeds derive from the run's seed, the version's
        number and `purpose`. An episode whose env breaks is played again, `breaks` times in a row at most.
        """
        self._actor.load(version)
        self._max_length = max_length
        envs = self._vector()
        lanes = envs.num_envs
        self._quota = np.full(lanes, episodes // lanes) + (np.arange(lanes) < episodes % lanes)
        envs.take_faults()  # of an earlier evaluation, if nobody asked
        self._obs = envs.reset(seed=derive_seed(self._args.seed, EVALUATION_STREAM, version.number, purpose))
        self._returns: list[float] = []
        self._infos: list[Info] = []
        self._running, self._length = np.zeros(lanes), np.zeros(lanes, np.int64)
        self._breaks_in_a_row = np.zeros(lanes, np.int64)  # since the lane's last episode was over
        self._steps = 0
        self._hopeless: int | None = None  # a lane
        self._memory = self._actor.spec.network.initial_state(lanes)  # empty without memory
        self._stop_finished(envs)

    def advance(self, seconds: float = math.inf) -> Evaluation:
        envs, until = self._vector(), time.monotonic() + seconds
        lockstep, failure = isinstance(envs, NativeVector), None
        try:
            while self._quota.any() and self._hopeless is None and time.monotonic() < until:
                self._step(envs, until)
        except EnvError as error:  # one that cannot be brought to step again
            failure = error
        found = envs.take_faults()
        if self._hopeless is not None:
            last = [fault for fault in found if fault.lane == self._hopeless][-1]
            often = f"env {self._args.env!r} broke in {self._breaks_in_a_row[self._hopeless]} evaluation episodes "
            where = f"in a row, in lane {last.lane} (episode seed {last.seed}, step {last.step}): {last.cause}"
            failure = EnvError(often + where)
            failure.facts = last.facts()
        if failure is not None:  # the next evaluation gets new envs
            self.close()
        over = failure is not None or not self._quota.any()
        returns, facts, told = np.asarray(self._returns), [fault.facts() for fault in found], values(self._infos)
        return Evaluation(over, returns, facts, self._steps, lockstep, failure, told)

    def play(
        self,
        version: PolicyVersion,
        episodes: int,
        max_length: int = 100_000,
        purpose: int = 0,
        seconds: float = math.inf,
    ) -> Evaluation:
        """`begin` and `advance` in one: asked again for the same version and purpose, it goes on where it was."""
        what = (version.number, episodes, max_length, purpose)
        if self._playing != what:
            try:
                self.begin(version, episodes, max_length, purpose)
            except Unavailable as error:
                return Evaluation(True, np.empty(0), failure=error)
            self._playing = what
        so_far = self.advance(seconds)
        if so_far.over:
            self._playing = None
        return so_far

    def close(self) -> None:
        if self._envs is not None:
            self._envs.close()
            self._envs = None

    def _step(self, envs: VectorEnv, until: float) -> None:
        if isinstance(envs, ParallelVector):
            self._step_ready(envs, until)
        else:
            self._step_all(envs)

    def _step_all(self, envs: VectorEnv) -> None:
        step = envs.step(self._greedy(self._obs))
        self._obs = step.obs
        seen = {"reward": step.reward, **step.obs}
        require_finite(self._args.env, seen, ("in evaluation, lane",), self._args.args)
        self._running += step.reward * step.valid
        self._length += step.valid
        self._steps += int(np.count_nonzero(step.valid & (self._quota > 0)))
        self._broke(step.cut)
        ended = step.terminated | step.truncated
        forget(self._memory, ended | ~step.valid)
        self._ended(ended, step.info)
        if ended.any():
            self._stop_finished(envs)

    def _step_ready(self, envs: ParallelVector, until: float) -> None:
        """A step of every lane that is ready; nobody waits for a slower one."""
        ready = np.flatnonzero(envs.idle & (self._quota > 0))
        if len(ready):
            # Of all rows, though few are used: so a row's outcome does not depend on who else is ready.
            envs.ask(ready, self._greedy(envs.rows(), ready)[ready])
        done, broke = envs.answers(until)
        self._running[done] += envs.reward[done]
        self._length[done] += 1
        self._steps += len(done)
        self._broke(broke)
        ended = np.zeros(envs.num_envs, np.bool_)
        ended[done] = envs.ended[done]
        forget(self._memory, np.flatnonzero(ended))
        forget(self._memory, broke)
        self._ended(ended, envs.take_info())

    def _greedy(self, obs: Mapping[str, np.ndarray], lanes: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Actions for all rows; these lanes remember that they have seen theirs."""
        if not self._memory:
            return self._actor.greedy(obs)
        actions, after = self._actor.greedy_step(obs, self._memory)
        for name, state in self._memory.items():
            state[lanes] = after[name][lanes]
        return actions

    def _ended(self, ended: np.ndarray, info: Mapping[int, Info]) -> None:
        """Episodes are over, `[B]`, or longer than they may be; `info` has by lane what they told."""
        endless = self._length >= self._max_length
        for lane in np.flatnonzero(ended | endless):
            if self._quota[lane]:
                self._quota[lane] = 0 if endless[lane] else self._quota[lane] - 1
                self._returns.append(float(self._running[lane]))
                self._infos.append(info.get(int(lane), NOTHING))
            self._running[lane], self._length[lane], self._breaks_in_a_row[lane] = 0.0, 0, 0

    def _stop_finished(self, envs: VectorEnv) -> None:
        """Lanes that have played their episodes are stepped no more, where they need not be."""
        if isinstance(envs, LocalVector):
            envs.stop(np.flatnonzero(self._quota == 0).tolist())

    def _broke(self, lanes: np.ndarray) -> None:
        if len(lanes):
            self._running[lanes], self._length[lanes] = 0.0, 0
            self._breaks_in_a_row[lanes] += 1
            hopeless = lanes[(self._breaks_in_a_row[lanes] > self._breaks) & (self._quota[lanes] > 0)]
            self._hopeless = int(hopeless[0]) if len(hopeless) else None

    def _vector(self) -> VectorEnv:
        if self._envs is None:
            self._envs = self._args.vector(
                EVALUATION_STREAM, record=False, hang_seconds=self._hang_seconds, at_most=True
            )
        return self._envs
