"""`raynforce train --seeds`, and `resume` of what it made: runs side by side, and their median."""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from raynforce.cli.watch import page
from raynforce.config import Config
from raynforce.errors import UsageError
from raynforce.runs.progress import Output, number
from raynforce.seeds import InterruptedSeeds, Seeds, Spread, numbers, resume_seeds, start_seeds
from raynforce.sinks import services


def train(arguments: argparse.Namespace, config: Config, preset: dict[str, Any], me: str) -> int:
    if "," in arguments.seeds and arguments.seed is not None:
        raise UsageError("--seeds names the seeds already: drop --seed, or give --seeds their number")
    seeds = numbers(arguments.seeds, config.seed)
    services(arguments.log)  # what cannot be is refused here, once
    at: dict[str, Any] = {"out": arguments.out, "go_on": arguments.resume}
    return _tell(arguments, lambda **how: start_seeds(config, preset, seeds, **at, **how), me)


def resume(arguments: argparse.Namespace, changes: dict[str, Any], me: str) -> int:
    return _tell(arguments, lambda **how: resume_seeds(arguments.run, changes, **how), me)


def _tell(arguments: argparse.Namespace, start: Callable[..., Seeds], me: str) -> int:
    if arguments.record is not None:
        raise UsageError("--record films one run, and these are several: leave it out, or train each --seed")
    stream = sys.stderr if arguments.json else sys.stdout
    progress = "quiet" if arguments.quiet else arguments.progress or os.environ.get("RAYNFORCE_PROGRESS") or "auto"
    how: dict[str, Any] = {"stream": stream, "log": arguments.log, "progress": progress}
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ:  # the driver of a job
        from raynforce.ops.draining import watch

        watch()
    try:
        with page(arguments, how, Output(stream).write if stream is not None else len):
            seeds = start(**how)
        code = 1 if seeds.failed else 0
    except InterruptedSeeds as interrupted:
        seeds, code = interrupted.seeds, 128 + interrupted.number
    if progress == "quiet":
        for run in seeds.failed:
            print(f"raynforce: seed {run.seed}: {run.error}", file=sys.stderr)
        print(f"runs: {seeds.folder}", file=stream)
    else:
        print(*lines(seeds, me), sep="\n", file=stream)
    if arguments.json:
        print(json.dumps(seeds.to_json()))
    return code


def lines(seeds: Seeds, me: str) -> Iterator[str]:
    """Median and spread, and what to type next."""
    found, results = seeds.summary(), seeds.results
    whole, seconds = "{:,.0f}".format, "{:.1f}".format
    yield ""
    if results:
        several = f"median of {len(results)} seeds, from the lowest to the highest:"
        yield several if len(results) > 1 else "one seed:"
        yield f"  best policy  {_spread(found['eval_return'], number)} mean return on fresh greedy episodes"
        if seeds.target is not None:
            met = f"  target       {seeds.target:g} met by {seeds.solved} of {len(results)}"
            steps, at = found["solved_steps"], found["solved_at"]
            if steps is not None and at is not None and math.isfinite(steps.median):
                met += f", after {_spread(steps, whole)} steps and {_spread(at, seconds)} s"
            elif steps is not None and at is not None:
                met += f", the first after {whole(steps.low)} steps and {seconds(at.low)} s"
            yield met
        beside = f", {seeds.at_once} at a time" if seeds.at_once > 1 else ""
        yield f"  speed        {_spread(found['steps_per_second'], whole)} steps/s{beside}"
    if seeds.failed:
        yield f"failed: seed{'s' * (len(seeds.failed) > 1)} {', '.join(str(run.seed) for run in seeds.failed)}"
    folder = shlex.quote(seeds.folder)
    yield from ["", f"runs: {seeds.folder}", "", "what to type next:", f"  {me} runs {folder}"]
    begun = [run.seed for run in seeds.runs if run.result is not None or Path(run.path, "config.yaml").exists()]
    if len(begun) > sum(not result.stopped.startswith("SIG") for result in results):
        yield f"  {me} resume {folder}"
    waiting = [str(run.seed) for run in seeds.runs if run.seed not in begun]
    which = f"--seeds {','.join(waiting)} --out {folder}"
    if len(waiting) == 1:  # a single number after --seeds is how many
        which = f"--seed {waiting[0]} --out {folder}/seed{waiting[0]}"
    if waiting:
        yield f"  the same command with {which}, for what had not begun"


def _spread(spread: Spread | None, show: Callable[[float], str]) -> str:
    if spread is None:
        return "–"
    middle, low, high = (show(value) if math.isfinite(value) else "never" for value in spread)
    return middle if low == high else f"{middle} ({low} to {high})"
