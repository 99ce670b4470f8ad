"""Metric sinks: where the numbers of a run go, and the JSON lines file that every run has."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from raynforce.errors import RaynforceError, UsageError, reason
from raynforce.runs import disk
from raynforce.runs.journal import Journal

if TYPE_CHECKING:
    import numpy as np

    from raynforce.trees import Tree  # numpy, which reading metrics does not need


class Sink(Protocol):
    """Anything that takes metrics: give your own to a run to send them elsewhere.

    Methods that it may have: `begin(path, config)` comes first, with the run's directory and all its settings;
    `episodes(step, returns, lengths)` has the episodes `[E]` that ended since the last line, before that line;
    `event(facts)` is a line of `events.jsonl` (a fault, its recovery, storage that fails, the end); `end(facts)` has
    the `result`, as `--json` prints it, and `where_the_time_went`, of a run that came to its end.
    """

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics (`charts/episodic_return`, `losses/policy_loss`, …) of one environment step count."""

    def close(self) -> None:
        """Finish writing; called once, at the end of the run."""


class Metrics:
    """Hands metrics to several sinks.

    A sink that fails is left out from then on, with one warning: a broken dashboard must not end a long training.
    `JsonlSink` is the exception: it is the record of the run, so its error (a metric that is no number) is raised.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)

    def add(self, sink: Sink) -> None:
        self._sinks.append(sink)

    def begin(self, path: Path, config: Mapping[str, Any]) -> None:
        """Tell every sink that wants to know which run this is."""
        self._tell("begin", path, config)

    def episodes(self, step: int, returns: np.ndarray, lengths: np.ndarray) -> None:
        self._tell("episodes", step, returns, lengths)

    def event(self, facts: Mapping[str, Any]) -> None:
        self._tell("event", facts)

    def end(self, facts: Mapping[str, Any]) -> None:
        self._tell("end", facts)

    def _tell(self, method: str, *args: Any) -> None:
        for sink in tuple(self._sinks):
            try:
                if (told := getattr(sink, method, None)) is not None:
                    told(*args)
            except Exception as error:
                self._sinks.remove(sink)
                how = "cannot begin" if method == "begin" else "failed"
                _warn(f"metric sink {type(sink).__name__} {how} and is left out", error)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for sink in tuple(self._sinks):
            try:
                sink.write(step, metrics)
            except Exception as error:
                if isinstance(sink, JsonlSink):
                    raise
                self._sinks.remove(sink)
                _warn(f"metric sink {type(sink).__name__} failed and is left out from step {step} on", error)
                with contextlib.suppress(Exception):  # it may hold a file or a connection
                    sink.close()

    def close(self) -> None:
        while self._sinks:
            sink = self._sinks.pop()
            try:
                sink.close()
            except Exception as error:
                _warn(f"metric sink {type(sink).__name__} failed to close", error)


class JsonlSink:
    """One JSON object per line: `{"step": …, "time": …, "charts/SPS": …, …}`.

    `time` is seconds since the run began: the metric `time/seconds` if there is one, else counted from when the sink
    was opened (and on from the last line, in a resumed run). NaN and infinities become `null`.

    A resumed run continues the file from `resume`, the `position()` that its checkpoint holds, without gaps and
    doubles; without a checkpoint it starts over.
    """

    def __init__(
        self, path: Path, journal: Journal, *, resume_step: int | None = None, resume: Tree | None = None
    ) -> None:
        self.path, self._journal = path, journal
        elapsed = 0.0
        try:
            if self.path.exists():
                if resume is not None or resume_step is not None:
                    elapsed = _cut(self.path, (resume or {}).get("bytes", 0))
                elif self.path.stat().st_size > 0:
                    fix = "resume that run, or choose another directory"
                    raise UsageError(f"metrics file {self.path} already holds a run: {fix}")
            journal.add(self.path)
        except OSError as error:
            raise cannot_write(self.path, error) from error
        self._began = time.monotonic() - elapsed

    def position(self) -> Tree:
        """Where the file will be after what was written so far, for a checkpoint."""
        return {"bytes": self._journal.position(self.path)}

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        values = {name: _json_number(name, value) for name, value in metrics.items()}
        seconds = values.get("time/seconds")
        if seconds is None:
            seconds = round(time.monotonic() - self._began, 3)
        line = json.dumps({"step": int(step), "time": seconds, **values}, allow_nan=False)
        self._journal.append(self.path, line.encode() + b"\n")

    def close(self) -> None:
        """Nothing is left to do here: the journal closes the file."""


def cannot_write(path: Path, error: OSError) -> RaynforceError:
    """The error for a file that could not be written, in one line: its path and the reason."""
    return RaynforceError(f"cannot write {path}: {error.strerror or error}; free some space or use another directory")


def _warn(what: str, error: Exception) -> None:
    with contextlib.suppress(OSError, ValueError):  # stderr may be closed
        print(f"raynforce: {what}: {reason(error)}", file=sys.stderr, flush=True)


def _json_number(name: str, value: float) -> float | None:
    if name in ("step", "time"):
        raise UsageError(f"metric name {name!r} is taken by the line's own field: use a name such as 'charts/{name}'")
    if isinstance(value, int):
        return value
    try:
        number = float(value)  # numpy scalars and zero-dimensional arrays too
    except (TypeError, ValueError):
        raise UsageError(f"metric {name!r} is {value!r} ({type(value).__name__}): metrics are numbers") from None
    return number if math.isfinite(number) else None


def _cut(path: Path, position: int) -> float:
    """Cut the file there, or at its last whole line before; return the time of the last line that is left."""
    with open(path, "r+b") as file:
        end = _line_end(file, min(position, os.fstat(file.fileno()).st_size))
        file.truncate(end)
        disk.sync(file.fileno())
        begin = _line_end(file, end - 1) if end else 0
        file.seek(begin)
        try:
            return float(json.loads(file.read())["time"] or 0.0)
        except (ValueError, TypeError, KeyError):  # no line is left, or a torn one
            return 0.0


def _line_end(file: BinaryIO, position: int) -> int:
    """The end of the last whole line that ends at `position` or before."""
    while position > 0:
        begin = max(0, position - 65536)
        file.seek(begin)
        found = file.read(position - begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        position = begin
    return 0
