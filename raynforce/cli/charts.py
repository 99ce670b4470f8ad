"""`raynforce plot`, `report` and `export-metrics`: what they print."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from raynforce.cli.text import Page, say
from raynforce.errors import UsageError
from raynforce.runs.progress import number

LABEL = 14
TELL_AFTER = 2.0  # seconds before it is told what is being done


@contextlib.contextmanager
def telling() -> Iterator[Callable[[str], None]]:
    """Takes what is being done, and says it on stderr now and then if it lasts."""
    doing, over, began = [""], threading.Event(), time.monotonic()

    def work() -> None:
        pause = TELL_AFTER
        while not over.wait(pause):
            if doing[0]:
                print(f"{doing[0]}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
            pause = min(60.0, 1.5 * pause)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield lambda text: doing.__setitem__(0, text)
    finally:
        over.set()
        thread.join()


def plot(arguments: argparse.Namespace, target: float | None) -> int:
    from raynforce.charts.plotting import plot

    with telling() as say_doing:
        how = {"metric": arguments.metric, "over": arguments.over, "target": target, "say": say_doing}
        found = plot(arguments.runs, arguments.out, **how)
    if arguments.json:
        print(json.dumps(found))
        return 0
    labels = [label for facts in found["envs"].values() for label in facts["groups"]]
    page = Page(max([LABEL, *(len(label) + 4 for label in labels)]))
    for env, facts in found["envs"].items():
        page.title(env, facts["score"])
        for label, score in facts["groups"].items():
            spread = f" ({number(score['low'])} to {number(score['high'])})" if score["runs"] > 1 else ""
            runs = f"{score['runs']} run{'s' * (score['runs'] != 1)}"
            page.row(f"  {label}", f"{number(score['iqm'])}{spread}, {runs}{_met(facts, label)}")
    say(f"written: {found['file']}")
    return 0


def _met(facts: dict[str, Any], label: str) -> str:
    if "target" not in facts:
        return ""
    took = facts["time_to_target"][label]
    median = "" if took["median"] is None else f" after {took['median']:,.0f} (median)"
    return f"; {facts['target']:g} met by {took['met']} of {took['runs']}{median}"


def report(arguments: argparse.Namespace) -> int:
    from raynforce.charts.report import report

    with telling() as say_doing:
        path = report(arguments.runs, arguments.out, say=say_doing)
    print(json.dumps({"file": str(path), "bytes": path.stat().st_size})) if arguments.json else say(f"written: {path}")
    return 0


def export_metrics(arguments: argparse.Namespace) -> int:
    from raynforce.charts.table import export_metrics

    if arguments.json and arguments.out is None:
        raise UsageError("--json prints one object, and the table would be before it: add -o FILE")
    with telling() as say_doing:
        found = export_metrics(arguments.run, sys.stdout if arguments.out is None else arguments.out, say=say_doing)
    if arguments.json:
        print(json.dumps({"file": arguments.out, **found}))
    elif arguments.out is not None:
        say(f"written: {arguments.out}, {found['rows']:,} rows of {len(found['columns'])} columns")
    return 0
