"""Steps per CPU second of PPO, DQN and IMPALA: this tree beside another revision of it, on the same work.

CartPole-v1, eight environments, networks of 64 by 64, inline, one thread, on one core, without evaluation and
checkpoints. The trees take turns, each time in a fresh process of the same Python, and every other pair the other way
round. The revision is checked out into a temporary worktree. The bar of a change is 0.97.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.measure import ROOT, Table, command, pinned, ratio, row

STEPS = {"ppo": 100_000, "dqn": 40_000, "impala": 100_000}
BAR = 0.97
Facts = dict[str, Any]


def measure(revision: str = "ffbed95", repeats: int = 8, only: str = "") -> list[Table]:
    """Train with each tree in turn; `only` names one of the algorithms."""
    with worktree(revision) as other, pinned():
        return [_table(algo, other, revision, repeats) for algo in STEPS if only in algo]


def _table(algo: str, other: Path, revision: str, repeats: int) -> Table:
    found: dict[str, list[Facts]] = {"this tree": [], revision: []}
    sides: dict[str, Callable[[int], Facts]] = {"this tree": partial(_train, ROOT, algo)}
    sides[revision] = partial(_train, other, algo)
    for repeat in range(repeats):
        print(f"{algo}: {repeat + 1} of {repeats}", file=sys.stderr, flush=True)
        for name in list(sides) if repeat % 2 else reversed(sides):
            found[name].append(sides[name](repeat))
    rates = {name: [facts["steps_per_cpu_second"] for facts in each] for name, each in found.items()}
    rows = [row(name, "steps/CPU s", values) for name, values in rates.items()]
    rows.append(ratio(f"this tree / {revision}", rates["this tree"], rates[revision], ("at least", BAR)))
    here, there = ([facts["weights"] for facts in each] for each in found.values())
    same = sum(a == b for a, b in zip(here, there, strict=True))
    return Table(f"{algo}, {STEPS[algo]:,} steps", rows, [f"equal weights in {same} of {repeats} pairs"])


def _train(tree: Path, algo: str, seed: int) -> Facts:
    script = [sys.executable, str(ROOT / "benchmarks" / "before_work.py"), algo, str(STEPS[algo]), str(seed)]
    env = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(script, cwd=tree, env=env, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise SystemExit(f"{algo} in {tree} ended with {done.returncode}:\n{done.stderr}")
    facts: Facts = json.loads(done.stdout.splitlines()[-1])
    if Path(facts["tree"]) != tree.resolve():
        raise SystemExit(f"{facts['tree']} was measured instead of {tree}")
    return facts


@contextmanager
def worktree(revision: str) -> Iterator[Path]:
    """A checkout of a revision, for as long as it is needed."""
    git = ["git", "-C", str(ROOT), "worktree"]
    with TemporaryDirectory() as folder:
        place = Path(folder) / "tree"
        subprocess.run([*git, "add", "--quiet", "--detach", str(place), revision], check=True)
        try:
            yield place
        finally:
            subprocess.run([*git, "remove", "--force", str(place)], check=True)


if __name__ == "__main__":
    command(measure, __doc__ or "")
