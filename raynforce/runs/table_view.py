"""A table in the terminal that is redrawn in place, and which kind of view fits a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO, TypeVar

from raynforce.runs import progress as views
from raynforce.runs.progress import Clock, Mode, Output, ReportPace, open_live

if TYPE_CHECKING:
    from rich.console import Group
    from rich.live import Live

View = TypeVar("View")


class LiveTable:
    """Redrawn every `every` seconds at most; lines scroll by above it."""

    def __init__(self, stream: TextIO, *, every: float, clock: Clock = time.monotonic) -> None:
        self._out, self._pace = Output(stream), ReportPace(every, clock)
        self._live: Live | None = None

    def message(self, text: str) -> None:
        if self._live is None:
            self._out.lines(text)
        elif not self._out.broken:
            self._live.console.print(text, markup=False, highlight=False)

    def draw(self, table: Callable[[float, int, int], Group]) -> None:
        """Show the table of these seconds for a terminal of this height and width, if that is due."""
        if self._out.broken or not self._pace.is_due():
            return
        if self._live is None:
            self._live = open_live(self._out, transient=True)
        console = self._live.console
        self._live.update(table(self._pace.seconds, console.height, console.width), refresh=True)

    def stop(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def fitting(
    progress: Mode,
    stream: TextIO | None,
    quiet: Callable[[], View],
    plain: Callable[[TextIO], View],
    live: Callable[[TextIO], View],
) -> View:
    """The view that fits `stream`, or stdout, as `make_progress` chooses it."""
    stream = stream or sys.stdout
    chosen = views.make_progress(stream, mode=progress)
    if stream is None or isinstance(chosen, views.QuietProgress):
        return quiet()
    return live(stream) if isinstance(chosen, views.LiveProgress) else plain(stream)
