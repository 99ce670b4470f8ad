"""A replay buffer as it was saved: its state tree with every part checked, and how it is laid out anew."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from raynforce.errors import CheckpointError
from raynforce.experience.storage import Column, Layout
from raynforce.trees import SEGMENTS, Tree

LARGEST = 2**53  # of any count in a checkpoint: sums and products of a few still fit into 64 bits
DAMAGED = "the checkpoint is damaged, or no replay buffer's: resume from an older one"
BLOCKS = 64
PIECE = 128


class Segment(NamedTuple):
    """Rows of the ring with all that belongs to them; it never changes once it has its stamp."""

    first: int
    stop: int
    stamp: int
    columns: dict[str, np.ndarray]
    """`[rows, width, ...]` each."""
    final_index: np.ndarray
    """`[K]` positions within the segment, in order, of steps with a true final observation."""
    finals: dict[str, np.ndarray]
    """`[K, ...]` each."""

    def flat(self, path: str) -> np.ndarray:
        array = self.columns[path]
        return array.reshape(-1, *array.shape[2:])


class SavedReplay:
    """What `Replay.state` has returned, once; raises `CheckpointError` for anything else, and allocates little."""

    def __init__(self, tree: Tree, columns: Sequence[Column], obs_paths: Sequence[str]) -> None:
        """`columns` and `obs_paths` are those of the buffer that it is for."""
        if not isinstance(tree, dict):
            raise _unexpected("the state", tree, "a tree")
        layout = tree.get("layout")
        if not isinstance(layout, dict):
            raise _unexpected("layout", layout, "rows, samplers and lanes")
        self.layout = Layout(*(_count(f"layout.{name}", layout.get(name), 1) for name in Layout._fields))
        if self.layout.capacity >= LARGEST:
            raise _unexpected("layout", layout, f"fewer than {LARGEST} transitions")
        self.head = _counts("head", tree.get("head"), 0, self.layout.samplers)
        """Rows that each sampler has ever written."""
        self.sequence = _counts("sequence", tree.get("sequence"), -1, self.layout.samplers)
        self.stamp = _count("stamp", tree.get("stamp"), 0)
        self.max_priority = _priority(tree.get("max_priority"))
        self.filled = self.layout.filled(self.head)
        self.priority = self._priorities(tree["priority"]) if "priority" in tree else None
        """`[filled * width]` float32, or None."""
        pieces = tree.get(SEGMENTS)
        if not isinstance(pieces, dict):
            raise _unexpected(SEGMENTS, pieces, "a tree")
        found = (self._segment(name, piece, columns, obs_paths) for name, piece in pieces.items())
        self.segments = sorted(found, key=lambda segment: segment.first)
        stop = 0
        for segment in self.segments:
            if not stop <= segment.first < segment.stop <= self.filled:
                raise CheckpointError(
                    f"replay: a segment has the rows {segment.first} to {segment.stop - 1}, expected some between "
                    f"{stop} and {self.filled - 1}; {DAMAGED}"
                )
            stop = segment.stop
        self.missing = (self.filled - sum(s.stop - s.first for s in self.segments)) * self.layout.width
        """Places of the ring that should be there and are in none of the segments."""

    def _priorities(self, found: Any) -> np.ndarray:
        shape = (self.filled * self.layout.width,)
        if not isinstance(found, np.ndarray) or found.shape != shape or found.dtype.name not in ("float32", "float64"):
            raise _unexpected("priority", found, f"{shape} float32")
        with np.errstate(over="ignore"):
            rounded = found.astype(np.float32)
        if not ((rounded >= 0) & (rounded < np.inf)).all():
            raise CheckpointError(f"replay: a priority is negative or not finite; {DAMAGED}")
        return rounded

    def _segment(self, name: Any, piece: Any, columns: Sequence[Column], obs_paths: Sequence[str]) -> Segment:
        numbers = re.fullmatch(r"([0-9]{1,16})-([0-9]{1,16})", name) if isinstance(name, str) else None
        if numbers is None:
            raise _unexpected("a segment's name", name, "'ROW-STAMP'")
        first, stamp = int(numbers[1]), int(numbers[2])
        _count("the stamp of a segment", stamp, 0, self.stamp + 1)
        width, valid = self.layout.width, _find(piece, "valid")
        rows = len(valid) if isinstance(valid, np.ndarray) and valid.ndim else 0
        if not 0 < rows <= self.filled:
            raise _unexpected(f"'{name}/valid'", valid, f"at most {self.filled} rows")
        index = _find(piece, "final_index")
        if not isinstance(index, np.ndarray) or index.ndim != 1 or index.dtype != np.int64:
            raise _unexpected(f"'{name}/final_index'", index, "one dimension of int64")
        if len(index) and not (index[0] >= 0 and index[-1] < rows * width and (index[1:] > index[:-1]).all()):
            raise CheckpointError(
                f"replay: '{name}/final_index' is not a rising sequence within {rows * width}; {DAMAGED}"
            )
        arrays, finals = {}, {}
        for column in columns:
            path = column.path
            arrays[path] = _array(piece, name, path, (rows, width, *column.shape), column.dtype)
            if path in obs_paths:
                finals[path] = _array(piece, name, f"final/{path}", (len(index), *column.shape), column.dtype)
        return Segment(first, first + rows, stamp, arrays, index, finals)

    def pick(self, slots: np.ndarray) -> Iterator[tuple[Segment, np.ndarray, np.ndarray]]:
        """Where these positions of the ring are found: a segment, which of them it has, and their places in it.

        The places of one segment come in rising order; positions that are in no segment do not come.
        """
        order = slots.argsort(kind="stable")
        ordered, width = slots[order], self.layout.width
        for segment in self.segments:
            start, stop = ordered.searchsorted([segment.first * width, segment.stop * width])
            if start < stop:
                yield segment, order[start:stop], ordered[start:stop] - segment.first * width

    def following(self, slots: np.ndarray) -> np.ndarray:
        """The position in the ring one row further on."""
        return (slots + self.layout.width) % self.layout.capacity

    def transitions(self) -> tuple[np.ndarray, np.ndarray]:
        """Positions of all steps whose next observation is there too; and their ages, 0 for a sampler's newest row."""
        rows, _, lanes = self.layout
        width = self.layout.width
        parts = [np.flatnonzero(segment.columns["valid"]) + segment.first * width for segment in self.segments]
        slots = np.concatenate([np.zeros(0, np.int64), *parts])
        row, written = slots // width, np.array(self.head)[slots % width // lanes]
        age = (written - 1 - row) % rows
        kept = (row < written) & (age < rows - 1)  # what comes behind a head is no step
        whole = np.zeros(len(slots), bool)
        for _, which, _ in self.pick(self.following(slots)):
            whole[which] = True
        for segment, which, place in self.pick(slots):
            whole[which] |= held(segment.final_index, place)[0]
        kept &= whole
        return slots[kept], age[kept]


def held(index: np.ndarray, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which of these places are in a rising `index`, and where in it those are."""
    at = index.searchsorted(places)
    found = np.zeros(len(places), bool)
    inside = at < len(index)
    found[inside] = index[at[inside]] == places[inside]
    return found, at[found]


class Move(NamedTuple):
    """Where transitions of a saved buffer go in one of another layout, by position in the ring."""

    source: np.ndarray  # [M]
    target: np.ndarray  # [M]
    cut: np.ndarray  # [M] bool: the row below its target is not what followed
    rows: int
    """How many of the new ring's rows they take, from the first on."""


def relayout(saved: SavedReplay, layout: Layout) -> Move:
    """The newest transitions that fit, rows that are none left out, the oldest ones again in the first rows.

    Streams are dealt out block by block, each block some stretch of time. Within one, streams stand end to end and
    are cut into as many pieces as there are lanes now; each lane's pieces join on to each other without a hole.
    """
    source, age = saved.transitions()
    room, width, before = layout.capacity - layout.width, layout.width, saved.layout
    if len(source) > room:
        newest = age.argsort(kind="stable")[:room]
        source, age = source[newest], age[newest]
    if not len(source):
        return Move(source, source, np.zeros(0, bool), 0)
    span = int(age.max()) + 1
    height = max(-(-span // BLOCKS), PIECE * -(-width // before.width))  # pieces of some length: a cut ends a window
    block = (span - 1) // height - age // height  # the oldest is 0
    order = ((block * before.width + source % before.width) * before.rows - age).argsort()
    source, block = source[order], block[order]

    # After `n` transitions, `(n + c) // width` of them are in lane c: these add up to n, whatever it is.
    dealt = np.concatenate([[0], np.bincount(block).cumsum()])[:, None]  # [blocks + 1, 1]
    depth = (dealt + np.arange(width)) // width  # [blocks + 1, width]
    length = np.diff(depth, axis=0).reshape(-1)  # of each piece
    rows = int(depth[-1].max())
    first_row = (depth[:-1] + rows - depth[-1]).reshape(-1)  # every lane ends in the last row
    lane = np.tile(np.arange(width), len(depth) - 1)
    within = np.arange(len(source)) - np.repeat(length.cumsum() - length, length)
    target = (np.repeat(first_row, length) + within) * width + np.repeat(lane, length)

    below = np.full((rows + 1) * width, -1)
    below[target] = source
    cut = below[target + width] != saved.following(source)
    return Move(source, target, cut, rows)


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
        raise CheckpointError(f"replay: {what} is {size}, expected one number for each of {length} samplers; {DAMAGED}")
    return [_count(what, value, least) for value in values]


def _priority(value: Any) -> float:
    number = value if type(value) is float or type(value) is int else -1
    rounded = float(np.float32(number)) if 0 < number <= float(np.finfo(np.float32).max) else 0.0
    if not rounded:
        raise _unexpected("max_priority", value, "a positive number")
    return rounded


def _find(tree: Any, path: str) -> Any:
    for key in path.split("/"):
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def _array(piece: Any, name: str, path: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    found = _find(piece, path)
    if not isinstance(found, np.ndarray) or found.shape != shape or found.dtype != dtype:
        what = "nothing" if found is None else _described(found)
        raise CheckpointError(
            f"replay: expected '{name}/{path}' of {shape} {dtype}, found {what}; the checkpoint belongs to another "
            "environment or buffer, or is damaged"
        )
    return found.view(np.uint8) != 0 if dtype == "bool" else found  # a file may hold other bytes than 0 and 1
