"""One environment that is stepped in place: what it gives is written where others can read it."""

from __future__ import annotations

import math
import time
from typing import Any, NamedTuple

import numpy as np

from raynforce.envs.faults import EnvFault
from raynforce.envs.local import Broke, LocalVector
from raynforce.envs.rows import Rows
from raynforce.infos import Info, numbers
from raynforce.spaces import EnvSpec
from raynforce.trees import Tree


class Plan(NamedTuple):
    """What all lanes are made from."""

    env: str
    args: dict[str, Any]
    seed: int
    sampler: int
    first: int
    record: bool

    def lane(self, index: int, episode: int) -> Lane:
        """Make and reset the environment of a lane; it begins with `episode`."""
        return Lane(self, self.first + index, episode)


class About(NamedTuple):
    """What is to be known of a lane once its environment is made."""

    spec: EnvSpec
    note: str
    way_back: str
    faults: list[EnvFault]
    """Of its first reset, which may take more than one environment."""


class Told(NamedTuple):
    """What is told of a step that is not in the lane's row."""

    broke: bool
    faults: list[EnvFault]
    info: Info | None
    """The numbers in `info`, if an episode has ended and there are any."""


class Lane(LocalVector):
    """A vector of one environment, whose steps allocate nothing: they write into its row."""

    def __init__(self, plan: Plan, number: int, episode: int) -> None:
        env, args, seed, sampler, _, record = plan
        super().__init__(env, args, 1, seed=seed, sampler=sampler, first=number, record=record)
        self.write_to(Rows(self.spec, 1))
        self.info: Info | None = None  # of an episode that has ended, until it is taken
        try:
            if episode:  # not the first one: that the env can do it has been seen
                self._proven = True
                self._episodes[0] = episode - 1
            self.reset()
        except BaseException:
            self.close()
            raise

    def about(self) -> About:
        return About(self.spec, self.note, self.way_back, self.take_faults())

    def write_to(self, row: Rows) -> None:
        """Use this row from now on; it begins with how things are."""
        row.episode[0], row.steps[0] = self._episodes[0], self._steps[0]
        self.row, self._episodes, self._steps = row, row.episode, row.steps
        self._columns, self._final = list(row.obs.values()), list(row.final.values())
        self._places = [column[0, ...] for column in self._columns]
        self._finite = [(self._places[i], np.empty(self._leaves[i].shape, np.bool_)) for i in self._floats]
        leaf = self._leaves[0]
        self._common = (leaf.shape, np.dtype(leaf.dtype)) if self._plain and not leaf.sizes else None
        if self._obs:
            for column, array in zip(self._columns, self._obs, strict=True):
                np.copyto(column, array)
            self._obs = self._columns

    def state(self) -> Tree:
        tree = super().state()
        return tree | {"obs": {key: array.copy() for key, array in tree["obs"].items()}}  # the row will change

    def step_one(self, action: np.ndarray) -> bool:
        """As `step`, with the results in the row; whether the env broke. `action` is `[1, ...]`."""
        begun = time.monotonic()
        if self._actions is not None:
            self._record(action)
        self._steps[0] += 1
        self._clock += 1
        row, obs = self.row, self._columns
        broke = False
        try:
            if self._unsaved:
                raise self._unsaved[0]
            row.reward[0], end, cut, info = self._step_lane(0, self._for_env(action)[0], obs)
            self._require_finite(0, obs, row.reward)
        except Broke as broken:
            self._restart(0, broken, obs)
            row.reward[0], end, cut, broke = 0.0, False, False, True
        row.terminated[0], row.truncated[0] = end, cut
        self._returns[0] += row.reward[0]
        if end or cut:
            self.info = numbers(info) or None
            self._end(obs)
        self._proven = self._proven or not broke
        row.seconds[0] = time.monotonic() - begun
        return broke

    def take_told(self, broke: bool) -> Told | None:
        """What else there is to tell of a step; most often nothing."""
        if not self.faults and self.info is None:
            return None
        info, self.info = self.info, None
        return Told(broke, self.take_faults(), info)

    def _end(self, obs: list[np.ndarray]) -> None:
        """Keep the last observation of the episode, and begin the next one."""
        for last, array in zip(self._final, obs, strict=True):
            np.copyto(last, array)
        try:
            self._begin(0, int(self._episodes[0]) + 1, obs)
        except Broke as broken:
            self._restart(0, broken, obs)

    def _new_obs(self) -> list[np.ndarray]:
        return self._columns

    def _put(self, lane: int, raw: Any, obs: list[np.ndarray]) -> None:
        if type(raw) is np.ndarray and (raw.shape, raw.dtype) == self._common:  # the common case, without detours
            self._places[0][...] = raw
        else:
            super()._put(lane, raw, obs)

    def _require_finite(self, lane: int, obs: list[np.ndarray], reward: np.ndarray | None = None) -> None:
        fine = reward is None or math.isfinite(reward[0])
        for place, flags in self._finite:
            np.isfinite(place, flags)
            fine = fine and b"\0" not in flags.tobytes()  # several times as fast as `flags.all()`
        if not fine:
            super()._require_finite(lane, obs, reward)
