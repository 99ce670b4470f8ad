"""Memory of each process of a run, PPO on CartPole-v1 with two samplers, while it trains.

Counted is the proportional set size (`Pss` in /proc/PID/smaps_rollup): pages that n processes share count 1/n in
each. A figure is the most that any process of that role had in the second half of a run. Samplers and driver have no
torch: the benchmark looks for its library in their address space, and fails if it is there.
"""

from __future__ import annotations

from benchmarks.measure import Row, Table, command, row
from benchmarks.runs import Watcher, held, train

SAMPLERS = 2
BARS = {"process": 80.0, "ray": 150.0}  # MB of a sampler


def measure(repeats: int = 3, steps: int = 100_000) -> list[Table]:
    """Look at the processes of each run, twice a second."""
    return [Table(f"Memory with runtime {r}, {repeats} runs", _rows(r, bar, repeats, steps)) for r, bar in BARS.items()]


def look(runtime: str, steps: int) -> Watcher:
    """A run, and what its processes had."""
    watcher = Watcher(SAMPLERS)
    settings = {"sampling.samplers": SAMPLERS}
    train("CartPole-v1", steps=steps, runtime=runtime, topology="overlap", settings=settings, watch=watcher, every=0.5)
    if not watcher.looks:
        raise SystemExit(f"runtime {runtime}: the run was over before it could be looked at; give more --steps")
    having = watcher.torch_in("driver", "sampler")
    if having:
        raise SystemExit(f"runtime {runtime}: torch is loaded in {', '.join(having)}")
    return watcher


def _rows(runtime: str, bar: float, repeats: int, steps: int) -> list[Row]:
    watchers = [look(runtime, steps) for _ in range(repeats)]
    ours = ("sampler", "learner", "driver")
    others = sorted(role for role in set().union(*(w.roles for w in watchers)) if not role.startswith((*ours, "eval")))
    sampler, *rest = (row(role, "MB", [w.megabytes(role) for w in watchers]) for role in (*ours, *others))
    return [held(sampler, ("at most", bar)), *rest]


if __name__ == "__main__":
    command(measure, __doc__ or "")
