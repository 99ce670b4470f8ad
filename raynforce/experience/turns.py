"""Lanes that act in turns: of a fragment with a row for each move of anybody, one with a row for each of its own.

What a lane earns between two of its moves belongs to the first. A move whose outcome is not known at a fragment's end
goes into the next one, with the log-probability and the recurrent state it was chosen with.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from raynforce.experience.builder import SEQUENCE, STATE, InFlight, finish
from raynforce.experience.fragment import Arrays, Fragment
from raynforce.infos import NOTHING
from raynforce.trees import Tree


class _End(NamedTuple):
    row: int  # of the last move
    lane: int
    stop: int  # the raw row in which the episode ended; what was seen last is after it
    counts: bool = True  # False: it was cut


class _Lane:
    """The moves `[T]` of one lane that have an outcome, what each earned, and the one that is under way."""

    def __init__(self, lane: int, moved: np.ndarray, done: np.ndarray, broken: np.ndarray, paid: np.ndarray) -> None:
        self.rows: list[int] = []
        self.earned: list[float] = []
        self.ends: list[_End] = []
        self.following: int | None = None
        self.cut_at_once = False  # the episode that the first row goes on with
        moves, stops = np.flatnonzero(moved).tolist(), np.flatnonzero(done | broken).tolist()
        for t, until in zip(moves, [*moves[1:], len(paid)], strict=False):
            at = bisect_left(stops, t)
            stop = stops[at] if at < len(stops) and stops[at] < until else None
            before = len(self.rows) - 1
            if stop is None and until == len(paid):
                self.following = t
            elif stop is not None and broken[stop]:  # its outcome is lost: the episode ended with the move before
                self.cut_at_once |= before < 0
                if before >= 0 and not (self.ends and self.ends[-1].row == before):
                    self.ends.append(_End(before, lane, t - 1, counts=False))
            else:
                to = until - 1 if stop is None else stop
                self.rows.append(t)
                self.earned.append(paid[to] - (paid[t - 1] if t else 0.0))
                if stop is not None:
                    self.ends.append(_End(before + 1, lane, stop))


class Turns:
    """Carries each lane's move under way, and its episode's return, from one fragment to the next.

    Of a network with memory, `raw` has the state before each of its rows; `every` so many rows of its own a lane's is
    recorded.
    """

    def __init__(self, lanes: int, every: int = 0) -> None:
        self.flying, self._every = InFlight(lanes), every
        self._carried: Arrays = {}  # [1, B, ...] the columns of moves under way
        self._under_way = np.zeros(lanes, np.bool_)

    def restart(self, lanes: Sequence[int] | slice = slice(None)) -> None:
        self.flying.restart(lanes)
        self._under_way[lanes] = False

    def compact(self, raw: Fragment, cuts: Sequence[np.ndarray]) -> Fragment:
        """`raw` has `valid` where the lane moved, and rewards and ends in any row; `cuts` are places of broken rows."""
        lanes = raw.lanes
        seen, rest = self._columns(raw)
        moved, reward = rest.pop("valid"), rest.pop("reward")
        done = rest["terminated"] | rest["truncated"]  # [T+1, B]
        broken = np.zeros_like(done)
        if cuts:
            broken.reshape(-1)[np.concatenate(cuts) + lanes] = True  # row 0 is what was carried
        paid = np.cumsum(reward, axis=0, dtype=np.float64)  # [T+1, B]
        last = {int(place) + lanes: k for k, place in enumerate(raw["final/index"])}

        rows: list[list[int]] = []  # by lane: raw rows of its moves that have an outcome
        after: list[int | None] = []  # by lane: the raw row of its move under way
        ends: list[_End] = []
        earned = np.zeros((len(reward), lanes), np.float32)
        for b in range(lanes):
            lane = _Lane(b, moved[:, b], done[:, b], broken[:, b], paid[:, b])
            if lane.cut_at_once:
                self.flying.restart(b)
            earned[: len(lane.rows), b] = lane.earned
            ends += lane.ends
            rows.append(lane.rows)
            after.append(lane.following)

        length = max(1, max(map(len, rows)))
        place = np.zeros((length + 1, lanes), np.int64)
        valid = np.zeros((length, lanes), np.bool_)
        for b, (kept, following) in enumerate(zip(rows, after, strict=True)):
            place[: len(kept), b], valid[: len(kept), b] = kept, True
            if following is not None:
                place[len(kept), b] = following
        columns = {path: np.where(_wide(valid, column), _taken(column, place[:-1]), 0) for path, column in rest.items()}
        columns = {path: column.astype(rest[path].dtype, copy=False) for path, column in columns.items()}
        columns |= {path: _taken(column, place) for path, column in seen.items()}
        terminated, truncated = np.zeros_like(valid), np.zeros_like(valid)
        for row, b, stop, counts in ends:
            terminated[row, b] = counts and rest["terminated"][stop, b]
            truncated[row, b] = not terminated[row, b]
        columns |= {"reward": earned[:length], "valid": valid, "terminated": terminated, "truncated": truncated}
        columns["final/index"] = np.array([end.row * lanes + end.lane for end in ends], np.int64)
        places = [(end, end.stop * lanes + end.lane) for end in ends]
        for path in [path for path in raw.columns if path.startswith("final/") and path != "final/index"]:
            source, given = seen[path.removeprefix("final/")], raw[path]
            found = [given[last[at]] if at in last else source[end.stop + 1, end.lane] for end, at in places]
            columns[path] = np.array(found, source.dtype) if found else source[:0, 0]
        told = [(end.row, end.lane, NOTHING if end.counts else None) for end in sorted(ends)]
        episodes = self.flying.add(columns, told)
        for b, kept in enumerate(rows):  # where others have more rows, it ends as if truncated: the next move is known
            if 0 < len(kept) < length and not terminated[len(kept) - 1, b]:
                truncated[len(kept) - 1, b] = True
        self._carry(seen, rest | {"reward": reward}, paid, after)
        named = {"version": raw.version, "sampler": raw.sampler, "sequence": raw.sequence}
        states = {path: columns.pop(path) for path in rest if path.startswith(STATE)}  # [T, B, ...]
        state0 = {path.removeprefix(STATE): state[:: self._every].copy() for path, state in states.items()}
        return finish(columns, episodes, **named, state0=state0, every=self._every)

    def _columns(self, raw: Fragment) -> tuple[Arrays, Arrays]:
        """What is seen `[T+2, B, ...]` and the rest `[T+1, B, ...]`, with the carried moves in front."""
        named = {k: v for k, v in raw.columns.items() if "/" not in k or k.startswith(("obs/", STATE))}
        seen = {k: v for k, v in named.items() if len(v) == raw.length + 1}
        rest = {k: v for k, v in named.items() if k not in seen and k not in ("first", SEQUENCE)}
        if not self._carried:
            self._carried = {k: np.zeros((1, *v.shape[1:]), v.dtype) for k, v in (seen | rest).items()}
        self._carried["valid"] = self._under_way[None]
        joined = {k: np.concatenate([self._carried[k], v]) for k, v in (seen | rest).items()}
        return {k: joined[k] for k in seen}, {k: joined[k] for k in rest}

    def _carry(self, seen: Arrays, rest: Arrays, paid: np.ndarray, after: Sequence[int | None]) -> None:
        self._under_way = np.array([t is not None for t in after])
        for b, t in enumerate(after):
            if t is not None:
                for path, column in (seen | rest).items():
                    self._carried[path][0, b] = column[t, b]
                self._carried["reward"][0, b] = paid[-1, b] - (paid[t - 1, b] if t else 0.0)

    def state(self) -> Tree:
        tree: Tree = {"returns": self.flying.returns.copy(), "lengths": self.flying.lengths.copy()}
        columns = {str(i): column.copy() for i, column in enumerate(self._carried.values())}
        return tree | {"under_way": self._under_way.copy(), "paths": list(self._carried), "columns": columns}

    def load(self, tree: Tree) -> None:
        self.flying.returns, self.flying.lengths = tree["returns"].copy(), tree["lengths"].copy()
        self._under_way = np.array(tree["under_way"])
        self._carried = {path: np.array(tree["columns"][str(i)]) for i, path in enumerate(tree["paths"])}


def _wide(flags: np.ndarray, column: np.ndarray) -> np.ndarray:
    return flags.reshape(*flags.shape, *(1,) * (column.ndim - 2))


def _taken(column: np.ndarray, place: np.ndarray) -> np.ndarray:
    """Rows `[T, B]` of a column `[..., B, ...]`."""
    return column[place, np.arange(place.shape[1])]
