"""The rows of a replay buffer: streams of fragments in preallocated arrays, each observation stored once."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from raynforce.errors import UsageError
from raynforce.experience.builder import SEQUENCE, STATE
from raynforce.experience.compressed import CompressedFrames, Stored
from raynforce.experience.fragment import Fragment
from raynforce.experience.stacks import StackPlan, Stacks
from raynforce.experience.storage import (
    Column,
    Layout,
    SlotPool,
    columns_of,
    derived_columns,
    saved_path,
    whole_columns,
)
from raynforce.infos import NOTHING
from raynforce.spaces import ActionSpec, ObsLeaf
from raynforce.trees import SEGMENTS, Tree, join

# A buffer is saved in pieces: few enough to be files, small enough that little is written again for a few new rows.
MOST_SEGMENTS = 64
LEAST_SEGMENT = 4096  # transitions


class Appended(NamedTuple):
    """Where a fragment went, in rows counted since its sampler's beginning."""

    before: int  # the head before it came
    first: int  # its first row: the head, or the row after it where a fragment is missing
    head: int  # the row of its newest observation
    steps: int  # valid ones


class Ring:
    """Rows of `samplers` x `lanes` lanes. Every sampler has its own write head, whose row is its newest observation.

    `ring[path]` is a column `[rows, width, ...]`, `ring.flat[path]` the same `[slots, ...]`. If it is to `compress`,
    images are in `ring.frames` instead; `ring.stored[path]` is any column.
    """

    def __init__(
        self,
        obs: Sequence[ObsLeaf],
        action: ActionSpec,
        layout: Layout,
        memory_fraction: float,
        compress: bool = False,
        states: Mapping[str, int] = NOTHING,
        burn_in: int = 0,
    ) -> None:
        """`states` are the sizes of recurrent states, kept of the rows at which sequences begin; of those without a
        step only if others may be learned from after a `burn_in` that begins there."""
        self.layout, self.rows, self.lanes = layout, layout.rows, layout.lanes
        self.width, self.capacity = layout.width, layout.capacity
        self.columns = columns_of(obs, action)
        self.obs = whole_columns(obs)
        self.obs_paths = [leaf.path for leaf in obs]
        columns = [*self.columns, *derived_columns(obs)]
        self.frames = {c.path: CompressedFrames(layout.capacity, c.shape) for c in columns if compress and c.is_image}
        shape, plain = (layout.rows, layout.width), [c for c in columns if c.path not in self.frames]
        self._arrays = {c.path: np.zeros((*shape, *c.shape), c.dtype) for c in plain}  # pages are taken when written
        self.flat = {path: array.reshape(layout.capacity, *array.shape[2:]) for path, array in self._arrays.items()}
        self.stored: dict[str, Stored] = {**self.flat, **self.frames}
        self.terminated, self.end, self.valid = (self.flat[k] for k in ("terminated", "end", "valid"))  # [slots]
        # Of steps whose next row does not hold the true next observation.
        self.finals = SlotPool(self.obs, self.flat["final_slot"], memory_fraction, "final observations")
        self._keeps_idle = burn_in > 0
        self.state_columns = [Column(name, (size,), "float32") for name, size in states.items()]
        slot = np.zeros(layout.capacity if states else 0, np.int32)
        self.states = SlotPool(self.state_columns, slot, memory_fraction, "recurrent states") if states else None
        stacked = [leaf for leaf in obs if leaf.stack > 1]
        self.stacked = whole_columns(stacked)
        self.stacks = Stacks(stacked, self.stored, self.flat, layout, memory_fraction) if stacked else None

        self.head = [0] * layout.samplers  # rows each sampler has ever written; modulo `rows`, where it writes next
        self.sequence = [-1] * layout.samplers
        self.num_valid = 0
        self.segment_rows = max(-(-LEAST_SEGMENT // layout.width), -(-layout.rows // MOST_SEGMENTS))
        self.stamp = 0  # counts fragments
        self.stamps = np.zeros(-(-layout.rows // self.segment_rows), np.int64)  # of each segment's last change

    def __getitem__(self, path: str) -> np.ndarray:
        return self._arrays[path]

    @property
    def nbytes(self) -> int:
        pools = self.finals.nbytes + (self.stacks.pool.nbytes if self.stacks else 0)
        pools += self.states.nbytes + self.states.slot.nbytes if self.states else 0
        return sum(column.nbytes for column in self.stored.values()) + pools

    def slots(self, sampler: int, start: int, stop: int) -> np.ndarray:
        """Flat positions of a sampler's rows, `[stop - start, B]`, in the order of time."""
        rows = np.arange(start, stop) % self.rows
        return rows[:, None] * self.width + np.arange(sampler * self.lanes, (sampler + 1) * self.lanes)

    def lanes_of(self, sampler: int) -> slice:
        return slice(sampler * self.lanes, (sampler + 1) * self.lanes)

    # A step's name is its row, counted since its sampler's beginning, times the ring's width, plus its column. Modulo
    # the capacity that is its position, and the head tells which of all the rows that stood there is there now.

    def names(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The names of the steps at these positions, `[n]`, and how many rows their samplers have added since."""
        last = self._last_names(slots)
        behind = (last - slots) % self.capacity
        return last - behind, behind // self.width

    def named(self, names: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The positions of these steps, `[n]`, and whether they have not been overwritten."""
        behind = self._last_names(names) - names
        return names % self.capacity, (behind >= 0) & (behind < self.capacity)

    def _last_names(self, slots: np.ndarray) -> np.ndarray:
        """The largest name that there can be, `[n]`, in the sampler of each position or name."""
        return np.array(self.head)[slots % self.width // self.lanes] * self.width - 1

    def observed(self, path: str, index: np.ndarray) -> np.ndarray:
        if self.stacks and path in self.stacks.frames:
            return self.stacks.get(path, index)
        return self.stored[path].take(index, axis=0)

    def observed_both(self, path: str, here: np.ndarray, there: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The observations at both; of compressed images that they share, each is decompressed once."""
        if path not in self.frames:
            return self.observed(path, here), self.observed(path, there)
        both = self.observed(path, np.concatenate([here, there]))
        return both[: len(here)], both[len(here) :]

    def append(self, fragment: Fragment) -> Appended:
        """Copy a fragment in, over the oldest steps of its sampler.

        The step before a gap in the sequence becomes an end; so does one whose next row is not valid, or shows
        something else.
        """
        self._check(fragment)
        sampler, final_index = fragment.sampler, fragment["final/index"]
        before = first = self.head[sampler]
        gap = first > 0 and fragment.sequence != self.sequence[sampler] + 1
        elsewhere = self._elsewhere(fragment, first) if first > 0 and not gap else np.zeros(0, np.int64)
        self.finals.reserve(len(final_index) + len(elsewhere))  # before anything changes: it may refuse
        if self.states:
            self.states.reserve(len(fragment[SEQUENCE]) * self.lanes)
        plan, whole = self._make_room(fragment, first, gap)

        changed = first
        if gap:
            changed = first - 1
            self["end"][(first - 1) % self.rows, self.lanes_of(sampler)] = True
            first += 1  # the row at the head stays: it is the true next observation of the truncated step
        elif first > 0 and self._join(fragment, first, elsewhere):
            changed = first - 1
        head = first + fragment.length
        written = self.slots(sampler, first, head + 1)  # [T+1, B]
        steps = self._write(fragment, first, written, final_index)
        if self.stacks and plan:
            self.stacks.write(plan, fragment, written)
        self.head[sampler] = head
        self.sequence[sampler] = fragment.sequence
        self.stamp += 1
        self.touch(np.concatenate([whole, np.arange(changed, head + 1)]))
        return Appended(before, first, head, steps)

    def _check(self, fragment: Fragment) -> None:
        length, lanes, sampler = fragment.length, fragment.lanes, fragment.sampler
        if not (0 <= sampler < self.layout.samplers and lanes == self.lanes):
            fits = f"this buffer was made for samplers 0 to {self.layout.samplers - 1} with {self.lanes} lanes each"
            raise UsageError(f"replay: a fragment of sampler {sampler} with {lanes} lanes does not fit; {fits}")
        if length >= self.rows:
            fix = f"raise algorithm.buffer_size to at least {(length + 1) * self.width} or lower --envs"
            raise UsageError(f"replay: a fragment of {length} steps does not fit into {self.rows} rows per lane; {fix}")
        for column in (*self.obs, *self.columns[len(self.obs) :]):
            if column.path in ("end", "depth"):
                continue
            expected = (length + (column.path in self.obs_paths), lanes, *column.shape)
            found = fragment.columns[column.path].shape if column.path in fragment.columns else "none"
            if found != expected:
                shapes = f"replay: fragment column {column.path!r} has shape {found}, expected {expected}"
                raise UsageError(f"{shapes}; make the buffer from the environment's own spec")
        for column in self.state_columns:
            if STATE + column.path not in fragment.columns:
                raise UsageError(f"replay: a fragment has no recurrent state {column.path!r}: sample with this network")
        if "priority" in fragment.columns and (found := fragment["priority"].shape) != (length, lanes):
            shapes = f"replay: fragment column 'priority' has shape {found}, expected {(length, lanes)}"
            raise UsageError(f"{shapes}; give one TD error for every step, or none at all")

    def _make_room(self, fragment: Fragment, head: int, gap: bool) -> tuple[StackPlan | None, np.ndarray]:
        """Let no stack of frames depend on rows that will be overwritten; returns the plan and the rows changed."""
        if self.stacks is None:
            return None, np.zeros(0, np.int64)
        sampler, first = fragment.sampler, head + gap
        oldest = max(0, first + fragment.length - self.rows + 1)  # that will be left
        joins = self.slots(sampler, head, head + 1)[0] if head > 0 and not gap else None
        plan = self.stacks.plan(fragment, joins, first - oldest)
        losing = self.stacks.losing(self.slots(sampler, oldest, min(oldest + self.stacks.most, first)))
        self.stacks.pool.reserve(len(losing) + int(np.count_nonzero(plan.whole)))
        if len(losing):
            self.stacks.pool.put(losing, {path: self.stacks.get(path, losing) for path in self.stacks.frames})
        return plan, losing // self.width

    def _elsewhere(self, fragment: Fragment, first: int) -> np.ndarray:
        """Lanes that begin elsewhere than at the row `first`, the newest observation, though their episode went on."""
        lanes = self.lanes_of(fragment.sampler)
        before, (newest,) = (first - 1) % self.rows, self.slots(fragment.sampler, first, first + 1)
        differ = np.zeros(self.lanes, bool)
        for path in self.obs_paths:
            unequal = self.observed(path, newest) != fragment[path][0]  # [B, ...]
            differ |= unequal.reshape(self.lanes, -1).any(axis=1)
        differ &= self["valid"][before, lanes] & ~self["end"][before, lanes]
        return differ.nonzero()[0]

    def _join(self, fragment: Fragment, first: int, elsewhere: np.ndarray) -> bool:
        """Let the step before row `first` be an end in the lanes that do not go on from there; whether any is."""
        offset = fragment.sampler * self.lanes
        before = (first - 1) % self.rows
        broken = offset + np.flatnonzero(~fragment["valid"][0])  # the row at the head is their last observation
        self["end"][before, broken] = True
        if len(elsewhere):  # the row at the head will be another episode's
            lanes = offset + elsewhere
            self["end"][before, lanes] = True
            newest = first % self.rows * self.width + lanes
            self.finals.put(before * self.width + lanes, {path: self.observed(path, newest) for path in self.obs_paths})
        return len(broken) + len(elsewhere) > 0

    def _write(self, fragment: Fragment, first: int, slots: np.ndarray, final_index: np.ndarray) -> int:
        """Store a fragment from row `first` on; `slots` `[T+1, B]` are its flat positions."""
        self.num_valid -= int(np.count_nonzero(self.valid.take(slots)))
        self.finals.drop(slots)
        lanes = self.lanes_of(fragment.sampler)
        for path in (*self.obs_paths, "action", "reward", "terminated"):
            source = self._newest(fragment, path)
            if path in self.frames:
                self.frames[path].put(slots[: len(source)], source)
                continue
            for ring, part in self._runs(first, len(source)):
                self[path][ring, lanes] = source[part]
        # The row at the head is the newest observation alone: whatever it was before, it is no step now.
        ended, valid = np.zeros((2, *slots.shape), bool)  # [T+1, B]
        np.logical_or(fragment["terminated"], fragment["truncated"], out=ended[:-1])
        valid[:-1] = fragment["valid"]
        self.end[slots], self.valid[slots] = ended, valid

        if self.states:
            self.states.drop(slots)
            begin = fragment[SEQUENCE]
            kept = np.logical_or.reduceat(fragment["valid"], begin, axis=0) | self._keeps_idle  # [P, B]
            self.states.put(slots[begin][kept], {c.path: fragment[STATE + c.path][kept] for c in self.state_columns})
        if len(final_index):
            self.finals.put(slots.reshape(-1)[final_index], fragment.final_obs())
        added = int(np.count_nonzero(valid))
        self.num_valid += added
        return added

    def _newest(self, fragment: Fragment, path: str) -> np.ndarray:
        """A column of a fragment; of stacked frames the newest alone."""
        column = fragment[path]
        if self.stacks and path in self.stacks.frames:
            return column[:, :, -self.stored[path].shape[1] :]
        return column

    def _runs(self, first: int, count: int) -> Iterator[tuple[slice, slice]]:
        """The one or two runs of rows that `count` steps from `first` on take, with their part of the source."""
        row = first % self.rows
        fits = min(count, self.rows - row)
        yield slice(row, row + fits), slice(0, fits)
        if fits < count:
            yield slice(0, count - fits), slice(fits, count)

    def state(self, known: Collection[str] = ()) -> Tree:
        """Filled rows in segments, and the samplers' cursors; views, but for compressed images.

        A segment's name is its first row and the stamp of its last change; one whose name is known is empty.
        """
        filled = self.filled
        segments: Tree = {}
        for first, stamp in zip(range(0, filled, self.segment_rows), self.stamps.tolist(), strict=False):
            name, stop = f"{first}-{stamp}", min(filled, first + self.segment_rows)
            segments[name] = {} if name in known else self._segment(first, stop)
        cursors = {"head": list(self.head), "sequence": list(self.sequence), "stamp": self.stamp}
        return {"layout": self.layout._asdict(), **cursors, SEGMENTS: segments}

    @property
    def filled(self) -> int:
        return self.layout.filled(self.head)

    def touch(self, rows: np.ndarray) -> None:
        self.stamps[rows % self.rows // self.segment_rows] = self.stamp

    def _segment(self, first: int, stop: int) -> Tree:
        arrays = {c.path: self[c.path][first:stop] for c in self.columns if c.path not in self.frames}
        for path, frames in self.frames.items():
            saved = frames.saved(first * self.width, stop * self.width)
            arrays |= {f"{path}/{name}": part for name, part in saved.items()}
        arrays |= self.finals.saved("final", first * self.width, stop * self.width)
        if self.states:
            arrays |= self.states.saved("state", first * self.width, stop * self.width)
        if self.stacks:
            arrays |= self.stacks.pool.saved("whole", first * self.width, stop * self.width)
        return join({saved_path(path): array for path, array in arrays.items()}, {})

    def clear(self, rows: np.ndarray) -> None:
        for column in self.columns:
            if column.path in self.frames:
                self.frames[column.path].clear(rows.repeat(self.width))
            else:
                self[column.path][rows] = 0
