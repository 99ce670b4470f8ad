"""What the commands print fits: a terminal of 80 columns, or a log with lines below 120 characters, none twice."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_helpers import PLAIN, SICK, TINY, Answer

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


def in_a_terminal(tmp_path: Path, *words: str, **environment: str) -> str:
    """What a command writes to a terminal of 80 columns."""
    main, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 80))
    command = [sys.executable, "-m", "raynforce", *words]
    inherited = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "NO_COLOR", "CI")}
    surroundings = {**inherited, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8", **environment}
    with subprocess.Popen(
        command, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=terminal, stderr=terminal, env=surroundings
    ):
        os.close(terminal)
        shown = b""
        while True:
            try:
                shown += os.read(main, 65536)
            except OSError:  # the other side was closed
                break
    os.close(main)
    return shown.decode().replace("\r\n", "\n")


def test_an_error_ends_its_lines_between_words_on_a_terminal_and_is_one_line_elsewhere(
    tmp_path: Path, cli: Cli
) -> None:
    words = ["train", "ppo", "CartPole-v1", "--set", "train_batch_size=4000"]
    shown = in_a_terminal(tmp_path, *words)
    (line,) = cli(*words).err.splitlines()
    assert len(line) > 80
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.split() == line.split()


@pytest.mark.parametrize(
    ("environment", "live", "colours"),
    [({}, True, True), ({"NO_COLOR": "1"}, True, False), ({"TERM": "dumb"}, False, False)],
)
def test_a_terminal_gets_what_it_can_show(
    tmp_path: Path, environment: dict[str, str], live: bool, colours: bool
) -> None:
    words = ["--no-preset", "--set", "eval.final_episodes=1", "--set", "eval.episodes=1", "--runtime", "inline"]
    shown = in_a_terminal(tmp_path, "train", "ppo", "CartPole-v1", "--steps", "64", *words, **environment)
    assert ("╭" in shown) == live
    assert bool(re.search("\x1b\\[[0-9;]*3[0-9][0-9;]*m", shown)) == colours
    assert ("\x1b" in shown) == live  # NO_COLOR is about colours: the panel is still drawn in place
    plain = re.sub("\x1b\\[[^a-zA-Z]*[a-zA-Z]", "", shown.replace("\r", "\n"))
    assert [line for line in plain.splitlines() if len(line) > 80] == []
