"""The terminal's views: what plain lines say and when; a panel that fits, ends cleanly, survives a closed pipe."""

import dataclasses
import io
import itertools
import os
import pty
import re
import subprocess
import sys
import termios
import time

import pytest
from rich.console import Console
from snapshots_shown import SNAPSHOT

from raynforce.errors import UsageError
from raynforce.runs.progress import (
    LiveProgress,
    PlainProgress,
    Progress,
    ProgressState,
    QuietProgress,
    clock_time,
    make_progress,
    number,
    panel,
    plain_line,
    sparkline,
)

EMPTY = ProgressState(0, 200_000, 0.0, 0.0, 0, 0, None, None, None, {})
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests see the same terminal wherever they run: rich knows no width but 80 for a dumb one."""
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("CI", "COLUMNS", "LINES", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)


class FakeClock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def at(steps: int, seconds: float) -> ProgressState:
    return dataclasses.replace(SNAPSHOT, steps=steps, seconds=seconds)


def test_plain_line() -> None:
    figures = "steps  40,960/200,000  20%   18,311 steps/s  return   143.2  best eval   210.0  eta    0:09"
    assert plain_line(SNAPSHOT, 9.0, 119) == f"{figures}  policy  -0.012"  # and no room for value
    assert plain_line(SNAPSHOT, 9.0, 200) == f"{figures}  policy  -0.012  value    12.3"
    faulty = dataclasses.replace(SNAPSHOT, faults=12, losses={"a_loss_of_twenty_five_ch": 1.0})
    assert plain_line(faulty, 9.0, 119) == f"{figures}  faults 12"
    assert plain_line(EMPTY, None, 119) == (
        "steps       0/200,000   0%        0 steps/s  return       –  best eval       –  eta       –"
    )


def test_plain_lines_are_aligned() -> None:
    early, late = plain_line(at(1_024, 1.0), 3600.0, 119), plain_line(at(199_999, 50.0), 0.0, 119)
    for word in ("steps/s", "return", "best eval", "policy", "eta"):
        assert early.index(word) == late.index(word)


def test_plain_prints_first_then_every_two_seconds_and_last() -> None:
    stream, clock = io.StringIO(), FakeClock()
    view = PlainProgress(stream, clock=clock)
    view.start("ppo · CartPole-v1")
    for i in range(401):  # 10 s, an update every 25 ms
        clock.now = 100.0 + i * 0.025
        view.update(at(i * 100, i * 0.025))
    view.message("saved")
    clock.now += 0.025
    view.update(at(40_100, 10.025))
    view.stop()
    view.stop()
    title, *lines = stream.getvalue().splitlines()
    assert title == "ppo · CartPole-v1"
    assert lines.pop(-2) == "saved"
    steps = [int(line.split("/")[0].split()[1].replace(",", "")) for line in lines]
    assert steps[0] == 0
    assert steps[-1] == 40_100
    assert len(steps) == 7
    assert all(1900 * 4 <= b - a <= 2100 * 4 for a, b in itertools.pairwise(steps[:-1]))


def test_time_left_follows_recent_speed() -> None:
    stream, clock = io.StringIO(), FakeClock()
    view = PlainProgress(stream, every=0.0, clock=clock)
    for second in range(61):  # slow for a minute
        view.update(at(second * 100, float(second)))
    for second in range(61, 101):  # ten times as fast since
        view.update(at(6_000 + (second - 60) * 1_000, float(second)))
    assert "eta    2:34" in stream.getvalue().splitlines()[-1]  # (200,000 - 46,000) / 1,000 per second


LONG = "a/path/of/forty-eight/letters/that/must/stay/whole"
PROSE = f"a fault of the simulator at {LONG} was told of by `raynforce doctor runs/x`, with --set a.b=c, after 12 µs"


@pytest.mark.parametrize(("columns", "live"), [(40, False), (80, False), (119, False), (40, True), (80, True)])
def test_messages_end_between_words(columns: int, live: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if columns != 119:
        monkeypatch.setenv("COLUMNS", str(columns))
    stream = Terminal() if live else io.StringIO()
    view = LiveProgress(stream, every=0.0) if live else PlainProgress(stream)
    if live:
        view.start("ppo")
        view.update(SNAPSHOT)
    stream.seek(0)
    stream.truncate()
    view.message(PROSE)
    written = re.sub("\x1b\\[[^a-zA-Z]*[a-zA-Z]|\r", "", stream.getvalue()).partition("╭")[0]
    lines = [line.rstrip() for line in written.splitlines() if line.strip()]
    view.stop()
    assert " ".join(" ".join(lines).split()) == PROSE
    assert all(len(line) <= columns or line.strip() == LONG for line in lines)
    for whole in (LONG, "`raynforce doctor runs/x`,", "--set a.b=c,", "12 µs"):
        assert any(whole in line for line in lines), whole


def test_no_plain_line_twice() -> None:
    stream, clock = io.StringIO(), FakeClock()
    view = PlainProgress(stream, every=0.0, clock=clock)
    for second in range(9):  # nothing but the clock, and so the speed, goes on
        view.update(dataclasses.replace(SNAPSHOT, seconds=float(second), steps_per_second=100.0 - second))
    for done in (0, 0, 5, 5, 9):
        view.update(dataclasses.replace(SNAPSHOT, note=f"evaluating: {done} of 9 episodes"))
    view.update(SNAPSHOT)
    view.stop()
    figures, *notes = stream.getvalue().splitlines()
    assert figures.startswith("steps  40,960/200,000")
    assert notes == [f"evaluating: {done} of 9 episodes" for done in (0, 5, 9)]


def test_no_line_of_a_log_is_longer_than_119() -> None:
    stream = io.StringIO()
    view = PlainProgress(stream, every=0.0)
    view.start("ppo on my_simulators:Arm")
    many = {f"loss_number_{i}": 10.0**i for i in range(8)}
    for steps in (0, 10**9):
        now = ProgressState(
            steps, 10**10, 1e6, 1e6, 10**9, 10**9, -1234.5, -12345.0, 0.0, many, "why " * 50, steps, "x"
        )
        view.update(now)
    view.message("word " * 100)
    view.stop()
    assert max(map(len, stream.getvalue().splitlines())) < 120


def test_once_it_is_over_no_time_is_left() -> None:
    stream, clock = io.StringIO(), FakeClock()
    view = PlainProgress(stream, clock=clock)
    view.update(at(100, 1.0))
    view.update(at(200, 2.0))  # too soon to be shown, but for being the last: the target is met
    view.stop()
    first, last = stream.getvalue().splitlines()
    assert re.search(r"eta +\d+:", first)
    assert re.search(r"eta +–", last)


def test_numbers_and_times() -> None:
    values = [None, float("nan"), float("-inf"), 0, 143.21, -0.0124, 0.0042, 3e-5, 5.5, 4321.0, 12345.6, 2.5e7]
    shown = ["–", "nan", "-inf", "0.0", "143.2", "-0.012", "0.0042", "3.0e-05", "5.500", "4321.0", "12,346", "2.5e+07"]
    assert [number(v) for v in values] == shown
    seconds = [None, float("inf"), 0.0, 9.4, 754.0, 3723.0, 183845.0]
    assert [clock_time(s) for s in seconds] == ["–", "–", "0:00", "0:09", "12:34", "1:02:03", "2d 03:04:05"]


def test_sparkline() -> None:
    assert sparkline([0.0, 1.0, 7.0, 3.5], 10) == "▁▂█▅"
    assert sparkline([float(i) for i in range(800)], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([2.0, 2.0, 2.0], 10) == "▁▁▁"
    assert sparkline([1.0], 10) == sparkline([1.0, 2.0], 1) == ""


@pytest.mark.parametrize("width", [12, 40, 60, 80, 100, 120])
def test_panel_fits_its_width(width: int) -> None:
    many = {f"loss_number_{i}": 10.0**i for i in range(8)}
    busy = dataclasses.replace(SNAPSHOT, losses=many, note="名" * 80, total_steps=3 * 10**9)
    for snapshot in (SNAPSHOT, EMPTY, busy):
        view = panel("a title " * 10, snapshot, 9.0, [1.0, 2.0, 3.0] * 40, width)
        with io.StringIO() as out:
            console = Console(file=out, width=width, force_terminal=True, color_system=None)
            lines = console.render_lines(view)
            assert {sum(segment.cell_length for segment in line) for line in lines} == {width}
            assert len(lines) == view.height


def test_panel_shows_everything() -> None:
    with io.StringIO() as out:
        Console(file=out, width=100, force_terminal=True, color_system=None).print(
            panel("ppo [CartPole-v1]", dataclasses.replace(SNAPSHOT, note="a note"), 9.0, [1.0, 8.0], 100)
        )
        text = re.sub(" +", " ", out.getvalue())
    for part in (
        "ppo [CartPole-v1]", "20%", "steps 40,960 / 200,000", "speed 18,311 steps/s", "elapsed 0:02", "left 0:09",
        "return 143.2 ▁█", "best eval 210.0 (target 475.0)", "episodes 312", "updates 160", "policy -0.012 value 12.3",
        "a note",
    ):  # fmt: skip
        assert part in text


@pytest.mark.parametrize("columns", [40, 120])
def test_live_view_draws_at_most_four_times_a_second(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    stream, clock = Terminal(), FakeClock()
    view = LiveProgress(stream, clock=clock)
    view.start("ppo · CartPole-v1")
    view.message("before the first update")
    for i in range(80):  # 2 s
        clock.now = 100.0 + i * 0.025
        view.update(at(i * 100, i * 0.025))
    assert stream.getvalue().count("╭") <= 9
    view.message("[saved] step_100")
    view.stop()
    written = stream.getvalue()
    assert "[saved] step_100" in written
    assert "7,900 / 200,000" in written.rsplit("╭", 1)[1]  # the last update is shown
    assert written.index(HIDE) < written.rindex("╭") < written.rindex(SHOW)
    view.stop()
    view.update(SNAPSHOT)
    assert stream.getvalue() == written


def test_a_narrower_terminal_clears_the_folded_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    stream = Terminal()
    view = LiveProgress(stream, every=0.0)
    view.start("ppo")
    view.update(SNAPSHOT)
    assert view._live is not None
    height = view._drawn[1]
    view._live.console.width = 60
    before = len(stream.getvalue())
    view.update(SNAPSHOT)
    redrawn = stream.getvalue()[before:]
    # Each of its rows became two; rich goes up over the rows it wrote but for the one the cursor is in.
    assert redrawn.split("╭")[0].count("\x1b[1A") == height + height - 1
    view.stop()


def test_updates_between_two_drawings_cost_little() -> None:
    for view in (LiveProgress(Terminal(), clock=FakeClock()), PlainProgress(io.StringIO(), clock=FakeClock())):
        view.start("ppo")
        view.update(SNAPSHOT)
        begin = time.monotonic()
        for _ in range(1000):
            view.update(SNAPSHOT)
        took = time.monotonic() - begin
        view.stop()
        assert took / 1000 < 50e-6


def test_auto_chooses_by_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(make_progress(Terminal()), LiveProgress)
    assert isinstance(make_progress(io.StringIO()), PlainProgress)
    assert isinstance(make_progress(Terminal(), mode="plain"), PlainProgress)
    assert isinstance(make_progress(io.StringIO(), mode="live"), LiveProgress)
    assert isinstance(make_progress(Terminal(), mode="quiet"), QuietProgress)
    monkeypatch.setenv("CI", "true")
    assert isinstance(make_progress(Terminal()), PlainProgress)
    monkeypatch.delenv("CI")
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_progress(Terminal()), PlainProgress)
    with pytest.raises(UsageError, match=r"'liv'.*did you mean 'live'"):
        make_progress(Terminal(), mode="liv")  # type: ignore[arg-type]


def exercise(view: Progress) -> None:
    view.start("ppo")
    view.update(SNAPSHOT)
    view.message("hello")
    view.update(SNAPSHOT)
    view.stop()


@pytest.mark.parametrize("kind", [PlainProgress, LiveProgress])
def test_a_closed_pipe_or_file_is_survived(kind: type[PlainProgress] | type[LiveProgress]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    with os.fdopen(write_end, "w") as pipe:
        exercise(kind(pipe, every=0.0))
    closed = io.StringIO()
    closed.close()
    exercise(kind(closed, every=0.0))


def test_quiet_shows_nothing_and_does_not_fail(capfd: pytest.CaptureFixture[str]) -> None:
    exercise(make_progress(sys.stderr, mode="quiet"))
    assert capfd.readouterr() == ("", "")


def test_a_stream_that_lacks_unicode_is_no_error() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    view = make_progress(stream, mode="plain")
    view.start("ppo · CartPole-v1")
    view.update(EMPTY)
    view.stop()
    assert raw.getvalue().startswith(b"ppo ? CartPole-v1\nsteps ")
    stream.close()


PROGRAM = """
import sys
from raynforce.runs.progress import ProgressState, make_progress, PlainProgress
{body}
"""


def test_piped_into_head_the_run_still_ends_well() -> None:
    body = """
view = PlainProgress(sys.stdout, every=0.0)
view.start("ppo")
for i in range(20000):
    view.update(ProgressState(i, 20000, 1.0, 1.0, 0, 0, None, None, None, {}))
view.stop()
print("finished", file=sys.stderr)
"""
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", '"$0" -c "$1" | head -n 1', sys.executable, PROGRAM.format(body=body)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ppo\n", "finished\n")


def test_the_cursor_comes_back_after_an_error_on_a_real_terminal() -> None:
    body = """
view = make_progress(sys.stderr)
view.start("ppo")
view.update(ProgressState(500, 1000, 1.0, 1.0, 0, 0, None, None, None, {}))
print("to the pipe")
raise SystemExit("boom")
"""
    main, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 40))
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(body=body)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=terminal,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    ) as process:
        os.close(terminal)
        shown = b""
        while True:
            try:
                shown += os.read(main, 65536)
            except OSError:  # the other side was closed
                break
        assert process.stdout is not None
        assert process.stdout.read() == b"to the pipe\n"  # what goes to a file is not drawn into the panel
    os.close(main)
    text = shown.decode()
    assert process.returncode == 1
    assert "boom" in text
    assert "╭─ ppo " + "─" * 29 + "╮" in text.replace("\x1b[2m", "").replace("\x1b[1m", "").replace("\x1b[0m", "")
    assert text.index(HIDE) < text.rindex(SHOW)
