"""What the terminal shows while a run lasts: a live view, plain lines for logs and pipes, or nothing."""

from __future__ import annotations

import atexit
import contextlib
import io
import math
import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import IO, TYPE_CHECKING, Any, Literal, TextIO, cast, get_args

from raynforce.errors import UsageError, nearest
from raynforce.runs.terminal import columns, folded, shortened

if TYPE_CHECKING:  # importing rich takes 0.1 s: only when a live view begins
    from rich.console import Console
    from rich.live import Live
    from rich.panel import Panel
    from rich.text import Text

Mode = Literal["auto", "full", "live", "plain", "quiet"]
Clock = Callable[[], float]

_MISSING = "–"


@dataclass(frozen=True, slots=True)
class ProgressState:
    steps: int
    total_steps: int
    seconds: float  # since the run began
    steps_per_second: float
    episodes: int | None  # None: not known
    updates: int | None
    return_mean: float | None
    best_eval: float | None
    target: float | None
    losses: Mapping[str, float]
    note: str = ""
    evaluating_left: float | None = 0.0
    """Seconds that an evaluation will still take which training waits for; None if that is not known."""
    ending: bool = False  # whether no more is trained, however many steps are left
    faults: int = 0  # how often something has failed and was restarted
    last_fault: str = ""
    roles: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # shares of each role's time, by activity
    checkpoint: str = ""  # the newest that was written


class Progress:
    """Shows a run. None of its methods fails because the terminal is gone."""

    def start(self, title: str) -> None:
        """Begin, with a line that says what runs."""

    def update(self, snapshot: ProgressState) -> None:
        """Tell where the run stands, as often as you like; it is drawn a few times a second at most."""

    def message(self, text: str) -> None:
        """Show a line that stays: a checkpoint, a note."""

    def fault(self, text: str) -> None:
        """The same of something that failed, and what was done about it."""

    def stop(self) -> None:
        """Show the last snapshot and give the terminal back; a second call does nothing."""


def make_progress(stream: TextIO | None, *, mode: Mode | Progress = "auto") -> Progress:
    """The view that fits `stream`, or `mode` if it is one: `auto` is full on a terminal, plain elsewhere.

    `full` takes the whole screen once a run lasts, `live` is a panel of a few lines.
    """
    if not isinstance(mode, str):
        return mode
    modes = get_args(Mode)
    if mode not in modes:
        raise UsageError(f"progress mode is {mode!r}: use one of {', '.join(modes)}{nearest(str(mode), modes)}")
    if stream is None or mode == "quiet":  # None: closed before we were started
        return QuietProgress()
    if mode == "full" or (mode == "auto" and can_draw(stream)):
        from raynforce.runs.fullscreen import FullProgress

        return FullProgress(stream)
    return LiveProgress(stream) if mode == "live" else PlainProgress(stream)


def can_draw(stream: TextIO) -> bool:
    try:
        terminal = stream.isatty()
    except ValueError:  # closed
        return False
    unicode = (stream.encoding or "").lower().replace("-", "") == "utf8"
    return terminal and unicode and os.environ.get("TERM") not in ("dumb", "unknown") and not os.environ.get("CI")


class QuietProgress(Progress):
    """Shows faults alone, on stderr: a run that heals itself for hours should not do so unseen."""

    def fault(self, text: str) -> None:
        if sys.stderr is not None:
            Output(sys.stderr).lines(text)


class ReportPace:
    """Says when a view is due: every so many seconds; with `thinning` more rarely in a long run, for a readable log."""

    def __init__(self, every: float, clock: Clock = time.monotonic, *, thinning: bool = False) -> None:
        self._every, self._clock, self._thinning = every, clock, thinning
        self._began, self._due = clock(), -math.inf

    @property
    def seconds(self) -> float:
        return self._clock() - self._began

    def is_due(self) -> bool:
        seconds = self.seconds
        if seconds < self._due:
            return False
        self._due = seconds + max(self._every, seconds / 60 if self._thinning else 0.0)
        return True


class _Drawn(Progress):
    """Shows the newest snapshot when that is due, and the last one in any case."""

    def __init__(self, stream: TextIO, pace: ReportPace) -> None:
        self._out, self._pace = Output(stream), pace
        self._speed = _RecentSpeed()
        self._waiting: ProgressState | None = None

    def update(self, snapshot: ProgressState) -> None:
        self._waiting = snapshot
        if self._pace.is_due():
            self._show(snapshot, self._speed.seconds_left(snapshot))
            self._waiting = None

    def stop(self) -> None:
        if self._waiting is not None:
            self._show(self._waiting, None)
            self._waiting = None

    def _show(self, snapshot: ProgressState, seconds_left: float | None) -> None:
        raise NotImplementedError


class PlainProgress(_Drawn):
    """Lines for logs and pipes: one every `every` seconds at most, the first at once, the last always, none twice."""

    def __init__(self, stream: TextIO, *, every: float = 2.0, clock: Clock = time.monotonic) -> None:
        super().__init__(stream, ReportPace(every, clock, thinning=True))
        self._shown: ProgressState | None = None
        self._note = ""

    def start(self, title: str) -> None:
        self.message(title)

    def message(self, text: str) -> None:
        self._out.lines(text)

    fault = message

    def _show(self, snapshot: ProgressState, seconds_left: float | None) -> None:
        learned = replace(snapshot, seconds=0.0, steps_per_second=0.0, note="", faults=0, last_fault="")
        figures = replace(learned, evaluating_left=0.0, ending=False, roles={}, checkpoint="")
        if figures != self._shown:
            self._shown = figures
            self._out.lines(plain_line(snapshot, seconds_left, self._out.columns))
        if snapshot.note and snapshot.note != self._note:
            self._out.lines(snapshot.note)
        self._note = snapshot.note


class LiveProgress(_Drawn):
    """A panel that is redrawn in place, without a thread of its own; messages scroll by above it."""

    max_width = 100

    def __init__(self, stream: TextIO, *, every: float = 0.25, clock: Clock = time.monotonic) -> None:
        super().__init__(stream, ReportPace(every, clock))
        self._returns = History()
        self._title = ""
        self._running = False
        self._live: Live | None = None
        self._drawn = (0, 0)  # width and height of the panel on the screen

    def start(self, title: str) -> None:
        # The panel comes with the first update: until then rich, and the time to import it, are not needed.
        self._title, self._running = title, True
        atexit.register(self.stop)  # shows the cursor again, whatever happens
        self._announce()

    def announce(self, title: str) -> None:
        """Another title, of what has no panel."""
        self._title = title
        if self._live is None:
            self._out.write(CLEAR_LINE)
            self._announce()

    def message(self, text: str) -> None:
        if self._live is None:
            self._out.write(CLEAR_LINE)
            self._out.lines(text)
            self._announce()
        elif not self._out.broken and not self._out.again(text):
            self._fit(self._live.console)
            lines = folded(text, self._live.console.width, further="  ")
            self._live.console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)

    fault = message

    def stop(self) -> None:
        if not self._running:
            return
        super().stop()
        self._running = False
        if self._live is None:
            self._out.write(CLEAR_LINE)
        else:
            self._live.stop()
            self._live = None
        atexit.unregister(self.stop)

    def _announce(self) -> None:
        if self._running:
            self._out.write(f"{shortened(self._title, self._out.columns - 3)} …")

    def _show(self, snapshot: ProgressState, seconds_left: float | None) -> None:
        if not self._running or self._out.broken:
            return
        if self._live is None:
            self._out.write(CLEAR_LINE)
            # What others print would tear the panel, so it goes above it; but not if it is going to a file or a pipe.
            out, err = (stream is not None and stream.isatty() for stream in (sys.stdout, sys.stderr))
            self._live = open_live(self._out, redirect_stdout=out, redirect_stderr=err)
        self._fit(self._live.console)
        self._returns.add(snapshot.return_mean)
        width = min(self._live.console.width - 3, self.max_width)  # room for the terminal's own ^C
        view = panel(self._title, snapshot, seconds_left, self._returns.values, width)
        self._live.update(view, refresh=True)
        self._drawn = (width, min(view.height or 0, self._live.console.height))

    def _fit(self, console: Console) -> None:
        """After the terminal became narrower it has folded the panel's lines: clear the rows rich does not know of."""
        width, height = self._drawn
        if width > console.width:
            from rich.control import Control
            from rich.segment import ControlType

            folded = height * (math.ceil(width / console.width) - 1)
            row_up = ((ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1))
            console.control(Control(*(row_up * folded)))
            self._drawn = (console.width, height)


CLEAR_LINE = "\r\x1b[2K"


def open_live(out: Output, **how: Any) -> Live:
    """A view that is redrawn in place from now on, whenever it is updated."""
    from rich.console import Console
    from rich.live import Live

    console = Console(file=cast(IO[str], out), force_terminal=True, force_jupyter=False)
    live = Live(console=console, auto_refresh=False, **how)
    live.start()
    return live


class Output(io.TextIOBase):
    """A stream that goes quiet, instead of raising, once nobody reads it (`raynforce train … | head`)."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last = ""
        self.broken = False

    @property
    def columns(self) -> int:
        return columns(self._stream)

    def lines(self, text: str) -> None:
        """Write it in lines that fit; not if it is what was written last."""
        if not self.again(text):
            self.write("\n".join(folded(text, self.columns, further="  ")) + "\n")

    def again(self, text: str) -> bool:
        before, self._last = self._last, text
        return text == before

    def write(self, text: str) -> int:
        if not self.broken:
            text = text.encode(self.encoding, "replace").decode(self.encoding)
            try:
                self._stream.write(text)
                self._stream.flush()
            except (OSError, ValueError) as error:  # ValueError: the file object is closed
                self.broken = True
                if isinstance(error, BrokenPipeError):
                    _drain(self._stream)
            except RuntimeError:  # a signal's message while the same stream is being written: better lost than fatal
                pass
        return len(text)

    def flush(self) -> None: ...  # done by write

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding or "utf-8"

    def isatty(self) -> bool:
        return not self.broken and self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()


def _drain(stream: TextIO) -> None:
    """Let what is still buffered go nowhere; else Python fails once more when it flushes the stream at exit."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


class _RecentSpeed:
    """Estimates the time left from the speed of about the last 30 seconds."""

    window = 30.0

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque()

    def seconds_left(self, now: ProgressState) -> float | None:
        points = self._points
        points.append((now.seconds, now.steps))
        while len(points) > 2 and points[1][0] <= now.seconds - self.window:
            points.popleft()
        if now.ending or now.steps >= now.total_steps:
            return now.evaluating_left
        seconds, steps = now.seconds - points[0][0], now.steps - points[0][1]
        speed = steps / seconds if seconds > 0 and steps > 0 else now.steps_per_second
        return (now.total_steps - now.steps) / speed + (now.evaluating_left or 0.0) if speed > 0 else None


class History:
    """The course of a number over the whole run, thinned out as it grows."""

    def __init__(self, limit: int = 128) -> None:
        self.limit = limit
        self.values: list[float] = []
        self._stride = 1
        self._seen = 0

    def add(self, value: float | None) -> None:
        if value is None or not math.isfinite(value):
            return
        if self._seen % self._stride == 0:
            self.values.append(value)
        self._seen += 1
        if len(self.values) >= self.limit:
            self.values = self.values[::2]
            self._stride *= 2


def plain_line(snapshot: ProgressState, seconds_left: float | None, most: int) -> str:
    """One line with the figures in the same columns each time, and as many losses as fit: the metrics have them all."""
    total = f"{snapshot.total_steps:,}"
    line = f"steps {snapshot.steps:>{len(total)},}/{total} {_percent(snapshot):>4}"
    line += f"  {snapshot.steps_per_second:>7,.0f} steps/s  return {number(snapshot.return_mean):>7}"
    line += f"  best eval {number(snapshot.best_eval):>7}  eta {clock_time(seconds_left):>7}"
    faults = f"  faults {snapshot.faults:,}" if snapshot.faults else ""
    for name, value in snapshot.losses.items():
        longer = f"{line}  {name} {number(value):>7}"
        if len(longer) + len(faults) > most:
            break
        line = longer
    return line + faults


def panel(title: str, snapshot: ProgressState, seconds_left: float | None, returns: list[float], width: int) -> Panel:
    """The live view, `width` columns wide: two columns of figures, or one below the other where that is too narrow."""
    from rich import box
    from rich.panel import Panel
    from rich.text import Text

    inner, total = max(width - 4, 8), f"{snapshot.total_steps:,}"
    run = [
        ("steps", f"{snapshot.steps:>{len(total)},} / {total}", ""),
        ("speed", f"{snapshot.steps_per_second:,.0f} steps/s", ""),
        ("elapsed", clock_time(snapshot.seconds), ""),
        ("left", clock_time(seconds_left), ""),
    ]
    best, target = snapshot.best_eval, snapshot.target
    reached = best is not None and target is not None and best >= target
    against = "" if target is None else f" (target {number(target)})"
    learning = [
        ("return", f"{number(snapshot.return_mean):<7}", "bold cyan"),
        ("best eval", number(best) + against, "bold green" if reached else ""),
        ("episodes", counted(snapshot.episodes), ""),
        ("updates", counted(snapshot.updates), ""),
    ]

    left = max(inner // 2, LABEL + max(len(value) for _, value, _ in run) + 2)
    two_columns = inner - left >= LABEL + 14
    room = (inner - left if two_columns else inner) - LABEL - 8
    spark = sparkline(returns, min(room, 24))

    lines = [bar_line(snapshot, inner)]
    for row in zip(run, learning, strict=True) if two_columns else zip(run + learning, strict=True):
        line = Text()
        for label, value, style in row:
            if line:
                line.pad_right(left - line.cell_len)
            line.append(f"{label:<{LABEL}}", "dim").append(value, style)
            if label == "return":
                line.append(" ").append(spark, "cyan")
        lines.append(line)
    lines += loss_lines(snapshot.losses, inner)
    if snapshot.faults:
        line = Text().append(f"{'faults':<{LABEL}}", "dim").append(f"{snapshot.faults:,}", "yellow")
        lines.append(line.append(f"  {snapshot.last_fault}", "yellow dim"))
    if snapshot.note:
        lines.append(Text(snapshot.note.replace("\n", " "), "italic dim"))
    for line in lines:
        line.truncate(inner, overflow="ellipsis")
    heading = Text(shortened(title, inner - 2), "bold not dim")
    look: dict[str, Any] = {"title_align": "left", "box": box.ROUNDED, "border_style": "dim"}
    return Panel(Text("\n").join(lines), title=heading, width=width, height=len(lines) + 2, **look)


LABEL = 11  # columns of a label

_PLAIN = re.compile(
    r"steps +(?P<steps>[\d,]+)/(?P<total>[\d,]+) +\d+%  +(?P<speed>[\d,]+) steps/s  return +(?P<ret>\S+)"
    r"  best eval +(?P<best>\S+)  eta +\S+(?: \S+:\S+)?(?P<rest>.*)"
)


def read_plain_line(line: str, seconds: float) -> ProgressState | None:
    """What a line of `plain_line` tells; None if it is another line. `seconds` is how long the run has lasted."""
    found = _PLAIN.fullmatch(line)
    if found is None:
        return None
    more = dict(re.findall(r"  (\S+) +(\S+)", found["rest"]))
    try:
        faults = _whole(more.pop("faults", "0"))
        losses = {name: value for name, text in more.items() if (value := _figure(text)) is not None}
        steps, total, speed = (_whole(found[name]) for name in ("steps", "total", "speed"))
        figures: dict[str, Any] = {"return_mean": _figure(found["ret"]), "best_eval": _figure(found["best"])}
    except ValueError:
        return None
    counts: dict[str, Any] = {"episodes": None, "updates": None, "target": None, "faults": faults}
    return ProgressState(steps, total, seconds, speed, losses=losses, **figures, **counts)


def _whole(text: str) -> int:
    return int(text.replace(",", ""))


def _figure(text: str) -> float | None:
    return None if text == _MISSING else float(text.replace(",", ""))


def bar_line(snapshot: ProgressState, width: int) -> Text:
    from rich.text import Text

    percent = f" {_percent(snapshot):>4}"
    cells = max(width - len(percent), 1)
    full, half = divmod(int(_fraction(snapshot) * cells * 2), 2)
    line = Text("━" * full + "╸" * half, "green" if full == cells else "cyan")
    return line.append("─" * (cells - full - half), "dim").append(percent, "bold")


def loss_lines(losses: Mapping[str, float], width: int) -> list[Text]:
    """`losses  policy -0.012   value 12.3 …`, on as many lines as it takes."""
    from rich.text import Text

    lines: list[Text] = []
    for name, value in losses.items():
        shown = f"{number(value):<7}"
        if not lines or lines[-1].cell_len + 2 + len(name) + 1 + len(shown) > width:
            lines.append(Text().append(f"{'' if lines else 'losses':<{LABEL}}", "dim"))
        else:
            lines[-1].append("  ")
        lines[-1].append(f"{name} ", "dim").append(shown, "" if math.isfinite(value) else "bold red")
    return lines


def sparkline(values: list[float], width: int) -> str:
    """A row of bars as high as the values, `width` of them at most, from the first to the last."""
    if width < 2 or len(values) < 2:
        return ""
    if len(values) > width:
        values = [values[round(i * (len(values) - 1) / (width - 1))] for i in range(width)]
    low, high = min(values), max(values)
    scale = 7 / (high - low) if high > low else 0.0
    return "".join("▁▂▃▄▅▆▇█"[round((value - low) * scale)] for value in values)


def number(value: float | None) -> str:
    """A figure in seven characters or so, precise where it is small."""
    if value is None:
        return _MISSING
    size = abs(value)
    if size >= 1e4 or not math.isfinite(value):
        return f"{value:,.0f}" if size < 1e6 or not math.isfinite(value) else f"{value:.1e}"
    if 0 < size < 5e-5:
        return f"{value:.1e}"
    digits = 1 if size >= 10 or size == 0 else 3 if size >= 0.01 else 4
    return f"{value:.{digits}f}"


def counted(value: int | None) -> str:
    return _MISSING if value is None else f"{value:,}"


def clock_time(seconds: float | None) -> str:
    """`0:09`, `12:34`, `1:02:03`, `2d 03:04:05`."""
    if seconds is None or not math.isfinite(seconds):
        return _MISSING
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d {hours % 24:02}:{minute:02}:{second:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _fraction(snapshot: ProgressState) -> float:
    return min(max(snapshot.steps / snapshot.total_steps, 0.0), 1.0) if snapshot.total_steps > 0 else 0.0


def _percent(snapshot: ProgressState) -> str:
    return f"{math.floor(_fraction(snapshot) * 100)}%"  # 100 % only when it is done
