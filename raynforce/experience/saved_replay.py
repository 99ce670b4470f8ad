"""A replay buffer as it was saved: its state tree with every part checked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from raynforce.errors import CheckpointError
from raynforce.experience.compressed import CompressedFrames, Stored
from raynforce.experience.fragment import Arrays
from raynforce.experience.storage import Column, Layout, saved_path
from raynforce.trees import SEGMENTS, Tree

LARGEST = 2**53  # of any count in a checkpoint: sums and products of a few still fit into 64 bits
DAMAGED = "the checkpoint is damaged, or no replay buffer's: resume from an older one"
NONE = np.zeros(0, np.int64)


class Segment(NamedTuple):
    """Rows of the ring with all that belongs to them; it never changes once it has its stamp."""

    first: int
    stop: int
    stamp: int
    columns: Arrays  # [rows, width, ...] each
    frames: dict[str, CompressedFrames]  # columns that are compressed, `[rows * width, ...]` each
    final_index: np.ndarray  # [K] positions within the segment, in order, of steps with a true final observation
    finals: Arrays  # [K, ...] each
    whole_index: np.ndarray  # [W] positions within the segment, in order, of stacks of frames that are stored whole
    wholes: Arrays  # [W, ...] each
    state_index: np.ndarray  # [P] positions within the segment, in order, at which recurrent states are known
    states: Arrays  # [P, ...] each

    def flat(self, path: str) -> np.ndarray:
        array = self.columns[path]
        return array.reshape(-1, *array.shape[2:])

    def stored(self, path: str) -> Stored:
        return self.frames[path] if path in self.frames else self.flat(path)


class SavedReplay:
    """What `Replay.state` has returned, once; raises `CheckpointError` for anything else, and allocates little."""

    def __init__(
        self,
        tree: Tree,
        columns: Sequence[Column],
        obs: Sequence[Column],
        stacked: Sequence[Column] = (),
        states: Sequence[Column] = (),
    ) -> None:
        """`columns` are those of the buffer that it is for, `obs` its observations, of which some may be `stacked`, and
        `states` its recurrent states."""
        self._obs, self._stacked, self._states = obs, stacked, states
        if not isinstance(tree, dict):
            raise _unexpected("the state", tree, "a tree")
        layout = tree.get("layout")
        if not isinstance(layout, dict):
            raise _unexpected("layout", layout, "rows, samplers and lanes")
        self.layout = Layout(*(_count(f"layout.{name}", layout.get(name), 1) for name in Layout._fields))
        if self.layout.capacity >= LARGEST:
            raise _unexpected("layout", layout, f"fewer than {LARGEST} transitions")
        self.head = _counts("head", tree.get("head"), 0, self.layout.samplers)  # rows ever written by each sampler
        self.sequence = _counts("sequence", tree.get("sequence"), -1, self.layout.samplers)
        self.stamp = _count("stamp", tree.get("stamp"), 0)
        self.max_priority = _priority(tree.get("max_priority"))
        self.late = _count("late", tree.get("late", 0), 0)
        self.drawn = _counts("drawn", tree.get("drawn", [0, 0]), 0, 2)
        self.filled = self.layout.filled(self.head)
        self.priority = self._priorities(tree["priority"]) if "priority" in tree else None  # [filled * width] float32
        pieces = tree.get(SEGMENTS)
        if not isinstance(pieces, dict):
            raise _unexpected(SEGMENTS, pieces, "a tree")
        found = (self._segment(name, piece, columns) for name, piece in pieces.items())
        self.segments = sorted(found, key=lambda segment: segment.first)
        stop = 0
        for segment in self.segments:
            if not stop <= segment.first < segment.stop <= self.filled:
                rows = f"rows {segment.first} to {segment.stop - 1}"
                expected = f"some between {stop} and {self.filled - 1}"
                raise CheckpointError(f"replay: a segment has the {rows}, expected {expected}; {DAMAGED}")
            stop = segment.stop
        # Places of the ring that should be there and are in none of the segments.
        self.missing = (self.filled - sum(s.stop - s.first for s in self.segments)) * self.layout.width

    def _priorities(self, found: Any) -> np.ndarray:
        shape = (self.filled * self.layout.width,)
        if not isinstance(found, np.ndarray) or found.shape != shape or found.dtype.name not in ("float32", "float64"):
            raise _unexpected("priority", found, f"{shape} float32")
        with np.errstate(over="ignore"):
            rounded = found.astype(np.float32)
        if not ((rounded >= 0) & (rounded < np.inf)).all():
            raise CheckpointError(f"replay: a priority is negative or not finite; {DAMAGED}")
        return rounded

    def _segment(self, name: Any, piece: Any, columns: Sequence[Column]) -> Segment:
        numbers = re.fullmatch(r"([0-9]{1,16})-([0-9]{1,16})", name) if isinstance(name, str) else None
        if numbers is None:
            raise _unexpected("a segment's name", name, "'ROW-STAMP'")
        first, stamp = int(numbers[1]), int(numbers[2])
        _count("the stamp of a segment", stamp, 0, self.stamp + 1)
        width, valid = self.layout.width, _find(piece, "valid")
        rows = len(valid) if isinstance(valid, np.ndarray) and valid.ndim else 0
        if not 0 < rows <= self.filled:
            raise _unexpected(f"'{name}/valid'", valid, f"at most {self.filled} rows")
        packed = [c for c in columns if c.is_image and isinstance(_find(piece, f"{c.path}/blob"), np.ndarray)]
        frames = {c.path: _frames(piece, name, c, rows * width) for c in packed}
        plain = [c for c in columns if c.path not in frames]
        arrays = {c.path: _array(piece, name, c.path, (rows, width, *c.shape), c.dtype) for c in plain}
        finals = _beside(piece, name, "final", rows * width, self._obs)
        wholes = _beside(piece, name, "whole", rows * width, self._stacked) if self._stacked else (NONE, {})
        states = _beside(piece, name, "state", rows * width, self._states) if self._states else (NONE, {})
        return Segment(first, first + rows, stamp, arrays, frames, *finals, *wholes, *states)

    def pick(self, slots: np.ndarray) -> Iterator[tuple[Segment, np.ndarray, np.ndarray]]:
        """Segments that have some of these ring positions: which of them, and their places in it, in rising order."""
        order = slots.argsort(kind="stable")
        ordered, width = slots[order], self.layout.width
        for segment in self.segments:
            start, stop = ordered.searchsorted([segment.first * width, segment.stop * width])
            if start < stop:
                yield segment, order[start:stop], ordered[start:stop] - segment.first * width

    def following(self, slots: np.ndarray, rows: int | np.ndarray = 1) -> np.ndarray:
        """The position in the ring one row further on, or `rows`."""
        return (slots + rows * self.layout.width) % self.layout.capacity

    def observed(self, path: str, slots: np.ndarray, frames: int = 1) -> np.ndarray:
        """The observations at these positions, `[n, ...]`; of stacks, how many `frames` they have is to be said."""
        (column,) = (column for column in self._obs if column.path == path)
        found = np.zeros((len(slots), *column.shape), column.dtype)
        if frames == 1:
            for segment, which, place in self.pick(slots):
                found[which] = segment.stored(path).take(place, axis=0)
            return found
        channels, depth = column.shape[0] // frames, self._depth(slots)
        parts = found.reshape(len(slots), frames, channels, *column.shape[1:])
        for back in range(frames):
            for segment, which, place in self.pick(self.following(slots, -np.minimum(back, depth))):
                parts[which, frames - 1 - back] = segment.stored(path).take(place, axis=0)
        for segment, which, place in self.pick(slots):
            whole, at = held(segment.whole_index, place)
            found[which[whole]] = segment.wholes[path][at]
        return found

    def _depth(self, slots: np.ndarray) -> np.ndarray:
        """How many rows above these positions their stacks of frames need, `[n]`; 0 where none or stored whole."""
        depth = np.zeros(len(slots), np.int64)
        if self._stacked:
            for segment, which, place in self.pick(slots):
                depth[which] = segment.flat("depth")[place]
                depth[which[held(segment.whole_index, place)[0]]] = 0
        return depth

    def _known(self, slots: np.ndarray) -> np.ndarray:
        """At which of these positions the observation is there, with all the rows above that it needs."""
        depth, known = self._depth(slots), np.ones(len(slots), bool)
        for back in range(int(depth.max(initial=0)) + 1):
            (needs,) = (depth >= back).nonzero()
            found = np.zeros(len(needs), bool)
            for _, which, _ in self.pick(self.following(slots[needs], -back)):
                found[which] = True
            known[needs] &= found
        return known

    def torn(self) -> np.ndarray:
        """Positions whose row is there, but not all those above that its stack of frames needs."""
        width = self.layout.width
        parts = [np.arange(segment.first * width, segment.stop * width) for segment in self.segments]
        slots = np.concatenate([np.zeros(0, np.int64), *parts])
        return slots[~self._known(slots)]

    def transitions(self) -> tuple[np.ndarray, np.ndarray]:
        """Positions of all steps whose next observation is there too; and their ages, 0 for a sampler's newest row."""
        rows, _, lanes = self.layout
        width = self.layout.width
        parts = [np.flatnonzero(segment.columns["valid"]) + segment.first * width for segment in self.segments]
        slots = np.concatenate([np.zeros(0, np.int64), *parts])
        row, written = slots // width, np.array(self.head)[slots % width // lanes]
        age = (written - 1 - row) % rows
        kept = (row < written) & (age < rows - 1)  # what comes behind a head is no step
        whole = self._known(self.following(slots))
        for segment, which, place in self.pick(slots):
            whole[which] |= held(segment.final_index, place)[0]
        kept &= whole & self._known(slots) if self._stacked else whole
        return slots[kept], age[kept]


def held(index: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which of these places are in a rising `index`, and where in it those are."""
    at = index.searchsorted(places)
    found = np.zeros(len(places), bool)
    inside = at < len(index)
    found[inside] = index[at[inside]] == places[inside]
    return found, at[found]


def _unexpected(what: str, found: Any, expected: str) -> CheckpointError:
    return CheckpointError(f"replay: {what} is {_described(found)}, expected {expected}; {DAMAGED}")


def _described(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.shape} {value.dtype}"
    if isinstance(value, int):
        return str(value) if abs(value) < LARGEST else "a huge number"
    if isinstance(value, str):
        return repr(value[:40])
    return repr(value) if value is None or isinstance(value, float) else f"a {type(value).__name__}"


def _count(what: str, value: Any, least: int, stop: int = LARGEST) -> int:
    if type(value) is not int or not least <= value < stop:
        raise _unexpected(what, value, f"a whole number from {least} to {stop - 1}")
    return value


def _counts(what: str, values: Any, least: int, length: int) -> list[int]:
    if not isinstance(values, list) or len(values) != length:
        size = f"{len(values)} numbers" if isinstance(values, list) else _described(values)
        raise CheckpointError(f"replay: {what} is {size}, expected {length} numbers; {DAMAGED}")
    return [_count(what, value, least) for value in values]


def _priority(value: Any) -> float:
    number = value if type(value) is float or type(value) is int else -1
    rounded = float(np.float32(number)) if 0 < number <= float(np.finfo(np.float32).max) else 0.0
    if not rounded:
        raise _unexpected("max_priority", value, "a positive number")
    return rounded


def _beside(piece: Any, name: str, kind: str, places: int, columns: Sequence[Column]) -> tuple[np.ndarray, Arrays]:
    """The observations that stand beside the rows of a segment, and at which of its places."""
    index = _find(piece, f"{kind}_index")
    if not isinstance(index, np.ndarray) or index.ndim != 1 or index.dtype != np.int64:
        raise _unexpected(f"'{name}/{kind}_index'", index, "one dimension of int64")
    if len(index) and not (index[0] >= 0 and index[-1] < places and (index[1:] > index[:-1]).all()):
        raise CheckpointError(f"replay: '{name}/{kind}_index' is not a rising sequence within {places}; {DAMAGED}")
    shapes = {c.path: ((len(index), *c.shape), c.dtype) for c in columns}
    return index, {path: _array(piece, name, f"{kind}/{path}", *shape) for path, shape in shapes.items()}


def _frames(piece: Any, name: str, column: Column, places: int) -> CompressedFrames:
    frames = CompressedFrames.from_saved(_find(piece, column.path), column.shape)
    if frames.shape[0] != places:
        found = f"'{name}/{column.path}' has {frames.shape[0]} compressed frames"
        raise CheckpointError(f"replay: {found}, expected {places}; {DAMAGED}")
    frames.take(np.zeros(1, np.int64))  # those of another size are found here, and not when they are sampled
    return frames


def _find(tree: Any, path: str) -> Any:
    for key in saved_path(path).split("/"):
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def _array(piece: Any, name: str, path: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    found = _find(piece, path)
    if not isinstance(found, np.ndarray) or found.shape != shape or found.dtype != dtype:
        what = "nothing" if found is None else _described(found)
        why = "the checkpoint belongs to another environment or buffer, or is damaged"
        raise CheckpointError(f"replay: expected '{name}/{path}' of {shape} {dtype}, found {what}; {why}")
    return found.view(np.uint8) != 0 if dtype == "bool" else found  # a file may hold other bytes than 0 and 1
