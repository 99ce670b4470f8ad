"""`raynforce export`: a policy as a folder that acts without us."""

from __future__ import annotations

import json
import sys
from shlex import quote

from raynforce.ops.exporting import export
from raynforce.runs.progress import number

SLOW = {"torchscript": "tracing and verifying", "cpp": "compiling and verifying"}


def tell(run: str, to: str, folder: str, *, which: str, as_json: bool) -> int:
    if to in SLOW:
        print(f"{SLOW[to]} ...", file=sys.stderr, flush=True)
    made = export(run, to, folder, which=which)
    if as_json:
        print(json.dumps(made.to_json()))
        return 0
    print(f"{made.path} has {', '.join(made.files)}")
    error = f"{made.error:.1g}" if made.error else number(0.0)
    print(f"verified on {made.observations:,} random observations: the largest difference to load(...).act is {error}")
    how = "cmake -B build && cmake --build build" if to == "cpp" else "python -c 'from predict import act; help(act)'"
    print(f"next: cd {quote(str(made.path))} && {how}")
    return 0
