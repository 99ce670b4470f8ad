"""`raynforce doctor RUN`: what a run went through, in plain words."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import statistics
import textwrap
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from raynforce import settings
from raynforce.cli.text import BOLD, DIM, GREEN, RED, YELLOW, Page, count, paint, times
from raynforce.errors import RaynforceError
from raynforce.runs.advising import advice
from raynforce.runs.catalog import last_lines, whole
from raynforce.runs.directory import RunDirectory
from raynforce.runs.faults import ENV_RESTARTED, FaultGroup, History, each_event, summarise
from raynforce.runs.terminal import folded

LABEL = 8  # columns
_PLACE = re.compile(r'File "([^"]+)", line (\d+)(?:,)? in (\S+)')


def tell(run: RunDirectory, *, me: str = "raynforce", as_json: bool = False) -> int:
    """Print it; `me` is how this command was called."""
    history = summarise(each_event(run.events))
    running = run.holder() is not None
    if history.outcome == "none":  # it has not said how far it came
        with contextlib.suppress(OSError):  # of all lines: evaluations end after later steps
            steps = [whole(line.get("step")) for line in last_lines(run.metrics, b'{"step":')]
            history.steps = max([history.steps, *steps])
    if as_json:
        rows = history.to_json()
        for group, row in zip(history.groups, rows["groups"], strict=True):
            row["advice"] = advice(group, _config(run))
        print(json.dumps({"run": run.shown, "running": running, **rows}))
    else:
        _show(run, history, running, me, Page(LABEL, 100))
    return 0


def _show(run: RunDirectory, history: History, running: bool, me: str, page: Page) -> None:
    config = _config(run)
    if history.began is None:
        return page.lines(f"{run.shown}: nothing has happened yet" + (", it is starting" if running else ""))
    state, end = _end(history, running)
    total = config.get("steps")
    of = f" of {total:,}" if isinstance(total, int) and total > history.steps else ""
    lasted = f"{history.steps:,}{of} steps in {_duration(_lasted(run, history, running))}"
    if not history.faults and not history.absences and not history.storage and state in ("running", "stopped"):
        told = f"{run.shown}: no faults in {lasted.replace(' in ', ' and ')} ({end})"
        return page.lines(*folded(told, page.columns, further="  "))
    page.title(run.shown, " on ".join(str(config[k]) for k in ("algo", "env") if k in config))
    resumed = f", resumed {times(history.starts - 1)}" if history.starts > 1 else ""
    page.lines(f"began   {time.strftime('%Y-%m-%d', time.localtime(history.began))} {_clock(history.began)}{resumed}")
    page.row("now" if running else "ended", f"{lasted}: {end}", RED if state in ("failed", "killed") else GREEN)
    for word, sentence in _overview(history):
        page.row(word, sentence)
    for group in history.groups:
        page.lines("")
        _group(group, history, config, f"{me} doctor {shlex.quote(run.shown)}", page)
    return None


def _end(history: History, running: bool) -> tuple[str, str]:
    """How it stands, and a sentence on it."""
    if running:
        return "running", "still running"
    if history.outcome == "none":
        return "killed", "it left no word of its end; it was killed, as by a second Ctrl-C, or the machine went down"
    if history.outcome == "failed":
        return "failed", f"failed, {history.reason}"
    words = {"SIGINT": "stopped by Ctrl-C", "SIGTERM": "stopped by SIGTERM"}
    return "stopped", words.get(history.reason, history.reason or "stopped")


def _overview(history: History) -> Iterator[tuple[str, str]]:
    """What is known beyond how it ended, as a word and a sentence each."""
    done: Counter[str] = sum((group.actions for group in history.groups), Counter())
    restarts = [(ENV_RESTARTED, "environments"), ("restarted", "roles")]
    parts = [f"{count(done[action], 'restart')} of {things}" for action, things in restarts if done[action]]
    yield "faults", f"{history.faults:,}" + (f": {', '.join(parts)}" if parts else "")
    back = []
    for role, seconds in history.recoveries.items():
        most = f" (median; {_seconds(max(seconds))} at most)" if len(seconds) > 1 else ""
        back.append(f"{role} after {_seconds(statistics.median(seconds))}{most}")
    if back:
        yield "back", ", ".join(back)
    if history.storage:
        failed = f"writing failed {times(len(history.storage))}, the last time: {history.storage[-1]}"
        yield "storage", f"{failed}. Free space there, or give another --out"
    if history.lost is not None:
        yield "lost", count(history.lost, "step")
    away = [role for role in history.absent if role not in history.given_up]
    absent = [f"given up: {_roles(sorted(history.given_up, key=_natural))}"] if history.given_up else []
    absent += [f"away at the end: {_roles(sorted(away, key=_natural))}"] if away else []
    absent += [f"the run went on without a role {times(history.absences)}"] if history.absences else []
    if absent:
        yield "absent", "; ".join(absent)


def _group(group: FaultGroup, history: History, config: Mapping[str, Any], doctor: str, page: Page) -> None:
    head = paint(f"{group.count:,} ×", BOLD, RED if group.grave else YELLOW)
    page.lines(f"{head} {paint(_what(group), BOLD)}")
    page.label = 4
    page.row("", _clean(group))
    if place := _place(group.trace or group.said):
        page.row("", f"at {place}", DIM)
    elif group.kind in ("died", "hung", "failed") and group.said.strip():
        for line in group.said.strip().splitlines()[-3:]:
            short = textwrap.shorten(f"| {line}", page.columns - 4, placeholder=" …")
            page.lines(f"    {paint(short, DIM)}")
    (began, first), (ended, last) = group.first, group.last
    day = history.began or began
    when = f"{_clock(began, day)} at step {first:,}"
    if group.count > 1:
        when = f"from {when} to {_clock(ended, day)} at step {last:,}"
    done = [a if len(group.actions) == 1 else f"{a} {times(n)}" for a, n in group.actions.most_common() if a]
    page.row("", f"{when}; {', '.join(done)}" if done else when, DIM)
    page.row("  →", advice(group, config))
    if group.evidence:
        page.command("    to see it here: ", f"{doctor} --replay {group.evidence[-1]}")
    page.label = LABEL


def _what(group: FaultGroup) -> str:
    roles = _roles(sorted(group.roles, key=_natural))
    if group.kind in ("raised", "garbage") or set(group.actions) == {ENV_RESTARTED}:
        return f"an environment {'returned garbage' if group.kind == 'garbage' else group.kind}, in {roles}"
    whose = "their" if len(group.roles) > 1 else "its"
    return f"{roles} outgrew {whose} memory" if group.kind == "memory" else f"{roles} {group.kind}"


def _clean(group: FaultGroup) -> str:
    """The cause, without what stands above it, and for a hang below it."""
    first = next(iter(group.roles))
    cause = group.cause.removeprefix(first).lstrip(" :").removeprefix(f"{group.kind}: ")
    if group.kind == "hung":
        cause = cause.partition("; if ")[0]
    return textwrap.shorten(cause, 300, placeholder="…")


def _place(trace: str) -> str:
    """Where a traceback ends, as `file:line in function`; faulthandler's stacks have the newest call first."""
    places = _PLACE.findall(trace)
    if not places:
        return ""
    path, line, name = places[0 if "most recent call first" in trace else -1]
    with contextlib.suppress(ValueError):  # of another drive
        near = os.path.relpath(path)
        path = path if near.startswith("..") else near
    return f"{path}:{line} in {name}"


def _roles(names: list[str]) -> str:
    """`samplers 0, 1 and 4`, or `samplers 0, 1, 2 and 13 more`."""
    kinds = {name.partition(" ")[0] for name in names}
    numbers = [name.partition(" ")[2] for name in names]
    if len(names) == 1 or len(kinds) > 1 or not all(numbers):
        return ", ".join(names)
    shown = numbers if len(numbers) <= 5 else [*numbers[:4], f"{len(numbers) - 4} more"]
    return f"{kinds.pop()}s {', '.join(shown[:-1])} and {shown[-1]}"


def _natural(name: str) -> tuple[str, int]:
    kind, _, number = name.partition(" ")
    return kind, int(number) if number.isdecimal() else 0


def _lasted(run: RunDirectory, history: History, running: bool) -> float:
    """Seconds of all its processes; the last one may have gone on after the last event."""
    until = time.time() if running else 0.0
    if not running and history.outcome == "none":
        with contextlib.suppress(OSError):
            until = run.metrics.stat().st_mtime
    return history.seconds + max(until - (history.ended or until), 0.0)


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes >= 120:
        return f"{minutes // 60:,} h {minutes % 60:02d} min"
    return f"{minutes} min" if seconds >= 120 else _seconds(seconds)


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def _clock(at: float, day: float | None = None) -> str:
    """The time, after its date if that is another than the day's."""
    now, then = time.localtime(at), time.localtime(at if day is None else day)
    return time.strftime("%H:%M:%S" if now[:3] == then[:3] else "%b %d %H:%M:%S", now)


def _config(run: RunDirectory) -> Mapping[str, Any]:
    with contextlib.suppress(RaynforceError):  # its history can be told without
        return settings.read_yaml(str(run.config))
    return {}
