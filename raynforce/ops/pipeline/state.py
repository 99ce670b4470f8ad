"""What a pipeline has done: a small file for each step that is done, beside its runs, in a directory or at a URL."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from raynforce.errors import CheckpointError, RaynforceError, UsageError
from raynforce.ops.pipeline.plan import Step
from raynforce.runs import disk, lock, remote_lock
from raynforce.runs.store import Missing, Store, is_url

DONE, ATTEMPTS = "done.json", "attempts.json"
SHORT = 12  # characters of a hash that are in a name


class State:
    """Folders `STEP-HASH`, by what a step was asked for and what it was given: nothing is ever written over."""

    def __init__(self, where: str) -> None:
        self.where = where
        self._store = Store.open(where) if is_url(where) else None
        if self._store is None and Path(where).exists() and not Path(where).is_dir():
            raise UsageError(f"dir = {where!r} is a file: give a directory for the pipeline's state")
        self.attempts: dict[str, int] = self._read(ATTEMPTS) or {}

    def hash(self, step: Step, inputs: Mapping[str, Any]) -> str:
        """Equal for a step of equal settings with equal inputs, unless it was asked to run again."""
        asked = [step.kind, step.settings, [inputs[need] for need in step.needs], self.attempts.get(step.name, 0)]
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:SHORT]

    def path(self, step: Step, hash: str) -> str:
        return f"{self.where}/{step.name}-{hash}"

    def done(self, step: Step, hash: str) -> dict[str, Any] | None:
        return self._read(f"{step.name}-{hash}/{DONE}")

    def finish(self, step: Step, hash: str, marker: Mapping[str, Any]) -> None:
        """The step is done from here on, however this process ends."""
        self._write(f"{step.name}-{hash}/{DONE}", {"step": step.name, "kind": step.kind, "hash": hash, **marker})

    def begun(self, step: Step, hash: str) -> bool:
        return f"{step.name}-{hash}" in self._names()

    def earlier(self, step: Step, hash: str) -> dict[str, Any] | None:
        """The marker of the last time that this step was done with something else."""
        others = [name for name in self._names() if name.startswith(f"{step.name}-") and not name.endswith(hash)]
        markers = [found for name in others if (found := self._read(f"{name}/{DONE}")) is not None]
        return max(markers, key=lambda marker: float(marker.get("time", 0)), default=None)

    def again(self, steps: set[str]) -> None:
        """Steps that are done are to run once more; what they made stays where it is."""
        self.attempts = {**self.attempts, **{name: self.attempts.get(name, 0) + 1 for name in steps}}
        self._write(ATTEMPTS, self.attempts)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """One process at a time works on a pipeline."""
        if self._store is not None:
            held = remote_lock.claim(self._store)
            try:
                yield
            finally:
                held.release()
            return
        try:
            Path(self.where).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot write to dir = {self.where!r}: {error.strerror}") from None
        with lock.locked(Path(self.where)):
            yield

    def _names(self) -> list[str]:
        if self._store is not None:
            self._store.fs.invalidate_cache()
            return list(self._store.entries())
        with contextlib.suppress(OSError):
            return os.listdir(self.where)
        return []

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            if self._store is not None:
                self._store.fs.invalidate_cache()
                data = self._store.read(name)
            else:
                data = (Path(self.where) / name).read_bytes()
            found = json.loads(data)
        except (Missing, FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"cannot read {self.where}/{name}: {error}; delete it to run the step again"
            ) from None
        return found if isinstance(found, dict) else None

    def _write(self, name: str, data: Mapping[str, Any]) -> None:
        text = json.dumps(data, indent=1).encode() + b"\n"
        if self._store is not None:
            self._store.write(name, text)
            return
        path = Path(self.where) / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.tmp")
            temporary.write_bytes(text)
            disk.flush(temporary)
            temporary.replace(path)
            disk.flush(path.parent)
        except OSError as error:
            with contextlib.suppress(OSError):
                path.with_name(f".{path.name}.tmp").unlink(missing_ok=True)
            raise RaynforceError(f"cannot write {path}: {error.strerror}") from error
