"""How long each runtime takes to the first update of PPO on CartPole-v1, with one sampler.

The figure is the `startup_seconds` that `raynforce train --json` reports: from the start of the process to the end of
the first round of learning. Processes are held against inline. Ray is held against what cannot be avoided: the whole
life of a process that calls `ray.init()` with Ray's own defaults and leaves, plus inline. A stricter ratio stands
beside it, to the moment at which that `ray.init()` returned.

All take turns, after one turn that is not counted and that fills the caches of the disk and of Python. Nothing of the
user's Ray is used: each child has a home and a temporary directory of its own, and no variable of Ray's.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

from benchmarks.measure import Table, command, ratio, row, take_turns
from benchmarks.runs import RUNTIMES, apart, train, watched

PROCESS_BAR, RAY_BAR = 1.3, 1.0
INIT = "import ray, time; ray.init({}); print(time.monotonic())"
Times = tuple[float, float]


def measure(repeats: int = 4) -> list[Table]:
    """Start each in turn."""
    sides: list[Callable[[], Times]] = [*(partial(_first_update, runtime) for runtime in RUNTIMES), ray_init]
    take_turns(1, *sides)
    found = take_turns(repeats, *sides, label="start-up")
    (inline, process, ray, returned), (*_, lived) = ([[times[i] for times in side] for side in found] for i in (0, 1))
    rows = [row(f"{name}, first update", "s", v) for name, v in zip(RUNTIMES, (inline, process, ray), strict=True)]
    rows += [row("ray.init(), whole process", "s", lived), row("ray.init() has returned", "s", returned)]
    rows.append(ratio("process / inline", process, inline, bar=("at most", PROCESS_BAR)))
    rows.append(ratio("ray / (ray.init() + inline)", ray, _sums(lived, inline), bar=("at most", RAY_BAR)))
    rows.append(ratio("ray / (ray.init() has returned + inline)", ray, _sums(returned, inline)))
    return [Table(f"Start-up of the runtimes, {repeats} turns each", rows)]


def _sums(a: list[float], b: list[float]) -> list[float]:
    return [x + y for x, y in zip(a, b, strict=True)]


def _first_update(runtime: str) -> Times:
    """Seconds to the first update, and until the process has ended."""
    began = time.monotonic()
    trained = train("CartPole-v1", steps=1, runtime=runtime, settings={"preset": "auto"})
    return trained.startup, time.monotonic() - began


def ray_init(options: str = "") -> Times:
    """Seconds until `ray.init()` with these options has returned, and until its process has ended."""
    began = time.monotonic()
    with apart() as environment:
        printed = watched([sys.executable, "-c", INIT.format(options)], environment)
        return float(printed.split()[-1]) - began, time.monotonic() - began


if __name__ == "__main__":
    command(measure, __doc__ or "")
