"""How things are put on a terminal: colours, ages, sizes, and tables that fit its width."""

from __future__ import annotations

import os
import sys

from raynforce.runs.terminal import LOG, TIED, columns, command, folded
from raynforce.runs.terminal import shortened as shortened

BOLD, DIM, RED, YELLOW, GREEN, CYAN = "1", "2", "31", "33", "32", "36"
STATES = {"running": CYAN, "finished": GREEN, "stopped": YELLOW, "failed": RED, "killed": RED, "broken": RED}
GAP = "  "


def paint(text: str, *codes: str) -> str:
    """In colour, where that can be seen."""
    seen = sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return f"\x1b[{';'.join(codes)}m{text}\x1b[0m" if seen and codes else text


class Page:
    """Prints a report: labels in a column of their own, and beside them what they say, in lines that fit."""

    def __init__(self, label: int, widest: int = LOG) -> None:
        self.label, self.columns = label, min(columns(sys.stdout), widest)  # longer lines are hard to read

    def title(self, name: str, text: str) -> None:
        """A name, and what it is beside it, or below it where there is no room."""
        first, *more = folded(f"{name.replace(' ', TIED)}  {text}", self.columns, further="  ")
        self.lines(paint(first[: len(name)], BOLD) + first[len(name) :], *more)

    def row(self, label: str, text: str, *codes: str) -> None:
        """Commands and paths in `text` are not broken."""
        self._beside(label, folded(text, self.columns, label.ljust(self.label)), *codes)

    def command(self, label: str, text: str) -> None:
        self._beside(label, command(text, self.columns, label.ljust(self.label)), BOLD)

    def _beside(self, label: str, lines: list[str], *codes: str) -> None:
        at = max(self.label, len(label))
        self.lines(*(line[:at] + paint(line[at:], *codes) for line in lines))

    def lines(self, *lines: str) -> None:
        for line in lines:
            say(line)


def say(line: str) -> None:
    """Print a line, on a terminal that may know few characters."""
    encoding = sys.stdout.encoding or "utf-8"
    print(line.encode(encoding, "replace").decode(encoding))


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
    power = 1 if count < 999_500 else 2 if count < 999_500_000 else 3
    value = count / 1000**power
    return (f"{value:.1f}".removesuffix(".0") if value < 99.95 else f"{value:,.0f}") + " kMG"[power]


def count(number: int, thing: str) -> str:
    """`1 step`, `2,000 steps`."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number:,} times")


def cut(text: str, most: int) -> str:
    """At most so long, without its end."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def plain(text: str) -> str:
    """One line that does nothing to a terminal, whatever a file has in it."""
    return "".join(c if c.isprintable() else " " for c in text)
