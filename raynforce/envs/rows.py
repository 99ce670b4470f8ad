"""What many environments last gave, a row for each: plain memory that threads and processes can share."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from raynforce.spaces import EnvSpec

_LINE = 64  # bytes of a cache line: no two lanes write to the same one


class Rows:
    """One row of memory for each lane, with all that its steps take and give; each array is a column, `[N, ...]`."""

    def __init__(self, spec: EnvSpec, count: int, memory: Any = None) -> None:
        self._spec, self._used, self._stride, self._count = spec, 0, row_bytes(spec), count
        self._memory = np.zeros(count * self._stride, np.uint8) if memory is None else np.frombuffer(memory, np.uint8)
        self.seconds = self._column("float32")  # that the last step took
        self.episode = self._column("int64")
        self.steps = self._column("int64")  # of the episode, the running one included
        self.reward = self._column("float32")
        self.terminated = self._column("bool")
        self.truncated = self._column("bool")
        self.obs = {leaf.path: self._column(leaf.dtype, leaf.shape) for leaf in spec.obs}
        rows = self._memory.reshape(count, self._stride)
        self.live = rows[:, : self._used]  # the bytes of all of the above
        begin = self._used
        self.final = {leaf.path: self._column(leaf.dtype, leaf.shape) for leaf in spec.obs}
        self.last = rows[:, begin : self._used]  # the bytes of `final`
        self.action = self._column(spec.action.dtype, spec.action.shape)

    def one(self, lane: int) -> Rows:
        return Rows(self._spec, 1, self._memory[lane * self._stride : (lane + 1) * self._stride])

    def _column(self, dtype: str, shape: tuple[int, ...] = ()) -> np.ndarray:
        kind = np.dtype(dtype)
        begin = _aligned(self._used, kind.itemsize)
        self._used = begin + math.prod(shape) * kind.itemsize
        inner = [math.prod(shape[i + 1 :]) * kind.itemsize for i in range(len(shape))]
        return np.ndarray((self._count, *shape), kind, self._memory, begin, (self._stride, *inner))


def row_bytes(spec: EnvSpec) -> int:
    arrays = [(leaf.dtype, leaf.shape) for leaf in (*spec.obs, *spec.obs)] + [(spec.action.dtype, spec.action.shape)]
    sizes = [_aligned(math.prod(shape) * np.dtype(dtype).itemsize, 16) for dtype, shape in arrays]
    return _aligned(_LINE + sum(sizes), _LINE)


def _aligned(size: int, to: int) -> int:
    return -(-size // to) * to
