"""Single environments stepped side by side, as one vector environment: all together, or each at its own pace."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from raynforce.envs.faults import EnvFault
from raynforce.envs.lanes import Lanes
from raynforce.envs.local import LaneVector
from raynforce.infos import Info


class ParallelVector(LaneVector):
    """As `LocalVector`, side by side. An env that hangs or whose process ends is replaced."""

    def __init__(self, lanes: Lanes) -> None:
        super().__init__(lanes.spec, lanes.count, lanes.note, lanes.way_back)
        self._lanes, self._rows = lanes, lanes.rows
        self._all = np.arange(lanes.count)
        self._watch = None if lanes.hang_seconds == math.inf else lanes.hang_seconds / 10  # seconds between two looks

    def reset(self, seed: int | None = None) -> dict[str, np.ndarray]:
        while not self.idle.all():  # an evaluation at each lane's own pace may have been given up
            self.answers(math.inf)
        if not self._obs and seed is None:
            return self._show()  # the lanes began with their first episodes
        self._lanes.reset(seed)
        self._lanes.take_info()  # of episodes that were given up
        return self._show()

    def take_faults(self) -> list[EnvFault]:
        return sorted(self._lanes.take_faults(), key=lambda fault: fault.lane or 0)

    def close(self) -> None:
        self._lanes.close()

    def _call(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        return self._lanes.call(method, args)

    def _step_lanes(self, action: np.ndarray) -> tuple[Sequence[int], Sequence[int], Mapping[int, Info]]:
        self._lanes.step(self._all, action)
        broke: list[int] = []
        left = self.num_envs
        while left:
            done, broken = self.answers(math.inf)
            broke += broken.tolist()
            left -= len(done) + len(broken)
        return np.flatnonzero(self.ended).tolist(), broke, self._lanes.take_info()

    # -- each lane at its own pace: first come, first served ----------------------------------------------

    @property
    def idle(self) -> np.ndarray:
        return np.isinf(self._lanes.busy_since())

    def rows(self) -> dict[str, np.ndarray]:
        """What the policy sees next, `[B, ...]`; of lanes that are at a step, something in between."""
        return self._lanes.obs

    @property
    def reward(self) -> np.ndarray:
        return self._lanes.reward

    @property
    def ended(self) -> np.ndarray:
        return self._lanes.terminated | self._lanes.truncated

    def ask(self, lanes: np.ndarray, action: np.ndarray) -> None:
        """Have these idle lanes, `[K]`, step with `action`, `[K, ...]`. Returns at once."""
        self._lanes.step(lanes, action)

    def take_info(self) -> Mapping[int, Info]:
        return self._lanes.take_info()

    def answers(self, until: float) -> tuple[np.ndarray, np.ndarray]:
        """Wait for some lanes, until a time on the monotonic clock: those that have stepped, and those that broke."""
        left = until - time.monotonic()
        self._lanes.wait(None if left == math.inf and self._watch is None else min(left, self._watch or left))
        done, broken = self._lanes.collect()
        if self._watch is not None:
            self._lanes.overdue(time.monotonic())
        return done, np.array([lane for lane, *_ in broken], np.int64)
