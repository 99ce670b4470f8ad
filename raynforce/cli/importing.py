"""`raynforce import`: another library's checkpoint as a run."""

from __future__ import annotations

import json
import shlex
import sys
from typing import Any

from raynforce.runs.terminal import columns, command, folded


def tell(folder: str, *, me: str, as_json: bool, **how: Any) -> int:
    """Take it over, and say what it is and what to type next."""
    from raynforce.api import import_rllib

    if how["trust"]:
        print(f"reading {folder} with RLlib, in a process of its own", file=sys.stderr, flush=True)
    found = import_rllib(folder, **how)
    config, most = found.config, columns(sys.stdout)
    if as_json:
        facts = {"run": str(found.path), "algo": config.algo, "env": config.env, "steps": found.steps}
        facts |= {"episodes": found.episodes, "resumable": found.resumable, "notes": list(found.notes)}
        print(json.dumps(facts))
        return 0
    print(f"imported: {config.algo} on {config.env}, {found.steps:,} steps and {found.episodes:,} episodes")
    for note in found.notes:
        print(*folded(f"note: {note}", most, further="  "), sep="\n")
    run = shlex.quote(str(found.path))
    print(f"\nrun: {found.path}\n\nwhat to type next:")
    typed = [f"{me} eval {run}"]
    typed += [f"{me} resume {run} --steps {2 * max(found.steps, 1)}"] if found.resumable else []
    for line in typed:
        print(*command(line, most, "  "), sep="\n")
    return 0
