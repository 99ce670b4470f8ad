"""What the benchmarks share: taking turns, ratios with their spread, child processes, plain tables."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, Literal, ParamSpec, TypeVar

ROOT = Path(__file__).resolve().parent.parent
T = TypeVar("T")
P = ParamSpec("P")
Bar = tuple[Literal["at least", "at most"], float]


@dataclass(frozen=True)
class Row:
    """One line of a table: a median and the extremes around it."""

    name: str
    unit: str
    median: float
    min: float
    max: float
    remark: str = ""
    bar: float | None = None
    """What a ratio is held against."""
    met: bool | None = None
    """Whether it stands the comparison."""


@dataclass(frozen=True)
class Table:
    """What a benchmark found."""

    title: str
    rows: Sequence[Row]
    notes: Sequence[str] = field(default_factory=list)

    def text(self) -> str:
        head = [("", "", "median", "min", "max", "")]
        body = [(r.name, r.unit, *(_number(v) for v in (r.median, r.min, r.max)), r.remark) for r in self.rows]
        widths = [max(len(line[i]) for line in head + body) for i in range(6)]
        lines = [self.title]
        for line in head + body:
            left, right = zip(line[:2], widths[:2], strict=True), zip(line[2:5], widths[2:5], strict=True)
            cells = [x.ljust(w) for x, w in left] + [x.rjust(w) for x, w in right] + [line[5]]
            lines.append("  " + "  ".join(cells).rstrip())
        return "\n".join(lines + [f"  note: {note}" for note in self.notes])


def row(name: str, unit: str, values: Sequence[float], remark: str = "") -> Row:
    """A quantity that was measured several times."""
    return Row(name, unit, median(values), min(values), max(values), remark)


def parts(unit: str, turns: Sequence[Mapping[str, float]], whole: str) -> list[Row]:
    """The parts of a whole, measured together several times: each with its share, then their sum."""
    sums = [sum(turn.values()) for turn in turns]
    rows = []
    for name in turns[0]:
        share = median(turn[name] / total for turn, total in zip(turns, sums, strict=True))
        rows.append(row(name, unit, [turn[name] for turn in turns], f"{share:.0%}"))
    return [*rows, row(whole, unit, sums)]


def ratio(name: str, over: Sequence[float], under: Sequence[float], bar: Bar | None = None) -> Row:
    """The ratio of two medians. Its extremes are those of the pairs that were measured next to each other."""
    value = median(over) / median(under)
    pairs = [a / b for a, b in zip(over, under, strict=True)]
    if bar is None:
        return Row(name, "ratio", value, min(pairs), max(pairs))
    side, limit = bar
    met = value >= limit if side == "at least" else value <= limit
    remark = f"bar: {side} {limit:g}, {'met' if met else 'missed'}"
    return Row(name, "ratio", value, min(pairs), max(pairs), remark, limit, met)


def take_turns(repeats: int, *sides: Callable[[], T], label: str = "") -> list[list[T]]:
    """Measure A B A B …, so that a slow spell of a shared machine falls on every side; one list per side."""
    found: list[list[T]] = [[] for _ in sides]
    for repeat in range(repeats):
        if label:
            print(f"{label}: {repeat + 1} of {repeats}", file=sys.stderr, flush=True)
        for results, side in zip(found, sides, strict=True):
            results.append(side())
    return found


class Stopwatch:
    """Adds up the seconds spent in functions, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def timed(self, name: str, function: Callable[P, T]) -> Callable[P, T]:
        """The same function with a clock around it."""

        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            began = time.monotonic()
            result = function(*args, **kwargs)
            self.seconds[name] += time.monotonic() - began
            return result

        return call


def run(command: Sequence[str]) -> str:
    """Run a command in the repository's root and return what it printed; if it fails, say what it complained of."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3600)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr or done.stdout}")
    return done.stdout


@contextmanager
def pinned() -> Iterator[None]:
    """Keep this process and the children it starts on one core, where the system lets us."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def command(measure: Callable[..., list[Table]], description: str) -> None:
    """Make a command of a benchmark: its keyword arguments become options."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, parameter in inspect.signature(measure).parameters.items():
        default = parameter.default
        if isinstance(default, bool):
            parser.add_argument(f"--{name}", action="store_true")
        elif isinstance(default, str):
            parser.add_argument(f"--{name}", default=default, metavar="PATH", help=f"default {default}")
        else:
            parser.add_argument(f"--{name}", type=_count, default=default, metavar="N", help=f"default {default:,}")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    options = vars(parser.parse_args())
    as_json = options.pop("json")
    machine, began, stolen = _machine(), time.monotonic(), stolen_seconds()
    tables = measure(**options)
    share = (stolen_seconds() - stolen) / max(time.monotonic() - began, 0.01)
    machine |= {"load_after": _load(), "stolen": round(share, 3)}
    if as_json:
        print(json.dumps({"machine": machine, "tables": [asdict(t) for t in tables]}))
        return
    print("\n\n".join(t.text() for t in tables))
    cores, before, after = machine["cores"], machine["load_before"], machine["load_after"]
    load = f"load {before} before and {after} after, {machine['stolen']:.1%} stolen by other machines"
    print(f"\nmachine: {cores} cores, {load}, Python {machine['python']}")


def replace_table(page: Path, name: str, text: str) -> bool:
    """Write what is between `<!-- table: NAME -->` and `<!-- /table -->` of a page; False if it has no such marks."""
    before = page.read_text() if page.exists() else ""
    marks = re.compile(rf"(<!-- table: {re.escape(name)} -->\n).*?(<!-- /table -->)", re.DOTALL)
    after, times = marks.subn(lambda found: f"{found[1]}{text}\n{found[2]}", before, count=1)
    if times:
        page.write_text(after)
    return bool(times)


def machine_line() -> str:
    """This machine and what is installed here, for pages."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "numpy", "gymnasium", "ray"))
    return f"{_processor()}, {os.cpu_count()} cores; Python {platform.python_version()}, {packages}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


def _machine() -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cores": cores,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "load_before": _load(),
    }


def _load() -> float | None:
    """Processes that wanted a core in the last minute, others' included; it tells how far to trust a figure."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def stolen_seconds() -> float:
    """How long a core of this virtual machine was somebody else's, on average; 0 where nobody tells."""
    try:
        ticks = int(Path("/proc/stat").read_text().split(maxsplit=9)[8])
        return ticks / os.sysconf("SC_CLK_TCK") / (os.cpu_count() or 1)
    except (OSError, ValueError, IndexError):
        return 0.0


def _number(value: float) -> str:
    size = abs(value)
    digits = 0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 1 else 3
    return f"{value:,.{digits}f}"
