"""Training runs as child processes: apart from the user's own Ray, watched while they run, ended whatever comes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from benchmarks.measure import ROOT, Bar, Row
from benchmarks.settings import PPO_WORK, TRAINING_ALONE

RUNTIMES = ("inline", "process", "ray")
Settings = Mapping[str, Any]
Watch = Callable[[int], None]


class Steady(NamedTuple):
    """A stretch of a run, after its start."""

    steps: float
    """Environment steps per second."""
    updates: float
    """Optimiser steps per second."""
    last: Mapping[str, float]
    """The metrics at its end."""


@dataclass(frozen=True)
class Trained:
    """A run that has ended."""

    facts: dict[str, Any]
    """The object that `--json` prints."""
    metrics: list[dict[str, float]]
    """The lines of its `metrics.jsonl`."""

    @property
    def speed(self) -> float:
        """Environment steps per second, start-up left out."""
        return float(self.facts["steps_per_second"])

    @property
    def startup(self) -> float:
        """Seconds from the start of the process to the end of the first update."""
        return float(self.facts["startup_seconds"])

    def median(self, metric: str) -> float:
        return median(line[metric] for line in self.metrics if metric in line)

    def after(self, step: int) -> Steady:
        """What it did from the first line of metrics at this step or beyond to the last."""
        lines = [line for line in self.metrics if "charts/updates" in line and line["step"] >= step]
        first, last = lines[0], lines[-1]
        steps, updates, seconds = (last[name] - first[name] for name in ("step", "charts/updates", "time/seconds"))
        return Steady(steps / seconds, updates / seconds, last)


def train(
    env: str,
    *,
    steps: int,
    algo: str = "ppo",
    runtime: str = "inline",
    topology: str = "sync",
    settings: Settings | None = None,
    watch: Watch | None = None,
    every: float = 1.0,
) -> Trained:
    """Run `raynforce train`; meanwhile `watch` is called with its process id, `every` so many seconds."""
    given = TRAINING_ALONE | dict(settings or {})
    if algo == "ppo" and given["preset"] == "none":
        given = PPO_WORK | given
    with apart() as environment:
        folder = Path(environment["HOME"]) / "run"
        command = [sys.executable, "-m", "raynforce", "train", algo, env, "--steps", str(steps), "--out", str(folder)]
        command += ["--runtime", runtime, "--topology", topology, "--json", "--quiet"]
        command += [word for name, value in given.items() for word in ("--set", f"{name}={json.dumps(value)}")]
        printed = watched(command, environment, watch, every)
        lines = (folder / "metrics.jsonl").read_text().splitlines()
    return Trained(json.loads(printed.splitlines()[-1]), [json.loads(line) for line in lines])


@contextmanager
def apart() -> Iterator[dict[str, str]]:
    """An environment for child processes: none of the user's settings of Ray, a home and temporary files of its own.

    Its path is short, because that of a socket may have 107 bytes, most of which Ray takes.
    """
    with TemporaryDirectory(prefix="rb-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        yield inherited | {"HOME": folder, "TMPDIR": folder}


def watched(
    command: Sequence[str], environment: Mapping[str, str], watch: Watch | None = None, every: float = 1.0
) -> str:
    """Run a command in the repository's root and return what it printed; it is ended with us, first gently."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        while True:
            try:
                printed, complaints = process.communicate(timeout=every if watch else 1800)
                break
            except subprocess.TimeoutExpired:
                if watch is None:
                    raise
                watch(process.pid)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{complaints or printed}")
    return printed


@dataclass(frozen=True)
class Process:
    """One process of a run, as the kernel sees it now."""

    pid: int
    role: str
    """`driver`, `learner`, `sampler 0`, …, `evaluator`, or the name of a process of Ray's own."""
    megabytes: float
    """Its proportional set size: memory shared by n processes counts 1/n in each."""
    own: float
    """The part of it that is no file: what it allocates, and its share of shared memory."""
    torch: bool
    """Whether torch's library is in its address space."""


def processes(driver: int, samplers: int = 1) -> list[Process]:
    """The driver and all that descend from it; those that have just ended are left out."""
    found: list[Process] = []
    order = 0  # of the workers that are not the learner: samplers are started one after the other, an evaluator last
    for pid in _family(driver):
        try:
            role = "driver" if pid == driver else _role(_read(pid, "cmdline").split("\0"))
            torch = "libtorch" in _read(pid, "maps")
            megabytes, files = _pss(pid)
        except (OSError, KeyError):  # it has ended
            continue
        if role == "worker":
            role = "learner" if torch else f"sampler {order}" if order < samplers else "evaluator"
            order += role != "learner"
        if role:
            found.append(Process(pid, role, megabytes, megabytes - files, torch))
    return found


def tree_megabytes(driver: int) -> float:
    """Proportional set size of the driver and all that descend from it, whatever they are."""
    total = 0.0
    for pid in _family(driver):
        with suppress(OSError, KeyError):  # it has ended
            total += _pss(pid)[0]
    return total


class Watcher:
    """Looks at the processes of a run again and again; a look counts once all roles are there."""

    def __init__(self, samplers: int = 1) -> None:
        self._samplers = samplers
        self.looks: list[list[Process]] = []

    def __call__(self, driver: int) -> None:
        look = processes(driver, self._samplers)
        wanted = {"learner", *(f"sampler {index}" for index in range(self._samplers))}
        if wanted <= {process.role for process in look}:
            self.looks.append(look)

    def megabytes(self, role: str) -> float:
        """The most that any process of this role had when training was under way."""
        return max((p.megabytes for look in self._settled for p in look if p.role.startswith(role)), default=0.0)

    @property
    def roles(self) -> set[str]:
        """Who was there when training was under way."""
        return {p.role for look in self._settled for p in look}

    @property
    def _settled(self) -> list[list[Process]]:
        return self.looks[len(self.looks) // 2 :]

    def torch_in(self, *roles: str) -> list[str]:
        """Which of these roles had torch in their address space at some time."""
        having = {p.role for look in self.looks for p in look if p.torch}
        return sorted(role for role in having if role.startswith(roles))


def held(found: Row, bar: Bar) -> Row:
    """A quantity beside its bar."""
    side, limit = bar
    met = found.median >= limit if side == "at least" else found.median <= limit
    return replace(found, remark=f"bar: {side} {limit:g}, {'met' if met else 'missed'}", bar=limit, met=met)


def _role(words: Sequence[str]) -> str:
    """The role of a process by its command line; empty if it has none."""
    title, program = words[0], Path(words[0]).name
    if title == "ray::IDLE":
        return "idle worker"
    if title.startswith("ray::"):
        name = title.removeprefix("ray::")
        return name if name.endswith("Agent") else "worker"
    if program in ("raylet", "gcs_server"):
        return program
    return "worker" if "raynforce.runtimes.worker" in words else ""


def _family(pid: int) -> list[int]:
    """A process and its descendants, parents before children, siblings in the order they were started."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return [pid]
    return [pid, *(descendant for child in sorted(children) for descendant in _family(child))]


def _pss(pid: int) -> tuple[float, float]:
    """Megabytes of the proportional set size, and those of mapped files in it."""
    lines = dict(line.split(":", 1) for line in _read(pid, "smaps_rollup").splitlines() if ":" in line)
    whole, files = (int(lines[name].split()[0]) * 1024 / 1e6 for name in ("Pss", "Pss_File"))
    return whole, files


def _read(pid: int, file: str) -> str:
    return Path(f"/proc/{pid}/{file}").read_text(errors="replace")
