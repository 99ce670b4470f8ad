"""The live view as the whole screen, on a terminal that is emulated: what it shows, and what it leaves."""

from __future__ import annotations

import dataclasses
import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from rich.console import Console
from snapshots_shown import SNAPSHOT as PLAIN

from raynforce.errors import UsageError
from raynforce.runs.fullscreen import FullProgress, chart, screen
from raynforce.runs.progress import ProgressState, make_progress

pyte = pytest.importorskip("pyte", reason="needs pyte, of the extra `dev`")

ENTER, LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"
SNAPSHOT = dataclasses.replace(
    PLAIN,
    seconds=12.0,
    steps_per_second=3_311.4,
    faults=3,
    last_fault="sampler 1 restarted: died",
    roles={"sampler": {"env": 0.6, "policy": 0.1, "waiting": 0.3}, "learner": {"learn": 0.2, "waiting": 0.8}},
    checkpoint="step 40,000 in 0.02 s, 0.2 MB",
)


def drawn(snapshot: ProgressState, width: int, height: int, said: list[str] | None = None) -> list[str]:
    console = Console(width=width + 1, height=height + 1, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        console.print(
            screen("ppo on CartPole-v1", snapshot, 9.0, [float(i) for i in range(90)], said or [], width, height)
        )
    return console.export_text().splitlines()


@pytest.mark.parametrize(("width", "height"), [(60, 21), (79, 23), (120, 40), (140, 70)])
def test_it_fits_and_shows_what_matters(width: int, height: int) -> None:
    lines = drawn(SNAPSHOT, width, height, ["a checkpoint", "x" * 300])
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for words in ("ppo on CartPole-v1", "143.2", "210.0", "40,960", "sampler", "env 60", "waiting 80", "step 40,000"):
        assert words in text
    assert "sampler 1 restarted" in text
    assert "█" in text
    assert "a checkpoint" in text or height < 24


def test_a_curve_rises_as_the_values_do() -> None:
    rows = [line.plain for line in chart([0.0, 1.0, 2.0, 4.0], 31, 4)]
    heights = [sum(row[11 + column] != " " for row in rows) for column in range(20)]
    assert heights == sorted(heights)
    assert (heights[0], heights[-1]) == (1, 4)
    assert chart([], 31, 4)[0].plain == "nothing yet"
    assert len(chart([5.0, 5.0], 31, 4)) == 4
    assert drawn(dataclasses.replace(SNAPSHOT, return_mean=None, roles={}, losses={"a": float("nan")}), 80, 24)


def test_modes_and_bad_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(make_progress(sys.stdout, mode="full"), FullProgress)
    with pytest.raises(UsageError, match="use one of auto, full, live, plain, quiet"):
        make_progress(sys.stdout, mode="huge")  # type: ignore[arg-type]


SCRIPT = """
import sys, time, dataclasses
sys.path.insert(0, {tests!r})
from test_fullscreen import SNAPSHOT
from raynforce.runs import fullscreen
from raynforce.runs.progress import make_progress
view = make_progress(sys.stdout, mode={mode!r})
if {mode!r} == "auto":
    view = fullscreen.FullProgress(sys.stdout, every=0.05, after=0.2)
view.start("ppo on CartPole-v1")
view.message("said before")
try:
    for i in range(40):
        view.update(dataclasses.replace(SNAPSHOT, steps=i * 100, seconds=i * 0.05, return_mean=float(i)))
        time.sleep(0.05)
        if i == 20:
            view.message("said meanwhile")
            print("printed by others")
        if i == 30 and {fails}:
            raise ZeroDivisionError("it broke")
finally:
    view.stop()
print("the result")
"""


class Terminal:
    """A command in a terminal of this size, and what is on its screen."""

    def __init__(self, words: list[str], columns: int = 100, rows: int = 30, **environment: str) -> None:
        self.master, follower = pty.openpty()
        self.resize(columns, rows)
        self.raw = b""
        kept = {k: v for k, v in os.environ.items() if k not in ("CI", "COLUMNS", "LINES", "NO_COLOR")}
        environment = {**kept, "TERM": "xterm-256color", "PYTHONPATH": os.pathsep.join(sys.path), **environment}
        how = {"stdin": follower, "stdout": follower, "stderr": follower, "env": environment}
        self.process = subprocess.Popen(words, **how, start_new_session=True)  # type: ignore[call-overload]
        os.close(follower)

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read(self, until: bytes = b"", timeout: float = 60.0) -> None:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and not (until and until in self.raw):
            if select.select([self.master], [], [], 0.1)[0]:
                try:
                    self.raw += os.read(self.master, 65536)
                except OSError:  # nobody has it open any more
                    break
        assert not until or until in self.raw, self.raw[-2000:]

    def end(self) -> int:
        self.read()
        os.close(self.master)
        return self.process.wait(10)

    @property
    def left(self) -> str:
        """What is on the screen after the whole screen was given back."""
        emulated = pyte.Screen(100, 60)
        before, _, rest = self.raw.partition(ENTER)
        pyte.ByteStream(emulated).feed(before + rest.rpartition(LEAVE)[2])
        return "\n".join(line.rstrip() for line in emulated.display).rstrip()

    @property
    def whole(self) -> str:
        emulated = pyte.Screen(100, 30)
        pyte.ByteStream(emulated).feed(self.raw.partition(ENTER)[2].rpartition(LEAVE)[0])
        return "\n".join(line.rstrip() for line in emulated.display)


def script(mode: str = "auto", fails: bool = False) -> list[str]:
    return [sys.executable, "-c", SCRIPT.format(tests=str(Path(__file__).parent), mode=mode, fails=fails)]


def test_it_takes_the_screen_and_gives_it_back_with_what_was_said() -> None:
    terminal = Terminal(script())
    assert terminal.end() == 0
    assert (terminal.raw.count(ENTER), terminal.raw.count(LEAVE)) == (1, 1)
    assert terminal.raw.rindex(b"\x1b[?25h") > terminal.raw.index(LEAVE) - 20  # the cursor is back
    for words in ("ppo on CartPole-v1", "printed by others", "said meanwhile", "learn 20"):
        assert words in terminal.whole
    lines = terminal.left.splitlines()
    order = [
        next(i for i, line in enumerate(lines) if words in line)
        for words in ("said before", "said meanwhile", "printed by others", "╭", "the result")
    ]
    assert order == sorted(order)
    assert terminal.left.count("╭") == 1  # one panel stays


def test_after_an_error_the_screen_is_back() -> None:
    terminal = Terminal(script(fails=True))
    assert terminal.end() == 1
    assert terminal.raw.count(ENTER) == terminal.raw.count(LEAVE) == 1
    assert "it broke" in terminal.left


def test_small_terminals_and_compact_modes_have_no_whole_screen() -> None:
    for terminal in (Terminal(script(), 50, 12), Terminal(script("live")), Terminal(script("plain"))):
        assert terminal.end() == 0
        assert ENTER not in terminal.raw
        assert b"the result" in terminal.raw


def test_a_terminal_may_change_its_size_and_have_no_colours() -> None:
    terminal = Terminal(script(), NO_COLOR="1")
    terminal.read(ENTER)
    for columns, rows in ((40, 10), (200, 60), (20, 4)):
        terminal.resize(columns, rows)
        terminal.read(timeout=0.3)
    assert terminal.end() == 0
    assert terminal.raw.count(LEAVE) == 1
    assert not any(code in terminal.raw for code in (b"\x1b[36m", b"\x1b[32m", b"\x1b[33m"))


def test_ctrl_z_gives_the_screen_back_until_it_goes_on() -> None:
    terminal = Terminal(script())
    terminal.read(b"elapsed, ")  # the first drawing
    terminal.process.send_signal(signal.SIGTSTP)
    terminal.read(LEAVE)
    terminal.process.send_signal(signal.SIGCONT)
    assert terminal.end() == 0
    assert terminal.raw.count(ENTER) == terminal.raw.count(LEAVE) == 2
    assert b"the result" in terminal.raw


def test_a_run_on_a_terminal_ends_on_ctrl_c_with_its_result(tmp_path: Path) -> None:
    words = ["train", "ppo", "CartPole-v1", "--steps", "10M", "--runtime", "inline", "--out", str(tmp_path / "run")]
    terminal = Terminal([sys.executable, "-m", "raynforce", *words])
    terminal.read(ENTER)
    terminal.read(b"waiting", timeout=30)
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.end() == 130
    assert terminal.raw.count(ENTER) == terminal.raw.count(LEAVE) == 1
    assert "stopping after this round" in terminal.left
    assert "stopped by Ctrl-C" in terminal.left
    assert "what to type next" in terminal.left
