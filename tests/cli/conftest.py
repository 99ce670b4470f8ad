"""A command line that runs in this process and in a directory of its own, and a small run to try things on."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_helpers import TINY, Answer

from raynforce.cli import main

Cli = Callable[..., Answer]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Call it with the words of a command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the current directory is added to it when user code is looked for

    def call(*words: str) -> Answer:
        capsys.readouterr()
        try:
            code = main(words)
        except SystemExit as error:  # --help
            code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        return Answer(code, *capsys.readouterr())

    return call


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with two checkpoints and a best policy."""
    path = tmp_path_factory.mktemp("trained") / "run"
    assert main(["train", "ppo", "cli_envs:Sick", *TINY, "--set", "checkpoint.every=32", "--out", str(path)]) == 0
    assert len(os.listdir(path / "checkpoints")) == 3
    return path


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of it to spoil, as `run` in the current directory of `cli`."""
    shutil.copytree(trained, tmp_path / "run", symlinks=True)
    return tmp_path / "run"
