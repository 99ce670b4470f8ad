"""Slow and uneven environments, one policy for all: what topology `central` makes of them, PPO training all the while.

Each step of an environment sleeps 10 to 50 ms (`slow_envs.Uniform`), so N of them can give N / 0.03 s steps per second
and no more. They live in threads of `--hosts64` and `--hosts256` host processes, on runtimes `process` and `ray`. PPO
learns from fragments of 32 steps, in four epochs of minibatches of 256; no evaluation, no checkpoints.

Steps per second are counted by the environments themselves, from 3 s after all of them have begun, for `--seconds`:
what they did, whatever has become of it since. What was learned from in the meantime stands beside it; it lags behind
at first, because lanes that begin together drift apart, and so ever more of them are amidst a fragment. Being up means
the end of the first update, counted from the start of the process, imports included; on Ray without the seconds that
another process takes, just before, until its `ray.init()`, without a dashboard, has returned.

The other side is the script `--baseline`, one actor for each environment and `ray.wait`: it is run as it is, with 64
environments, and tells its own figures, without learning anything. If it is not there, nothing is measured beside.

Then one of 64 environments is ten times slower. The speed of the 63 others, counted for themselves, is held against
that of environments that are all alike, in turns. No step may be lost: none dropped as too old, none lost on the way,
and in the run's own ledger as many produced as were trained on or are in flight.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from benchmarks.measure import Row, Table, command, ratio, row, stolen_seconds, take_turns
from benchmarks.runs import Trained, apart, held, train, watched
from benchmarks.runtimes_startup import ray_init
from benchmarks.slow_envs import Count, Counter
from raynforce.envs.vector import derive_seed

BARS = {("process", 64): 0.95, ("process", 256): 0.90, ("ray", 64): 0.90, ("ray", 256): 0.85}  # of the limit
UP_BAR, OTHERS_BAR = 6.0, 0.97
STEP, SLOWNESS = 0.03, 10.0  # mean seconds of a step, and how much longer those of the slow one are
SETTLING = 3.0  # seconds from the first steps of all until the clock starts
FRAGMENT, SEED, SLOW_LANE = 32, 0, 17
SHARES = ("busy", "policy", "wire", "learner", "restart")  # of the environments' time


class Pace(NamedTuple):
    """Steps per second once it runs."""

    all: float
    marked: float
    """Of those that are marked, which are part of all."""
    stolen: float
    """Share of all cores' time that other virtual machines took meanwhile."""


class Looks:
    """Looks at the counts of `envs` environments again and again, once all of them have begun."""

    def __init__(self, folder: Path, envs: int) -> None:
        self._folder, self._envs = folder, envs
        self._looks: list[tuple[float, float, dict[str, Count]]] = []

    def __call__(self, _: int) -> None:
        now, counts = time.monotonic(), Counter.read(self._folder)
        if sum(count.steps > 0 for count in counts.values()) >= self._envs:
            self._looks.append((now, stolen_seconds(), counts))

    def pace(self, seconds: float) -> Pace:
        """From the end of settling on, for so long."""
        if not self._looks:
            raise SystemExit(f"not all of {self._envs} environments have begun")
        since = self._looks[0][0] + SETTLING
        looks = [look for look in self._looks if since <= look[0] <= since + seconds]
        if len(looks) < 2 or self._looks[-1][0] < since + 0.8 * seconds:
            raise SystemExit(f"the environments were not stepped for {SETTLING + seconds:.0f} s")
        (began, stolen, before), (ended, stolen_by_then, after) = looks[0], looks[-1]
        done = {name: count.steps - before[name].steps for name, count in after.items() if name in before}
        marked = sum(steps for name, steps in done.items() if after[name].marked)
        taken = ended - began
        return Pace(sum(done.values()) / taken, marked / taken, (stolen_by_then - stolen) / taken)


class Turn(NamedTuple):
    """What one run did."""

    pace: Pace
    learned: float
    """Environment steps per second that were trained on."""
    up: float
    """Seconds to the first update, without those that the runtime itself takes."""
    run: Trained


class Said(NamedTuple):
    """What the baseline tells of itself."""

    start: float
    speed: float


def measure(
    repeats: int = 3,
    seconds: int = 20,
    hosts64: int = 1,
    hosts256: int = 2,
    baseline: str = "",
    only: str = "",
) -> list[Table]:
    """Measure the speed of all, then that of 63 beside a slow one; or only one of these, such as `ray,256`."""
    sizes = [(runtime, envs) for runtime, envs in BARS if only in ("", f"{runtime},{envs}")]
    tables = [_speed(repeats, seconds, sizes, {64: hosts64, 256: hosts256}, baseline)]
    return tables if only else [*tables, _one_slow(repeats, seconds, hosts64)]


def _speed(repeats: int, seconds: int, sizes: Sequence[tuple[str, int]], hosts: dict[int, int], baseline: str) -> Table:
    sides: dict[Any, Callable[[], Any]] = {
        (runtime, envs): partial(train_slow, runtime, envs, hosts[envs], seconds) for runtime, envs in sizes
    }
    there = Path(baseline).is_file()
    if there:
        sides["baseline"] = partial(_theirs, baseline, 64)
    turns = take_turns(repeats, *sides.values(), label="one policy for all")
    found = dict(zip(sides, turns, strict=True))
    theirs = found.pop("baseline", [])
    rows: list[Row] = []
    notes: list[str] = []
    for (runtime, envs), ours in found.items():
        name = f"{runtime}, {envs} envs in {hosts[envs]} hosts"
        rows += _rows(name, envs, ours, BARS[runtime, envs])
        notes.append(f"{name}: {_shares([turn.run for turn in ours])}")
    if theirs:
        speeds = [said.speed for said in theirs]
        rows.append(row("baseline, 64 envs", "steps/s", speeds))
        rows.append(row("  share of the limit", "ratio", [speed * STEP / 64 for speed in speeds]))
        rows.append(row("  up", "s", [said.start for said in theirs]))
        for runtime, ours in ((runtime, turns) for (runtime, envs), turns in found.items() if envs == 64):
            rows.append(ratio(f"{runtime} / baseline", [turn.pace.all for turn in ours], speeds))
    else:
        notes.append("nothing was measured beside: give the path of a script with --baseline")
    return Table(f"PPO with steps of 10 to 50 ms, {repeats} turns each", rows, notes)


def _rows(name: str, envs: int, turns: list[Turn], bar: float) -> list[Row]:
    speeds = [turn.pace.all for turn in turns]
    share = row("  share of the limit", "ratio", [speed * STEP / envs for speed in speeds])
    up = row("  up, without the runtime", "s", [turn.up for turn in turns])
    return [
        row(name, "steps/s", speeds),
        row("  learned from", "steps/s", [turn.learned for turn in turns]),
        held(share, ("at least", bar)),
        row("  first update", "s", [turn.run.startup for turn in turns]),
        held(up, ("at most", UP_BAR)) if envs == 64 else up,
        row("  environments busy", "share", [turn.run.median("time/env/busy") for turn in turns]),
        row("  cores' time stolen", "share", [turn.pace.stolen for turn in turns]),
    ]


def _one_slow(repeats: int, seconds: int, hosts: int) -> Table:
    rows: list[Row] = []
    notes: list[str] = []
    for runtime in ("process", "ray"):
        sides = [partial(train_slow, runtime, 64, hosts, seconds, slow) for slow in (False, True)]
        even, uneven = take_turns(repeats, *sides, label=f"{runtime}, one slow")
        before = [turn.pace.all * 63 / 64 for turn in even]
        others = [turn.pace.all - turn.pace.marked for turn in uneven]
        rows.append(row(f"{runtime}: 63 envs of 64 alike", "steps/s", before))
        rows.append(row(f"{runtime}: the 63 beside a slow one", "steps/s", others))
        rows.append(ratio(f"{runtime}: beside a slow one / alike", others, before, bar=("at least", OTHERS_BAR)))
        rows.append(row(f"{runtime}: the slow one", "steps/s", [turn.pace.marked for turn in uneven]))
        lost = row(f"{runtime}: steps lost", "steps", [_lost(turn.run) for turn in uneven])
        rows.append(held(lost, ("at most", 0)))
        notes.append(f"{runtime}, one slow: {_shares([turn.run for turn in uneven])}")
    return Table(f"PPO, one of 64 environments {SLOWNESS:g} times slower, {repeats} turns each", rows, notes)


def train_slow(runtime: str, envs: int, hosts: int, seconds: int, slow: bool = False) -> Turn:
    """Train for so long after all has settled."""
    limit = envs / STEP
    settings = {
        "seed": SEED,
        "sampling.samplers": hosts,
        "sampling.envs": envs // hosts,
        "sampling.fragment": FRAGMENT,
        "sampling.parallel": "threads",
        "log_every": 1,  # a line of metrics for each round
    }
    if slow:
        settings |= {"env_args.slow_seed": derive_seed(SEED, 0, SLOW_LANE, 0), "env_args.slowness": SLOWNESS}
    if runtime == "ray":
        settings["ray.sampler_cpus"] = 0.1  # they sleep
    init = ray_init("include_dashboard=False")[0] if runtime == "ray" else 0.0
    with TemporaryDirectory(dir="/tmp") as folder:
        looks = Looks(Path(folder), envs)
        run = train(
            "benchmarks.slow_envs:Uniform",
            steps=int(limit * (SETTLING + seconds + 2)),
            runtime=runtime,
            topology="central",
            settings=settings | {"env_args.counts": folder},
            watch=looks,
            every=0.5,
        )
        pace = looks.pace(seconds)
    if slow and not pace.marked:
        raise SystemExit("no environment was the slow one")
    return Turn(pace, run.after(int(limit * SETTLING)).steps, run.startup - init, run)


def _lost(run: Trained) -> float:
    """Steps that were sampled, and neither learned from nor are in flight."""
    last = [line for line in run.metrics if "health/produced_steps" in line][-1]
    books = last["health/produced_steps"] - last["step"] - last["health/in_flight_steps"]
    return abs(books) + run.facts["lost_steps"] + run.facts["dropped_steps"]


def _shares(runs: list[Trained]) -> str:
    """Where the environments' time went."""
    found = {name: median(run.median(f"time/env/{name}") for run in runs) for name in SHARES}
    return "of the environments' time " + ", ".join(f"{name} {share:.1%}" for name, share in found.items())


def _theirs(path: str, envs: int) -> Said:
    with apart() as environment:
        printed = watched([sys.executable, path, str(envs)], environment)
    found = re.search(r"start=([\d.]+)s sps=(\d+)", printed)
    if found is None:
        raise SystemExit(f"{path} printed no start=…s sps=…:\n{printed}")
    return Said(float(found[1]), float(found[2]))


if __name__ == "__main__":
    command(measure, __doc__ or "")
