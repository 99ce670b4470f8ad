"""Whether memory stays flat: every process of a run over 2,000 rounds of PPO on CartPole-v1, and the object store.

Overlap with two samplers, the runtimes process and Ray, with fragments of 150 kB (Ray keeps smaller ones elsewhere than
in its object store). The proportional set size of each process is read twice a second, the object store's size is
the run's own metric. Growth is what there is at the end of training beyond what there was at a quarter of it, each
the lowest of a tenth of all readings: an update's working memory comes and goes, a leak stays. The bar is 2 MB or 2 %,
whichever is more, for driver, learner, samplers and object store; Ray's own processes stand there for information.

The share that a process has in a library's pages changes when others on the machine load that library or end, so the
bar also holds for the set size without files, which only the process itself can change.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from benchmarks.measure import Row, Table, command
from benchmarks.runs import Process, Watcher, train

MEGABYTES_BAR, PERCENT_BAR = 2.0, 2.0
SAMPLERS, ENVS, FRAGMENT = 2, 64, 64
STORE = "health/object_store_mb"
SETTINGS = {
    "sampling.samplers": SAMPLERS,
    "sampling.envs": ENVS,
    "sampling.fragment": FRAGMENT,
    "algorithm.epochs": 1,
    "algorithm.minibatch_size": 2048,
}


def measure(rounds: int = 2000) -> list[Table]:
    """Train once on each runtime."""
    return [_table(runtime, rounds) for runtime in ("process", "ray")]


def _table(runtime: str, rounds: int) -> Table:
    watcher = Watcher(SAMPLERS)
    trained = train(
        "CartPole-v1",
        steps=rounds * SAMPLERS * ENVS * FRAGMENT,
        runtime=runtime,
        topology="overlap",
        settings=SETTINGS,
        watch=watcher,
        every=0.5,
    )
    rows = []
    for role, readings in _by_process(watcher).items():
        whole, own = [r.megabytes for r in readings], [r.own for r in readings]
        rows.append(_row(role, whole, own, bar=role.startswith(("driver", "learner", "sampler"))))
    store = [line[STORE] for line in trained.metrics if STORE in line]
    if store:
        rows.append(_row("object store", store, store, bar=True))
    notes = ["the first column is the level at the end, min and max are those since a quarter of the run"]
    return Table(f"Memory with runtime {runtime} over {rounds:,} rounds", rows, notes)


def _by_process(watcher: Watcher) -> dict[str, list[Process]]:
    """Readings of each process that was there until training ended, from the first that had all roles."""
    readings: dict[tuple[int, str], list[Process]] = defaultdict(list)
    looks = [look for look in watcher.looks if all(process.role != "evaluator" for process in look)]
    for look in looks:
        for process in look:
            readings[process.pid, process.role].append(process)
    return {role: found for (_, role), found in readings.items() if len(found) > 0.9 * len(looks)}


def _row(name: str, whole: Sequence[float], own: Sequence[float], bar: bool) -> Row:
    """The level at the end, the extremes from a quarter on, and the growth since then."""
    (before, end), (own_before, own_end) = _levels(whole), _levels(own)
    grown, own_grown = end - before, own_end - own_before
    since = whole[len(whole) // 4 :]
    limit = max(MEGABYTES_BAR, PERCENT_BAR / 100 * before)
    met = max(grown, own_grown) <= limit
    remark = f"{grown:+.2f} MB, {grown / max(before, 1e-9):+.1%}, without files {own_grown:+.2f} MB"
    if not bar:
        return Row(name, "MB", end, min(since), max(since), remark)
    remark += f"; bar: at most {limit:+.2f} MB, {'met' if met else 'missed'}"
    return Row(name, "MB", end, min(since), max(since), remark, limit, met)


def _levels(values: Sequence[float]) -> tuple[float, float]:
    """What there was at a quarter, and at the end."""
    few, quarter = max(1, len(values) // 10), len(values) // 4
    return min(values[quarter : quarter + few]), min(values[-few:])


if __name__ == "__main__":
    command(measure, __doc__ or "")
