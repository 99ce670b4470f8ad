"""The replay buffer: a ring of fragments in preallocated arrays, each observation stored once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from raynforce.errors import UsageError
from raynforce.experience.fragment import Fragment
from raynforce.experience.memory import require_memory
from raynforce.experience.saved_replay import SavedReplay, held, relayout
from raynforce.experience.storage import DERIVED, FinalPool, Layout, columns_of, estimate_bytes
from raynforce.experience.sumtree import SumTree
from raynforce.spaces import ActionSpec, ObsLeaf
from raynforce.trees import SEGMENTS, Tree, join

EPSILON = 1e-6
"""Added to every absolute TD error, so that no transition is out of reach."""
REDRAWS = 8
# A buffer is saved in pieces: few enough to be files, small enough that little is written again for a few new rows.
MOST_SEGMENTS = 64
LEAST_SEGMENT = 4096  # transitions


class Replay:
    """Transitions of `samplers` x `lanes` lanes, at most about `capacity` of them, sampled with n-step returns.

    Time runs down the rows, a column is a lane; every sampler has its own write head. The row at a head
    holds the newest observation alone, so `capacity - samplers * lanes` transitions fit. A transition can be
    sampled once its n-step window is complete: `n_step` steps long, or shorter where the episode ended.

    `len(replay)` counts the transitions that can be sampled now, `replay.resident` all valid ones it holds.
    """

    def __init__(
        self,
        obs: Sequence[ObsLeaf],
        action: ActionSpec,
        *,
        capacity: int,
        lanes: int,
        samplers: int = 1,
        n_step: int = 1,
        gamma: float = 0.99,
        prioritized: bool = False,
        alpha: float = 0.6,
        memory_fraction: float = 0.8,
    ):
        self.lanes, self.samplers, self.n_step = lanes, samplers, n_step
        self.gamma, self.alpha = gamma, alpha
        self._width = samplers * lanes
        self._rows = capacity // self._width
        if n_step < 1:
            raise UsageError(f"replay: n_step {n_step} is not allowed; it is at least 1")
        if self._rows < n_step + 2:
            raise UsageError(
                f"replay: a capacity of {capacity} gives each of {self._width} lanes {self._rows} rows, {n_step}-step "
                f"returns need {n_step + 2}; raise algorithm.buffer_size to at least {(n_step + 2) * self._width} "
                "or lower --envs"
            )
        needed = estimate_bytes(obs, action, capacity=capacity, lanes=lanes, samplers=samplers, prioritized=prioritized)
        require_memory(needed, memory_fraction, f"replay: a buffer of {capacity} transitions")

        self._layout = Layout(self._rows, samplers, lanes)
        self.capacity = self._layout.capacity
        self._columns = columns_of(obs, action)
        self._obs_paths = [leaf.path for leaf in obs]
        # np.zeros takes pages only when they are written. Each array twice: [rows, width, ...] and, flat, [slots, ...].
        self._ring = {
            column.path: np.zeros((self._rows, self._width, *column.shape), column.dtype)
            for column in [*self._columns, *DERIVED]
        }
        self._flat = {path: array.reshape(self.capacity, *array.shape[2:]) for path, array in self._ring.items()}
        self._terminated, self._end, self._valid = (self._flat[k] for k in ("terminated", "end", "valid"))
        self._ready = self._flat["ready"]
        self._final_slot = self._flat["final_slot"]  # -1: the next row holds the true next observation
        self._final_slot[:] = -1
        self._finals = FinalPool(self._columns[: len(obs)], memory_fraction)
        self._tree = SumTree(self.capacity) if prioritized else None
        self._max_priority = 1.0

        self._head = [0] * samplers  # rows each sampler has ever written; modulo `rows`, where it writes next
        self._sequence = [-1] * samplers
        self._num_ready = 0
        self._num_valid = 0
        self.missing = 0
        """Places of the ring that the checkpoint it was loaded from had lost."""
        self._segment_rows = max(-(-LEAST_SEGMENT // self._width), -(-self._rows // MOST_SEGMENTS))
        self._stamp = 0  # counts inserts
        self._stamps = np.zeros(-(-self._rows // self._segment_rows), np.int64)  # of each segment's last change
        self._gammas = gamma ** np.arange(n_step + 1)
        self._window = np.arange(n_step) * self._width  # offsets of the steps of an n-step window

    def __len__(self) -> int:
        return self._num_ready

    @property
    def resident(self) -> int:
        """Valid transitions stored, those included whose n-step window is not complete yet."""
        return self._num_valid

    @property
    def nbytes(self) -> int:
        """Bytes reserved; the operating system hands them out as rows fill."""
        tree = self._tree.nbytes if self._tree else 0
        return sum(array.nbytes for array in self._ring.values()) + self._finals.nbytes + tree

    # Insert

    def insert(self, fragment: Fragment) -> int:
        """Copy a fragment in, over the oldest steps of its sampler; returns how many valid transitions it added.

        A sampler's fragments join into one stream of time. Where a sequence number is missing the step before
        the gap becomes a truncation, so that no window reaches across. So does the step before a lane's first row
        that is not valid, or that shows another observation than the one before has led to.
        """
        self._check(fragment)
        length, sampler = fragment.length, fragment.sampler
        final_index = fragment["final/index"]
        first = self._head[sampler]
        gap = first > 0 and fragment.sequence != self._sequence[sampler] + 1
        elsewhere = self._elsewhere(fragment, first) if first > 0 and not gap else np.zeros(0, np.int64)
        self._finals.reserve(len(final_index) + len(elsewhere))  # before anything changes: it may refuse

        pending = first - self.n_step + 1  # the oldest step whose window may still be open
        changed = first
        if gap:
            changed = first - 1
            lanes = slice(sampler * self.lanes, (sampler + 1) * self.lanes)
            self._ring["end"][(first - 1) % self._rows, lanes] = True
            first += 1  # the row at the head stays: it is the true next observation of the truncated step
        elif first > 0 and self._join(fragment, first, elsewhere):
            changed = first - 1
        head = first + length
        oldest = max(0, pending, head - self._rows + 1)
        slots = self._slots(sampler, oldest, head + 1)  # [head + 1 - oldest, B]
        written = slots[first - oldest :]  # [T+1, B]

        added = self._write(fragment, first, written, final_index)
        self._settle(slots, first - oldest)
        self._head[sampler] = head
        self._sequence[sampler] = fragment.sequence
        self._stamp += 1
        self._touch(np.arange(changed, head + 1))
        return added

    def _touch(self, rows: np.ndarray) -> None:
        """Put the newest stamp on the segments of these rows."""
        self._stamps[rows % self._rows // self._segment_rows] = self._stamp

    def _elsewhere(self, fragment: Fragment, first: int) -> np.ndarray:
        """Lanes that begin elsewhere than at the row `first`, the newest observation, though their episode went on."""
        offset = fragment.sampler * self.lanes
        lanes = slice(offset, offset + self.lanes)
        before = (first - 1) % self._rows
        differ = np.zeros(self.lanes, bool)
        for path in self._obs_paths:
            unequal = self._ring[path][first % self._rows, lanes] != fragment[path][0]  # [B, ...]
            differ |= unequal.reshape(self.lanes, -1).any(axis=1)
        differ &= self._ring["valid"][before, lanes] & ~self._ring["end"][before, lanes]
        return differ.nonzero()[0]

    def _join(self, fragment: Fragment, first: int, elsewhere: np.ndarray) -> bool:
        """Let the step before row `first` be an end in the lanes that do not go on from there; whether any is."""
        offset = fragment.sampler * self.lanes
        before = (first - 1) % self._rows
        broken = offset + np.flatnonzero(~fragment["valid"][0])  # the row at the head is their last observation
        self._ring["end"][before, broken] = True
        if len(elsewhere):  # the row at the head will be another episode's
            lanes, slots = offset + elsewhere, self._finals.take(len(elsewhere))
            self._ring["end"][before, lanes] = True
            self._ring["final_slot"][before, lanes] = slots
            for path, final in self._finals.arrays.items():
                final[slots] = self._ring[path][first % self._rows, lanes]
        return len(broken) + len(elsewhere) > 0

    def _check(self, fragment: Fragment) -> None:
        length, lanes = fragment.length, fragment.lanes
        if not (0 <= fragment.sampler < self.samplers and lanes == self.lanes):
            raise UsageError(
                f"replay: a fragment of sampler {fragment.sampler} with {lanes} lanes does not fit; "
                f"this buffer was made for samplers 0 to {self.samplers - 1} with {self.lanes} lanes each"
            )
        if length >= self._rows:
            raise UsageError(
                f"replay: a fragment of {length} steps does not fit into {self._rows} rows per lane; raise "
                f"algorithm.buffer_size to at least {(length + 1) * self._width} or lower --envs"
            )
        for column in self._columns:
            if column.path == "end":
                continue
            rows = length + 1 if column.path in self._obs_paths else length
            expected = (rows, lanes, *column.shape)
            found = fragment.columns[column.path].shape if column.path in fragment.columns else "none"
            if found != expected:
                raise UsageError(
                    f"replay: fragment column {column.path!r} has shape {found}, expected {expected}; "
                    "make the buffer from the environment's own spec"
                )

    def _slots(self, sampler: int, start: int, stop: int) -> np.ndarray:
        """Flat positions of a sampler's rows, `[stop - start, B]`, in the order of time."""
        rows = np.arange(start, stop) % self._rows
        return rows[:, None] * self._width + np.arange(sampler * self.lanes, (sampler + 1) * self.lanes)

    def _write(self, fragment: Fragment, first: int, slots: np.ndarray, final_index: np.ndarray) -> int:
        """Store a fragment from row `first` on; `slots` `[T+1, B]` are its flat positions."""
        self._num_valid -= int(np.count_nonzero(self._valid.take(slots)))
        if self._finals.used:
            old = self._final_slot.take(slots)
            self._finals.release(old[old >= 0])
            self._final_slot[slots] = -1

        lanes = slice(fragment.sampler * self.lanes, (fragment.sampler + 1) * self.lanes)
        for path in (*self._obs_paths, "action", "reward", "terminated"):
            source = fragment[path]
            for ring, part in self._runs(first, len(source)):
                self._ring[path][ring, lanes] = source[part]
        # The row at the head is the newest observation alone: whatever it was before, it is no step now.
        ended, valid = np.zeros((2, *slots.shape), bool)  # [T+1, B]
        np.logical_or(fragment["terminated"], fragment["truncated"], out=ended[:-1])
        valid[:-1] = fragment["valid"]
        self._end[slots], self._valid[slots] = ended, valid

        if len(final_index):
            taken = self._finals.take(len(final_index))
            self._final_slot[slots.reshape(-1)[final_index]] = taken
            for path, final in fragment.final_obs().items():
                self._finals.arrays[path][taken] = final
        added = int(np.count_nonzero(valid))
        self._num_valid += added
        return added

    def _runs(self, first: int, count: int) -> Iterator[tuple[slice, slice]]:
        """The one or two runs of rows that `count` steps from `first` on take, with their part of the source."""
        row = first % self._rows
        fits = min(count, self._rows - row)
        yield slice(row, row + fits), slice(0, fits)
        if fits < count:
            yield slice(0, count - fits), slice(fits, count)

    def _settle(self, slots: np.ndarray, written: int) -> None:
        """Make sampleable what has become so in a sampler's newest rows, of which those from `written` on are new."""
        before = self._ready.take(slots)
        ready = self._complete(slots)
        self._ready[slots] = ready
        self._num_ready += int(np.count_nonzero(ready)) - int(np.count_nonzero(before))
        if self._tree:
            priority = ready * self._max_priority  # [n, B]
            kept = before[:written]
            priority[:written][kept] = self._tree.get(slots[:written][kept])
            self._tree.set(slots.reshape(-1), priority.reshape(-1))

    def _complete(self, slots: np.ndarray) -> np.ndarray:
        """Which steps have a complete window, in a sampler's newest rows `[n, B]`, the last one being at the head.

        It is complete when `n_step` steps stand before the head, or when an episode ends before it.
        """
        complete: np.ndarray = np.logical_or.accumulate(self._end.take(slots)[::-1])[::-1]
        complete[: max(0, len(slots) - self.n_step)] = True
        complete &= self._valid.take(slots)
        return complete

    # Sample

    def sample(self, batch_size: int, rng: np.random.Generator, beta: float = 0.4) -> dict[str, np.ndarray]:
        """Draw transitions with replacement: uniformly, or in proportion to their priorities.

        | column | shape, dtype | meaning |
        |---|---|---|
        | `obs`, or `obs/NAME` per leaf | `[n, ...]` | where the action was taken |
        | `action` | `[n, ...]` | |
        | `reward` | `[n]` float32 | discounted sum over the n-step window |
        | `next_obs`, or `next_obs/NAME` | `[n, ...]` | the true observation after the window |
        | `discount` | `[n]` float32 | what the value of `next_obs` counts: gamma ** steps, 0 if terminated |
        | `weight` | `[n]` float32 | importance weight, at most 1; all 1 when uniform |
        | `index` | `[n]` int64 | for `update_priorities` |
        """
        if self._num_ready == 0:
            raise UsageError(
                f"replay: none of the {self._num_valid} transitions stored can be sampled yet; "
                f"insert at least {self.n_step} steps first (algorithm.learning_starts)"
            )
        if self._tree:
            index, weight = self._draw_prioritized(self._tree, batch_size, rng, beta)
        else:
            index, weight = self._draw_uniform(batch_size, rng), np.ones(batch_size, np.float32)

        reward, last, steps = self._returns(index)
        following = (last + self._width) % self.capacity
        discount = self._gammas[steps] * ~self._terminated.take(last)
        batch = {path: self._flat[path].take(index, axis=0) for path in (*self._obs_paths, "action")}
        batch |= {"reward": reward, "discount": discount.astype(np.float32), "weight": weight, "index": index}
        batch |= {f"next_{path}": self._flat[path].take(following, axis=0) for path in self._obs_paths}
        if self._finals.used:
            slot = self._final_slot.take(last)
            ends = (slot >= 0).nonzero()[0]
            if len(ends):
                slot = slot[ends]
                for path, final in self._finals.arrays.items():
                    batch[f"next_{path}"][ends] = final[slot]
        return batch

    def _draw_uniform(self, n: int, rng: np.random.Generator) -> np.ndarray:
        filled = min(self._rows, max(self._head)) * self._width
        index = rng.integers(filled, size=n)
        for _ in range(REDRAWS):  # rejection: exactly uniform over what is ready
            (redraw,) = (~self._ready.take(index)).nonzero()
            if not len(redraw):
                return index
            index[redraw] = rng.integers(filled, size=len(redraw))
        (redraw,) = (~self._ready.take(index)).nonzero()
        if len(redraw):  # few are ready: choose among them by name
            (ready,) = self._ready[:filled].nonzero()
            index[redraw] = ready[rng.integers(len(ready), size=len(redraw))]
        return index

    def _draw_prioritized(
        self, tree: SumTree, n: int, rng: np.random.Generator, beta: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Proportional, one draw in each of `n` equal slices of the total (Schaul et al. 2016)."""
        index = tree.sample((np.arange(n) + rng.random(n)) * (tree.total / n))
        priority = tree.get(index)
        # (N * P) ** -beta divided by the batch's largest: N and the sum of priorities cancel.
        return index, ((priority / priority.min()) ** -beta).astype(np.float32)

    def _returns(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | int]:
        """n-step rewards `[n]` of transitions, the position of each one's last step, and how many steps it has."""
        if self.n_step == 1:
            return self._flat["reward"].take(index), index, 1
        window = (index[:, None] + self._window) % self.capacity  # [n, n_step]
        used = np.ones(window.shape, bool)  # a step counts while no step before it ended the episode
        np.logical_or.accumulate(self._end.take(window[:, :-1]), axis=1, out=used[:, 1:])
        np.logical_not(used[:, 1:], out=used[:, 1:])
        reward = np.where(used, self._flat["reward"].take(window), 0.0)  # no product: behind an end may be infinity
        reward = (reward * self._gammas[:-1]).sum(axis=1)
        steps = np.count_nonzero(used, axis=1)
        return reward.astype(np.float32), window[np.arange(len(index)), steps - 1], steps

    def update_priorities(self, index: np.ndarray, priority: np.ndarray) -> None:
        """Set the priorities of sampled transitions from their TD errors; a uniform buffer has none to set.

        Positions that cannot be sampled any more, because they have been overwritten, are skipped.
        """
        if not self._tree:
            return
        raised = (np.abs(np.asarray(priority, np.float64)) + EPSILON) ** self.alpha
        with np.errstate(over="ignore"):  # infinity is refused below
            raised = raised.astype(np.float32).astype(np.float64)  # as it is saved
        ready = self._ready.take(index)
        if not ready.all():
            index, raised = index[ready], raised[ready]
        if len(index):
            self._tree.set(index, raised)
            self._max_priority = max(self._max_priority, float(raised.max()))

    # State

    def state(self) -> Tree:
        """All that later samples depend on; only the rows that have been filled, in segments.

        A segment's name is its first row and the stamp of its last change: while the name stays, so does what is in it.
        Priorities, which change all the time, stand apart.

        The arrays are views: a second copy of a large buffer may not fit into memory. What a role returns is copied
        (inline, by `keep`) or serialised (process, ray) by the runtime before the role's next call; so must it be by
        whoever calls this otherwise.
        """
        filled = self._layout.filled(self._head)
        firsts = range(0, filled, self._segment_rows)
        tree: Tree = {
            "layout": self._layout._asdict(),
            "head": list(self._head),
            "sequence": list(self._sequence),
            "max_priority": self._max_priority,
            "stamp": self._stamp,
            SEGMENTS: {
                f"{first}-{stamp}": self._segment(first, min(filled, first + self._segment_rows))
                for first, stamp in zip(firsts, self._stamps.tolist(), strict=False)
            },
        }
        if self._tree:
            tree["priority"] = self._tree.leaves[: filled * self._width].astype(np.float32)
        return tree

    def _segment(self, first: int, stop: int) -> Tree:
        arrays = {column.path: self._ring[column.path][first:stop] for column in self._columns}
        slots = self._final_slot[first * self._width : stop * self._width]
        (ends,) = (slots >= 0).nonzero()
        arrays["final_index"] = ends
        for path, final in self._finals.arrays.items():
            arrays[f"final/{path}"] = final[slots[ends]]
        return join(arrays, {})

    def load(self, tree: Tree) -> None:
        """Become the buffer that `state` was taken from. `n_step`, `gamma` and priorities may differ.

        Rows whose segment is missing are not valid; `missing` counts them. Of a buffer with another capacity, or
        other samplers or lanes, the newest transitions that fit are kept. Where their streams have to be cut, they
        end as by truncation: with the true next observation, from which values are bootstrapped.
        """
        saved = SavedReplay(tree, self._columns, self._obs_paths)
        priority = self._restore(saved) if saved.layout == self._layout else self._refill(saved)
        self.missing, self._max_priority = saved.missing, saved.max_priority
        self._ready[:] = self._valid
        for sampler, head in enumerate(self._head):  # all windows are complete but those near the heads
            near = self._slots(sampler, max(0, head - self.n_step + 1), head + 1)
            self._ready[near] = self._complete(near)
        self._num_valid = int(np.count_nonzero(self._valid))
        self._num_ready = int(np.count_nonzero(self._ready))
        if self._tree:
            priority[priority == 0.0] = self._max_priority  # what comes without a priority is as good as new
            self._tree.rebuild(priority * self._ready)

    def _begin_anew(self, saved: SavedReplay, rows: np.ndarray | slice) -> None:
        """Empty these rows, and give all segments a stamp that no saved one has."""
        if self._stamp:  # else they are empty, and their memory not even there
            for column in self._columns:
                self._ring[column.path][rows] = 0
        self._finals.clear()
        self._final_slot[:] = -1
        self._stamp = saved.stamp + 1
        self._stamps[:] = self._stamp

    def _restore(self, saved: SavedReplay) -> np.ndarray:
        """Take over a buffer of the same layout, each row where it was; returns priorities, 0 if not known."""
        there = np.zeros(self._rows, bool)
        for segment in saved.segments:
            there[segment.first : segment.stop] = True
        self._begin_anew(saved, ~there)  # what is there may be views of our own
        self._head, self._sequence = saved.head, saved.sequence
        for segment in saved.segments:
            for path, array in segment.columns.items():
                self._ring[path][segment.first : segment.stop] = array
            self._put_finals(segment.final_index + segment.first * self._width, segment.finals)
            number, within = divmod(segment.first, self._segment_rows)
            if within == 0 and segment.stop == min(saved.filled, segment.first + self._segment_rows):
                self._stamps[number] = segment.stamp
        for sampler, head in enumerate(self._head):  # a head's row is no step, whatever the checkpoint says
            lanes = slice(sampler * self.lanes, (sampler + 1) * self.lanes)
            for path in ("end", "valid"):
                self._ring[path][head % self._rows, lanes] = False
                self._ring[path][head:, lanes] = False
        self._cut_off(np.flatnonzero(~there[: saved.filled]), there)
        in_use = self._stamps[: -(-saved.filled // self._segment_rows)]
        if (in_use < self._stamp).all():
            self._stamp = saved.stamp
        priority = np.zeros(self.capacity)
        if saved.priority is not None:
            priority[: len(saved.priority)] = saved.priority
        return priority

    def _cut_off(self, gone: np.ndarray, there: np.ndarray) -> None:
        """End the streams before rows that are `gone`.

        A step right before has lost its next observation, and is no step any more; the step before that one can
        still be truncated.
        """
        end, valid, final_slot = (self._ring[path] for path in ("end", "valid", "final_slot"))
        last = (gone - 1) % self._rows
        for row in last[there[last]]:
            lost = valid[row] & (final_slot[row] < 0)  # [width]
            valid[row, lost] = end[row, lost] = False
            end[row - 1] |= lost & valid[row - 1]
            self._touch(np.array([row - 1, row]))

    def _refill(self, saved: SavedReplay) -> np.ndarray:
        """Take over a buffer of another layout, as `relayout` says; returns priorities, 0 if not known."""
        move = relayout(saved, self._layout)
        self._begin_anew(saved, slice(None))
        self._head = [move.rows] * self.samplers
        self._sequence = [*saved.sequence, *[-1] * self.samplers][: self.samplers]
        for segment, which, place in saved.pick(move.source):
            target = move.target[which]
            for path in segment.columns:
                self._flat[path][target] = segment.flat(path)[place]
            found, at = held(segment.final_index, place)
            self._put_finals(target[found], {path: final[at] for path, final in segment.finals.items()})
        cut = move.target[move.cut]
        self._end[cut] = True
        open_ = self._final_slot[cut] < 0
        cut, following = cut[open_], saved.following(move.source[move.cut][open_])
        for segment, which, place in saved.pick(following):
            self._put_finals(cut[which], {path: segment.flat(path)[place] for path in self._obs_paths})
        priority = np.zeros(self.capacity)
        if saved.priority is not None:
            priority[move.target] = saved.priority[move.source]
        return priority

    def _put_finals(self, slots: np.ndarray, finals: Mapping[str, np.ndarray]) -> None:
        """Store the true next observations of the steps at these positions."""
        taken = self._finals.take(len(slots))
        self._final_slot[slots] = taken
        for path, final in finals.items():
            self._finals.arrays[path][taken] = final
