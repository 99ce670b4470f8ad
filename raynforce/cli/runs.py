"""`raynforce runs`: the runs of a folder, one line each, the newest first."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from raynforce.cli import text
from raynforce.errors import UsageError
from raynforce.imports import bare
from raynforce.runs.catalog import Glance, find, glance
from raynforce.runs.progress import number
from raynforce.runs.terminal import columns

Row = dict[str, str]
COLUMNS = ("run", "algo", "env", "status", "steps", "return", "best", "active", "size")
LEAST = {"env": 11, "algo": 8}  # columns that may be narrower than what is in them, down to this
DISPENSABLE = ("size", "algo", "best", "active", "env")  # what a narrow terminal does without, one after the other
RIGHT = ("steps", "return", "best", "size")


def tell(folder: str | None, *, me: str = "raynforce", as_json: bool = False) -> int:
    """Print them; `me` is how this command was called."""
    directory = Path(folder or "runs")
    if folder is not None and not directory.is_dir():
        what = "is not a folder" if directory.exists() else "does not exist"
        raise UsageError(f"{directory} {what}: give the folder that the runs are in")
    found = sorted(map(glance, find(directory)), key=lambda run: (-run.active, str(run.path)))
    if as_json:
        now = time.time()
        rows = [{"name": _name(run, directory), **run.to_json(), "age_seconds": now - run.active} for run in found]
        print(json.dumps({"folder": str(directory), "runs": rows}))
    elif not found:
        text.say(f"no runs in {directory} yet; this makes one: {me} train ppo CartPole-v1 --target 475")
    else:
        for line in lines(found, directory, columns(sys.stdout)):
            text.say(line)
    return 0


def lines(runs: Sequence[Glance], directory: Path, columns: int) -> Iterator[str]:
    """A table that fits into so many columns. A name that is too long for it is not cut, but has a line of its own."""
    now = time.time()
    rows = [_row(run, directory, now) for run in runs]
    widths = _fit(rows, columns)
    yield text.paint(_line({name: name for name in COLUMNS}, widths, {}).rstrip(), text.DIM)
    for run, row in zip(runs, rows, strict=True):
        if len(row["run"]) > widths["run"]:
            yield text.paint(row["run"], text.BOLD)
            row["run"] = ""
        line = _line(row, widths, {"run": text.BOLD, "status": text.STATES[run.state]})
        if run.state == "broken":  # what is wrong with it takes the place of what is not known
            taken = _total({name: width for name, width in widths.items() if row[name] or name == "run"})
            line = f"{line.rstrip()}{text.GAP}{text.cut(text.plain(run.reason), max(columns - taken - 2, 12))}"
        yield line.rstrip()


def _row(run: Glance, directory: Path, now: float) -> Row:
    row = dict.fromkeys(COLUMNS, "") | {"run": text.plain(_name(run, directory)), "status": run.state}
    # Of `module:name` the name tells runs apart; `show` has all of it.
    row |= {name: text.plain(bare(str(run.config.get(name, "–")))).rpartition(":")[2] for name in ("algo", "env")}
    if run.state == "broken":
        return row
    total = "" if run.total is None else f"/{text.short(run.total)}"
    row |= {"steps": f"{text.short(run.steps)}{total}", "active": text.age(now - run.active)}
    return row | {"return": number(run.return_mean), "best": number(run.best_eval), "size": text.size(run.size)}


def _name(run: Glance, directory: Path) -> str:
    """Where it is from the folder that was asked about."""
    return os.path.relpath(run.path, directory) if run.path != directory else str(directory)


def _fit(rows: Sequence[Row], columns: int) -> dict[str, int]:
    """Which columns are shown, and how wide they are."""
    full = {name: max(len(name), *(len(row[name]) for row in rows)) for name in COLUMNS}
    needed = {name: width for name, width in full.items() if name not in DISPENSABLE}
    room = columns - _total(needed | {"run": 0})
    full["run"] = max([len("run"), *(len(row["run"]) for row in rows if len(row["run"]) <= room)])
    shown = {name: full[name] for name in needed}
    for name in reversed(DISPENSABLE):  # whatever there is room for, what is missed most first
        least = shown | {name: min(full[name], LEAST.get(name, full[name]))}
        if _total(least) <= columns:
            shown = least
    for name in (name for name in LEAST if name in shown):
        shown[name] += min(full[name] - shown[name], max(0, columns - _total(shown)))
    return {name: shown[name] for name in COLUMNS if name in shown}


def _total(widths: dict[str, int]) -> int:
    return sum(widths.values()) + len(text.GAP) * (len(widths) - 1)


def _line(row: Row, widths: dict[str, int], colours: Mapping[str, str]) -> str:
    cells = []
    for name, width in widths.items():
        cell = f"{text.shortened(row[name], width):{'>' if name in RIGHT else '<'}{width}}"
        cells.append(text.paint(cell, *filter(None, [colours.get(name)])))
    return text.GAP.join(cells)
