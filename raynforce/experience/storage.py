"""What a replay buffer is made of: its layout, its columns, their size, and the pools of observations beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from raynforce.errors import UsageError
from raynforce.experience.compressed import OBJECT
from raynforce.experience.sumtree import tree_bytes
from raynforce.memory import require_memory
from raynforce.spaces import MASK, ActionSpec, ObsLeaf

POINTER = 8  # bytes


class Layout(NamedTuple):
    """How a ring is laid out: time runs down its rows, each sampler has some lanes side by side."""

    rows: int
    samplers: int
    lanes: int

    @staticmethod
    def of(capacity: int, lanes: int, samplers: int = 1) -> Layout:
        return Layout(capacity // (samplers * lanes), samplers, lanes)

    @property
    def width(self) -> int:
        return self.samplers * self.lanes

    @property
    def capacity(self) -> int:
        return self.rows * self.width

    def filled(self, head: Sequence[int]) -> int:
        """Rows in use, the newest observation's included, when each sampler has written so many."""
        return min(self.rows, max(head) + 1) if max(head) > 0 else 0


class Column(NamedTuple):
    """One array of the ring, `[rows, samplers * lanes, *shape]`."""

    path: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def is_image(self) -> bool:
        """Whether it can be compressed: bytes in two dimensions or more."""
        return self.dtype == "uint8" and len(self.shape) >= 2


def saved_path(path: str) -> str:
    """Where a column is in a saved segment, whose levels a '/' separates: a mask is not below an array `obs`."""
    return path.replace(MASK, "action_mask")


def whole_columns(obs: Sequence[ObsLeaf]) -> list[Column]:
    return [Column(leaf.path, leaf.shape, leaf.dtype) for leaf in obs]


def observation_bytes(obs: Sequence[ObsLeaf]) -> int:
    return sum(column.nbytes for column in whole_columns(obs))


def columns_of(obs: Sequence[ObsLeaf], action: ActionSpec) -> list[Column]:
    """What is kept of every step, and saved; of stacked frames the newest alone."""
    return [
        *(Column(leaf.path, _frame(leaf), leaf.dtype) for leaf in obs),
        Column("action", action.shape, "float32" if action.kind == "box" else "int64"),
        Column("reward", (), "float32"),
        Column("terminated", (), "bool"),
        Column("end", (), "bool"),  # the episode, or what is known of it, ends with this step
        Column("valid", (), "bool"),
        *([Column("depth", (), "uint8")] if _is_stacked(obs) else []),  # rows above that a stack of frames goes on in
    ]


def derived_columns(obs: Sequence[ObsLeaf]) -> list[Column]:
    """What follows: whether a step can be sampled, where its true next observation is, and stacks stored whole."""
    whole = [Column("whole_slot", (), "int32")] if _is_stacked(obs) else []
    return [Column("ready", (), "bool"), Column("final_slot", (), "int32"), *whole]


def _is_stacked(obs: Sequence[ObsLeaf]) -> bool:
    return any(leaf.stack > 1 for leaf in obs)


def _frame(leaf: ObsLeaf) -> tuple[int, ...]:
    return leaf.shape if leaf.stack == 1 else (leaf.shape[0] // leaf.stack, *leaf.shape[1:])


def estimate_bytes(
    obs: Sequence[ObsLeaf], action: ActionSpec, layout: Layout, *, prioritized: bool = False, compress: bool = False
) -> int:
    """Bytes of a full `Replay` without final observations and whole stacks; compressed images count as a third."""
    columns = [*columns_of(obs, action), *derived_columns(obs)]
    each = sum(POINTER + OBJECT + c.nbytes // 3 if compress and c.is_image else c.nbytes for c in columns)
    return layout.capacity * each + (tree_bytes(layout.capacity) if prioritized else 0)


def has_images(obs: Sequence[ObsLeaf]) -> bool:
    return any(column.is_image for column in whole_columns(obs))


def require_images(obs: Sequence[ObsLeaf]) -> None:
    if not has_images(obs):
        found = ", ".join(f"{leaf.path!r} is {leaf.shape} {leaf.dtype}" for leaf in obs)
        images = "images, which are uint8 of two dimensions or more"
        raise UsageError(f"replay.compress = true compresses {images}, and {found}: leave it out")


class SlotPool:
    """Observations of some of the ring's positions: true last ones of episodes, or whole stacks of frames."""

    def __init__(self, columns: Sequence[Column], slot: np.ndarray, memory_fraction: float, what: str):
        """`slot` `[positions]` is the ring's own column."""
        self._memory_fraction, self._what = memory_fraction, what
        self._bytes_each = sum(column.nbytes for column in columns)
        self.arrays = {column.path: np.zeros((0, *column.shape), column.dtype) for column in columns}  # [slots, ...]
        self.slot = slot  # where in `arrays` a position's observation is; -1: nowhere
        self._free, self._num_free = np.zeros(0, np.int32), 0  # a stack: the first `_num_free` are free slots
        self.clear()

    @property
    def used(self) -> int:
        return len(self._free) - self._num_free

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values()) + self._free.nbytes

    def reserve(self, count: int) -> None:
        """Make sure that `count` slots are free, doubling the pool if they are not."""
        if count <= self._num_free:
            return
        old = len(self._free)
        new = max(64, 2 * old, old + count)
        require_memory(new * self._bytes_each, self._memory_fraction, f"replay: {new} {self._what}")
        for path, array in self.arrays.items():
            grown = np.zeros((new, *array.shape[1:]), array.dtype)
            grown[:old] = array
            self.arrays[path] = grown
        free = np.zeros(new, np.int32)
        free[: self._num_free] = self._free[: self._num_free]
        free[self._num_free : self._num_free + new - old] = np.arange(old, new)
        self._free, self._num_free = free, self._num_free + new - old

    def put(self, positions: np.ndarray, found: Mapping[str, np.ndarray]) -> None:
        self.reserve(len(positions))
        self._num_free -= len(positions)
        taken = self._free[self._num_free : self._num_free + len(positions)].copy()
        self.slot[positions] = taken
        for path, array in self.arrays.items():
            array[taken] = found[path]

    def drop(self, positions: np.ndarray) -> None:
        if self.used:
            old = self.slot.take(positions)
            old = old[old >= 0]
            self._free[self._num_free : self._num_free + len(old)] = old
            self._num_free += len(old)
            self.slot[positions] = -1

    def clear(self) -> None:
        self._num_free = len(self._free)
        self._free[:] = np.arange(self._num_free)
        self.slot[:] = -1

    def saved(self, name: str, start: int, stop: int) -> dict[str, np.ndarray]:
        """What it has of the positions from `start` to before `stop`, and of which."""
        slots = self.slot[start:stop]
        (index,) = (slots >= 0).nonzero()
        return {f"{name}_index": index} | {f"{name}/{path}": array[slots[index]] for path, array in self.arrays.items()}
