"""All runs that a page shows: found, looked at again when their files change, and told in JSON."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from raynforce.errors import UsageError
from raynforce.imports import bare
from raynforce.runs import asking, lock
from raynforce.runs.catalog import Glance, find, glance, number, read_object, whole
from raynforce.runs.faults import each_event
from raynforce.runs.store import is_url
from raynforce.web.mirror import Mirror
from raynforce.web.reading import MetricsFile, spark

LOOK, FIND = 0.4, 2.0  # seconds between looks at known runs, and for new ones
AGAIN = 15.0  # seconds after which a running run is looked at though it wrote nothing: it may have been killed
IDLE = 30.0  # seconds without a question after which nobody looks any more
MEMORY = 32 << 20  # bytes of metrics that are kept; more only for what is on the page
TUNING = "tune.json"
_FILES = ("config.yaml", "metrics.jsonl", "events.jsonl", asking.LIVE, asking.NOTES, lock.NAME, "episodes", ".")


@dataclass
class Watched:
    """One run on the page."""

    id: str
    path: Path
    name: str
    mirror: Mirror | None = None
    stamp: tuple[Any, ...] = ()
    looked: float = 0.0
    version: int = 0  # changes when anything does
    glance: Glance | None = None
    spark: list[float] = field(default_factory=list)
    faults: int = 0

    @property
    def shown(self) -> str:
        return str(self.path) if self.mirror is None else self.mirror.shown(self.path)


@dataclass(frozen=True)
class _Source:
    text: str
    path: Path
    mirror: Mirror | None = None


class Board:
    """Looks at runs while anybody asks for them."""

    def __init__(self, sources: Sequence[str]) -> None:
        self.version = 0
        self._copies: tempfile.TemporaryDirectory[str] | None = None
        self._sources = [self._source(text) for text in sources]
        self._runs: dict[str, Watched] = {}
        self._tunings: dict[str, Path] = {}
        self._files: dict[str, MetricsFile] = {}  # the newest in use last
        self._lock = threading.RLock()
        self._asked = time.monotonic()
        self._found = 0.0
        self._end, self._wake = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="raynforce-board", daemon=True)

    def _source(self, text: str) -> _Source:
        if is_url(text):
            if self._copies is None:
                self._copies = tempfile.TemporaryDirectory(prefix="raynforce-watch-")
            local = Path(self._copies.name) / _id(text)
            local.mkdir()
            mirror = Mirror(text, local)
            return _Source(mirror.url, local, mirror)
        path = Path(text).expanduser()
        if path.exists() and not path.is_dir():
            raise UsageError(f"{text} is a file: give a run, a folder of runs, or a URL")
        return _Source(text, path.absolute())

    def start(self) -> None:
        for mirror in self._mirrors:
            mirror.start(lambda: not self._idle)
        self._thread.start()

    @property
    def _mirrors(self) -> list[Mirror]:
        return [source.mirror for source in self._sources if source.mirror is not None]

    @property
    def _idle(self) -> bool:
        return time.monotonic() - self._asked > IDLE

    def close(self) -> None:
        self._end.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(5.0)
        for mirror in self._mirrors:
            mirror.close()
        if self._copies is not None:
            self._copies.cleanup()

    def _work(self) -> None:
        while not self._end.is_set():
            if self._idle:
                self._wake.wait(IDLE)
            self._wake.clear()
            with contextlib.suppress(Exception):  # whatever the disk has, the page goes on
                self.look()
            self._end.wait(LOOK)

    def touch(self) -> None:
        """Somebody is looking."""
        idle, self._asked = self._idle, time.monotonic()
        if idle:
            self._wake.set()

    def look(self) -> None:
        """See what has changed since the last look."""
        if time.monotonic() - self._found > FIND:
            self._find()
            self._found = time.monotonic()
        for run in tuple(self._runs.values()):
            self._look_at(run)

    def _find(self) -> None:
        found: dict[str, Watched] = {}
        tunings: dict[str, Path] = {}
        for source in self._sources:
            for path in find(source.path):
                run = Watched(_id(str(path)), path, self._name(source, path), source.mirror)
                found.setdefault(run.id, self._runs.get(run.id, run))
            tunings |= {_id(str(path)): path for path in _tunings(source.path)}
        with self._lock:
            if found.keys() != self._runs.keys() or tunings != self._tunings:
                self._runs, self._tunings = found, tunings
                for gone in self._files.keys() - found.keys():
                    del self._files[gone]
                self.version += 1

    def _name(self, source: _Source, path: Path) -> str:
        within = os.path.relpath(path, source.path)
        if within == ".":
            return source.path.name if source.mirror is None else source.text.rpartition("/")[2]
        several = len(self._sources) > 1
        return f"{source.text.rstrip('/').rpartition('/')[2]}/{within}" if several else within

    def _look_at(self, run: Watched) -> None:
        holder = None if run.mirror is None else run.mirror.holder(run.path)
        stamp, now = (*_stamp(run.path), holder), time.monotonic()
        running = run.glance is not None and run.glance.state == "running"
        if stamp == run.stamp and not (running and now - run.looked > AGAIN):
            return
        seen = glance(run.path)
        if holder is not None:
            seen = replace(_told(seen), state="running", reason="", holder=holder)
        changed = stamp != run.stamp
        if stamp[1:2] != run.stamp[1:2]:
            run.spark = spark(run.path / "metrics.jsonl")
        if stamp[2:3] != run.stamp[2:3]:
            run.faults = _faults(run.path / "events.jsonl")
        if changed or run.glance is None or seen.state != run.glance.state:
            run.version += 1
            self.version += 1
        run.stamp, run.looked, run.glance = stamp, now, seen

    # -- what is asked ------------------------------------------------------------------------------------------------

    @property
    def sources(self) -> list[str]:
        return [source.text for source in self._sources]

    @property
    def versions(self) -> dict[str, int]:
        return {run.id: run.version for run in tuple(self._runs.values())}

    def run(self, id: str) -> Watched | None:
        return self._runs.get(id)

    def tuning(self, id: str) -> Path | None:
        return self._tunings.get(id)

    def run_at(self, path: Path) -> str | None:
        """The id of the run in a folder, if it is one of these."""
        id = _id(str(path))
        return id if id in self._runs else None

    def metrics(self, ids: Sequence[str]) -> dict[str, MetricsFile]:
        """The metric files of these runs; others may be forgotten to make room."""
        with self._lock:
            found = {}
            for id in ids:
                if (run := self._runs.get(id)) is not None:
                    file = self._files.pop(id, None) or MetricsFile(run.path / "metrics.jsonl")
                    found[id] = self._files[id] = file
            room = MEMORY - sum(file.nbytes for file in self._files.values())
            for id in list(self._files):
                if room >= 0 or id in found:
                    break
                room += self._files.pop(id).nbytes
            return found

    def to_json(self) -> dict[str, Any]:
        runs = [run for run in tuple(self._runs.values()) if run.glance is not None]
        return {
            "sources": self.sources,
            "troubles": [mirror.trouble for mirror in self._mirrors if mirror.trouble],
            "missing": [s.text for s in self._sources if s.mirror is None and not s.path.is_dir()],
            "ready": self._found > 0 and all(mirror.looked for mirror in self._mirrors),
            "runs": [row(run) for run in runs],
            "tunings": [{"id": id, "name": path.name, "path": str(path)} for id, path in self._tunings.items()],
        }


def row(run: Watched) -> dict[str, Any]:
    """A line of the table."""
    seen = run.glance
    assert seen is not None
    facts = seen.to_json()
    same = ("status", "reason", "seed", "runtime", "topology", "steps", "best_eval", "active", "total_steps", "target")
    return {
        "id": run.id,
        "name": run.name,
        "path": run.shown,
        "group": os.path.dirname(run.name),
        **{name: facts[name] for name in same},
        "algo": bare(str(facts["algo"] or "?")),
        "env": bare(str(facts["env"] or "?")),
        "return": facts["return_mean"],
        "speed": number(seen.metrics.get("charts/SPS")),
        "seconds": number(seen.metrics.get("time")),
        "faults": run.faults,
        "bytes": seen.size,
        "version": run.version,
        "spark": run.spark,
        "noted": bool(run.stamp and run.stamp[4]),
    }


def _told(seen: Glance) -> Glance:
    """With what a run at a URL has told since its metrics were copied."""
    live = read_object(seen.path / asking.LIVE)
    steps, metrics = whole(live.get("steps")), live.get("metrics")
    if steps <= seen.steps or not isinstance(metrics, dict):
        return seen
    return replace(seen, steps=steps, metrics={**seen.metrics, **metrics})


def _stamp(path: Path) -> tuple[Any, ...]:
    """What changes when a run writes."""
    found: list[Any] = []
    for name in _FILES:
        try:
            stat = os.stat(path / name)
            found.append((stat.st_mtime_ns, stat.st_size))
        except OSError:
            found.append(None)
    for link in ("last", "best"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(path / link))
    return tuple(found)


def _faults(path: Path) -> int:
    try:
        kinds = (event for event in each_event(path) if event["event"] == "fault")
        return sum(count if isinstance(count := event.get("count"), int) else 1 for event in kinds)
    except UsageError:
        return 0


def _tunings(folder: Path, depth: int = 2) -> Iterator[Path]:
    if (folder / TUNING).is_file():
        yield folder
    elif depth:
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False):
                    yield from _tunings(folder / entry.name, depth - 1)


def _id(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
