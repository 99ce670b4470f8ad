"""Lines end between words, and what is typed can be typed."""

from __future__ import annotations

import io
import os
import shlex
import subprocess
import termios

import pytest

from raynforce.runs.terminal import LOG, columns, command, folded


def test_a_line_that_fits_is_left_as_it_is() -> None:
    assert folded("steps   1/9   a  b", 40) == ["steps   1/9   a  b"]
    assert folded("", 40, "head  ") == ["head"]
    assert folded("one\ntwo", 40, "ok  ") == ["ok  one", "    two"]


@pytest.mark.parametrize("most", [30, 50, 80])
def test_further_lines_are_indented(most: int) -> None:
    text = "shared-agent and made-up words " * 5
    for head, further in (("ok  ", None), ("", "  ")):
        first, *others = folded(text, most, head, further)
        assert first.startswith(head)
        assert all(line.startswith(further or "    ") for line in others)
        assert max(map(len, [first, *others])) <= max(most, 34)
        assert " ".join([first.removeprefix(head), *(line.strip() for line in others)]) == text.strip()


def test_an_option_stays_with_its_value_and_a_number_with_its_unit() -> None:
    for most in range(30, 90):
        lines = folded(
            "Fewer cost less: --set algorithm.batch_size=128 or --topology overlap, 12 µs or 34 % of it", most
        )
        for whole in ("--set algorithm.batch_size=128", "--topology overlap,", "12 µs", "34 %"):
            assert any(whole in line for line in lines)


@pytest.mark.parametrize("path", ["runs/mine", "runs/my run; ls", "runs/" + "x" * 90])
def test_a_folded_command_is_still_the_same_for_a_shell(path: str) -> None:
    text = f"raynforce resume {shlex.quote(path)} --steps 2000 --set algorithm.learning_rate=0.001"
    assert command(text, 200, "  ") == [f"  {text}"]
    lines = command(text, 60, "  ")
    assert len(lines) > 1
    assert all(line.endswith(" \\") for line in lines[:-1])
    assert all(len(line) <= 60 or "x" * 90 in line for line in lines)
    shell = "show() { printf '%s\\n' \"$@\"; }; show " + "\n".join(lines)
    words = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True).stdout.splitlines()
    assert words == shlex.split(text)


def test_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    main, terminal = os.openpty()
    with open(terminal, "w") as stream:
        termios.tcsetwinsize(terminal, (24, 61))
        assert columns(stream) == 61
    os.close(main)
    closed = io.StringIO()
    closed.close()
    assert columns(io.StringIO()) == columns(closed) == columns(None) == LOG < 120
    monkeypatch.setenv("COLUMNS", "72")
    assert columns(io.StringIO()) == 72
