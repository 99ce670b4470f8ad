"""The live view as the whole screen: the curve, each role's time, checkpoints, faults, and what was said."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from raynforce.runs.progress import (
    CLEAR_LINE,
    LABEL,
    Clock,
    History,
    LiveProgress,
    ProgressState,
    bar_line,
    clock_time,
    counted,
    loss_lines,
    number,
    open_live,
    panel,
)
from raynforce.runs.terminal import folded, shortened

if TYPE_CHECKING:
    from rich.console import Group
    from rich.text import Text

AFTER = 3.0  # seconds; a run that ends before shall not flash a screen
LONG_ENOUGH = 5.0  # seconds left, for it to be worth while
LEAST = 60, 22  # columns and rows; smaller terminals have the panel
WIDEST = 140
KEPT = 1000  # lines that were said, which stay on the screen after the end
BLOCKS = " ▁▂▃▄▅▆▇█"
SHADES = {"env": "green", "learn": "green", "policy": "cyan", "prepare": "cyan", "gradients": "cyan", "busy": "green"}
SHADES |= {"transport": "yellow", "wire": "yellow", "other": "magenta", "learner": "magenta", "waiting": "bright_black"}


class FullProgress(LiveProgress):
    """A panel at first; the whole screen once the run lasts. After its end the panel and what was said are left."""

    def __init__(
        self, stream: TextIO, *, every: float = 0.25, clock: Clock = time.monotonic, after: float = AFTER
    ) -> None:
        super().__init__(stream, every=every, clock=clock)
        self._after, self._clock, self._began = after, clock, clock()
        self._full = False
        self._said: deque[str] = deque(maxlen=KEPT)
        self._unsaid = 0  # lines that were said and have no room any more
        self._last: tuple[ProgressState, float | None] | None = None
        self._returns = History(limit=512)
        self._busy = False  # drawing
        self._suspended_by: int | None = None  # the signal that came meanwhile
        self._before: tuple[Any, Any, Any] = (None, None, None)  # stdout, stderr, and what Ctrl-Z did

    def message(self, text: str) -> None:
        if not self._full:
            super().message(text)
        elif not self._out.again(text):
            self._unsaid += len(self._said) == KEPT
            self._said.append(text)
            with self._undisturbed():
                self._draw()

    fault = message

    def stop(self) -> None:
        if self._full:
            self._leave()
            if self._unsaid:
                self._out.lines(f"({self._unsaid:,} earlier lines are left out)")
            for text in self._said:
                self._out.write("\n".join(folded(text, self._out.columns, further="  ")) + "\n")
            self._after = float("inf")
            if self._waiting is None and self._last is not None:
                self._waiting = self._last[0]  # the panel that stays
        super().stop()

    def _show(self, snapshot: ProgressState, seconds_left: float | None) -> None:
        self._last = snapshot, seconds_left
        with self._undisturbed():
            if not self._full and self._is_time(seconds_left):
                self._enter()
            if self._full:
                self._returns.add(snapshot.return_mean)
                self._draw()
            else:
                super()._show(snapshot, seconds_left)

    def _is_time(self, seconds_left: float | None) -> bool:
        lasts = self._clock() - self._began >= self._after and (seconds_left or 0.0) >= LONG_ENOUGH
        if not (lasts and self._running) or self._out.broken:
            return False
        try:
            size = os.get_terminal_size(self._out.fileno())
        except (OSError, ValueError):
            return False
        return size.columns >= LEAST[0] and size.lines >= LEAST[1]

    def _enter(self) -> None:
        if self._live is not None:
            self._live.transient = True  # the panel comes again at the end
            self._live.stop()
        else:
            self._out.write(CLEAR_LINE)
        self._live, self._full = open_live(self._out, screen=True, redirect_stdout=False, redirect_stderr=False), True
        streams = sys.stdout, sys.stderr
        if _is_terminal(sys.stdout):
            sys.stdout = _Captured(sys.stdout, self.message)
        if _is_terminal(sys.stderr):
            sys.stderr = _Captured(sys.stderr, self.message)
        stopper = None
        if threading.current_thread() is threading.main_thread():
            stopper = signal.signal(signal.SIGTSTP, self._suspend)
        self._before = (*streams, stopper)

    def _leave(self) -> None:
        """Give the screen back as it was."""
        if self._live is None:
            return
        live, self._live, self._full = self._live, None, False
        live.stop()
        out, err, stopper = self._before
        for name, stream in (("stdout", out), ("stderr", err)):
            captured = getattr(sys, name)
            if isinstance(captured, _Captured):
                self._said += captured.rest()
                setattr(sys, name, stream)
        if stopper is not None:
            signal.signal(signal.SIGTSTP, stopper)
        self._drawn = (0, 0)

    def _suspend(self, number: int, _: Any) -> None:
        """Ctrl-Z: the shell gets its screen; after `fg` the next drawing takes the whole one again."""
        if self._busy:
            self._suspended_by = number
            return
        self._leave()
        os.kill(os.getpid(), number)

    @contextlib.contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """While the screen is drawn, Ctrl-Z has to wait."""
        self._busy = True
        try:
            yield
        finally:
            self._busy = False
            number, self._suspended_by = self._suspended_by, None
            if number is not None:
                self._suspend(number, None)

    def _draw(self) -> None:
        if self._live is None or self._last is None or self._out.broken:
            return
        console = self._live.console
        snapshot, left = self._last
        view: Any
        if console.width < LEAST[0] or console.height < LEAST[1]:
            view = panel(self._title, snapshot, left, self._returns.values, max(console.width - 1, 12))
        else:
            width = min(console.width - 1, WIDEST)
            view = screen(
                self._title, snapshot, left, self._returns.values, list(self._said), width, console.height - 1
            )
        self._live.update(view, refresh=True)


def _is_terminal(stream: Any) -> bool:
    with contextlib.suppress(ValueError, AttributeError):  # closed, or none
        return bool(stream.isatty())
    return False


class _Captured(io.TextIOBase):
    """What others print to the terminal, line by line."""

    def __init__(self, stream: TextIO, say: Any) -> None:
        self._stream, self._say, self._line = stream, say, ""

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            if line.strip():
                self._say(line.rpartition("\r")[2].rstrip())
        return len(text)

    def rest(self) -> list[str]:
        line, self._line = self._line, ""
        return [line] if line.strip() else []

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()


def screen(
    title: str,
    snapshot: ProgressState,
    seconds_left: float | None,
    returns: Sequence[float],
    said: Sequence[str],
    width: int,
    height: int,
) -> Group:
    """The whole screen, in so many columns and rows."""
    from rich.console import Group
    from rich.text import Text

    head = Text(shortened(title, width), "bold")
    eta = f"{clock_time(snapshot.seconds)} elapsed, {clock_time(seconds_left)} left"
    if width - head.cell_len > len(eta) + 2:
        head.pad_right(width - head.cell_len - len(eta))
        head.append(eta, "dim")
    above = [head, bar_line(snapshot, width), Text(), *_figures(snapshot, width), Text()]
    below = [*_roles(snapshot.roles, width), *loss_lines(snapshot.losses, width)[:3], *_state(snapshot, width)]
    room = height - len(above) - len(below) - 3
    log = min(max(2, room // 3), max(2, len(said)))
    curve = chart(returns, width, max(3, room - log), snapshot.target)
    lines = [*above, Text("return, mean of the last 100 episodes", "dim"), *curve, Text(), *below]
    lines.append(Text("─" * width, "dim"))
    lines += [Text(shortened(text.replace("\n", " "), width), "dim") for text in said[-(height - len(lines)) :]]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
        line.no_wrap = True
    return Group(*lines[:height])


def _figures(snapshot: ProgressState, width: int) -> list[Text]:
    from rich.text import Text

    best, target = snapshot.best_eval, snapshot.target
    reached = best is not None and target is not None and best >= target
    cells = [
        ("return", number(snapshot.return_mean), "bold cyan"),
        ("best eval", number(best), "bold green" if reached else "bold"),
        ("target", number(target), ""),
        ("speed", f"{snapshot.steps_per_second:,.0f}/s", "bold"),
        ("steps", f"{snapshot.steps:,}", ""),
        ("of", f"{snapshot.total_steps:,}", ""),
        ("episodes", counted(snapshot.episodes), ""),
        ("updates", counted(snapshot.updates), ""),
    ]
    across = 4 if width >= 92 else 2
    each = width // across
    lines = []
    for first in range(0, len(cells), across):
        line = Text()
        for column, (label, value, style) in enumerate(cells[first : first + across]):
            line.pad_right(max(0, column * each - line.cell_len))
            line.append(f"{label:<{LABEL}}", "dim").append(value, style)
        lines.append(line)
    return lines


def _roles(roles: Mapping[str, Mapping[str, float]], width: int) -> list[Text]:
    """A bar for each role, and the shares of its time in percent."""
    from rich.text import Text

    cells, lines = min(30, width // 3), []
    for role, shares in roles.items():
        line, so_far, drawn = Text().append(f"{role:<{LABEL}}", "dim"), 0.0, 0
        for name, share in shares.items():
            so_far += share
            count = max(0, min(cells, round(so_far * cells)) - drawn)
            line.append(("·" if name == "waiting" else "█") * count, SHADES.get(name, "blue"))
            drawn += count
        line.append(" " * (cells - drawn + 2))
        for name, share in sorted(shares.items(), key=lambda item: -item[1]):
            if share >= 0.005:
                line.append(f"{name} ", SHADES.get(name, "blue")).append(f"{share * 100:.0f}  ")
        lines.append(line)
    return lines


def _state(snapshot: ProgressState, width: int) -> list[Text]:
    from rich.text import Text

    lines = []
    if snapshot.checkpoint:
        lines.append(Text().append(f"{'saved':<{LABEL}}", "dim").append(snapshot.checkpoint))
    faults = (
        Text().append(f"{'faults':<{LABEL}}", "dim").append(f"{snapshot.faults:,}", "yellow" * bool(snapshot.faults))
    )
    lines.append(faults.append(f"  {snapshot.last_fault}", "yellow dim"))
    if snapshot.note:
        lines.append(Text(snapshot.note.replace("\n", " "), "italic"))
    return lines


def chart(values: Sequence[float], width: int, height: int, target: float | None = None) -> list[Text]:
    """A curve of blocks over so many rows, from the first value to the last, with its scale on the left."""
    from rich.text import Text

    left = 9
    columns = width - left - 2
    if len(values) < 2 or columns < 4:
        return [Text("" if row else "nothing yet", "dim") for row in range(height)]
    some = [values[round(i * (len(values) - 1) / (columns - 1))] for i in range(columns)]
    low, high = min(some), max(some)
    if target is not None and high < target <= high + 2 * (high - low):
        high = target
    span = (high - low) or 1.0
    eighths = [round((value - low) / span * (8 * height - 1)) + 1 for value in some]
    lines = []
    for row in range(height - 1, -1, -1):
        at = high if row == height - 1 else low if row == 0 else None
        line = Text(f"{'' if at is None else number(at):>{left}} ", "dim")
        line.append("│" if at is None else "┤", "dim")
        bars = "".join(BLOCKS[max(0, min(8, each - 8 * row))] for each in eighths)
        lines.append(line.append(bars, "cyan"))
    return lines
