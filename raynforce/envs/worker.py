"""A lane whose steps are read elsewhere than where they are taken: it does as it is asked and reports."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from raynforce.envs.faults import EnvFault
from raynforce.envs.lane import Lane, Plan
from raynforce.infos import Info
from raynforce.spaces import EnvSpec

GRACE = 3
"""Seconds that environments have to close."""


class Report(NamedTuple):
    """What came of something that a lane was asked for."""

    lane: int
    what: Literal["spaces", "made", "step", "broke", "answer", "error", "died", "gone"]
    """`spaces`: a process has made its env and waits for shared rows; `gone`: one that was abandoned has ended."""
    value: Any = None
    """With a new env, `About`; with a step, the numbers in `info` of an episode that it ended; with an answer, what the
    method returned; with an error, the exception; with a process that died, how."""
    faults: Sequence[EnvFault] = ()
    """On the way. The first is what a lane broke by."""


class About(NamedTuple):
    """What is to be known of a lane once its environment is made."""

    spec: EnvSpec
    note: str
    way_back: str


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
        return report if report.faults or report.value is not None else None

    def call(self, method: str, args: tuple[Any, ...]) -> Report:
        return self._report("answer", lambda: getattr(self.lane, method)(*args))

    def close(self) -> None:
        if self.lane is not None:
            self.lane.close()

    def _report(self, what: Literal["made", "step", "answer"], work: Callable[[], Any]) -> Report:
        try:
            value = work()
        except BaseException as error:
            return Report(self.index, "error", error)
        assert self.lane is not None
        return Report(self.index, "broke" if value is _BROKE else what, value, self.lane.shared.take_faults())

    def _make(self) -> About:
        lane = Lane(self.plan, self.index)
        try:
            lane.begin_at(self.episode)
        except BaseException:
            lane.close()
            raise
        self.lane, self.action = lane, lane.row.action
        return About(lane.spec, lane.note, lane.way_back)

    def _step(self) -> Info | None:
        lane = self.lane
        assert lane is not None
        begun = time.monotonic()
        broke = lane.step(lane.ready(self.action)[0])
        lane.row.seconds[0] = time.monotonic() - begun
        return _BROKE if broke else lane.take_info()


_BROKE: Info = {}
