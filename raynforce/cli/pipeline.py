"""`raynforce pipeline`, `promote`, `rollback` and `registry`: the way of a policy to where it is served."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Sequence
from shlex import join, quote
from typing import Any

from raynforce.api import Interrupted
from raynforce.ops import registry as api
from raynforce.ops.pipeline import Pipelined, pipeline
from raynforce.ops.pipeline.steps import environment
from raynforce.ops.registry import Entry
from raynforce.ops.serving.tokens import VARIABLE
from raynforce.runs.terminal import columns, folded


def run(file: str, *, start_at: str | None, dry_run: bool, dir: str | None, quiet: bool, as_json: bool, me: str) -> int:
    """Run what is not done; a server is what this process becomes at the end."""
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ:  # the driver of a job
        from raynforce.ops.draining import watch

        watch()
    stream = sys.stderr if as_json else sys.stdout
    progress = "quiet" if quiet else "auto"
    try:
        made = pipeline(file, start_at=start_at, dry_run=dry_run, dir=dir, stream=stream, progress=progress)
    except Interrupted as interrupted:
        print(f"stopped; to go on: {me} pipeline {_shown(file)}", file=stream)
        if as_json:
            result = interrupted.run.result
            print(json.dumps({"stopped": result.stopped, "run": result.run, "steps": result.steps}))
        return 128 + interrupted.number
    if not quiet and not dry_run:
        print(*_summary(made, me), sep="\n", file=stream)
    if as_json:
        print(json.dumps(made.to_json()), flush=True)
    if made.serve and not dry_run:
        if not quiet:
            print(f"serving: {me} {join(made.serve)}", file=stream)
        sys.stdout.flush()
        sys.stderr.flush()
        token = {} if made.token is None else {VARIABLE: made.token}
        os.execve(sys.executable, [sys.executable, "-m", "raynforce", *made.serve], {**environment(), **token})
    return 0


def _shown(file: str) -> str:
    return quote(file) if len(file) < 200 else "..."


def _summary(made: Pipelined, me: str) -> Sequence[str]:
    ran = sum(step.status == "ran" for step in made.steps)
    done = sum(step.status == "done" for step in made.steps)
    skipped = sum(step.status == "skipped" for step in made.steps)
    lines = ["", f"pipeline {made.name}: {ran} ran, {done} done before" + (f", {skipped} skipped" if skipped else "")]
    for step in made.steps:
        if step.kind == "promote" and step.outputs is not None:
            lines.append(f"registry: {me} registry {quote(str(step.outputs['registry']))}")
    return lines


def promote(run: str, to: str, *, as_json: bool, **how: Any) -> int:
    say = functools.partial(print, file=sys.stderr, flush=True)
    found = api.promote(run, to, say=say, **how)
    if as_json:
        print(json.dumps(found.to_json()))
    else:
        line = f"{'promoted' if found.promoted else 'not promoted'}: {found.reason}"
        print(*folded(line, columns(sys.stdout), further="  "), sep="\n")
    return 0 if found.promoted else 1


def rollback(registry: str, to: str | None, *, as_json: bool) -> int:
    entry = api.rollback(registry, to)
    if as_json:
        print(json.dumps({"registry": registry, "current": entry.to_json()}))
    else:
        print(f"{registry}: {entry.name} is current again, as entry {entry.number}")
    return 0


def tell_registry(registry: str, *, as_json: bool) -> int:
    found = api.registry(registry)
    if as_json:
        print(json.dumps({"registry": registry, "entries": [entry.to_json() for entry in found.entries]}))
        return 0
    width = max(len(entry.name) for entry in found.entries)
    for entry in reversed(found.entries):
        mark = "*" if entry == found.current else " "
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.time))
        line = f"{mark} {entry.number:>3}  {entry.name:<{width}}  {when}  {_how(entry)}"
        print(*folded(line, columns(sys.stdout), further="       "), sep="\n")
    return 0


def _how(entry: Entry) -> str:
    if entry.event == "rolled back":
        return f"rolled back to {entry.of}, from {entry.over}"
    if entry.over is None:
        return f"the first, from {entry.run}"
    if entry.comparison is None:
        return f"over {entry.over}, without playing, from {entry.run}"
    figures = entry.comparison
    spread = f"{figures['low']:+.4g} to {figures['high']:+.4g}"
    return f"over {entry.over} by {figures['difference']:+.4g} ({spread}, p = {figures['p']:.2g}), from {entry.run}"
