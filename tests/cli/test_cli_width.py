"""What the commands print fits: a terminal of 80 columns, or a log with lines below 120 characters, none twice."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import sys
import termios
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_helpers import PLAIN, SICK, TINY, Answer

from raynforce.cli import main

Cli = Callable[..., Answer]
LOUD = [word for word in TINY if word != "--quiet"]


def everything(cli: Cli) -> str:
    """What a first hour prints."""
    name = "a-run-of-a-name-that-is-rather-long"
    words = [
        ["train", "ppo", SICK, *LOUD, "--out", name, "--target", "99"],
        ["resume", name, "--steps", "128", "--set", "algorithm.learning_rate=0.01", "--set", "algorithm.clip=0.1"],
        ["train", "dqn", "CartPole-v1", *LOUD[:2], "--out", "dqn", "--set", "eval.final_episodes=1"],
        ["train", "ppo", PLAIN, *LOUD, "--set", "algorithm.learning_rate=0.01"],  # a directory of its own
        ["eval", name, "--episodes", "2"],
        ["runs"],
        ["runs", "."],
        ["show", name],
        ["show", f"{name}/best"],
        ["doctor", name],
        ["doctor", "CartPole-v1"],
        ["doctor"],
        ["train", "--help"],
    ]
    answers = [cli(*command) for command in words]
    assert {answer.code for answer in answers} == {0}
    return "".join(answer.out + answer.err for answer in answers)


@pytest.mark.parametrize("columns", [80, None])
def test_every_line_fits(cli: Cli, columns: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", str(columns))
    too_long = [line for line in everything(cli).splitlines() if len(line) > (columns or 119)]
    assert too_long == []


def test_no_line_of_a_log_comes_twice(cli: Cli) -> None:
    answer = cli("train", "ppo", SICK, *LOUD, "--out", "run", "--target", "99")
    lines = [line.strip() for line in answer.out.splitlines() if line.strip()]
    assert sorted(lines) == sorted(set(lines))


def in_a_terminal(monkeypatch: pytest.MonkeyPatch, *words: str, **environment: str) -> str:
    """What a command writes to a terminal of 80 columns."""
    shown = []
    main_end, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 80))

    def read() -> None:
        with contextlib.suppress(OSError):  # the other side was closed
            while True:
                shown.append(os.read(main_end, 65536))

    reader = threading.Thread(target=read)
    with monkeypatch.context() as patch, os.fdopen(terminal, "w", encoding="utf-8") as stream:
        for name in ("COLUMNS", "NO_COLOR", "CI"):
            patch.delenv(name, raising=False)
        for name, value in {"TERM": "xterm-256color", **environment}.items():
            patch.setenv(name, value)
        for name in ("stdout", "stderr", "__stdout__", "__stderr__"):
            patch.setattr(sys, name, stream)
        reader.start()
        main(words)
    reader.join()
    os.close(main_end)
    return b"".join(shown).decode().replace("\r\n", "\n")


def test_an_error_ends_its_lines_between_words_on_a_terminal_and_is_one_line_elsewhere(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["train", "ppo", "CartPole-v1", "--set", "train_batch_size=4000"]
    shown = in_a_terminal(monkeypatch, *words)
    (line,) = cli(*words).err.splitlines()
    assert len(line) > 80
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.split() == line.split()


@pytest.mark.parametrize(
    ("environment", "live", "colours"),
    [({}, True, True), ({"NO_COLOR": "1"}, True, False), ({"TERM": "dumb"}, False, False)],
)
def test_a_terminal_gets_what_it_can_show(
    environment: dict[str, str], live: bool, colours: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--no-preset", "--set", "eval.final_episodes=1", "--set", "eval.episodes=1", "--runtime", "inline"]
    shown = in_a_terminal(monkeypatch, "train", "ppo", "CartPole-v1", "--steps", "64", *words, **environment)
    assert ("╭" in shown) == live
    assert bool(re.search("\x1b\\[[0-9;]*3[0-9][0-9;]*m", shown)) == colours
    assert ("\x1b" in shown) == live  # NO_COLOR is about colours: the panel is still drawn in place
    plain = re.sub("\x1b\\[[^a-zA-Z]*[a-zA-Z]", "", shown.replace("\r", "\n"))
    assert [line for line in plain.splitlines() if len(line) > 80] == []
