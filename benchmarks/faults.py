"""What failures cost: samplers, the learner and nodes of a cluster are taken away while CartPole is trained.

A sampler is killed every few seconds for a minute, on processes and on Ray, then the learner. `back` is the time from
the moment that its death was noticed until it has answered what it was asked for when it died; a run that nobody
disturbed is trained beside it, to compare what was learned. On a cluster of three nodes (`ray.cluster_utils`, all on
this machine), one is removed and later another one is added; there every step sleeps, so that speed follows the number
of samplers and not that of the cores.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import ROOT, Bar, Row, Table, command, row
from benchmarks.runs import Settings, apart, held, processes

SAMPLERS = 2
SOLVED = 475
SETTINGS: dict[str, Any] = {
    "sampling.samplers": SAMPLERS,
    "eval.every": 20_000,
    "checkpoint.every": 0,
    "learner.device": "cpu",
}
BACK: dict[str, Bar] = {"sampler": ("at most", 2.0), "learner": ("at most", 5.0)}
NODE: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 100_000_000}
NOTICE = {  # a node that was removed is missed after a second or two, not after half a minute
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
Line = dict[str, Any]


class Training:
    """A `raynforce train` of its own, and what it has written."""

    def __init__(
        self,
        env: str,
        environment: Mapping[str, str],
        folder: Path,
        settings: Settings,
        *words: str,
        before: Sequence[str] = (),
    ) -> None:
        """With `before`, the words of a command that runs it."""
        self.folder = folder
        command = [*before, sys.executable, "-m", "raynforce", "train", "ppo", env]
        command += ["--out", str(folder), "--json", "--quiet"]
        command += [word for name, value in settings.items() for word in ("--set", f"{name}={json.dumps(value)}")]
        self._log = folder.with_suffix(".log").open("w+")
        self.process = subprocess.Popen(
            [*command, *words], cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=self._log, text=True
        )

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def wait_for(self, there: Callable[[], object], seconds: float = 120.0) -> float:
        """Seconds until something is there; an error if the run ends before, or it takes too long."""
        began = time.monotonic()
        while not there():
            if not self.running or time.monotonic() - began > seconds:
                raise SystemExit(f"nothing happens in {self.folder}: {self._complaints()}")
            time.sleep(0.05)
        return time.monotonic() - began

    def read(self, name: str) -> list[Line]:
        """The lines of one of its files so far."""
        with suppress(FileNotFoundError):
            whole = (self.folder / name).read_text().rpartition("\n")[0]
            return [json.loads(line) for line in whole.splitlines()]
        return []

    @property
    def reports(self) -> list[Line]:
        return [line for line in self.read("metrics.jsonl") if "health/produced_steps" in line]

    @property
    def steps(self) -> int:
        """How many it has trained on."""
        return int(self.reports[-1]["step"])

    def events(self, kind: str, role: str = "") -> list[Line]:
        lines = self.read("events.jsonl")
        return [line for line in lines if line["event"] == kind and str(line.get("role", "")).startswith(role)]

    def end(self, number: int = 0) -> None:
        """Wait until it has ended, if need be after a signal."""
        if number:
            self.process.send_signal(number)
        self._printed, _ = self.process.communicate(timeout=3600)
        if self.process.returncode not in (0, 128 + number):
            raise SystemExit(f"a run ended with {self.process.returncode}: {self._complaints()}")

    def close(self) -> None:
        """End it whatever it is at."""
        if self.running:
            self.process.terminate()
            try:
                self.process.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.communicate()
        self._log.close()

    @cached_property
    def facts(self) -> Line:
        """The object that `--json` prints."""
        return dict(json.loads(self._printed.splitlines()[-1]))

    def books(self) -> str:
        """The ledger at the last report, in words."""
        last = self.reports[-1]
        dropped, flying = last["health/dropped_steps"], last["health/in_flight_steps"]
        balance = last["health/produced_steps"] == last["step"] + dropped + flying
        parts = f"{last['step']:,.0f} trained + {dropped:,.0f} dropped + {flying:,.0f} in flight"
        return f"{last['health/produced_steps']:,.0f} steps produced {'=' if balance else '≠'} {parts}"

    def _complaints(self) -> str:
        self._log.seek(0)
        return self._log.read()[-2000:]


@contextmanager
def training(
    env: str, environment: Mapping[str, str], settings: Settings, *words: str, before: Sequence[str] = ()
) -> Iterator[Training]:
    number = len(list(Path(environment["HOME"]).glob("run*.log")))
    run = Training(env, environment, Path(environment["HOME"]) / f"run{number}", settings, *words, before=before)
    try:
        yield run
    finally:
        run.close()


def measure(seconds: int = 60, every: int = 3, kills: int = 6, roles: bool = False, nodes: bool = False) -> list[Table]:
    """Kill samplers `every` so many seconds, then the learner `kills` times; then nodes. Or one of the two."""
    tables = []
    if roles or not nodes:
        for runtime in ("process", "ray"):
            steps = steps_in(runtime, seconds)
            tables.append(killing("sampler", runtime, steps, seconds // every, every))
        for runtime in ("process", "ray"):
            steps = steps_in(runtime, 2 * every * kills)
            tables.append(killing("learner", runtime, steps, kills, 2 * every))
    if nodes or not roles:
        tables += [nodes_come_and_go(topology) for topology in ("sync", "async")]
    return tables


# -- roles --------------------------------------------------------------------------------------------------


def steps_in(runtime: str, seconds: float) -> int:
    """About how many steps are trained in so many seconds when nobody disturbs."""
    with apart() as environment, training("CartPole-v1", environment, SETTINGS, *_where(runtime, 40_000)) as run:
        run.end()
        return int(seconds * run.facts["steps_per_second"])


def killing(kind: str, runtime: str, steps: int, times: int, every: float) -> Table:
    """Train twice, once with kills and once without."""
    print(f"{kind}s on {runtime}, {steps:,} steps: killing", file=sys.stderr, flush=True)
    with apart() as environment:
        with training("CartPole-v1", environment, SETTINGS, *_where(runtime, steps)) as run:
            run.wait_for(lambda: run.reports)
            killed = _kill(run, kind, times, every)
            run.end()
            back = [event["seconds"] for event in run.events("recovered", kind)]
            facts, books = run.facts, run.books()
        print(f"{kind}s on {runtime}: the same in quiet", file=sys.stderr, flush=True)
        with training("CartPole-v1", environment, SETTINGS, *_where(runtime, steps)) as quiet:
            quiet.end()
    same = facts["weights_sha256"] == quiet.facts["weights_sha256"]
    rows = [held(row(f"{kind} is back", "s", back), BACK[kind]) if back else Row("never back", "s", 0, 0, 0)]
    rows.append(row(f"{kind} is back, 9 of 10 within", "s", [_quantile(back, 0.9)]))
    rows.append(row("kills", "", [killed], f"{facts['restarts']} restarts, {facts['redone_updates']:,} updates redone"))
    score = facts["eval_return"]
    rows.append(row("best policy, 100 episodes", "return", [score], "solved" if score >= SOLVED else "not solved"))
    rows.append(row("whole run, with kills", "s", [facts["seconds"]]))
    rows.append(row("whole run, quiet", "s", [quiet.facts["seconds"]]))
    notes = [books, f"weights {'equal those' if same else 'DIFFER from those'} of the quiet run"]
    notes.append(f"{facts['updates']:,} updates reported, in quiet {quiet.facts['updates']:,}")
    return Table(f"A {kind} killed every {every:g} s, {runtime}, sync, {steps:,} steps of CartPole-v1", rows, notes)


def _kill(run: Training, kind: str, times: int, every: float) -> int:
    """Kill a random process of a role again and again; returns how often."""
    chance, killed = random.Random(0), 0
    for _ in range(times):
        until = time.monotonic() + every
        while run.running and time.monotonic() < until:
            time.sleep(0.05)
        pids = [p.pid for p in processes(run.process.pid, SAMPLERS) if p.role.startswith(kind)] if run.running else []
        if pids:
            with suppress(ProcessLookupError):
                os.kill(chance.choice(pids), signal.SIGKILL)
                killed += 1
    return killed


def _where(runtime: str, steps: int) -> list[str]:
    return ["--runtime", runtime, "--topology", "sync", "--steps", str(steps)]


def _quantile(values: Sequence[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0


# -- nodes --------------------------------------------------------------------------------------------------


def nodes_come_and_go(topology: str, seconds: float = 15.0) -> Table:
    """Take one of three nodes away in mid-run, and add another one later."""
    print(f"nodes, {topology}", file=sys.stderr, flush=True)
    settings = SETTINGS | {"sampling.samplers": 5, "sampling.envs": 1, "sampling.fragment": 32, "log_every": 1}
    settings |= {"env_args.seconds": 0.002, "eval.every": 0, "eval.episodes": 1}
    settings |= {"eval.max_length": 1, "eval.final_episodes": 0}
    settings |= {"preset": "none", "algorithm.epochs": 1, "algorithm.minibatch_size": 256}
    with cluster() as (nodes, leaving, environment):
        where = ["--runtime", "ray", "--topology", topology, "--address", nodes.address, "--steps", "1e9"]
        with training("benchmarks.envs:Sleeping", environment, settings, *where) as run:
            run.wait_for(lambda: len(run.reports) > 20)
            before = _speed(run, seconds)
            removed = time.time()
            nodes.remove_node(leaving, allow_graceful=False)
            stopped = len(run.reports)
            run.wait_for(lambda: run.events("fault"))
            noticed = run.events("fault")[0]["time"] - removed
            known = len(run.reports)
            went_on = noticed + run.wait_for(lambda: len(run.reports) > known + 1)
            during = _speed(run, seconds)
            used_before = len(_joined(run))
            added = time.time()
            nodes.add_node(**NODE)
            run.wait_for(lambda: len(_joined(run)) > used_before)
            used = _joined(run)[used_before]["time"] - added
            after = _speed(run, seconds)
            run.end(signal.SIGINT)
            facts, books, kinds = run.facts, run.books(), {event["kind"] for event in run.events("fault")}
    rows = [row("before", "steps/s", [before])]
    rows.append(row("one node less", "steps/s", [during], f"{during / before:.0%}"))
    rows.append(row("another one added", "steps/s", [after], f"{after / before:.0%}"))
    rows.append(row("its loss was noticed after", "s", [noticed]))
    rows.append(row("the others went on after", "s", [went_on], f"{known - stopped} rounds in between"))
    rows.append(row("the new one was used after", "s", [used]))
    notes = [
        books,
        f"{facts['restarts']} restarts, faults: {', '.join(sorted(kinds))}, {facts['lost_steps']} steps lost",
    ]
    return Table(f"Three nodes of 2 CPUs, 5 samplers, {topology}: one is removed, another added", rows, notes)


@contextmanager
def cluster() -> Iterator[tuple[Any, Any, dict[str, str]]]:
    """Three nodes on this machine, the one of them that will leave, and an environment for those who join."""
    from ray.cluster_utils import Cluster

    from raynforce.runtimes.ray.state import environment as changed

    with apart() as environment:
        environment |= NOTICE
        others = dict.fromkeys(name for name in os.environ if name.startswith("RAY_"))
        with changed({**others, **NOTICE, "HOME": environment["HOME"]}):
            head = {**NODE, "include_dashboard": False, "temp_dir": f"{environment['HOME']}/r"}
            nodes = Cluster(initialize_head=True, head_node_args=head)
            try:
                nodes.add_node(**NODE)
                yield nodes, nodes.add_node(**NODE), environment
            finally:
                nodes.shutdown()  # type: ignore[no-untyped-call]


def _joined(run: Training) -> list[Line]:
    """Each time that a sampler came back."""
    return sorted(run.events("recovered", "sampler") + run.events("back", "sampler"), key=lambda event: event["time"])


def _speed(run: Training, seconds: float) -> float:
    """Median steps per second of the next seconds."""
    found, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        began, first = time.monotonic(), run.steps
        time.sleep(min(3.0, seconds / 3))
        found.append((run.steps - first) / (time.monotonic() - began))
    return median(found)


if __name__ == "__main__":
    command(measure, __doc__ or "")
