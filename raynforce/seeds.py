"""Several seeds of one experiment, side by side: each an ordinary run in a process of its own, and their median."""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import raynforce
from raynforce import topologies
from raynforce.api import fresh_name, preset_line, require_same_config, resolved, with_absolute_paths
from raynforce.auto import settle
from raynforce.config import Config
from raynforce.driver.signals import StopRequest
from raynforce.driver.status import Result
from raynforce.errors import RaynforceError, UsageError, how_it_ended
from raynforce.experiment import resolve, settings_of
from raynforce.given import lending
from raynforce.given import pack as pack_given
from raynforce.imports import bare
from raynforce.kernels import pin
from raynforce.one_seed import SeedJob, pack
from raynforce.runs import disk
from raynforce.runs.directory import seeds_in
from raynforce.runs.mirrored import begun_run, new_run
from raynforce.runs.progress import Mode, ProgressState
from raynforce.runs.seeds_view import SeedsView, make_view
from raynforce.runs.store import is_url
from raynforce.runtimes.placing import cores
from raynforce.runtimes.process import first_on_path
from raynforce.settings import Range, coerce, nested
from raynforce.topologies.declaration import stepping

COUNT = Annotated[int, Range(1, 1000)]
SEED = Annotated[int, Range(0, 2**63 - 1)]
ENDING = 5.0  # seconds that a run has to end at once
LAST_WORDS = 300  # characters of what a process said last that are worth repeating in one line


class Spread(NamedTuple):
    """Of one figure over all seeds."""

    median: float
    low: float
    high: float

    def to_json(self) -> dict[str, float | None]:
        return {k: v if math.isfinite(v) else None for k, v in self._asdict().items()}


@dataclass
class SeedRun:
    """One of the runs."""

    seed: int
    path: str
    """Its run directory, or URL."""
    result: Result | None = None
    """None if it failed, or was ended before it began."""
    error: str = ""
    exit_code: int = 0

    def to_json(self) -> dict[str, Any]:
        if self.result is not None:
            return self.result.to_json()
        return {"run": self.path, "seed": self.seed, "error": self.error or "ended before it began"}


@dataclass(frozen=True)
class Seeds:
    """Runs of several seeds that have ended."""

    folder: str
    """Each has a directory in it: `seed0`, `seed1`, …"""
    runs: list[SeedRun]
    target: float | None
    at_once: int
    """How many trained at the same time."""

    @property
    def results(self) -> list[Result]:
        """Of the seeds that did not fail."""
        return [run.result for run in self.runs if run.result is not None]

    @property
    def failed(self) -> list[SeedRun]:
        return [run for run in self.runs if run.error]

    @property
    def solved(self) -> int:
        """How many met the target; one that a resume has removed was met by none."""
        return sum(result.solved_steps is not None for result in self.results) if self.target is not None else 0

    def summary(self) -> dict[str, Spread | None]:
        """Median, lowest and highest of each figure. A seed that has not met the target counts as infinitely late."""
        results, late = self.results, self.solved > 0

        def spread(figure: str) -> Spread | None:
            missing = math.inf if figure.startswith("solved") else None
            if missing is not None and not late:
                return None
            values = [missing if (value := getattr(result, figure)) is None else value for result in results]
            known = [value for value in values if value is not None]
            return Spread(statistics.median(known), min(known), max(known)) if known else None

        return {name: spread(name) for name in ("eval_return", "solved_steps", "solved_at", "steps_per_second")}

    def to_json(self) -> dict[str, Any]:
        figures = {name: spread and spread.to_json() for name, spread in self.summary().items()}
        summary = {"solved": self.solved, "failed": len(self.failed), **figures}
        facts = {"folder": self.folder, "seeds": [run.seed for run in self.runs], "at_once": self.at_once}
        return {**facts, "runs": [run.to_json() for run in self.runs], "summary": summary}


class InterruptedSeeds(KeyboardInterrupt):
    """A signal ended all runs, each after a clean checkpoint; `seeds` is what there is of them."""

    def __init__(self, seeds: Seeds, number: int) -> None:
        super().__init__(f"ended by {signal.Signals(number).name}; to go on: raynforce resume {seeds.folder}")
        self.seeds = seeds
        self.number = number


def train_seeds(
    env: str | Callable[..., Any],
    algo: str | type[Any] = "ppo",
    *,
    seeds: int | Sequence[int] = 5,
    seed: int | None = None,
    steps: int | None = None,
    target: float | None = None,
    runtime: str | None = None,
    topology: str | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    start_from: str | os.PathLike[str] | None = None,
    data: str | Path | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    progress: Mode = "auto",
) -> Seeds:
    """Train several seeds side by side, as many at a time as there are cores for.

    `seeds` is their number, counted from `seed`, or a list of them. Each is an ordinary run in a directory of its own
    under `out`, and ends in the same weights as `train` with that seed. The other arguments are those of `train`;
    callbacks and sinks are not among them, as the runs are in processes of their own. A seed that fails is in `failed`
    of what is returned, and the others go on. Ctrl-C raises `InterruptedSeeds` after a checkpoint of each.
    """
    with lending() as lender:
        given = {"runtime": runtime, "topology": topology, "start_from": start_from, "data": data}
        found, preset = resolved(env, algo, config, settings, lender, steps=steps, target=target, seed=seed, **given)
        return start_seeds(found, preset, numbers(seeds, found.seed), out, go_on=resume, progress=progress)


def numbers(seeds: int | str | Sequence[int], first: int) -> list[int]:
    """The seeds that `5`, or `11,12,13`, stands for."""
    several: int | Sequence[Any] = seeds
    if isinstance(seeds, str):
        several = [part for part in seeds.split(",") if part] if "," in seeds else coerce(seeds, COUNT, "seeds")
    if isinstance(several, int):
        several = range(first, first + coerce(several, COUNT, "seeds"))
    found: list[int] = [coerce(seed, SEED, "seeds") for seed in several]
    if not found or len(set(found)) < len(found):
        raise UsageError(f"seeds = {seeds!r} must be a number of seeds, or different ones such as 11,12,13")
    return found


def start_seeds(
    config: Config,
    preset: Mapping[str, Any],
    seeds: Sequence[int],
    out: str | Path | None,
    log: Sequence[str] = (),
    opened: Callable[[str], None] = lambda folder: None,
    *,
    go_on: bool = False,
    **how: Any,
) -> Seeds:
    """Train a resolved config with each of these seeds, or `go_on` with those that are at `out`; `log` are services
    that metrics are sent to, `opened` is told of the folder."""
    view = make_view(**how)
    config, chosen = with_absolute_paths(config), ""
    settled = _begun(config, seeds, out) if go_on else None
    for seed in seeds if out is not None and not go_on else ():
        new_run(f"{out}/seed{seed}")
    if settled is None:  # once, on a machine that is not busy with the others yet
        settled, _, chosen = settle(config)
    config = settled
    given = pack_given((config.env, config.algo, config.network.factory))
    for line in filter(None, (preset_line(preset), chosen)):
        view.message(line)
    with _folder(config, seeds, out) as folder:
        opened(str(folder))
        configs = _of_seeds(config, seeds)
        jobs = {seed: SeedJob(f"{folder}/seed{seed}", configs[seed], {}, tuple(log), go_on) for seed in seeds}
        title = f"{bare(config.algo)} on {bare(config.env)}, {len(seeds)} seeds"
        return _side_by_side(title, str(folder), config, jobs, given, view)


def _of_seeds(config: Config, seeds: Sequence[int]) -> dict[int, Config]:
    ports = _ports(config.metrics_port, seeds)
    return {seed: replace(config, seed=seed, metrics_port=ports[seed]) for seed in seeds}


def _ports(first: int, seeds: Sequence[int]) -> dict[int, int]:
    """Where Prometheus finds each of them: one port after another from the first, or none."""
    if first + len(seeds) > 65_536:
        most = 65_536 - len(seeds)
        raise UsageError(f"metrics_port {first} leaves no room for {len(seeds)} seeds: {most} at most")
    return {seed: first and first + i for i, seed in enumerate(seeds)}


def _begun(config: Config, seeds: Sequence[int], out: str | Path | None) -> Config | None:
    """The config of the seeds that began at `out`, with what was chosen for them; None if none did."""
    if out is None:
        raise UsageError("resume goes on with the runs at out, and none is given: name it")
    found = None
    for seed, each in _of_seeds(config, seeds).items():
        run = begun_run(f"{out}/seed{seed}")
        if run is None:
            new_run(f"{out}/seed{seed}")
            continue
        require_same_config(run, each)
        had, _ = resolve({"preset": "none"}, settings_of(run.config)[0])
        found = found or replace(had, seed=config.seed, metrics_port=config.metrics_port)
    return found


def resume_seeds(
    folder: str | Path,
    changes: Mapping[str, Any],
    log: Sequence[str] = (),
    opened: Callable[[str], None] = lambda folder: None,
    **how: Any,
) -> Seeds:
    """Go on with all runs of a folder, side by side; `changes` as in `resume`, dotted."""
    opened(str(folder))
    runs = seeds_in(folder)
    config, _ = resolve({"preset": "none"}, settings_of(runs[0] / "config.yaml")[0], nested(changes))
    paths = {int(run.name.removeprefix("seed")): str(run) for run in runs}
    own: dict[int, dict[str, Any]] = {seed: {} for seed in paths}
    if "metrics_port" in changes:
        own = {seed: {"metrics_port": port} for seed, port in _ports(config.metrics_port, sorted(paths)).items()}
    jobs = {seed: SeedJob(run, None, {**changes, **own[seed]}, tuple(log)) for seed, run in paths.items()}
    view = make_view(**how)
    return _side_by_side(f"resuming {folder}", str(folder), config, jobs, b"", view)


def cores_of(config: Config) -> int:
    """How many cores a run keeps busy."""
    each = config.sampling.envs if stepping(config) == "processes" else 1
    samplers, learner = config.sampling.samplers * each, config.learner.threads
    if config.runtime == "inline" or not topologies.topology(config.topology).overlaps:  # one after the other
        return max(samplers if each > 1 or config.runtime != "inline" else 1, learner)
    return samplers + learner


def at_once(config: Config, seeds: int) -> int:
    """How many of so many seeds train at the same time."""
    if config.runtime == "ray" and (config.ray.address or os.environ.get("RAY_ADDRESS", "local")) != "local":
        return 1  # whatever room the cluster has, one run finds it
    return max(1, min(seeds, cores() // cores_of(config)))


@contextlib.contextmanager
def _folder(config: Config, seeds: Sequence[int], out: str | Path | None) -> Iterator[str | Path]:
    """Where the runs go; if none of them began, it is not left behind."""
    if out is not None:
        yield out if is_url(str(out)) else Path(out).expanduser()
        return
    folder = fresh_name(config, f"s{min(seeds)}-{max(seeds)}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder = disk.numbered(folder)
    except OSError as error:
        raise UsageError(f"cannot write to output directory {folder}: {error.strerror}") from None
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()  # which fails if there is a run


def _side_by_side(
    title: str, folder: str, config: Config, jobs: Mapping[int, SeedJob], given: bytes, view: SeedsView
) -> Seeds:
    several = at_once(config, len(jobs))
    pin(config.kernels)  # for their processes
    runs = {seed: SeedRun(seed, job.out) for seed, job in jobs.items()}
    title += f", {several} at a time" if several < len(jobs) else ""
    view.start(title, list(jobs), config.steps, config.target)
    number = _Crowd(runs, view).train(jobs, given, several)
    seeds = Seeds(folder, list(runs.values()), config.target, several)
    if number is not None:
        raise InterruptedSeeds(seeds, number)
    if len(seeds.failed) == len(runs):  # most likely all for one reason
        worst = seeds.failed[0]
        raise (UsageError if worst.exit_code == 2 else RaynforceError)(f"seed {worst.seed}: {worst.error}")
    return seeds


@dataclass(eq=False)
class _Process:
    run: SeedRun
    process: subprocess.Popen[bytes]
    rest: dict[Any, bytes] = field(default_factory=dict)  # what has come of a line that has not ended, by file
    said: str = ""


class _Crowd:
    def __init__(self, runs: Mapping[int, SeedRun], view: SeedsView) -> None:
        self._runs, self._view = runs, view
        self._selector = selectors.DefaultSelector()
        self._living: list[_Process] = []
        self._asked = False  # to end

    def train(self, jobs: Mapping[int, SeedJob], given: bytes, at_once: int) -> int | None:
        """Have all jobs done, so many at a time; returns the signal that ended it, if one did."""
        told = "stopping all seeds after this round, with checkpoints; press Ctrl-C again to end at once"
        stop, waiting = StopRequest(lambda: self._view.message(told)), dict(jobs)
        with contextlib.closing(self._selector), stop.watching():
            try:
                while self._living or (waiting and stop.number is None):
                    while waiting and stop.number is None and len(self._living) < at_once:
                        seed = next(iter(waiting))
                        self._begin(seed, replace(waiting.pop(seed), began=time.monotonic()), given)
                    if stop.number is not None and not self._asked:
                        self._asked = True
                        self._signal(stop.number)
                    self._hear(0.1)
            except BaseException:  # a second Ctrl-C: at once
                self._signal(signal.SIGINT)
                self._drain()
                raise
            finally:
                self._view.stop()
        return stop.number

    def _begin(self, seed: int, job: SeedJob, given: bytes) -> None:
        process = subprocess.Popen(
            [sys.executable, "-P", "-u", "-m", "raynforce.one_seed"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,  # a terminal's Ctrl-C is for us to hand on
            env={**os.environ, "PYTHONPATH": first_on_path(Path(raynforce.__file__).parent.parent)},
        )
        one = _Process(self._runs[seed], process)
        self._living.append(one)
        for file in (process.stdout, process.stderr):
            assert file is not None
            os.set_blocking(file.fileno(), False)
            self._selector.register(file, selectors.EVENT_READ, one)
        self._view.began(seed)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # how it ended will tell
            process.stdin.write(pack(job, given))
            process.stdin.flush()

    def _hear(self, timeout: float) -> None:
        """Take what has come, and notice who has ended."""
        for key, _ in self._selector.select(timeout):
            self._read(key.data, key.fileobj)
        for one in tuple(self._living):
            if one.process.poll() is not None:
                self._ended(one)
        self._view.draw()

    def _read(self, one: _Process, file: Any) -> None:
        chunk = b""
        with contextlib.suppress(BlockingIOError):  # a program that it has started keeps the pipe open
            chunk = os.read(file.fileno(), 65536)
        *lines, one.rest[file] = (one.rest.get(file, b"") + chunk).split(b"\n")
        for line in filter(None, lines if chunk else [*lines, one.rest[file]]):
            if file is one.process.stdout:
                self._told(one.run, json.loads(line))
            else:
                one.said = line.decode(errors="replace").rstrip()
                self._view.told(one.run.seed, one.said)
        if not chunk:
            self._selector.unregister(file)
            file.close()

    def _told(self, run: SeedRun, facts: dict[str, Any]) -> None:
        if "snapshot" in facts:
            self._view.update(run.seed, ProgressState(**facts["snapshot"]))
        elif "message" in facts:
            self._view.told(run.seed, facts["message"])
        elif "fault" in facts:
            self._view.fault(run.seed, facts["fault"])
        elif "result" in facts:
            run.result = Result(**facts["result"])
        else:
            run.error, run.exit_code = facts["error"], facts["code"]

    def _ended(self, one: _Process) -> None:
        self._living.remove(one)
        for file in (one.process.stdout, one.process.stderr):
            while file is not None and not file.closed:
                self._read(one, file)
        with contextlib.suppress(OSError):
            one.process.stdin and one.process.stdin.close()
        run = one.run
        if run.result is None and not run.error and not self._asked:
            said = f"; the last it said: {one.said[-LAST_WORDS:]}" if one.said else ""
            run.error, run.exit_code = f"its process {how_it_ended(one.process.wait())}{said}", 1
        self._view.ended(run.seed, run.result, run.error)

    def _signal(self, number: int) -> None:
        for one in self._living:
            with contextlib.suppress(ProcessLookupError):
                one.process.send_signal(number)

    def _drain(self) -> None:
        until = time.monotonic() + ENDING
        while self._living and time.monotonic() < until:
            self._hear(0.1)
        for one in tuple(self._living):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.process.pid, signal.SIGKILL)
            one.process.wait()
            self._ended(one)
