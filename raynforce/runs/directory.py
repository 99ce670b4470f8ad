"""The run directory: where a run's config, metrics, events and checkpoints are."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from raynforce.errors import CheckpointError, UsageError
from raynforce.runs import checkpoint
from raynforce.trees import Tree


class RunDirectory:
    """A run on disk.

    `config.yaml`, `metrics.jsonl`, `events.jsonl`, `tensorboard/`, `checkpoints/`, and the links `best` (the policy
    that evaluated best) and `last` (everything, for `resume`).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.events = path / "events.jsonl"
        self.tensorboard = path / "tensorboard"
        self.checkpoints = path / "checkpoints"
        self.best = path / "best"
        self.last = path / "last"

    def must_be_new(self) -> None:
        """Refuse a directory that holds anything already."""
        try:
            taken = self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir()))
        except OSError as error:
            raise UsageError(f"cannot use output directory {self.path}: {error.strerror}") from None
        if taken:
            hint = f"; to go on with that run: raynforce resume {self.path}" if self.config.exists() else ""
            raise UsageError(f"output directory {self.path} exists already: choose another with --out{hint}")

    def create(self, config: str) -> None:
        """Make it, with its config."""
        self.must_be_new()
        try:
            self.checkpoints.mkdir(parents=True)
            self.config.write_text(config)
            self.events.touch()
        except OSError as error:
            raise UsageError(f"cannot write to output directory {self.path}: {error.strerror}") from None

    @staticmethod
    def open(path: Path) -> RunDirectory:
        """Open an existing run, one that can be resumed."""
        run = RunDirectory(path)
        if not path.is_dir():
            raise UsageError(f"there is no run at {path}{_similar(path)}")
        if not run.config.is_file():
            raise UsageError(f"{path} is not a run directory: it has no config.yaml")
        for unfinished in run.checkpoints.glob(".*"):  # what a kill left half written
            shutil.rmtree(unfinished, ignore_errors=True)
        return run

    def event(self, kind: str, **facts: Any) -> None:
        """Append a line to the run's history."""
        with self.events.open("a") as file:
            file.write(json.dumps({"time": time.time(), "event": kind, **facts}) + "\n")

    def save(self, step: int, parts: dict[str, Tree], keep: int) -> None:
        """Write a whole checkpoint, point `last` to it, and delete all but the newest `keep`."""
        path = self.checkpoints / f"step_{step:012d}"
        checkpoint.save(path, parts, step=step)
        checkpoint.point(self.last, path)
        for old in sorted(self.checkpoints.glob("step_*"))[:-keep]:
            if old != path:
                shutil.rmtree(old, ignore_errors=True)

    def save_best(self, step: int, policy: Tree, score: float) -> None:
        """Write a policy and point `best` to it."""
        path = self.checkpoints / f"best_{step:012d}"
        checkpoint.save(path, {"policy": policy}, step=step, eval_return=score)
        checkpoint.point(self.best, path)
        for old in self.checkpoints.glob("best_*"):
            if old != path:
                shutil.rmtree(old, ignore_errors=True)

    def load_last(self) -> dict[str, Tree]:
        """The newest whole checkpoint."""
        if not self.last.is_dir():
            raise CheckpointError(f"{self.path} has no checkpoint to resume from: it was stopped before its first one")
        return checkpoint.load(self.last)


def find_policy(path: Path, which: str = "best") -> Path:
    """The checkpoint that a path stands for: a run's `best` (or `last`), or a checkpoint itself."""
    if (path / checkpoint.MANIFEST).exists():
        return path
    if not path.exists():
        raise CheckpointError(f"there is no run or checkpoint at {path}{_similar(path)}")
    for name in (which, "last"):
        if (path / name).is_dir():
            return path / name
    raise CheckpointError(f"{path} holds no checkpoint: it is not a run, or was stopped before its first checkpoint")


def _similar(path: Path) -> str:
    from raynforce.errors import nearest

    try:
        return nearest(path.name, os.listdir(path.parent))
    except OSError:
        return ""
