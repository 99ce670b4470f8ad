"""`raynforce tune`: a search for settings, its table, and what to type next."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterator
from typing import Any

from raynforce import settings
from raynforce.config import Config
from raynforce.errors import UsageError
from raynforce.ops.tuning.space import read
from raynforce.ops.tuning.study import Study
from raynforce.ops.tuning.tuner import SEEDS, InterruptedTune, Tuned, checked, tune
from raynforce.ops.tuning.view import figure, shown, value_text
from raynforce.seeds import numbers

ROWS = 10  # of the table at the end, the best


def tell(arguments: argparse.Namespace, given: dict[str, Any], me: str) -> int:
    """Search, print, and return the exit code."""
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ:  # the driver of a job
        from raynforce.ops.draining import watch

        watch()
    stream = sys.stderr if arguments.json else sys.stdout
    how: dict[str, Any] = {"progress": "quiet" if arguments.quiet else "auto", "stream": stream}
    code = 0
    try:
        if arguments.resume is not None and arguments.resume == arguments.out:  # go on with it, or begin
            tuned = tune(**_arguments(arguments, given), resume=True, **how)
        elif arguments.resume is not None:
            require_same(arguments, given)
            tuned = tune(resume=arguments.resume, address=arguments.address, **how)
        else:
            tuned = tune(**_arguments(arguments, given), **how)
        code = 1 if tuned.failed else 0
    except InterruptedTune as interrupted:
        tuned, code = interrupted.tuned, 128 + interrupted.number
    if arguments.quiet:
        print(tuned.path, file=stream)
    else:
        print(*lines(tuned, me), sep="\n", file=stream)
    if arguments.json:
        print(json.dumps(tuned.to_json()))
    return code


def preview(arguments: argparse.Namespace) -> tuple[Config, dict[str, list[str]]]:
    """What a command would search from, checked without trying it; and what its files of ranges say, in words."""
    from raynforce.cli.commands import tune_settings
    from raynforce.experiment import resolve

    given = _arguments(arguments, tune_settings(arguments))
    named = {name: given[name] for name in ("env", "algo")} | {"runtime": given.get("runtime", "inline")}
    config, _ = resolve(given.get("config", {}), settings.nested(given["settings"]), named)
    how = {name: given[name] for name in ("trials", "scheduler", "objective") if name in given}
    checked(config, read(arguments.search), **how)
    numbers(given.get("seeds", SEEDS), config.seed)
    files = [item for item in arguments.search if "=" not in item]
    return config, {file: [f"{key}={domain}" for key, domain in read([file]).items()] for file in files}


def _arguments(arguments: argparse.Namespace, given: dict[str, Any]) -> dict[str, Any]:
    file = settings.read_yaml(arguments.config) if arguments.config else {}
    env = arguments.env or given.get("env") or file.get("env")
    algo = arguments.algo or given.get("algo") or file.get("algo") or "ppo"
    if not env:
        raise UsageError("tune needs ALGO and ENV, such as: raynforce tune ppo CartPole-v1 --target 475")
    names = ("trials", "scheduler", "objective", "out", "cpus", "gpus", "address")
    found = {name: getattr(arguments, name) for name in names}
    found |= {"env": env, "algo": algo, "search": arguments.search, "settings": given, "config": file}
    if arguments.runtime is not None:
        found["runtime"] = arguments.runtime
    if arguments.seeds is not None:
        found["seeds"] = arguments.seeds
    return {name: value for name, value in found.items() if value is not None}


def require_same(arguments: argparse.Namespace, given: dict[str, Any]) -> None:
    """A search goes on as it was begun: refuse anything else that was typed."""
    plan = Study.open(arguments.resume).plan
    had = {"algo": plan.algorithm, "env": plan.env, "trials": plan.trials, "scheduler": plan.scheduler}
    had |= {"objective": plan.objective, "seeds": len(plan.seeds), "steps": plan.steps, "target": plan.target}
    had |= {"cpus": plan.cpus, "gpus": plan.gpus, "seed": plan.seed}
    for name, value in had.items():
        asked = getattr(arguments, name, None)
        if asked is None:
            continue
        same = str(asked) == str(value)
        if isinstance(value, int | float) and not same:
            kind = int if isinstance(value, int) else float
            same = settings._number(asked, kind) == value
        if not same:
            raise UsageError(f"{arguments.resume} has {name} {value}, and cannot go on with {asked}: leave it out")
    for option, values in {"search": arguments.search, "set": arguments.set, "out": arguments.out}.items():
        if values:
            raise UsageError(f"--{option} is for a new search, and --resume goes on with one as it was: leave it out")
    if arguments.config or arguments.no_preset or arguments.runtime or arguments.topology:
        raise UsageError("--resume goes on with a search as it was: leave the other settings out")


def lines(tuned: Tuned, me: str) -> Iterator[str]:
    """The best trials, what mattered, and what to type next."""
    plan = tuned.plan
    counts = {name: sum(trial.status == name for trial in tuned.trials) for name in ("done", "stopped", "failed")}
    waiting = plan.trials - sum(counts.values())
    parts = [f"{count} {name}" for name, count in counts.items() if count]
    parts += [f"{waiting} not over"] if waiting else []
    yield from ("", f"trials: {', '.join(parts)}; here {tuned.seconds:.1f} s")
    ranked = Study(tuned.path, plan, tuned.trials).ranked()[:ROWS]
    rows = [["trial", "", plan.objective, "steps", *(key.rpartition(".")[2] for key in plan.search)]]
    for trial in ranked:
        values = [value_text(trial.config[key]) for key in plan.search]
        rows.append([str(trial.id), trial.status, figure(trial, plan), f"{trial.steps:,}", *values])
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    for row in rows if len(rows) > 1 else ():
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    for trial in tuned.failed[:3]:
        yield f"failed: trial {trial.id}: {trial.cause}"
    if tuned.importance:
        shares = ", ".join(f"{key.rpartition('.')[2]} {share:.0%}" for key, share in tuned.importance.items())
        yield f"importance ({tuned.method}): {shares}"
    if tuned.best is not None:
        median = f", median of {len(plan.seeds)} seeds" if len(plan.seeds) > 1 else ""
        yield f"best: trial {tuned.best.id}, {figure(tuned.best, plan)}{median}: {shown(tuned.best.config)}"
    folder = shlex.quote(str(tuned.path))
    yield from ("", f"search: {tuned.path}")
    if tuned.picture is not None:
        yield f"picture: {tuned.picture}"
    elif tuned.best is not None:
        yield "picture: none without matplotlib; pip install 'raynforce[plot]'"
    yield from ("", "what to type next:")
    if waiting:
        yield f"  {me} tune --resume {folder}"
    if tuned.best is not None:
        fresh = max(plan.seeds) + 1
        yield f"  {me} train --config {shlex.quote(str(tuned.config))} --seeds 5 --seed {fresh}"
    yield f"  {me} runs {folder}"
