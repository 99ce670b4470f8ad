"""The run directory: where a run's config, metrics, events and checkpoints are."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from raynforce.errors import CheckpointError, UsageError
from raynforce.runs import checkpoint
from raynforce.runs.metrics import cannot_write
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
            hint = (
                f"; to go on with that run: raynforce resume {shlex.quote(str(self.path))}"
                if self.config.exists()
                else ""
            )
            raise UsageError(f"output directory {self.path} exists already: choose another with --out{hint}")

    def create(self, config: str) -> None:
        """Make it, with its config."""
        self.must_be_new()
        made: list[Path] = []
        try:
            self.checkpoints.mkdir(parents=True)
            made = [self.events, self.config, self.checkpoints]
            self.config.write_text(config)
            self.events.touch()
        except OSError as error:
            for path in made:  # so that the same command can be tried again
                with contextlib.suppress(OSError):
                    path.rmdir() if path.is_dir() else path.unlink()
            raise UsageError(f"cannot write to output directory {self.path}: {error.strerror}") from None

    def write_config(self, config: str) -> None:
        """Replace the config, whole or not at all."""
        temporary = self.config.with_name(".config.yaml.tmp")
        try:
            temporary.write_text(config)
            temporary.replace(self.config)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise cannot_write(self.config, error) from error

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Be its one writer, until the end of this process at the latest, however that comes."""
        with contextlib.ExitStack() as stack:
            descriptor = os.open(self.path, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UsageError(f"run {self.path} is in use by another process: wait, or end it first") from None
            for unfinished in self.checkpoints.glob(".*.tmp"):  # what a kill left half written
                shutil.rmtree(unfinished, ignore_errors=True)
            yield

    @staticmethod
    def open(path: Path) -> RunDirectory:
        """Open an existing run, one that can be resumed."""
        run = RunDirectory(path)
        if not path.exists():
            raise UsageError(f"there is no run at {path}{_similar(path)}")
        if not path.is_dir():
            raise UsageError(f"{path} is not a run directory: it is a file")
        if not run.config.is_file():
            raise UsageError(f"{path} is not a run directory: it has no config.yaml")
        return run

    def event(self, kind: str, /, **facts: Any) -> None:
        """Append a line to the run's history."""
        try:
            with self.events.open("a") as file:
                file.write(json.dumps({"time": time.time(), "event": kind, **facts}) + "\n")
        except OSError as error:
            raise cannot_write(self.events, error) from error

    def save(self, step: int, parts: dict[str, Tree], keep: int) -> None:
        """Write a whole checkpoint, point `last` to it, and delete all but the newest `keep`."""
        path = self._free(f"step_{step:012d}")
        checkpoint.save(path, parts, step=step)
        checkpoint.point(self.last, path)
        for old in self._steps()[:-keep]:
            if old != path:  # which is not the newest by number after going back to an older one
                shutil.rmtree(old, ignore_errors=True)

    def save_best(self, step: int, policy: Tree, score: float) -> None:
        """Write a policy and point `best` to it."""
        path = self._free(f"best_{step:012d}")
        checkpoint.save(path, {"policy": policy}, step=step, eval_return=score)
        checkpoint.point(self.best, path)
        for old in self.checkpoints.glob("best_*"):
            if old != path:
                shutil.rmtree(old, ignore_errors=True)

    def _free(self, name: str) -> Path:
        """A name of its own: the same step again, after a resume, must not touch what `last` or `best` names."""
        taken = [_age(path)[1] for path in self.checkpoints.glob(f"{name}*")]
        return self.checkpoints / (f"{name}.{max(taken) + 1}" if taken else name)

    def _steps(self) -> list[Path]:
        """Whole checkpoints, the oldest first."""
        return sorted(self.checkpoints.glob("step_*"), key=_age)

    def last_step(self) -> int:
        """How far the newest checkpoint is."""
        if not self.last.is_dir():
            raise CheckpointError(f"{self.path} has no checkpoint to resume from: it was stopped before its first one")
        return int(checkpoint.manifest(self.last).get("step", 0))

    def load_last(self) -> dict[str, Tree]:
        """The newest whole checkpoint."""
        self.last_step()
        try:
            return checkpoint.load(self.last)
        except CheckpointError as error:
            older = [p.name for p in self._steps() if p.name != self.last.resolve().name]
            hint = f"; to go back to an older one: ln -sfn checkpoints/{older[-1]} {self.last}" if older else ""
            raise CheckpointError(f"{error}{hint}") from error


def _age(path: Path) -> tuple[int, int]:
    """The step of a checkpoint's name, and which of that step it is."""
    step, _, count = path.name.partition("_")[2].partition(".")
    return int(step), int(count or 1)


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
