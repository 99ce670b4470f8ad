"""How the rows of a saved replay buffer come back: each where it was, or in another layout."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from raynforce.experience.compressed import copy
from raynforce.experience.ring import Ring
from raynforce.experience.saved_replay import SavedReplay, Segment, held
from raynforce.experience.storage import Layout

BLOCKS = 64
PIECE = 128


def restore(ring: Ring, saved: SavedReplay) -> np.ndarray:
    """Let a ring have the rows of a saved buffer; returns priorities `[slots]`, 0 where none is known."""
    target, source = _restore(ring, saved) if saved.layout == ring.layout else _refill(ring, saved)
    ring.num_valid = int(np.count_nonzero(ring.valid))
    priority = np.zeros(ring.capacity)
    if saved.priority is not None:
        priority[target] = saved.priority[source]
    return priority


def _start_fresh(ring: Ring, saved: SavedReplay, rows: np.ndarray) -> None:
    """Empty these rows, and give all segments a stamp that no saved one has."""
    if ring.stamp:  # else they are empty, and their memory not even there
        ring.clear(rows)
    ring.finals.clear()
    if ring.stacks:
        ring.stacks.pool.clear()
    if ring.states:
        ring.states.clear()
    ring.stamp = saved.stamp + 1
    ring.stamps[:] = ring.stamp


def _take_over(ring: Ring, slots: np.ndarray | slice, segment: Segment, places: np.ndarray | slice) -> None:
    for path in (*segment.columns, *segment.frames):
        copy(segment.stored(path), places, ring.stored[path], slots)


def _restore(ring: Ring, saved: SavedReplay) -> tuple[slice, slice]:
    """Take over a buffer of the same layout, each row where it was; returns target and source slots."""
    there = np.zeros(ring.rows, bool)
    for segment in saved.segments:
        there[segment.first : segment.stop] = True
    _start_fresh(ring, saved, ~there)  # what is there may be views of our own
    ring.head, ring.sequence = saved.head, saved.sequence
    for segment in saved.segments:
        _take_over(ring, slice(segment.first * ring.width, segment.stop * ring.width), segment, slice(None))
        ring.finals.put(segment.final_index + segment.first * ring.width, segment.finals)
        if ring.stacks:
            ring.stacks.pool.put(segment.whole_index + segment.first * ring.width, segment.wholes)
        if ring.states:
            ring.states.put(segment.state_index + segment.first * ring.width, segment.states)
        number, within = divmod(segment.first, ring.segment_rows)
        if within == 0 and segment.stop == min(saved.filled, segment.first + ring.segment_rows):
            ring.stamps[number] = segment.stamp
    for sampler, head in enumerate(ring.head):  # a head's row is no step, whatever the checkpoint says
        lanes = ring.lanes_of(sampler)
        for path in ("end", "valid"):
            ring[path][head % ring.rows, lanes] = False
            ring[path][head:, lanes] = False
    unknown = np.zeros((ring.rows, ring.width), bool)
    unknown[: saved.filled] = ~there[: saved.filled, None]
    if ring.stacks:
        unknown.reshape(-1)[saved.torn()] = True
    _cut_off(ring, unknown, there)
    if (ring.stamps[: -(-saved.filled // ring.segment_rows)] < ring.stamp).all():
        ring.stamp = saved.stamp
    return slice(saved.filled * ring.width), slice(None)


def _cut_off(ring: Ring, unknown: np.ndarray, there: np.ndarray) -> None:
    """End streams before `unknown` rows `[rows, width]`: their last step is not valid, the one before ends."""
    end, valid, final_slot = (ring[path] for path in ("end", "valid", "final_slot"))
    torn = unknown & there[:, None]
    valid[torn] = end[torn] = False
    ring.touch(np.flatnonzero(torn.any(axis=1)))
    for row in np.flatnonzero(unknown.any(axis=1)) - 1:
        if there[row]:
            lost = unknown[(row + 1) % ring.rows] & valid[row] & (final_slot[row] < 0)  # [width]
            valid[row, lost] = end[row, lost] = False
            end[row - 1] |= lost & valid[row - 1]
            ring.touch(np.array([row - 1, row]))


def _refill(ring: Ring, saved: SavedReplay) -> tuple[np.ndarray, np.ndarray]:
    """Take over a buffer of another layout, as `relayout` says; returns target and source slots."""
    move = relayout(saved, ring.layout)
    _start_fresh(ring, saved, np.ones(ring.rows, bool))
    ring.head = [move.rows] * ring.layout.samplers
    ring.sequence = [*saved.sequence, *[-1] * ring.layout.samplers][: ring.layout.samplers]
    for segment, which, place in saved.pick(move.source):
        target = move.target[which]
        _take_over(ring, target, segment, place)
        found, at = held(segment.final_index, place)
        ring.finals.put(target[found], {path: final[at] for path, final in segment.finals.items()})
        if ring.stacks:
            found, at = held(segment.whole_index, place)
            ring.stacks.pool.put(target[found], {path: whole[at] for path, whole in segment.wholes.items()})
        if ring.states:
            found, at = held(segment.state_index, place)
            ring.states.put(target[found], {path: state[at] for path, state in segment.states.items()})
    _mend(ring, saved, move)
    cut = move.target[move.cut]
    ring.end[cut] = True
    open_ = ring.finals.slot[cut] < 0
    cut, following = cut[open_], saved.following(move.source[move.cut][open_])
    ring.finals.put(cut, {path: _saved_obs(ring, saved, path, following) for path in ring.obs_paths})
    return move.target, move.source


def _mend(ring: Ring, saved: SavedReplay, move: Move) -> None:
    """Store those stacks of frames whole that a new layout has torn from the rows above them."""
    if ring.stacks is None:
        return
    origin, torn = np.full(ring.capacity, -1), np.zeros(len(move.source), bool)
    origin[move.target] = move.source
    depth = ring.stacks.depth.take(move.target)
    for back in range(1, ring.stacks.most + 1):
        above = move.target - back * ring.width
        fits = (above >= 0) & (origin[np.maximum(above, 0)] == saved.following(move.source, -back))
        torn |= (depth >= back) & ~fits
    torn &= ring.stacks.pool.slot.take(move.target) < 0
    found = {path: _saved_obs(ring, saved, path, move.source[torn]) for path in ring.stacks.frames}
    ring.stacks.pool.put(move.target[torn], found)


def _saved_obs(ring: Ring, saved: SavedReplay, path: str, slots: np.ndarray) -> np.ndarray:
    return saved.observed(path, slots, ring.stacks.frames.get(path, 1) if ring.stacks else 1)


class Move(NamedTuple):
    source: np.ndarray  # [M]
    target: np.ndarray  # [M]
    cut: np.ndarray  # [M] bool: the row below its target is not what followed
    rows: int  # how many of the new ring's rows they take, from the first on


def relayout(saved: SavedReplay, layout: Layout) -> Move:
    """The newest transitions that fit, the oldest first: streams, by blocks of time, are cut into pieces for lanes."""
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
    return Move(source, target, below[target + width] != saved.following(source), rows)
