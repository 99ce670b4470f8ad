"""What is known of runs without loading them: names and sizes of files, their first and last lines, their manifests."""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from raynforce import settings
from raynforce.errors import CheckpointError, RaynforceError, reason
from raynforce.runs import lock

if TYPE_CHECKING:
    from raynforce.runs.files import Stated

State = Literal["running", "finished", "stopped", "failed", "killed", "broken"]
DEPTH = 3  # folders that runs are looked for in, one in another
BLOCK, MOST = 1 << 14, 1 << 20  # bytes that are read of the end of a file: at once, and in all
HEAD = ("env", "algo", "seed", "steps", "target", "runtime", "topology")  # settings that a list of runs may show

CUT_SHORT = ("SIG", "tune: ")  # how the reason begins of a run that was stopped before its end
_PARTS = {"config.yaml", "events.jsonl", "checkpoints"}


@dataclass(frozen=True)
class Glance:
    """One run, from the ends of its files."""

    path: Path
    state: State  # `killed`: it began, and neither ended nor is held by a process
    reason: str = ""  # of its end, or what is broken
    config: Mapping[str, Any] = field(default_factory=dict)  # those of its settings that are in `HEAD`
    steps: int = 0
    metrics: Mapping[str, Any] = field(default_factory=dict)  # of its last report
    best_eval: float | None = None
    active: float = 0.0  # when it last wrote anything, in seconds since the epoch
    size: int = 0  # bytes of all its files
    holder: lock.Holder | None = None

    @property
    def return_mean(self) -> float | None:
        """Mean return of the last 100 episodes."""
        return number(self.metrics.get("charts/episodic_return"))

    @property
    def total(self) -> int | None:
        return whole(self.config.get("steps")) or None

    def to_json(self) -> dict[str, Any]:
        return {
            "run": str(self.path),
            "status": self.state,
            **{name: self.config.get(name) for name in ("algo", "env", "seed", "runtime", "topology")},
            **{name: getattr(self, name) for name in ("reason", "steps", "return_mean", "best_eval", "active")},
            "total_steps": self.total,
            "target": number(self.config.get("target")),
            "bytes": self.size,
            "holder": self.holder and {k: getattr(self.holder, k) for k in ("host", "pid", "started")},
        }


def find(directory: Path, depth: int = DEPTH) -> Iterator[Path]:
    """The runs in a folder, itself included, each once whatever links lead there; and folders that cannot be read."""
    seen: set[tuple[int, int]] = set()
    folders, links = [(directory, 0)], list[tuple[Path, int]]()
    while folders or links:
        folder, level = folders.pop() if folders else links.pop()
        try:
            at = folder.stat()
            if (at.st_dev, at.st_ino) in seen:
                continue
            seen.add((at.st_dev, at.st_ino))
            with os.scandir(folder) as entries:
                inside = list(entries)
        except OSError:
            if os.path.isdir(folder):
                yield folder
            continue
        if len(_PARTS.intersection(entry.name for entry in inside)) >= 2:
            if not is_registry(folder):
                yield folder
        elif level < depth:
            for entry in inside:
                with contextlib.suppress(OSError):  # a link that leads in circles
                    if not entry.name.startswith(".") and entry.is_dir():
                        (links if entry.is_symlink() else folders).append((folder / entry.name, level + 1))


def is_registry(path: Path) -> bool:
    """Whether it has the form of a run and holds promoted policies."""
    with contextlib.suppress(OSError):
        config = path / "config.yaml"
        return config.is_file() and config.read_text(errors="replace")[:200].startswith("# A registry")
    return False


def glance(path: Path) -> Glance:
    """What is known of a run; whatever is wrong with it, this does not fail."""
    active, size = _latest(path), 0
    try:
        size = bytes_in(path)
        return _glance(path, active, size)
    except OSError as error:
        wrong = f"{os.path.basename(os.fspath(error.filename or ''))}: {error.strerror or error}"
    except Exception as error:
        wrong = reason(error).replace(f"{path}/", "")
    return Glance(path, "broken", wrong, active=active, size=size)


def _glance(path: Path, active: float, size: int) -> Glance:
    config, holder = read_head(path / "config.yaml"), lock.holder(path)
    state, why, steps, ended = _end(path / "events.jsonl")
    metrics = last_metrics(path / "metrics.jsonl")
    if holder is not None:
        state, why = "running", ""
    if state in ("running", "killed"):
        steps = max(steps, whole(metrics.get("step")), _step_of(path / "last"))
    elif ended:
        active = ended  # files have the time of a copy
    if whole(metrics.get("step")) <= _step_of(path / "last"):  # the last report is a while before the last step
        saved = read_object(path / "last" / "run.json").get("metrics")
        metrics = {**metrics, **(saved if isinstance(saved, dict) else {})}
    best = number(read_object(path / "best" / "manifest.json").get("eval_return"))
    return Glance(path, state, why, config, steps, metrics, best, active, size, holder)


def read_head(path: Path) -> dict[str, Any]:
    """The settings in `HEAD`, as JSON can have them: YAML knows dates, lists and NaN."""
    open_regular(path).close()
    config = settings.read_yaml(str(path))
    if not isinstance(config.get("env"), str):
        raise CheckpointError("config.yaml names no env")
    found = {name: config[name] for name in HEAD if name in config}
    plain = {k for k, v in found.items() if v is None or isinstance(v, str | int) or number(v) is not None}
    return {name: value if name in plain else str(value) for name, value in found.items()}


def _end(path: Path) -> tuple[State, str, int, float]:
    """How the last process of a run ended, why, at which step, and when: from the last of its events that says so."""
    for event in last_lines(path, b'{"time":'):
        kind, reason, steps = event.get("event"), str(event.get("reason", "")), whole(event.get("steps"))
        if kind == "started":
            return "killed", "", steps, 0.0
        if kind in ("stopped", "failed"):
            state: State = "failed" if kind == "failed" else "stopped" if reason.startswith(CUT_SHORT) else "finished"
            return state, reason, steps, number(event.get("time")) or 0.0
    return "killed", "", 0, 0.0


def last_metrics(path: Path) -> dict[str, Any]:
    """The last report of a run, with the newest `time` and `step`: evaluations have lines of their own."""
    first: dict[str, Any] = {}
    for line in last_lines(path, b'{"step":'):
        first = first or line
        if "charts/episodic_return" in line:
            step = max(whole(line.get("step")), whole(first.get("step")))
            return line | {k: first[k] for k in ("time",) if k in first} | {"step": step}
    return first


def last_lines(path: Path, head: bytes) -> Iterator[dict[str, Any]]:
    """The JSON objects in the lines of a file, the last one first, as far as its last megabyte goes."""
    with contextlib.suppress(FileNotFoundError), open_regular(path) as file:
        yield from filter(None, (object_in(line, head) for line in _lines_backwards(file)))


def _lines_backwards(file: BufferedReader) -> Iterator[bytes]:
    end = start = file.seek(0, os.SEEK_END)
    rest = b""
    while start and end - start < MOST:
        size = min(BLOCK, start)
        start = file.seek(start - size)
        rest, *lines = (file.read(size) + rest).split(b"\n")
        yield from reversed(lines)
    if not start:
        yield rest


def object_in(line: bytes, head: bytes = b"") -> dict[str, Any]:
    """The JSON object in a line, or the one that was appended behind a torn line and begins with `head`; else empty."""
    for text in (line, line[max(0, line.rfind(head)) :]) if head else (line,):
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(found := json.loads(text), dict):
                return found
    return {}


def open_regular(path: Path) -> BufferedReader:
    """Open a file to read; a pipe or a device, which might never answer, is refused."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(0, "is not a regular file", str(path))
    return open(descriptor, "rb")


def bytes_in(path: Path | str) -> int:
    """The size of all files in a folder, without what links lead to."""
    total = 0
    with os.scandir(path) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # it is deleted at this moment, or nobody may look
                if entry.is_dir(follow_symlinks=False):
                    total += bytes_in(entry.path)
                elif not entry.is_symlink():
                    total += entry.stat(follow_symlinks=False).st_size
    return total


def _latest(path: Path) -> float:
    """When anything was written there: lines, the pointer to a checkpoint, the lock."""
    times = [0.0]
    for name in (".", "metrics.jsonl", "events.jsonl", lock.NAME):
        with contextlib.suppress(OSError):
            times.append(os.stat(path / name).st_mtime)
    return max(times)


def _step_of(link: Path) -> int:
    """The step in the name of the checkpoint that a link leads to."""
    try:
        return _step_in(os.path.basename(os.readlink(link)))
    except OSError:  # a copy that followed the links
        return whole(read_object(link / "manifest.json").get("step"))


def _step_in(name: str) -> int:
    """The step in a checkpoint's name, `step_000000050000.2`."""
    digits = name.partition("_")[2].partition(".")[0]
    return int(digits) if digits.isdecimal() and len(digits) < 19 else 0


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a small file; empty if there is none."""
    with contextlib.suppress(OSError), open_regular(path) as file:
        return object_in(file.read(MOST))
    return {}


def whole(value: Any) -> int:
    """A count that was read from a file; 0 if it is none."""
    return int(value) if isinstance(value, int | float) and 0 <= value < 1e18 else 0


def number(value: Any) -> float | None:
    """A figure that was read from a file, if it is one."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


# -- checkpoints ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeptCheckpoint:
    """One checkpoint on disk, by its manifest."""

    path: Path
    manifest: Mapping[str, Any]  # empty if it cannot be read
    wrong: tuple[str, ...] = ()  # what is not as its manifest says; empty if all is well
    marks: tuple[str, ...] = ()  # `best`, `last`: what leads to it
    time: float = 0.0
    files: Mapping[str, int] = field(default_factory=dict)  # its own files and their stated sizes
    segments: Mapping[str, int] = field(default_factory=dict)
    """The files that it shares with other checkpoints, and their stated sizes."""

    @property
    def step(self) -> int:
        return whole(self.manifest.get("step")) if self.manifest else _step_in(self.path.name)

    @property
    def number(self) -> int | None:
        """Which of its run it is, the first is 0; a policy alone has none."""
        found = self.manifest.get("number")
        return found if isinstance(found, int) else None

    @property
    def resumable(self) -> bool:
        """Whether it has all that `resume` needs, as far as was looked."""
        return not self.wrong and "run.json" in self.files

    @property
    def parts(self) -> dict[str, int]:
        parts: Counter[str] = Counter()
        for name, size in self.files.items():
            parts[name.rpartition(".")[0]] += size
        return parts

    @property
    def versions(self) -> dict[str, str]:
        """What it was written with, as far as that was written down."""
        names = ("raynforce", "torch", "numpy", "python", "libc", "cpu", "kernels", "host")
        return {name: str(self.manifest[name]) for name in names if name in self.manifest}

    def to_json(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            **{name: getattr(self, name) for name in ("step", "number", "time", "marks", "parts", "wrong")},
            "bytes": sum(self.files.values()),
            "segments": len(self.segments),
            "segment_bytes": sum(self.segments.values()),
            "format": self.manifest.get("format_version"),
            **self.versions,
        }


def checkpoints_of(run: Path, *, verify: bool = False) -> list[KeptCheckpoint]:
    """The checkpoints of a run, the newest first; with `verify` every byte of them is read and compared."""
    leads = {mark: os.path.realpath(run / mark) for mark in ("last", "best")}
    known: dict[str, str] = {}
    found = []
    for path in (path for kind in ("step", "best") for path in (run / "checkpoints").glob(f"{kind}_*")):
        marks = tuple(mark for mark, target in leads.items() if target == os.path.realpath(path))
        kept = look_at(path, verify=verify, marks=marks, known=known)
        if not kept.wrong or path.exists():  # else a run that goes on has just deleted it
            found.append(kept)
    return sorted(found, key=lambda kept: (kept.step, kept.path.name[:4], kept.number or 0, kept.time), reverse=True)


def look_at(
    path: Path, *, verify: bool = False, marks: tuple[str, ...] = (), known: dict[str, str] | None = None
) -> KeptCheckpoint:
    """Look at the files of a checkpoint: sizes, and with `verify` every byte; `known` is of shared ones."""
    from raynforce.runs import checkpoint, files  # they import numpy: not for a list of runs
    from raynforce.trees import SEGMENTS

    known = {} if known is None else known
    try:
        manifest = checkpoint.manifest(path)
        at = number(manifest.get("time")) or os.stat(path / checkpoint.MANIFEST).st_mtime
    except (RaynforceError, OSError) as error:
        reason = str(error).removeprefix(f"checkpoint {path} ").removeprefix("is torn: ")
        return KeptCheckpoint(path, {}, (reason,), marks, _latest(path))
    own, shared = checkpoint.stated_in(manifest, "files"), checkpoint.stated_in(manifest, SEGMENTS)

    def fault(file: Path, stated: Stated) -> str:
        try:
            (files.verify if verify else files.check_size)(file, stated)
        except files.Unreadable as error:
            return f"{file.name} {error}"
        return ""

    faults = [fault(path / name, stated) for name, stated in own.items()]
    for name, stated in shared.items():
        if name not in known:
            known[name] = fault(checkpoint.segments_of(path) / name, stated)
        faults.append(known[name])
    sizes = [{name: stated.size for name, stated in group.items()} for group in (own, shared)]
    return KeptCheckpoint(path, manifest, tuple(filter(None, faults)), marks, at, *sizes)
