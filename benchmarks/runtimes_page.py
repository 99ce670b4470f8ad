"""Writes `docs/runtimes.md`: inline, process and Ray side by side on the same work, in turns."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median

from benchmarks.measure import ROOT, Row, Table, command, row, take_turns
from benchmarks.runs import RUNTIMES, Process, processes, train
from benchmarks.runtimes_calls import times
from benchmarks.runtimes_overlap import burning, calibrate

PAGE = ROOT / "docs" / "runtimes.md"
Figures = dict[str, float]
UNITS = {
    "first update": "s",
    "memory of a sampler": "MB",
    "memory in all": "MB",
    "CartPole, sync": "steps/s",
    "CartPole, overlap": "steps/s",
    "slow CartPole, sync": "steps/s",
    "slow CartPole, overlap": "steps/s",
    "empty call": "ms",
    "1 MB from sampler to learner": "ms",
}


def measure(repeats: int = 3, steps: int = 60_000, rounds: int = 50) -> list[Table]:
    """Measure each runtime in turn, and write the page."""
    work = calibrate()
    found = take_turns(repeats, *(partial(_figures, r, steps, rounds, work) for r in RUNTIMES), label="runtimes")
    rows: dict[tuple[str, str], Row] = {}
    for runtime, turns in zip(RUNTIMES, found, strict=True):
        for name in turns[0]:
            rows[name, runtime] = row(f"{name}, {runtime}", UNITS[name], [turn[name] for turn in turns])
    PAGE.write_text(_page(rows))
    ordered = [rows[name, runtime] for name in UNITS for runtime in RUNTIMES if (name, runtime) in rows]
    return [Table(f"The runtimes, {repeats} turns each", ordered, [f"written to {PAGE.relative_to(ROOT)}"])]


def _figures(runtime: str, steps: int, rounds: int, work: int) -> Figures:
    """One turn of one runtime."""
    looks: list[list[Process]] = []
    cartpole = {}
    for topology in ("sync", "overlap"):
        look: Callable[[int], None] = lambda driver: looks.append(processes(driver))  # noqa: E731
        cartpole[topology] = train(
            "CartPole-v1", steps=steps, runtime=runtime, topology=topology, watch=look, every=0.3
        )
    slow = {topology: burning(work, rounds, runtime, topology) for topology in cartpole}
    figures = {"first update": median(trained.startup for trained in cartpole.values())}
    samplers = [p.megabytes for look in looks for p in look if p.role == "sampler 0" and not p.torch]
    if samplers:
        figures["memory of a sampler"] = max(samplers)
    figures["memory in all"] = max(sum(p.megabytes for p in look if p.role != "evaluator") for look in looks)
    figures |= {f"CartPole, {topology}": trained.speed for topology, trained in cartpole.items()}
    figures |= {f"slow CartPole, {topology}": trained.speed for topology, trained in slow.items()}
    return figures | times(runtime)


def _page(rows: dict[tuple[str, str], Row]) -> str:
    lines = ["| | " + " | ".join(RUNTIMES) + " |", "|---|" + "---:|" * len(RUNTIMES)]
    for name, unit in UNITS.items():
        cells = [_shown(rows[name, runtime].median) if (name, runtime) in rows else "–" for runtime in RUNTIMES]
        lines.append(f"| {name}, {unit} | " + " | ".join(cells) + " |")
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "numpy", "gymnasium", "ray"))
    machine = f"{_processor()}, {os.cpu_count()} cores; Python {platform.python_version()}, {packages}"
    return TEXT.format(table="\n".join(lines), machine=machine)


TEXT = """\
# Where a run lives

```sh
python -m benchmarks.runtimes_page   # measures everything below and writes this page; takes some minutes
```

`--runtime` says where sampler, learner and evaluator live. Nothing else changes: with `--topology sync` and `overlap`,
equal seeds lead to equal weights, bit for bit, on all three. `auto`, the default, times a step of the environment and
takes `inline` where that is cheap, else `process`; it says so, and writes it to `config.yaml`. What it
measured is remembered, so that it decides the same way each time.

- **`inline`**: everything in one process, one call after the other. Choose it for light environments and small
  networks, to use one core, and to debug: a breakpoint stops where you expect it to. Overlap gains nothing here.
- **`process`**: each role in a process of this machine. Choose it when the environment costs as much as learning or
  more: `--topology overlap` then samples while it learns, and `--samplers` uses more cores. Fragments go through
  shared memory that vanishes with its last reader. Linux only.
- **`ray`**: each role a Ray actor. Choose it for several machines, for roles that need custom resources, or where Ray
  runs already. On one machine it does what `process` does, starts later, and takes more memory.

Calls cost Ray most: a round makes a few for each sampler, so longer fragments (`sampling.fragment`) make up for it.
Where samplers differ in speed, use `--topology async`, on either.

{table}

The first update is counted from the start of the process. CartPole is PPO with its defaults and one sampler of 8
environments and 128 steps; the slow CartPole has a loop in each step, such that a round's sampling takes as long as
its learning (10 epochs). Memory is the proportional set size while it trains, in all processes together with Ray's
own. A fragment of 1 MB goes from the sampler's process to the learner's, which reads it. Figures are medians of
turns that alternate between the runtimes; a shared machine moves them by a third, so compare within a row.

Generated by `benchmarks/runtimes_page.py` on: {machine}.
"""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.3f}"


if __name__ == "__main__":
    command(measure, __doc__ or "")
