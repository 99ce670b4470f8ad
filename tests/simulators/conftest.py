"""Simulators that are compiled once for all tests."""

from __future__ import annotations

import fcntl
import hashlib
import os
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
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled"  # the same for all workers
    folder.mkdir(exist_ok=True)

    def compile_(source: str, *options: str) -> str:
        named = hashlib.sha256(repr((source, options)).encode()).hexdigest()[:8]
        program = folder / f"{Path(source).stem}-{named}"
        with open(f"{program}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not program.exists():
                words = [compiler, "-std=c++17", "-O0", *WARNINGS, *options, "-pthread", f"-I{ROOT / 'sdk' / 'cpp'}"]
                words += [str(ROOT / source), "-o", f"{program}.part"]
                done = subprocess.run(words, capture_output=True, text=True)
                assert done.returncode == 0, done.stderr
                os.rename(f"{program}.part", program)
        return str(program)

    return compile_


@pytest.fixture(scope="session")
def cartpole(compiled: Callable[[str], str]) -> str:
    return compiled("examples/cpp/cartpole.cpp")


@pytest.fixture(scope="session")
def odd(compiled: Callable[[str], str]) -> str:
    return compiled("tests/simulators/odd.cpp")
