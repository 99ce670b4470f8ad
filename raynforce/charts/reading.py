"""What charts need of runs: their metrics as columns, their events, and which belong together."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from raynforce import settings
from raynforce.errors import RaynforceError, UsageError
from raynforce.imports import bare
from raynforce.runs import catalog
from raynforce.runs.catalog import Glance, find, glance, object_in, open_regular
from raynforce.runs.directory import RunDirectory, seeds_in
from raynforce.runs.faults import each_event
from raynforce.runs.mirrored import open_run
from raynforce.runs.store import Store, is_url

MOST_LINES = 20_000  # of a run that are read for a chart: a longer file is read here and there, evaluations all
RETURN, EVALUATION, DEVIATION = "charts/episodic_return", "eval/return", "eval/deviation"
ATARI = "raynforce.envs.atari:make"
Say = Callable[[str], None]

_NOT_THE_EXPERIMENT = {"seed", "metrics_port", "preset", "kernels", "config_version"}  # runs may differ in them


@dataclass(frozen=True)
class Series:
    """One metric of a run: where, when and what; NaN where it was none."""

    steps: np.ndarray  # [N]
    seconds: np.ndarray  # [N]
    values: np.ndarray  # [N]

    def over(self, x: str) -> np.ndarray:
        return self.steps if x == "steps" else self.seconds


@dataclass
class RunData:
    """A run, read from its directory; whatever is wrong with it, there is something to show."""

    shown: str  # as a user names it
    path: Path
    series: Mapping[str, Series] = field(default_factory=dict)
    lines: int = 0  # of metrics that were read
    left_out: int = 0  # lines that are torn

    @cached_property
    def glance(self) -> Glance:
        return glance(self.path)

    @cached_property
    def config(self) -> dict[str, Any]:
        with contextlib.suppress(RaynforceError):
            return settings.read_yaml(str(self.path / "config.yaml"))
        return {}

    @cached_property
    def result(self) -> dict[str, Any]:
        """How its last process ended, if it has."""
        found: dict[str, Any] = {}
        with contextlib.suppress(RaynforceError):
            for event in each_event(self.path / "events.jsonl"):
                found = event if event["event"] == "result" else {} if event["event"] == "started" else found
        return found

    @property
    def env(self) -> str:
        """Its name; of Atari, that of the game."""
        name, args = bare(str(self.config.get("env", "?"))), self.config.get("env_args")
        return str(args.get("game", name)) if name == ATARI and isinstance(args, dict) else name

    @property
    def algo(self) -> str:
        return bare(str(self.config.get("algo", "?")))

    @property
    def name(self) -> str:
        return self.shown.rstrip("/").rpartition("/")[2] or self.shown

    @property
    def target(self) -> float | None:
        return catalog.number(self.config.get("target"))

    def experiment(self) -> dict[str, Any]:
        """Its settings without what seeds of one experiment differ in."""
        return {k: v for k, v in settings.dotted(self.config).items() if k not in _NOT_THE_EXPERIMENT}

    def time_to(self, target: float) -> tuple[float, float] | None:
        """Steps and seconds until an evaluation, or without any the mean of 100 episodes, met a target."""
        found = self.series.get(EVALUATION) or self.series.get(RETURN)
        if found is None:
            return None
        met = np.flatnonzero(found.values >= target)
        if not len(met):
            return None
        first = met[np.argmin(found.seconds[met])]
        return float(found.steps[first]), float(found.seconds[first])


def silent(doing: str) -> None:
    """Tells nobody."""


def runs_of(paths: Sequence[str | os.PathLike[str]], say: Say = silent) -> list[RunData]:
    """The runs that these stand for: each a run, the folder of several seeds, any folder with runs, or a URL."""
    if not paths:
        raise UsageError("no run is given: name a run directory, or a folder with runs")
    found: dict[Path, RunData] = {}
    for text in map(str, paths):
        for run in _expanded(text, say):
            found.setdefault(run.path.resolve(), RunData(run.shown, run.path))
    for index, data in enumerate(found.values(), 1):
        say(f"reading {data.shown}" + (f", {index} of {len(found)}" if len(found) > 1 else ""))
        read(data)
    return list(found.values())


def _expanded(text: str, say: Say) -> list[RunDirectory]:
    if is_url(text):
        say(f"fetching {text}")
        return [open_run(run) for run in _at_url(text)]
    path = Path(text).expanduser()
    if path.is_dir() and not (path / "config.yaml").exists():
        inside = seeds_in(path) or sorted(folder for folder in find(path) if (folder / "config.yaml").is_file())
        if not inside:
            raise UsageError(f"{text} holds no runs: name a run directory, or a folder with runs")
        return [RunDirectory(folder) for folder in inside]
    return [open_run(path)]


def _at_url(url: str) -> list[str]:
    """The run at a URL, or those in a folder there."""
    store = Store.open(url)
    if store.has("config.yaml"):
        return [url]
    inside = sorted(path.removesuffix("/config.yaml") for path in store.list() if path.endswith("/config.yaml"))
    return [f"{store.given}/{run}" for run in inside if "checkpoints/" not in run] or [url]


def read(run: RunData) -> None:
    """Read its metrics; torn lines are counted and left out."""
    columns: dict[str, tuple[list[float], list[float], list[float]]] = {}
    try:
        for line in _some_lines(run):
            step, seconds = _figure(line.pop("step", None)), _figure(line.pop("time", None))
            for name, value in line.items():
                column = columns.setdefault(name, ([], [], []))
                for part, figure in zip(column, (step, seconds, _figure(value)), strict=True):
                    part.append(figure)
    except FileNotFoundError:  # it has not reported yet
        pass
    except OSError as error:
        raise UsageError(f"cannot read {run.path / 'metrics.jsonl'}: {error.strerror or error}") from None
    found = {}
    for name, column in columns.items():
        arrays = [np.asarray(part, np.float64) for part in column]
        order = np.argsort(arrays[0], kind="stable")  # an evaluation beside training is told late
        order = order[np.isfinite(arrays[0][order])]
        found[name] = Series(*(array[order] for array in arrays))
    run.series = found


def _figure(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def _some_lines(run: RunData) -> Iterator[dict[str, Any]]:
    with open_regular(run.path / "metrics.jsonl") as file:
        head = file.read(1 << 16)
        size = file.seek(0, 2)
        file.seek(0)
        lines = size * max(1, head.count(b"\n")) / max(1, len(head))
        stride = max(1, math.ceil(lines / MOST_LINES))
        for index, line in enumerate(file):
            if index % stride and b'"eval/return"' not in line:
                continue
            found = object_in(line, b'{"step":')
            if found:
                run.lines += 1
                yield found
            else:
                run.left_out += 1


@dataclass
class Group:
    """Runs of one experiment that differ in their seed alone."""

    label: str
    env: str
    runs: list[RunData]


def grouped(runs: Iterable[RunData]) -> list[Group]:
    """Runs with equal settings but the seed, together; their labels say in what groups of one environment differ."""
    found: dict[str, list[RunData]] = {}
    for run in runs:
        found.setdefault(repr(sorted(run.experiment().items(), key=str)), []).append(run)
    groups = [Group("", several[0].env, several) for several in found.values()]
    for group in groups:
        rivals = [other for other in groups if other.env == group.env]
        group.label = _label(group, rivals)
    labels = [(group.env, group.label) for group in groups]
    for group, label in zip(groups, labels, strict=True):
        if labels.count(label) > 1:
            group.label = f"{group.label} ({group.runs[0].name})"
    return groups


def _label(group: Group, rivals: Sequence[Group]) -> str:
    settled = [other.runs[0].experiment() for other in rivals]
    mine, algo = group.runs[0].experiment(), group.runs[0].algo
    names = sorted({name for each in settled for name in each} - {"algo", "env"})
    same_algo = [each for each in settled if each.get("algo") == mine.get("algo")]
    differ = [name for name in names if len({repr(each.get(name)) for each in same_algo}) > 1]
    shown = [f"{name.rpartition('.')[2]}={_short(mine.get(name))}" for name in differ[:3]]
    return " ".join([algo, *shown])


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
