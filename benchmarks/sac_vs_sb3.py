"""Updates per second of SAC on Pendulum-v1: Raynforce beside Stable-Baselines3, on the same work.

Equal on both sides (`sac_work.py`): four environments, an update for every environment step, batches drawn uniformly
from a buffer of 100,000, learning from step 500 on, two critics, a learned temperature, a target that follows by 0.005
after each update, Adam at 3e-4, one process and one thread, on one core. The sides take turns, each time in a fresh
process.

Counted: everything from the end of a warm-up of 1,000 steps on: sampling, replay, learning, episode statistics and
logging. Not counted: imports, building, evaluation, checkpoints. Updates per second of CPU time stand beside it, which
other work on the machine hardly moves.

The bar is for networks of 64 by 64 and batches of 256. With 256 by 256, the default, matrix products are most of the
time on either side (docs/performance.md): there the bar is for `kernels=native`, on a processor with AVX-512. Portable
kernels, the default, leave half of it unused. Neither side is held by variables such as OPENBLAS_CORETYPE.

Stable-Baselines3 gets a virtual environment of its own, `.venv-sb3` in the repository's root, made at first use; or set
RAYNFORCE_SB3_PYTHON to a Python that has it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

from benchmarks.measure import Bar, Table, command, pinned, ratio, row, run, take_turns
from benchmarks.peers import SB3
from raynforce import kernels

BAR = 2.5
NATIVE = "Raynforce, kernels=native"
SIZES = {64: 256, 256: 256}  # width of the hidden layers, and the batch
Facts = dict[str, Any]


def measure(repeats: int = 3, updates: int = 4_000) -> list[Table]:
    """Train with each side in turn, every time in a fresh process."""
    return [_table(repeats, updates, hidden, batch) for hidden, batch in SIZES.items()]


def _table(repeats: int, updates: int, hidden: int, batch: int) -> Table:
    work = updates, hidden, batch
    sides: dict[str, Callable[[int], Facts]] = {"Raynforce": partial(_train, sys.executable, "raynforce", *work)}
    if hidden == 256:
        sides[NATIVE] = partial(_train, sys.executable, "native", *work)
    sides[SB3.title] = partial(_train, SB3.python(), "sb3", *work)
    seeds = {name: iter(range(repeats)) for name in sides}

    def turn(name: str) -> Facts:
        return sides[name](next(seeds[name]))

    with pinned():
        results = take_turns(repeats, *(partial(turn, name) for name in sides), label=" / ".join(sides))
    found = dict(zip(sides, results, strict=True))
    wall, cpu = (
        {n: [f[key] for f in fs] for n, fs in found.items()} for key in ("updates_per_second", "updates_per_cpu_second")
    )
    rows = [row(name, "updates/s", values) for name, values in wall.items()]
    rows += [row(name, "updates/CPU s", values) for name, values in cpu.items()]
    bar: Bar = ("at least", BAR)
    for ours in list(sides)[:-1]:
        held = bar if hidden == 64 or (ours == NATIVE and "avx512f" in kernels.cpu("flags")) else None
        rows.append(ratio(f"{ours} / {SB3.title}", wall[ours], wall[SB3.title], held))
        rows.append(ratio("the same in CPU time", cpu[ours], cpu[SB3.title]))
    notes = [f"{name}: {_medians(facts)}" for name, facts in found.items()]
    title = f"SAC on Pendulum-v1, networks of {hidden} by {hidden}, batches of {batch}"
    return Table(f"{title}, {updates:,} updates, {repeats} turns each, one thread", rows, notes)


def _medians(facts: list[Facts]) -> str:
    per_step, returns = (median(f[key] for f in facts) for key in ("updates_per_step", "return_mean"))
    return f"{per_step:.2f} updates per environment step, final return {returns:.0f}"


def _train(python: str, side: str, updates: int, hidden: int, batch: int, seed: int) -> Facts:
    script = [python, "-m", "benchmarks.sac_work", side]
    free = ["env", *(word for name in kernels.pins() for word in ("-u", name))]
    facts: Facts = json.loads(run([*free, *script, *map(str, (updates, seed, hidden, batch))]).splitlines()[-1])
    return facts


if __name__ == "__main__":
    command(measure, __doc__ or "")
