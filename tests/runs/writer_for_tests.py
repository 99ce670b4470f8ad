"""A run that does nothing but save, for tests that kill it: `python writer_for_tests.py RUN FIRST`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from raynforce import trees
from raynforce.runs.directory import RunDirectory
from raynforce.trees import SEGMENTS, Tree

PLACES, ROWS = 5, 4000


def state(count: int) -> dict[str, Tree]:
    """A learner that changes one of its segments, in turn, between two checkpoints."""
    stamps = [max(0, count - (count - place) % PLACES) for place in range(PLACES)]
    ring = {f"{place}-{stamp}": {"x": np.full(ROWS, stamp)} for place, stamp in enumerate(stamps)}
    return {"learner": {"replay": {SEGMENTS: ring}, "count": count, "params": np.full(ROWS, count)}}


def save(run: RunDirectory, count: int) -> None:
    parts = state(count)
    parts["learner"] = trees.without(parts["learner"], run.known("learner"))
    run.save(count, parts, keep=2, keep_nth=50)


def main(path: str, first: int) -> None:
    run = RunDirectory(Path(path))
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    run.load_newest()
    for count in range(first, first + 10**6):
        save(run, count)
        print(count, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
