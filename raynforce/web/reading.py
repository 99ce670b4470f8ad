"""Metric files as columns: read as they grow, and thinned out so that no minimum or maximum is lost."""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from raynforce.runs.catalog import number, object_in, open_regular

BLOCK = 1 << 20  # bytes that are parsed at once
LARGE = 8 << 20  # bytes; of a longer file that is not read yet, pieces are shown first
PIECES, PIECE = 400, 16 << 10  # how many, and their bytes
TAIL = 64  # bytes before the end of what was read: a resumed run cuts its file and writes on
HEAD = b'{"step":'
OWN = ("step", "time")
SPARK = 48  # points
_RETURN = re.compile(rb'"charts/episodic_return": (-?[0-9][0-9.eE+-]*)')


class Column(NamedTuple):
    """One metric: where, sorted, and what."""

    x: np.ndarray
    y: np.ndarray


class _Table:
    """Rows with the same names: `at` is [2, N], step and time; `values` is [names, N]."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = {name: index for index, name in enumerate(names)}
        self.rows = 0
        self.at = np.empty((2, 0))
        self.values = np.empty((len(names), 0), np.float32)

    def add(self, at: np.ndarray, values: np.ndarray) -> None:
        rows = self.rows + at.shape[1]
        if rows > self.at.shape[1]:
            room = max(16, rows + rows // 4)
            self.at, self.values = (_wider(array, self.rows, room) for array in (self.at, self.values))
        self.at[:, self.rows : rows] = at
        self.values[:, self.rows : rows] = values
        self.rows = rows


def _wider(array: np.ndarray, rows: int, room: int) -> np.ndarray:
    wider = np.empty((len(array), room), array.dtype)
    wider[:, :rows] = array[:, :rows]
    return wider


class MetricsFile:
    """A `metrics.jsonl` that may be growing, cut, torn or deleted at any moment."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.version = 0  # changes with what is known
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._tables: dict[tuple[str, ...], _Table] = {}
        self._offset, self._inode, self._tail = 0, 0, b""
        self._columns: dict[tuple[str, str], Column] = {}
        self._pieces: dict[tuple[str, ...], _Table] | None = None
        self.version += 1

    @property
    def nbytes(self) -> int:
        tables = [*self._tables.values(), *(self._pieces or {}).values()]
        columns = sum(column.x.nbytes + column.y.nbytes for column in tuple(self._columns.values()))
        return columns + sum(table.at.nbytes + table.values.nbytes for table in tables)

    @property
    def names(self) -> list[str]:
        return sorted({name for table in self._known().values() for name in table.names})

    def read(self, seconds: float) -> bool:
        """Read what is new, for so many seconds at most; whether that was all of it."""
        until = time.monotonic() + seconds
        with self._lock:
            try:
                with open_regular(self.path) as file:
                    return self._read(file, until)
            except OSError:  # not there yet, or not any more
                if self._offset:
                    self._forget()
                return True

    def _read(self, file: Any, until: float) -> bool:
        stat = os.fstat(file.fileno())
        file.seek(max(0, self._offset - len(self._tail)))
        if stat.st_ino != self._inode or stat.st_size < self._offset or file.read(len(self._tail)) != self._tail:
            self._forget()
            self._inode = stat.st_ino
        if not self._offset and stat.st_size > LARGE and self._pieces is None:
            self._pieces = {}
            for lines in _pieces(file, stat.st_size):
                _parse(lines, self._pieces)
            self.version += 1
        while self._offset < stat.st_size:
            file.seek(self._offset)
            data = file.read(BLOCK)
            end = data.rfind(b"\n") + 1
            if not end:
                if len(data) < BLOCK:
                    break  # half a line, which is being written
                end = len(data)  # no line of ours
            _parse(data[:end].split(b"\n"), self._tables)
            self._offset += end
            self._tail = data[max(0, end - TAIL) : end]
            self._columns.clear()
            if self._pieces is None:
                self.version += 1
            if time.monotonic() > until and self._offset < stat.st_size - BLOCK:
                return False
        if self._pieces is not None:
            self._pieces = None
            self.version += 1
        return True

    def _known(self) -> dict[tuple[str, ...], _Table]:
        return self._tables if self._pieces is None else self._pieces

    def column(self, name: str, by: str) -> Column:
        """A metric over `step` or `time`."""
        with self._lock:
            if (name, by) not in self._columns:
                self._columns[name, by] = self._column(name, by)
            return self._columns[name, by]

    def _column(self, name: str, by: str) -> Column:
        tables = [table for table in self._known().values() if name in table.names and table.rows]
        if not tables:
            return Column(np.empty(0), np.empty(0, np.float32))
        x = [table.at[OWN.index(by), : table.rows] for table in tables]
        y = [table.values[table.names[name], : table.rows] for table in tables]
        at, values = (x[0], y[0]) if len(tables) == 1 else (np.concatenate(x), np.concatenate(y))
        if len(at) > 1 and not (at[1:] >= at[:-1]).all():
            order = np.argsort(at, kind="stable")
            at, values = at[order], values[order]
        whole = np.isfinite(at)
        return Column(at, values) if whole.all() else Column(at[whole], values[whole])


def _pieces(file: Any, size: int) -> Iterator[list[bytes]]:
    """Whole lines from all over a file."""
    for place in np.linspace(0, max(0, size - PIECE), PIECES).astype(int).tolist():
        file.seek(place)
        lines = file.read(PIECE).split(b"\n")
        yield lines[1 if place else 0 : -1]


def _parse(lines: Sequence[bytes], tables: dict[tuple[str, ...], _Table]) -> None:
    try:
        rows = json.loads(b"[" + b",".join(filter(None, lines)) + b"]")
    except (ValueError, RecursionError):  # one of them is torn
        rows = [object_in(line, HEAD) for line in lines]
    groups: dict[tuple[str, ...], list[list[Any]]] = {}
    for row in rows:
        if isinstance(row, dict) and "step" in row:
            groups.setdefault(tuple(row), []).append(list(row.values()))
    for keys, values in groups.items():
        names = tuple(key for key in keys if key not in OWN)
        try:
            found = np.array(values, np.float64).T
        except (ValueError, TypeError):  # what is no number
            found = np.array([[_figure(value) for value in row] for row in values], np.float64).T
        places = {key: index for index, key in enumerate(keys)}
        at = found[[places["step"], places.get("time", places["step"])]]
        with np.errstate(over="ignore"):
            figures = (
                found[[places[name] for name in names]].astype(np.float32) if names else np.empty((0, len(values)))
            )
        tables.setdefault(names, _Table(names)).add(at, figures)


def _figure(value: Any) -> float:
    found = None if isinstance(value, bool) else number(value)
    return float("nan") if found is None else found


def spark(path: Path) -> list[float]:
    """The course of a run's return, from pieces of its file: for a table of runs."""
    found: list[float] = []
    with contextlib.suppress(OSError), open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        whole = size <= SPARK * PIECE // 4
        places = [0] if whole else np.linspace(0, size - PIECE // 4, SPARK).astype(int).tolist()
        for place in places:
            file.seek(place)
            texts = _RETURN.findall(file.read(size if whole else PIECE // 4))
            found += map(float, texts if whole else texts[-1:])
    if len(found) > SPARK:
        found = [found[index] for index in np.linspace(0, len(found) - 1, SPARK).astype(int)]
    return [float(f"{value:.5g}") for value in found]


# -- thinning out -----------------------------------------------------------------------------------------------------


class Drawn(NamedTuple):
    """Lines over the same `x`; of a set of several runs `y` is the median, `low` and `high` how far they spread."""

    x: np.ndarray
    y: list[np.ndarray]
    low: list[np.ndarray | None]
    high: list[np.ndarray | None]
    raw: list[np.ndarray | None]  # where `y` is smoothed
    points: list[int]  # in view, before they were thinned out
    span: tuple[float, float] | None  # of all that there is


def draw(
    sets: Sequence[Sequence[Column]],
    view: tuple[float | None, float | None] = (None, None),
    points: int = 800,
    smooth: float = 0.0,
) -> Drawn:
    """Lines for what is in view, thinned out to about two values a point."""
    columns = [column for each in sets for column in each if len(column.x)]
    span = None
    if columns:
        span = float(min(c.x[0] for c in columns)), float(max(c.x[-1] for c in columns))
    low, high = (given if given is not None else end for given, end in zip(view, span or (0.0, 1.0), strict=True))
    smoothed = [[_smooth(column, smooth) for column in each] for each in sets]
    shown = [[_within(column, low, high) for column in each] for each in smoothed]
    several = any(len(each) > 1 for each in sets)
    counts = [sum(len(column.x) for column in each) for each in shown]
    exact = np.unique(np.concatenate([c.x for each in shown for c in each] or [np.empty(0)]))
    if not several and len(exact) <= 2 * points and len(exact) * len(sets) <= 200_000:
        x = exact

        def lay(column: Column) -> np.ndarray:
            return _placed(column, x)
    else:
        edges = np.linspace(low, high if high > low else low + 1.0, points + 1)
        width = edges[1] - edges[0]
        x = np.stack([edges[:-1] + 0.25 * width, edges[:-1] + 0.75 * width], 1).ravel()

        def lay(column: Column) -> np.ndarray:
            return _thinned(column, edges)

    y: list[np.ndarray] = []
    lows: list[np.ndarray | None] = []
    highs: list[np.ndarray | None] = []
    raws: list[np.ndarray | None] = []
    for each, before in zip(shown, sets, strict=True):
        if len(each) == 1:
            y.append(lay(each[0]))
            lows.append(None)
            highs.append(None)
            raws.append(lay(_within(before[0], low, high)) if smooth > 0 else None)
        else:
            middle, least, most = _spread(each, x)
            y.append(middle)
            lows.append(least)
            highs.append(most)
            raws.append(None)
    return Drawn(x, y, lows, highs, raws, counts, span)


def _within(column: Column, low: float, high: float) -> Column:
    """What is in view, with the point before and the one after, so that lines go on to the edge."""
    first = max(0, int(np.searchsorted(column.x, low, "left")) - 1)
    last = int(np.searchsorted(column.x, high, "right")) + 1
    return Column(column.x[first:last], column.y[first:last])


def _placed(column: Column, x: np.ndarray) -> np.ndarray:
    y = np.full(len(x), np.nan)
    y[np.searchsorted(x, column.x)] = column.y
    return y


def _thinned(column: Column, edges: np.ndarray) -> np.ndarray:
    """Minimum and maximum of each interval, in the order that the line has: `[2 × intervals]`."""
    out = np.full((len(edges) - 1, 2), np.nan)
    finite = np.isfinite(column.y)
    at, y = (column.x, column.y) if finite.all() else (column.x[finite], column.y[finite])
    if len(at):
        place = np.clip(np.searchsorted(edges, at, "right") - 1, 0, len(out) - 1)
        starts = np.flatnonzero(np.diff(place, prepend=-1))
        least, most = np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts)
        ends = np.append(starts[1:], len(y)) - 1
        rising = y[starts] <= y[ends]
        out[place[starts], 0] = np.where(rising, least, most)
        out[place[starts], 1] = np.where(rising, most, least)
    return out.ravel()


def _spread(columns: Sequence[Column], x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Median, lowest and highest of several runs, each where it has been."""
    rows = []
    for column in columns:
        finite = np.isfinite(column.y)
        if finite.any():
            rows.append(np.interp(x, column.x[finite], column.y[finite], np.nan, np.nan))
    if not rows:
        return (np.full(len(x), np.nan),) * 3
    table = np.stack(rows)
    known = np.isfinite(table).any(0)
    out = np.full((3, len(x)), np.nan)
    out[:, known] = np.nanmedian(table[:, known], 0), np.nanmin(table[:, known], 0), np.nanmax(table[:, known], 0)
    return out[0], out[1], out[2]


def _smooth(column: Column, share: float) -> Column:
    """The mean over so large a share of its points around each; a square, so that small shares can be chosen."""
    half = int(len(column.x) * share * share / 4) if share > 0 else 0
    if share > 0 and len(column.x) > 2:
        half = max(1, half)
    if not half:
        return column
    known = np.isfinite(column.y)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, column.y, 0.0), dtype=np.float64)])
    counts = np.concatenate([[0], np.cumsum(known)])
    index = np.arange(len(column.x))
    first, last = np.maximum(index - half, 0), np.minimum(index + half + 1, len(index))
    with np.errstate(invalid="ignore"):
        mean = (sums[last] - sums[first]) / (counts[last] - counts[first])
    return Column(column.x, np.where(known, mean, np.nan))


def plain(values: np.ndarray | None) -> list[float | None] | None:
    """As JSON has it: a figure that is none is null."""
    if values is None:
        return None
    return np.where(np.isfinite(values), values, np.array(None)).tolist()
