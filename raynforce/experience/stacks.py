"""Stacked frames in a replay buffer: each frame is stored once, and stacks are put together when they are asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from raynforce.experience.compressed import Stored
from raynforce.experience.fragment import Arrays, Fragment
from raynforce.experience.storage import Layout, SlotPool, whole_columns
from raynforce.spaces import ObsLeaf


class StackPlan(NamedTuple):
    depth: np.ndarray  # [T+1, B] uint8, rows above that belong to a stack; older frames repeat the oldest of these
    whole: np.ndarray  # [T+1, B] bool, the stacks that the rows above do not give


class Stacks:
    """Observations of a ring that are stacks of frames; a row has its newest frame alone.

    A stack that the rows above do not give to the bit is stored whole; so are a lane's oldest.
    """

    def __init__(
        self, obs: Sequence[ObsLeaf], stored: Mapping[str, Stored], flat: Arrays, layout: Layout, memory_fraction: float
    ) -> None:
        """`stored` has the ring's columns, `[slots, ...]` each, `flat` those that are never compressed."""
        self.frames = {leaf.path: leaf.stack for leaf in obs}
        self.most = max(self.frames.values()) - 1  # rows above a stack's own that it can reach
        self.depth = flat["depth"]
        self.pool = SlotPool(whole_columns(obs), flat["whole_slot"], memory_fraction, "whole stacks")
        self._stored, self._width, self._capacity = stored, layout.width, layout.capacity

    def get(self, path: str, index: np.ndarray) -> np.ndarray:
        frames = self.frames[path]
        back = np.minimum(np.arange(frames - 1, -1, -1), self.depth.take(index)[:, None])  # [n, frames]
        found = self._stored[path].take((index[:, None] - back * self._width) % self._capacity, axis=0)
        stacks: np.ndarray = found.reshape(len(index), frames * found.shape[2], *found.shape[3:])
        if self.pool.used:
            slot = self.pool.slot.take(index)
            (whole,) = (slot >= 0).nonzero()
            stacks[whole] = self.pool.arrays[path][slot[whole]]
        return stacks

    def plan(self, fragment: Fragment, joins: np.ndarray | None, above: int) -> StackPlan:
        """How a fragment will be stored below `above` rows; `joins` are the positions of the row it goes on from."""
        words = [_words(fragment[path], frames) for path, frames in self.frames.items()]  # [T+1, B, frames, words]
        rows, lanes = words[0].shape[:2]
        goes_on, dirty = np.ones((rows, lanes), bool), np.zeros((rows, lanes), bool)
        for stack in words:
            for t in range(1, rows):  # one row at a time: what is compared stays in the processor's cache
                goes_on[t] &= (stack[t, :, :-1] == stack[t - 1, :, 1:]).all(axis=(1, 2))
        depth_above, dirty_above = np.zeros(lanes, np.int64), np.zeros(lanes, bool)
        if joins is None:
            goes_on[0] = False
        else:
            for stack, (path, frames) in zip(words, self.frames.items(), strict=True):
                goes_on[0] &= (stack[0] == _words(self.get(path, joins)[None], frames)[0]).all(axis=(1, 2))
            depth_above, dirty_above = self.depth.take(joins).astype(np.int64), self.pool.slot.take(joins) >= 0
        begins = (~goes_on).nonzero()
        for stack in words:
            here = stack[begins]
            dirty[begins] |= (here[:, 1:] != here[:, :-1]).any(axis=(1, 2))  # it has frames from before its row

        times = np.arange(rows)[:, None]
        begun = np.maximum.accumulate(np.where(goes_on, -1, times))  # the row in which it began; -1: above
        depth = np.minimum(np.where(begun >= 0, times - begun, depth_above + times), self.most)
        dirty = np.where(begun >= 0, np.take_along_axis(dirty, np.maximum(begun, 0), axis=0), dirty_above)
        return StackPlan(depth.astype(np.uint8), (dirty & (depth < self.most)) | (depth > times + above))

    def write(self, plan: StackPlan, fragment: Fragment, slots: np.ndarray) -> None:
        """Store all but the frames of a fragment; `slots` `[T+1, B]` are its positions."""
        self.pool.drop(slots)
        self.depth[slots] = plan.depth
        if plan.whole.any():
            self.pool.put(slots[plan.whole], {path: fragment[path][plan.whole] for path in self.frames})

    def losing(self, slots: np.ndarray) -> np.ndarray:
        """Which positions have to be stored whole if `slots` `[n, B]` become the oldest rows."""
        reaches: np.ndarray = self.depth.take(slots) > np.arange(len(slots))[:, None]
        return slots[reaches & (self.pool.slot.take(slots) < 0)]


def _words(stacks: np.ndarray, frames: int) -> np.ndarray:
    """`[T, B, frames * C, ...]` as `[T, B, frames, words]`, of as many bytes as possible each."""
    plain = np.ascontiguousarray(stacks).reshape(*stacks.shape[:2], frames, -1).view(np.uint8)
    return plain.view(np.uint64) if plain.shape[-1] % 8 == 0 else plain
