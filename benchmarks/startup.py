"""How long one waits: from the command to the first update, and for `--help`, in units of unavoidable imports.

The first figure is the `startup_seconds` that `raynforce train ppo CartPole-v1 --json` reports: from the start of the
process to the end of the first round of learning, so it holds a first fragment and its epochs beside all imports. It
is divided by the whole life of a process that only imports torch and gymnasium. Of that life, taking the interpreter
down again is a part that the first figure does not have, so a stricter ratio stands beside it: to a process that
leaves as soon as it has imported. The second figure is the whole life of `raynforce --help`, divided by that of a
process that only imports numpy. All take turns, after one turn that is not counted and that fills the caches of the
disk and of Python.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from tempfile import TemporaryDirectory

from benchmarks.measure import Table, command, ratio, row, run, take_turns

FIRST_UPDATE_BAR, HELP_BAR = 1.6, 2.0


def measure(repeats: int = 9) -> list[Table]:
    """Start each process in turn."""
    sides: dict[str, Callable[[], float]] = {
        "raynforce train, first update": _first_update,
        "import torch, gymnasium": partial(_wall, ["-c", "import torch, gymnasium"]),
        "the same, leaving at once": partial(_wall, ["-c", "import torch, gymnasium, os; os._exit(0)"]),
        "raynforce --help": partial(_wall, ["-m", "raynforce", "--help"]),
        "import numpy": partial(_wall, ["-c", "import numpy"]),
    }
    take_turns(1, *sides.values())
    found = take_turns(repeats, *sides.values(), label="start-up")
    update, imports, bare, usage, numpy = found
    rows = [row(name, "s", values) for name, values in zip(sides, found, strict=True)]
    rows.append(ratio("first update / imports", update, imports, bar=("at most", FIRST_UPDATE_BAR)))
    rows.append(ratio("first update / leaving at once", update, bare))
    rows.append(ratio("--help / import numpy", usage, numpy, bar=("at most", HELP_BAR)))
    return [Table(f"Start-up, {repeats} turns each", rows)]


def _first_update() -> float:
    with TemporaryDirectory() as folder:
        train = ["-m", "raynforce", "train", "ppo", "CartPole-v1", "--out", f"{folder}/run", "--json", "--quiet"]
        short = ["--steps", "1", "--set", "eval.final_episodes=0"]  # one round, and none of the waiting after it
        printed = run([sys.executable, *train, *short])
    return float(json.loads(printed.splitlines()[-1])["startup_seconds"])


def _wall(arguments: Sequence[str]) -> float:
    began = time.monotonic()
    run([sys.executable, *arguments])
    return time.monotonic() - began


if __name__ == "__main__":
    command(measure, __doc__ or "")
