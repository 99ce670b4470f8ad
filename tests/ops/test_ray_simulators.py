"""A simulator on a cluster: its program is sent along, or is on the nodes already."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rays import Head

import raynforce
from raynforce.config import Config
from raynforce.errors import UsageError
from raynforce.runtimes.ray.shipping import code_roots

ROOT = Path(raynforce.__file__).parents[1]
BALL = f"""#!{sys.executable}
import os, sys
with open("{{where}}", "a") as file:
    print(os.path.abspath(__file__), file=file)
sys.path.insert(0, "{ROOT}/examples")
import other_python
other_python.sim.serve(other_python.Ball)
"""


def make(folder: Path) -> Path:
    program = folder / "sims" / "ball"
    program.parent.mkdir()
    program.write_text(BALL.replace("{where}", str(folder / "where.txt")))
    program.chmod(0o755)
    return program


def test_a_program_in_the_current_directory_is_sent_along(head: Head, tmp_path: Path) -> None:
    make(tmp_path)
    others = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    others |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": head.token, "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    words = [
        "train",
        "ppo",
        "./sims/ball",
        "--runtime",
        "ray",
        "--address",
        head.address,
        "--set",
        "ray.ship_code=always",
    ]
    words += ["--sampler-cpus", "1", "--steps", "64", "--envs", "2", "--set", "sampling.fragment=16", "--out", "run"]
    command = [sys.executable, "-m", "raynforce", *words, "--set", "eval.every=1000000"]
    done = subprocess.run(command, cwd=tmp_path, env=others, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    started = (tmp_path / "where.txt").read_text().splitlines()
    assert [path for path in started if "working_dir_files" in path], started


def test_what_is_sent_of_a_simulator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = make(tmp_path)
    monkeypatch.chdir(tmp_path)
    here = [tmp_path.resolve()]
    assert code_roots(Config(env="./sims/ball --track oval")) == here
    assert code_roots(Config(env=f"sim:{sys.executable} sims/ball")) == here
    assert code_roots(Config(env=str(program))) == [], "a path from the root is one on the nodes"
    assert code_roots(Config(env="connect:tcp:127.0.0.1:5555")) == []
    with pytest.raises(UsageError, match="there is no file"):
        code_roots(Config(env="./sims/other"))
