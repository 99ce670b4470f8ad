"""How things are put on a terminal: colours, ages, sizes, and tables that fit its width."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

from raynforce.runs.terminal import TIED, columns, folded
from raynforce.runs.terminal import shortened as shortened

BOLD, DIM, RED, YELLOW, GREEN, CYAN = "1", "2", "31", "33", "32", "36"
STATES = {"running": CYAN, "finished": GREEN, "stopped": YELLOW, "failed": RED, "killed": RED, "broken": RED}
GAP = "  "


class Paint:
    """Colours, where they can be seen."""

    def __init__(self, stream: Any) -> None:
        self._on = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def __call__(self, text: str, *codes: str) -> str:
        return f"\x1b[{';'.join(codes)}m{text}\x1b[0m" if self._on and codes else text


def wrapped(head: str, text: str, columns: int, paint: Paint, *codes: str) -> Iterator[str]:
    """`head` and then `text`, whose further lines are indented as far; commands and paths are not broken."""
    for line in folded(text, columns, head):
        yield line[: len(head)] + paint(line[len(head) :], *codes)


def titled(name: str, text: str, columns: int, paint: Paint) -> Iterator[str]:
    """A name, and what it is beside it, or below it where there is no room."""
    for index, line in enumerate(folded(f"{name.replace(' ', TIED)}  {text}", columns, further="  ")):
        yield line if index else paint(line[: len(name)], BOLD) + line[len(name) :]


def say(line: str) -> None:
    """Print a line, on a terminal that may know few characters."""
    encoding = sys.stdout.encoding or "utf-8"
    print(line.encode(encoding, "replace").decode(encoding))


def width() -> int:
    """Columns of the terminal, or of a log."""
    return columns(sys.stdout)


def age(seconds: float) -> str:
    """`just now`, `40 s ago`, `3 min ago`, `5 h ago`, `12 days ago`."""
    if seconds < 1:
        return "just now"
    for unit, size, most in (("s", 1, 100), ("min", 60, 100), ("h", 3600, 48)):
        if seconds < most * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds / 86400:,.0f} days ago" if seconds < 3e9 else "–"


def size(count: int) -> str:
    """`340 B`, `1.2 kB`, `56 MB`."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.1f} {unit}" if value < 9.95 and unit != "B" else f"{value:.0f} {unit}"
        value /= 1000
    return f"{value:,.1f} TB"


def short(count: int) -> str:
    """A count in five characters or so: `8,192`, `60.2k`, `1.5M`."""
    if count < 10_000:
        return f"{count:,}"
    value = float(count)
    for unit in ("k", "M", "G"):
        value /= 1000
        if value < 999.5 or unit == "G":
            break
    return f"{f'{value:.1f}'.removesuffix('.0') if value < 99.95 else f'{value:,.0f}'}{unit}"


def cut(text: str, most: int) -> str:
    """At most so long, without its end."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def plain(text: str) -> str:
    """One line that does nothing to a terminal, whatever a file has in it."""
    return "".join(c if c.isprintable() else " " for c in text)
