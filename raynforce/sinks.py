"""Sinks for services that others run: Weights & Biases and MLflow, each an extra (`pip install "raynforce[wandb]"`).

    raynforce.train("CartPole-v1", sinks=[raynforce.sinks.WandbSink(project="carts")])

They get every line of metrics (evaluations and each role's time among them), all settings, faults as they happen, and
at the end the events, the result, what bound the run, its films (`episodes/*.mp4`) and your notes, if there are any.
A thread sends what a run writes, so training waits for no network. A service that fails is left out with one warning.
A file in the run's directory has the service's name of the run, so that a resumed run goes on there.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import logging
import os
import re
import sys
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from raynforce import settings
from raynforce.errors import RaynforceError, UsageError, summary
from raynforce.runs import asking
from raynforce.runs.catalog import object_in

EVERY = 1.0  # seconds between two messages to a service
AT_ONCE = 50  # lines in one message
MOST_WAITING = 10_000  # lines that a service may be behind; what comes then is lost, and counted
MOST_EVENTS = 1_000  # of one process that a service keeps; `events.jsonl` has them all
MOST_VIDEOS = 20  # the newest
OPEN_SECONDS, CLOSE_SECONDS = 20.0, 30.0  # that a service may take to begin, and for what is left at the end


class Line(NamedTuple):
    step: int
    metrics: Mapping[str, float]
    time: float  # in seconds since 1970


class Service(ABC):
    """A sink whose metrics a thread sends to a service."""

    name: ClassVar[str]
    package: ClassVar[str]
    extra: ClassVar[str]
    """What is installed for it: `raynforce[extra]`; also the name of the file in the run's directory."""

    def __init__(self) -> None:
        if importlib.util.find_spec(self.package) is None:
            needs = f"{type(self).__name__} needs {self.package}, which is not installed"
            raise UsageError(f'{needs}: pip install "raynforce[{self.extra}]"')
        self.url = ""  # where the run can be seen, once that is known
        self._thread: threading.Thread | None = None
        self._reset()

    def _reset(self) -> None:
        self._waiting: deque[Line] = deque()
        self._events: deque[Mapping[str, Any]] = deque(maxlen=MOST_EVENTS)
        self._untold = 0  # of them
        self._ended: Mapping[str, Any] = {}
        self._lost = 0
        self._closing = threading.Event()
        self._failed_run = False
        self._failure: BaseException | None = None

    def begin(self, path: Path, config: Mapping[str, Any]) -> None:
        """The run has a directory: open the service's run, or the one that this run had there before."""
        self._reset()  # one run after another may use it
        self._path, self._file = path, path / f"{self.extra}.json"
        self._thread = threading.Thread(target=self._work, args=(path, config), daemon=True, name=self.extra)
        self._thread.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._raise_failure()
        if len(self._waiting) < MOST_WAITING:
            self._waiting.append(Line(step, dict(metrics), time.time()))
        else:
            self._lost += 1

    def event(self, facts: Mapping[str, Any]) -> None:
        """A fault, its recovery, storage that fails, the start and the end."""
        self._events.append(facts)
        self._untold += 1

    def end(self, facts: Mapping[str, Any]) -> None:
        """The run has come to its end: its result, and where the time went."""
        self._ended = facts

    @property
    def _faults(self) -> list[str]:
        """What failed, in one line each."""
        told = [event for event in tuple(self._events) if event["event"] == "fault"]
        return [f"{event.get('role')}: {event.get('cause')}; {event.get('action')}" for event in told]

    def _event_lines(self) -> str:
        return "".join(json.dumps(event, default=str) + "\n" for event in tuple(self._events))

    @property
    def _videos(self) -> list[Path]:
        return sorted(self._path.glob("episodes/*.mp4"), key=lambda film: film.stat().st_mtime)[-MOST_VIDEOS:]

    @property
    def _notes(self) -> str:
        with contextlib.suppress(OSError):
            return (self._path / asking.NOTES).read_text(errors="replace")[: asking.LONGEST_NOTES]
        return ""

    def close(self) -> None:
        """Send what is left, for a while at most."""
        self._failed_run = isinstance(sys.exc_info()[1], Exception)
        self._closing.set()
        if self._thread is None:
            return
        self._thread.join(CLOSE_SECONDS)
        self._raise_failure()
        if self._thread.is_alive():
            lost = self._lost + len(self._waiting)
            raise RaynforceError(f"{self.name} has not answered for {CLOSE_SECONDS:.0f} s; {lost:,} lines are lost")
        if self._lost:
            raise RaynforceError(f"{self.name} was too slow: {self._lost:,} lines of metrics are lost")

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise RaynforceError(f"{self.name}: {summary(self._failure)[:300]}") from self._failure

    def _work(self, path: Path, config: Mapping[str, Any]) -> None:
        try:
            known = self._open(path, config, self._known())
            self._file.write_text(json.dumps(known) + "\n")
            closing = False
            while not closing:
                closing = self._closing.wait(EVERY)
                while self._waiting:
                    self._send([self._waiting.popleft() for _ in range(min(AT_ONCE, len(self._waiting)))])
                if self._untold:
                    self._untold = 0
                    self._tell()
            if self._ended:
                self._conclude(self._ended["result"], str(self._ended["where_the_time_went"]))
            self._finish(failed=self._failed_run)
        except BaseException as error:  # whatever it is, training goes on
            self._failure = error

    def _known(self) -> dict[str, Any]:
        """What was written when this run was opened before; nothing if it never was."""
        with contextlib.suppress(OSError):
            return object_in(self._file.read_bytes())
        return {}

    @abstractmethod
    def _open(self, path: Path, config: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
        """Begin, or go on with the run that is `known`; returns what is to be known the next time."""

    @abstractmethod
    def _send(self, lines: Sequence[Line]) -> None: ...

    def _tell(self) -> None:
        """Something is new in `_events`."""
        return

    def _conclude(self, result: Mapping[str, Any], where_the_time_went: str) -> None:
        """Send what is known of a run that came to its end."""
        return

    @abstractmethod
    def _finish(self, failed: bool) -> None: ...


class WandbSink(Service):
    """Weights & Biases, over `step`, the environment steps; `WANDB_MODE=offline`, `WANDB_ENTITY` and the like work."""

    name, package, extra = "W&B", "wandb", "wandb"

    def __init__(self, project: str | None = None, name: str | None = None) -> None:
        """`project` is `WANDB_PROJECT` or `raynforce` if not given, `name` that of the run's directory."""
        super().__init__()
        self._project, self._name = project, name

    def _open(self, path: Path, config: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
        wandb = importlib.import_module("wandb")
        limits = {"init_timeout": OPEN_SECONDS, "finish_timeout": CLOSE_SECONDS}
        quiet = wandb.Settings(silent=True, console="off", **limits)  # silent: it does not ask for a key either
        offline = wandb.setup(settings=quiet).settings.mode in ("offline", "dryrun")  # nobody there to go on with
        self._run = run = wandb.init(
            project=known.get("project") or self._project or os.environ.get("WANDB_PROJECT") or "raynforce",
            entity=known.get("entity"),
            id=known.get("id") or uuid.uuid4().hex[:8],
            name=self._name or path.name,
            config={**config, "run_path": str(path.resolve())},
            resume=None if offline else "allow",
            reinit="create_new",  # another one of this process is none of our business
            settings=quiet,
        )
        run.define_metric("step")
        run.define_metric("*", step_metric="step")  # its own count would refuse an evaluation that ends late
        self.url = run.url or ""
        return {"id": run.id, "project": run.project, "entity": run.entity, "url": self.url}

    def _send(self, lines: Sequence[Line]) -> None:
        for line in lines:
            self._run.log({**line.metrics, "step": line.step})

    def _tell(self) -> None:
        if self._faults:
            self._run.summary.update({"faults": len(self._faults), "last_fault": self._faults[-1]})

    def _conclude(self, result: Mapping[str, Any], where_the_time_went: str) -> None:
        wandb = importlib.import_module("wandb")
        self._run.summary.update({f"result/{name}": value for name, value in result.items()})
        self._run.summary["where_the_time_went"] = where_the_time_went
        if self._notes:
            self._run.notes = self._notes
        for film in self._videos:
            self._run.log({f"videos/{film.stem}": wandb.Video(str(film), format="mp4")})

    def _finish(self, failed: bool) -> None:
        Path(self._run.dir, "events.jsonl").write_text(self._event_lines())  # which is sent with its files
        self._run.finish(exit_code=int(failed))


class MlflowSink(Service):
    """MLflow; its `step` are the environment steps. `MLFLOW_TRACKING_URI` and the like work."""

    name, package, extra = "MLflow", "mlflow", "mlflow"

    def __init__(self, experiment: str | None = None, tracking_uri: str | None = None, name: str | None = None) -> None:
        """`experiment` is `MLFLOW_EXPERIMENT_NAME` or `raynforce` if not given, `name` that of the run's directory."""
        super().__init__()
        self._experiment, self._uri, self._name = experiment, tracking_uri, name
        given = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", "")
        if given.startswith("file:") or ("://" not in given and given not in ("", "databricks")):
            folder = os.path.abspath(given.removeprefix("file://").removeprefix("file:"))
            fix = f"use a database, such as sqlite:///{folder}.db, or a server"
            raise UsageError(f"MLflow's tracking URI is {given!r}, a folder, which it takes no more: {fix}")

    def _open(self, path: Path, config: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
        logging.getLogger("mlflow").setLevel(logging.WARNING)  # it tells of each table of a new database
        logging.getLogger("alembic").setLevel(logging.WARNING)
        mlflow, self._entities = importlib.import_module("mlflow"), importlib.import_module("mlflow.entities")
        uri = self._uri or known.get("tracking_uri") or mlflow.get_tracking_uri()
        self._client = importlib.import_module("mlflow.tracking").MlflowClient(tracking_uri=uri)
        self._id = known.get("run_id", "")
        try:
            if self._id:
                self._client.update_run(self._id, status="RUNNING")
        except Exception as error:
            if getattr(error, "error_code", "") != "RESOURCE_DOES_NOT_EXIST":
                raise
            self._id = ""
        self._id = self._id or self._create(path, config)
        self.url = f"run {self._id} at {uri}"
        return {"run_id": self._id, "tracking_uri": uri}

    def _create(self, path: Path, config: Mapping[str, Any]) -> str:
        name = self._experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "raynforce"
        found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        tags = {"raynforce.path": str(path.resolve())}
        created = self._client.create_run(experiment, run_name=self._name or path.name, tags=tags)
        made: str = created.info.run_id
        params = [self._entities.Param(key, str(value)[:6000]) for key, value in settings.dotted(config).items()]
        for first in range(0, len(params), 100):  # no more are taken at once
            self._client.log_batch(made, params=params[first : first + 100])
        return made

    def _send(self, lines: Sequence[Line]) -> None:
        metrics = [
            self._entities.Metric(_FORBIDDEN.sub("_", name), float(value), int(1000 * line.time), line.step)
            for line in lines
            for name, value in line.metrics.items()
        ]
        for first in range(0, len(metrics), 1000):  # no more are taken at once
            self._client.log_batch(self._id, metrics=metrics[first : first + 1000])

    def _tell(self) -> None:
        if self._faults:
            self._client.set_tag(self._id, "raynforce.faults", len(self._faults))
            self._client.set_tag(self._id, "raynforce.last_fault", self._faults[-1][:5000])

    def _conclude(self, result: Mapping[str, Any], where_the_time_went: str) -> None:
        for name, value in result.items():
            self._client.set_tag(self._id, f"raynforce.result.{name}", value)
        self._client.set_tag(self._id, "raynforce.where_the_time_went", where_the_time_went[:5000])
        if self._notes:
            self._client.set_tag(self._id, "mlflow.note.content", self._notes[:5000])
        for film in self._videos:
            self._client.log_artifact(self._id, str(film), "videos")

    def _finish(self, failed: bool) -> None:
        self._client.log_text(self._id, self._event_lines(), "events.jsonl")
        self._client.set_terminated(self._id, status="FAILED" if failed else "FINISHED")


_FORBIDDEN = re.compile(r"[^\w./ :-]")  # in names of MLflow's metrics
KINDS: Mapping[str, type[WandbSink] | type[MlflowSink]] = {"wandb": WandbSink, "mlflow": MlflowSink}


def services(names: Sequence[str], run: Path | None = None) -> list[Service]:
    """The sinks of these names, each once, and those that a `run` had before; `none` among them stands for none."""
    if "none" in names:
        return []
    before = [name for name, kind in KINDS.items() if run is not None and _goes_on(kind, run)]
    return [KINDS[name]() for name in dict.fromkeys([*before, *names])]


def _goes_on(kind: type[Service], run: Path) -> bool:
    """Whether a run was logged there before; without the package, which nobody asked for now, that is only told."""
    if not (run / f"{kind.extra}.json").is_file():
        return False
    there = importlib.util.find_spec(kind.package) is not None
    if not there:
        hint = f'{kind.package} is not installed: pip install "raynforce[{kind.extra}]"'
        print(f"raynforce: {run} goes on without {kind.name}: {hint}", file=sys.stderr)
    return there
