"""Help and docstrings name all that there is, in lines that fit a terminal and end between words."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from cli_helpers import Answer

import raynforce
from raynforce.algos import BUILT_IN
from raynforce.config import Config
from raynforce.settings import docs

Cli = Callable[..., Answer]
COMMANDS = ("", "train", "resume", "eval", "runs", "show", "doctor", "explain", "import", "submit", "jobs", "cluster")
COMMANDS += ("export", "pipeline", "promote", "rollback", "registry")
README = (Path(__file__).parents[2] / "README.md").read_text()


def choices(setting: str) -> tuple[str, ...]:
    return get_args(get_type_hints(Config)[setting])


def missing(names: tuple[str, ...], text: str) -> list[str]:
    return [name for name in names if not re.search(rf"(?<![\w-]){name}(?![\w-])", text)]


@pytest.mark.parametrize("setting", ["topology", "runtime"])
def test_every_topology_and_runtime_is_listed_wherever_they_are(cli: Cli, setting: str) -> None:
    names = choices(setting)
    for command in ("train", "resume"):
        text = " ".join(cli(command, "--help").out.split())
        described = text.rpartition(f"--{setting} NAME ")[2].partition(" --")[0]
        assert missing(names, described) == []
    assert missing(names, docs(Config)[setting]) == []
    assert missing(names, raynforce.train.__doc__ or "") == []
    table = README.partition(f"| `--{setting}` |")[2].partition("\n\n")[0]
    assert missing(names, table) == []


def test_every_algorithm_is_listed_wherever_they_are(cli: Cli) -> None:
    names = tuple(BUILT_IN)
    assert missing(names, cli("train", "--help").out.partition("ALGO  ")[2].partition("\n")[0]) == []
    assert missing(names, docs(Config)["algo"]) == []
    assert missing(names, raynforce.train.__doc__ or "") == []
    assert missing(names, README) == []
    assert [name for name in names if f"(raynforce/algos/{name}.py)" not in README] == []


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("columns", [60, 80, 120])
def test_no_line_of_help_is_broken_within_a_word(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, command: str, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = cli(*command.split(), "--help").out
    monkeypatch.setenv("COLUMNS", "1000")
    whole = cli(*command.split(), "--help").out
    assert set(text.split()) == set(whole.split())  # every word is as it is where there is room for all of them
    if columns >= 80:
        assert max(map(len, text.splitlines())) <= columns
