"""What the terminal shows while several seeds train side by side: a table, plain lines, or nothing."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from raynforce.runs import progress as views
from raynforce.runs.progress import Clock, Mode, Output, ProgressState, ReportPace, clock_time, number
from raynforce.runs.table_view import LiveTable, fitting

if TYPE_CHECKING:
    from rich.console import Group

    from raynforce.driver.status import Result

SURE = 0.02  # of all that is to be done, before the time left can be guessed


@dataclass
class SeedRow:
    state: str = "waiting"
    seen: ProgressState | None = None

    def fraction(self, total: int) -> float:
        if self.state in ("done", "failed"):
            return 1.0
        return min(1.0, self.seen.steps / total) if self.seen is not None and total else 0.0


class SeedsView:
    """All seeds of one experiment. This one shows nothing; none of its methods fails because the terminal is gone."""

    def __init__(self) -> None:
        self.rows: dict[int, SeedRow] = {}
        self._total = 0
        self._target: float | None = None
        self._notes: set[str] = set()

    def start(self, title: str, seeds: Sequence[int], total: int, target: float | None = None) -> None:
        """Begin, with a line that says what runs; `total` is the number of steps of each, `target` what they aim at."""
        self.rows, self._total, self._target = {seed: SeedRow() for seed in seeds}, total, target
        self.message(title)

    def began(self, seed: int) -> None:
        self.rows[seed].state = "training"

    def update(self, seed: int, snapshot: ProgressState) -> None:
        self.rows[seed].seen = snapshot

    def told(self, seed: int, text: str) -> None:
        """Show a line of one seed; what all of them would note is shown once."""
        if not text.startswith("note: "):
            self.message(f"seed {seed}: {text}")
        elif text not in self._notes:
            self._notes.add(text)
            self.message(text)

    def fault(self, seed: int, text: str) -> None:
        """Show that something failed in one seed, and what was done about it; also where nothing else is shown."""
        views.QuietProgress().fault(f"seed {seed}: {text}")

    def ended(self, seed: int, result: Result | None, error: str) -> None:
        stopped = result is None or result.stopped.startswith("SIG")
        self.rows[seed].state = "failed" if error else "stopped" if stopped else "done"
        how = f"failed: {error}" if error else "ended before it began"
        if not error and result is not None:
            how = f"{result.stopped} at {result.steps:,} steps"
            if self._target is not None and result.solved_steps is not None and result.solved_at is not None:
                how = f"target met at {result.solved_steps:,} steps, after {result.solved_at:.1f} s"
            how += f"; best policy {number(result.eval_return)}"
        self.message(f"seed {seed}: {how}")

    def message(self, text: str) -> None:
        """Show a line that stays."""

    def draw(self) -> None:
        """Show where all of them stand, if that is due."""

    def stop(self) -> None:
        """Give the terminal back."""

    def line(self, seconds: float) -> str:
        """Where all of them stand, in one line."""
        rows = list(self.rows.values())
        fraction = statistics.fmean(row.fraction(self._total) for row in rows)
        speed = sum(row.seen.steps_per_second for row in rows if row.seen is not None and row.state == "training")
        done, left = sum(row.state in ("done", "failed") for row in rows), seconds * (1 / max(fraction, SURE) - 1)
        line = f"seeds done {done}/{len(rows)} {fraction:>4.0%}   {speed:>7,.0f} steps/s"
        line += f"   return {self._median('return_mean'):>7}   best eval {self._median('best_eval'):>7} (medians)"
        return f"{line}   eta {clock_time(left if fraction > SURE else None):>5}"

    def _median(self, figure: str) -> str:
        values = [getattr(row.seen, figure) for row in self.rows.values() if row.seen is not None]
        known = [value for value in values if value is not None]
        return number(statistics.median(known) if known else None)


class PlainSeeds(SeedsView):
    """One line for all of them, every `every` seconds at most."""

    def __init__(self, stream: TextIO, *, every: float = 2.0, clock: Clock = time.monotonic) -> None:
        super().__init__()
        self._out = Output(stream)
        self._pace = ReportPace(every, clock, thinning=True)
        self._pace.is_due()  # at once there is nothing to tell
        self._last = ""

    fault = SeedsView.told

    def message(self, text: str) -> None:
        self._out.lines(text)

    def draw(self) -> None:
        if any(row.seen for row in self.rows.values()) and self._pace.is_due():
            line = self.line(self._pace.seconds)
            if line.partition("eta")[0] != self._last.partition("eta")[0]:  # else nothing has happened
                self.message(line)
            self._last = line


class LiveSeeds(SeedsView):
    """A table that is redrawn in place; lines scroll by above it."""

    def __init__(self, stream: TextIO, *, every: float = 0.25, clock: Clock = time.monotonic) -> None:
        super().__init__()
        self._table = LiveTable(stream, every=every, clock=clock)

    fault = SeedsView.told

    def message(self, text: str) -> None:
        self._table.message(text)

    def draw(self) -> None:
        self._table.draw(lambda seconds, height, _: self._view(seconds, height))

    def stop(self) -> None:
        self._table.stop()

    def _view(self, seconds: float, height: int) -> Group:
        from rich import box
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD)
        for name in ("seed", "", "steps", "return", "best eval", "steps/s"):
            table.add_column(name, justify="left" if not name else "right", no_wrap=True)
        rows = sorted(self.rows.items(), key=lambda item: item[1].state != "training")  # those at work come first
        for seed, row in rows[: max(3, height - 6)]:
            seen: Any = row.seen
            cells = [""] * 4
            if seen is not None:
                speed = f"{seen.steps_per_second:,.0f}" if row.state == "training" else ""
                steps = f"{seen.steps:,} {min(1.0, seen.steps / max(seen.total_steps, 1)):>4.0%}"
                cells = [steps, number(seen.return_mean), number(seen.best_eval), speed]
            table.add_row(str(seed), row.state, *cells, style="" if row.state == "training" else "dim")
        return Group(table, Text(f" {self.line(seconds)}", no_wrap=True, overflow="ellipsis"))


def make_view(progress: Mode = "auto", stream: TextIO | None = None) -> SeedsView:
    return fitting(progress, stream, SeedsView, PlainSeeds, LiveSeeds)
