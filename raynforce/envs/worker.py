"""A lane whose steps are read elsewhere than where they are taken: it does as it is asked and reports."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np

from raynforce.envs.faults import EnvFault
from raynforce.envs.lane import Lane, Plan
from raynforce.infos import Info
from raynforce.spaces import EnvSpec

GRACE = 3.0
"""Seconds that environments have to close."""


class Report(NamedTuple):
    """Something else than a step that went well."""

    lane: int
    what: Literal["spaces", "made", "step", "answer", "error", "died", "gone"]
    """With a new env, `About` (`spaces` before a process writes to shared rows); with a step that has more to tell than
    its row, `Told`; with an answer, what the method returned, and faults on the way; with an error, the exception; with
    a process that died, how. One that was abandoned is gone."""
    value: Any


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


class LaneWorker:
    """Makes the lane number `index` of a plan, beginning with `episode`, and calls it."""

    lane: Lane | None = None
    action: np.ndarray
    """`[1, ...]` for the next step."""

    def __init__(self, plan: Plan, index: int, episode: int) -> None:
        self.plan, self.index, self.episode = plan, index, episode

    def make(self) -> Report:
        return self._report("made", self._make)

    def step(self) -> Report | None:
        """None if there is nothing to tell but what is in the row."""
        report = self._report("step", self._step)
        return None if report.value is None else report

    def call(self, method: str, args: tuple[Any, ...]) -> Report:
        return self._report("answer", lambda: self._call(method, args))

    def close(self) -> None:
        if self.lane is not None:
            self.lane.close()

    def _report(self, what: Literal["made", "step", "answer"], work: Callable[[], Any]) -> Report:
        try:
            return Report(self.index, what, work())
        except BaseException as error:
            return Report(self.index, "error", error)

    def _make(self) -> About:
        lane = Lane(self.plan, self.index)
        try:
            lane.begin_at(self.episode)
        except BaseException:
            lane.close()
            raise
        self.lane, self.action = lane, lane.row.action
        return About(lane.spec, lane.note, lane.way_back, lane.shared.take_faults())

    def _call(self, method: str, args: tuple[Any, ...]) -> tuple[Any, list[EnvFault]]:
        assert self.lane is not None
        return getattr(self.lane, method)(*args), self.lane.shared.take_faults()

    def _step(self) -> Told | None:
        lane = self.lane
        assert lane is not None
        begun = time.monotonic()
        broke = lane.step(lane.ready(self.action)[0])
        lane.row.seconds[0] = time.monotonic() - begun
        info = lane.take_info()
        return Told(broke, lane.shared.take_faults(), info) if info is not None or lane.shared.faults else None
