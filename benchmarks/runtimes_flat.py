"""Whether memory stays flat: every process of a run over 2,000 rounds of PPO on CartPole-v1, and the object store.

Overlap with two samplers, the runtimes process and Ray. The proportional set size of each process is read twice a
second, and the object store's size from the run's own metric. Growth is what a process has at the end of training
(median of the last tenth of the readings) beyond what it had at a quarter of it (median of those from a quarter on, as
many). The bar is 2 % or 2 MB, whichever is more, for driver, learner and samplers; Ray's own processes stand there for
information.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from benchmarks.measure import Row, Table, command
from benchmarks.runs import Watcher, train

PERCENT_BAR, MEGABYTES_BAR = 2.0, 2.0
SAMPLERS, ENVS, FRAGMENT = 2, 8, 64
STORE = "health/object_store_mb"
SETTINGS = {"sampling.samplers": SAMPLERS, "sampling.envs": ENVS, "sampling.fragment": FRAGMENT}


def measure(rounds: int = 2000) -> list[Table]:
    """Train once on each runtime."""
    return [_table(runtime, rounds) for runtime in ("process", "ray")]


def _table(runtime: str, rounds: int) -> Table:
    watcher = Watcher(SAMPLERS)
    # A round has a little fewer steps than this: those on which an environment is only reset do not count.
    steps = rounds * SAMPLERS * ENVS * FRAGMENT
    trained = train(
        "CartPole-v1", steps=steps, runtime=runtime, topology="overlap", settings=SETTINGS, watch=watcher, every=0.5
    )
    rows = [_row(name, values, bar=_ours(name)) for name, values in _by_process(watcher).items()]
    store = [line[STORE] for line in trained.metrics if STORE in line]
    if store:
        rows.append(_row("object store", store, bar=True))
    return Table(f"Memory with runtime {runtime}, {rounds:,} rounds, {trained.speed:,.0f} steps/s", rows)


def _by_process(watcher: Watcher) -> dict[str, list[float]]:
    """Readings of each process that was there from a quarter of the run to its end."""
    looks = [look for look in watcher.looks if all(p.role != "evaluator" for p in look)]
    readings: dict[tuple[str, int], list[float]] = defaultdict(list)
    for look in looks:
        for process in look:
            readings[process.role, process.pid].append(process.megabytes)
    return {role: values for (role, _), values in readings.items() if len(values) > 0.8 * len(looks)}


def _row(name: str, values: Sequence[float], bar: bool) -> Row:
    """The level at the end, the extremes from a quarter on, and how much it has grown since."""
    few = max(1, len(values) // 10)
    since = values[len(values) // 4 :]
    before, now = median(since[:few]), median(since[-few:])
    grown, percent = now - before, 100 * (now - before) / max(before, 1e-9)
    met = grown <= MEGABYTES_BAR or percent <= PERCENT_BAR
    remark = f"{grown:+.2f} MB, {percent:+.1f} %"
    if not bar:
        return Row(name, "MB", now, min(since), max(since), remark)
    remark += f"; bar: at most {MEGABYTES_BAR:g} MB or {PERCENT_BAR:g} %, {'met' if met else 'missed'}"
    return Row(name, "MB", now, min(since), max(since), remark, MEGABYTES_BAR, met)


def _ours(role: str) -> bool:
    return role.startswith(("driver", "learner", "sampler"))


if __name__ == "__main__":
    command(measure, __doc__ or "")
