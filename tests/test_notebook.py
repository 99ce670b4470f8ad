"""A real notebook, executed as `jupyter nbconvert --execute` does: its own environment trains on every runtime."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import raynforce

ROOT = Path(raynforce.__file__).parents[1]
DEADLINE = 240.0

DEFINE = """
    import gymnasium, numpy as np, raynforce

    class Maze(gymnasium.Env):
        '''Counts to five, one point for each step.'''

        observation_space, action_space = gymnasium.spaces.Box(0, 10, (1,)), gymnasium.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.t = 0
            return np.zeros(1, np.float32), {}

        def step(self, action):
            self.t += 1
            return np.full(1, self.t, np.float32), 1.0, self.t >= 5, False, {}

    settings = {"sampling.envs": 2, "sampling.fragment": 16, "eval.episodes": 2, "eval.final_episodes": 2}
"""
INLINE = """
    run = raynforce.train(Maze, steps=1_000, runtime="inline", out="inline", settings=settings)
"""
PROCESS = """
    import os, signal

    def interrupt(status):
        if status.steps > 500:
            os.killpg(os.getpgid(0), signal.SIGINT)  # what a kernel gets when it is interrupted

    try:
        how = dict(settings=settings, callbacks=[interrupt], progress="quiet")
        raynforce.train(Maze, steps=10**9, runtime="process", out="process", **how)
    except raynforce.Interrupted as interrupted:
        print(interrupted.run.result.stopped, interrupted)
        print(interrupted.run.result.return_mean)
"""
AFTER = """
    again = raynforce.resume("inline", steps=2_000, env=Maze, progress="quiet")
    print(again.result.steps >= 2_000, again.result.eval_return)
    returns, _ = raynforce.evaluate("process", episodes=3)
    print(returns.tolist(), raynforce.load("process").act([3.0]) in (0, 1))
"""


def executed(where: Path, *cells: str) -> list[str]:
    """What each cell printed. A cell that raises fails the test, with its traceback."""
    notebook: dict[str, Any] = {
        "nbformat": 4,
        "nbformat_minor": 5,
        "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
        "cells": [
            {
                "cell_type": "code",
                "id": f"cell{index}",
                "metadata": {},
                "execution_count": None,
                "outputs": [],
                "source": textwrap.dedent(text).strip(),
            }
            for index, text in enumerate(cells)
        ],
    }
    (where / "maze.ipynb").write_text(json.dumps(notebook))
    own = {name: str(where / name.lower()) for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR")}
    environ = {**os.environ, **own, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", "--output", "done.ipynb", "maze.ipynb"],
        cwd=where,
        env=environ,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((where / "done.ipynb").read_text())["cells"]
    assert all(output["output_type"] == "stream" for cell in found for output in cell["outputs"]), found
    return ["".join("".join(output["text"]) for output in cell["outputs"]) for cell in found]


def test_an_environment_of_a_notebook_trains_is_interrupted_resumes_and_evaluates(tmp_path: Path) -> None:
    _, inline, process, after = executed(tmp_path, DEFINE, INLINE, PROCESS, AFTER)
    assert "ppo on __main__:Maze\n" in inline
    assert 3 <= inline.count("\n") < 60, "progress, in bearable length"
    assert inline.replace("\n", "").isprintable(), "no control characters"
    assert process == "SIGINT ended by SIGINT; to go on: raynforce.resume('process', env=...)\n5.0\n"
    assert after == "True 5.0\n[5.0, 5.0, 5.0] True\n"
    assert "env: '__main__:Maze@notebook'\n" in (tmp_path / "inline" / "config.yaml").read_text()
    events = [json.loads(line) for line in (tmp_path / "process" / "events.jsonl").read_text().splitlines()]
    assert (events[-2]["event"], events[-2]["reason"]) == ("stopped", "SIGINT")
    with pytest.raises(raynforce.UsageError, match=r"'__main__:Maze' was defined in notebook.*env=Maze"):
        raynforce.evaluate(tmp_path / "inline")
