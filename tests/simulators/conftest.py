"""Simulators that are compiled once for all tests."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Werror")


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The path of a program, by that of its source from the project's root."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++ to compile simulators with (Debian: apt install g++)")
    folder, made = tmp_path_factory.mktemp("simulators"), {}

    def compile_(source: str, *options: str) -> str:
        if (source, options) not in made:
            program = folder / f"{Path(source).stem}{len(made)}"
            words = [compiler, "-std=c++17", "-O1", *WARNINGS, *options, "-pthread", f"-I{ROOT / 'sdk' / 'cpp'}"]
            done = subprocess.run([*words, str(ROOT / source), "-o", str(program)], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            made[source, options] = str(program)
        return made[source, options]

    return compile_


@pytest.fixture(scope="session")
def cartpole(compiled: Callable[[str], str]) -> str:
    return compiled("examples/cpp/cartpole.cpp")


@pytest.fixture(scope="session")
def odd(compiled: Callable[[str], str]) -> str:
    return compiled("tests/simulators/odd.cpp")
