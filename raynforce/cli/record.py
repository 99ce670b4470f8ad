"""`raynforce record`: episodes that a policy plays, as a file."""

from __future__ import annotations

import functools
import json
import shlex
import sys
from typing import Any

from raynforce.runs.progress import number
from raynforce.runs.terminal import columns, command, folded
from raynforce.settings import assignment


def tell(source: str, *, me: str, as_json: bool, **how: Any) -> int:
    """Play and write, and say what there is and what to type next."""
    from raynforce.demonstrations import record

    made = record(source, say=functools.partial(print, file=sys.stderr, flush=True), **how)
    mean, deviation = float(made.returns.mean()), float(made.returns.std())
    if as_json:
        facts = {"path": str(made.path), "format": made.format, "env": made.env}
        print(
            json.dumps({**facts, "episodes": made.episodes, "steps": made.steps, "mean": mean, "deviation": deviation})
        )
        return 0
    most = columns(sys.stdout)
    spread = f"mean return {number(mean)} (deviation {number(deviation)})"
    line = f"recorded: {made.episodes:,} episodes and {made.steps:,} steps of {made.env}, {spread}"
    print(*folded(line, most, further="  "), sep="\n")
    print(f"\ndata: {made.path}\n\nwhat to type next:")
    typed = f"{me} train bc {shlex.quote(made.env)} --data {shlex.quote(str(made.path))}"
    for key, value in made.env_args.items():
        typed += f" --set {shlex.quote(assignment(f'env_args.{key}', value))}"
    print(*command(typed, most, "  "), sep="\n")
    return 0
