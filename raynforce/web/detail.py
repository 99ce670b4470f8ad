"""One run in JSON: settings, roles, time, faults, checkpoints, episodes; and the trials of a search."""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
from collections import deque
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from raynforce import settings
from raynforce.errors import RaynforceError, UsageError
from raynforce.runs import asking, lock
from raynforce.runs.advising import advice, bound
from raynforce.runs.catalog import checkpoints_of, last_lines, open_regular, read_object
from raynforce.runs.directory import RunDirectory
from raynforce.runs.faults import each_event, evidence_of, summarise
from raynforce.web.board import TUNING, Board, Watched, row

LINES = 400  # of events
LONGEST = 4000  # characters of a text
FILM = re.compile(r"[A-Za-z0-9_.-]+\.(mp4|webm|png|gif|jpg)")
TYPES = {"mp4": "video/mp4", "webm": "video/webm", "png": "image/png", "gif": "image/gif", "jpg": "image/jpeg"}
SMALL = 8 << 20  # bytes of a JSON file


def detail(run: Watched) -> dict[str, Any]:
    config = config_of(run.path)
    assert run.glance is not None
    history, advised = {}, []
    with contextlib.suppress(UsageError):
        told = summarise(each_event(run.path / "events.jsonl"))
        history, advised = told.to_json(), [advice(group, config) for group in told.groups]
        history["groups"] = [_group(row, text) for row, text in zip(history["groups"], advised, strict=True)]
    live = read_object(run.path / asking.LIVE)
    went = str(live.get("time_went") or _result(run.path).get("where_the_time_went") or "")
    return {
        **row(run),
        "config": settings.dotted(config) if config else {},
        "metrics": dict(run.glance.metrics),
        "history": history,
        "live": {name: live[name] for name in ("time", "roles") if name in live},
        "bound": bound(went),
        "elsewhere": run.mirror is not None,
        "checkpoints": _checkpoints(run),
        "evidence": [number for number, _ in evidence_of(RunDirectory(run.path))],
        "episodes": episodes(run.path),
        "notes": notes(run.path),
        "holder": run.glance.to_json()["holder"],
        "can": can(run),
    }


def _result(path: Path) -> dict[str, Any]:
    """What a run told at its end, in its last lines."""
    lines = last_lines(path / "events.jsonl", b'{"time":')
    return next((event for event in islice(lines, 4) if event.get("event") == "result"), {})


def _group(facts: Mapping[str, Any], told: str) -> dict[str, Any]:
    texts = {name: str(facts[name])[-LONGEST:] for name in ("trace", "said")}
    return {**facts, **texts, "advice": told}


def _checkpoints(run: Watched) -> list[dict[str, Any]]:
    try:
        found = [kept.to_json() for kept in checkpoints_of(run.path)]
    except (RaynforceError, OSError):
        return []
    for kept in found:
        kept["path"] = f"{run.shown}/checkpoints/{Path(kept['path']).name}"
        if run.mirror is not None:  # only manifests are copied
            kept["wrong"] = []
    return found


def config_of(path: Path) -> Mapping[str, Any]:
    with contextlib.suppress(RaynforceError, OSError):
        open_regular(path / "config.yaml").close()
        return settings.read_yaml(str(path / "config.yaml"))
    return {}


def notes(path: Path) -> str:
    with contextlib.suppress(OSError), open_regular(path / asking.NOTES) as file:
        return file.read(asking.LONGEST_NOTES).decode(errors="replace")
    return ""


def events(run: Watched) -> list[dict[str, Any]]:
    """The last lines of its log."""
    with contextlib.suppress(UsageError):
        found = deque(each_event(run.path / "events.jsonl"), LINES)
        return [{name: _short(value) for name, value in event.items()} for event in found]
    return []


def _short(value: Any) -> Any:
    return value[-LONGEST:] if isinstance(value, str) else value


def evidence(run: Watched, number: int) -> dict[str, Any] | None:
    for found, facts in evidence_of(RunDirectory(run.path)):
        if found == number:
            actions = facts.get("actions")
            if isinstance(actions, list) and len(actions) > 100:
                facts = {**facts, "actions": actions[-100:], "actions_left_out": len(actions) - 100}
            return facts
    return None


def episodes(path: Path) -> list[dict[str, Any]]:
    """Films and pictures in the run's folder `episodes`: `step_000000050000-1.mp4`, or any other name."""
    found = []
    with contextlib.suppress(OSError):
        for film in sorted((path / "episodes").iterdir()):
            if FILM.fullmatch(film.name) and film.is_file():
                step = re.match(r"step_(\d{1,18})", film.name)
                told = read_object(film.with_suffix(".json"))
                facts = {"name": film.name, "step": int(step[1]) if step else None, "bytes": film.stat().st_size}
                found.append({**facts, "return": told.get("return"), "time": film.stat().st_mtime})
    return found[-200:]


def episode(run: Watched, name: str) -> Path | None:
    """The file of a film that is listed; no other."""
    return next((run.path / "episodes" / e["name"] for e in episodes(run.path) if e["name"] == name), None)


def can(run: Watched) -> dict[str, str]:
    """Why a run cannot be asked to stop or to save; empty if it can."""
    assert run.glance is not None
    why = ""
    if run.glance.state != "running":
        why = "it is not running"
    elif run.mirror is not None:
        why = "it runs elsewhere: stop it there, or with `raynforce jobs stop`"
    return {"stop": why, "checkpoint": why}


def ask(run: Watched, what: asking.Request) -> str:
    """Ask the driver; why not, if it cannot be."""
    holder = None if run.mirror is not None else lock.holder(run.path)
    if why := can(run)[what]:
        return why
    if holder is None:
        return "it is not running"
    try:
        asking.ask(run.path, what)
    except OSError as error:
        return f"cannot write to {run.path}: {error.strerror}"
    return ""


def note(run: Watched, text: str) -> str:
    """Write the notes of a run; why not, if they cannot be."""
    try:
        if run.mirror is not None:
            run.mirror.write(run.path, asking.NOTES, text)
        asking.replace(run.path / asking.NOTES, text)
    except (OSError, RaynforceError) as error:
        return f"cannot write {asking.NOTES}: {getattr(error, 'strerror', None) or error}"
    return ""


def tuning(board: Board, path: Path) -> dict[str, Any]:
    """A search: what was searched, its trials, and the share of each setting in the outcome."""
    trials: Any = []
    with contextlib.suppress(OSError, ValueError), open_regular(path / "trials.json") as file:
        trials = json.loads(file.read(SMALL))
    rows = (
        [_trial(board, path, trial) for trial in trials if isinstance(trial, dict)] if isinstance(trials, list) else []
    )
    shares = {k: v for k, v in read_object(path / "importance.json").items() if isinstance(v, int | float)}
    return {
        "name": path.name,
        "path": str(path),
        "tune": read_object(path / TUNING),
        "trials": rows,
        "importance": shares,
    }


def _trial(board: Board, path: Path, trial: Mapping[str, Any]) -> dict[str, Any]:
    runs = trial.get("runs")
    named = [path / str(run) for run in runs] if isinstance(runs, list) else []
    config = trial.get("config")
    facts = {name: trial.get(name) for name in ("id", "status", "objective", "steps", "seconds", "cause")}
    ids = [found for run in named if (found := board.run_at(run))]
    merits = trial.get("merits")  # how good it was at each evaluation, whether or not it met the target
    if isinstance(merits, list) and merits and isinstance(merits[-1], list):
        facts["merit"] = merits[-1][-1]
    return {**facts, "config": settings.dotted(config) if isinstance(config, dict) else {}, "runs": ids}


def safe(value: Any) -> Any:
    """As JSON has it: NaN and infinities are null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): safe(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set):
        return [safe(each) for each in value]
    if value is None or isinstance(value, str | int):
        return value
    return str(value)


def now() -> float:
    return time.time()
