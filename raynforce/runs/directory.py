"""The run directory: where a run's config, metrics, events and checkpoints are."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from raynforce.errors import CheckpointError, UsageError, nearest
from raynforce.runs import checkpoint, disk, lock
from raynforce.runs.files import Stated, Unavailable
from raynforce.runs.journal import Journal
from raynforce.runs.metrics import cannot_write
from raynforce.runs.provenance import provenance
from raynforce.trees import SEGMENTS, Tree

_NEW_CONFIG = ".config.yaml.tmp"
_NAME = re.compile(r"(step|best)_\d{12,18}(\.\d{1,9})?")
_UNFINISHED = re.compile(r"\.[A-Za-z0-9_.-]+\.\d+\.tmp")


class Saved(NamedTuple):
    path: Path
    bytes_written: int


class Loaded(NamedTuple):
    """A checkpoint that was read, and what is to be said about it: others that were skipped, and why."""

    path: Path
    parts: dict[str, Tree]
    manifest: dict[str, Any]
    notes: list[str]


class RunDirectory:
    """A run on disk.

    `config.yaml`, `metrics.jsonl`, `events.jsonl`, `tensorboard/`, `checkpoints/`, and the links `best` (the policy
    that evaluated best) and `last` (everything, for `resume`).
    """

    patience: float | None = None
    """Seconds that the last checkpoint may be under way, if it is not the disk that it is written to."""
    is_mirrored = False
    """Whether others see it elsewhere."""

    def __init__(self, path: Path, *, numbered: bool = False) -> None:
        """`numbered` if `create` may put `-2` behind its name, and so on, where there is one already."""
        self._numbered = numbered
        self._be_at(path)
        self.notes: list[str] = []  # what a user should know of it since it was opened
        self._saving = threading.Lock()
        self._newest: dict[str, Stated] = {}  # segments of the checkpoint that was saved or loaded last, by file
        self._manifests: dict[str, dict[str, Any] | None] = {}  # of whole checkpoints
        self.made_on: dict[str, str] = {}
        """What manifests say of the machines that its roles live on, where that is more than of this one."""
        self.heard: Callable[[dict[str, Any]], None] | None = None  # is told of every event, while there is one
        self.journal: Journal | None = None  # writes the events while there is one, so that nobody waits for the disk

    def _be_at(self, path: Path) -> None:
        self.path = path
        self.shown = str(path)  # how a user names it
        self.config, self.metrics, self.events = (path / f for f in ("config.yaml", "metrics.jsonl", "events.jsonl"))
        self.tensorboard, self.checkpoints = path / "tensorboard", path / "checkpoints"
        self.best, self.last = path / "best", path / "last"

    def must_be_new(self) -> None:
        """Refuse a directory that holds anything already, unless another name will do."""
        if self._numbered:
            return
        try:
            taken = self.path.exists() and not (self.path.is_dir() and self._is_unmade())
        except OSError as error:
            raise UsageError(f"cannot use output directory {self.path}: {error.strerror}") from None
        if taken:
            resume = f"; to go on with that run: raynforce resume {shlex.quote(str(self.path))}"
            hint = resume if self.config.exists() else ""
            raise UsageError(f"output directory {self.path} exists already: choose another with --out{hint}")

    def _is_unmade(self) -> bool:
        """Whether there is nothing in it but what `create` leaves when it is killed."""
        left = {path.name for path in self.path.iterdir()} <= {self.checkpoints.name, self.events.name, _NEW_CONFIG}
        written = self.events.exists() and self.events.stat().st_size > 0
        return left and not written and not (self.checkpoints.is_dir() and any(self.checkpoints.iterdir()))

    def create(self, config: str) -> None:
        """Make it, with its config. Of several processes that want the same one, a single one gets it."""
        self.must_be_new()
        made: list[Path] = []  # to be removed again if it fails
        try:
            with contextlib.suppress(FileExistsError):  # a file, which the next lines complain about
                self.path.parent.mkdir(parents=True, exist_ok=True)
            if self._numbered:
                self._be_at(disk.numbered(self.path))
                made.append(self.path)
            else:
                with contextlib.suppress(FileExistsError):
                    self.path.mkdir()  # one process alone can do that
                    made.append(self.path)
            with disk.alone(self.path, os.O_RDONLY | os.O_DIRECTORY):
                self.must_be_new()  # another process may have had it until now
                self.checkpoints.mkdir(parents=True, exist_ok=True)
                made += [self.checkpoints, self.config.with_name(_NEW_CONFIG), self.events]
                self.events.write_bytes(b"")
                self._replace_config(config)  # the last: a directory with a config is a run
                made.clear()
        except OSError as error:
            raise UsageError(f"cannot write to output directory {self.path}: {error.strerror}") from None
        finally:
            for path in reversed(made):  # so that the same command can be tried again
                with contextlib.suppress(OSError):
                    path.rmdir() if path.is_dir() else path.unlink()

    def write_config(self, config: str) -> None:
        try:
            self._replace_config(config)
        except OSError as error:
            with contextlib.suppress(OSError):
                self.config.with_name(_NEW_CONFIG).unlink()
            raise cannot_write(self.config, error) from error

    def _replace_config(self, config: str) -> None:
        temporary = self.config.with_name(_NEW_CONFIG)
        temporary.write_text(config, encoding="utf-8")
        disk.flush(temporary)
        temporary.replace(self.config)
        disk.flush(self.path)

    @contextlib.contextmanager
    def locked(self) -> Iterator[lock.Lock]:
        """Be its one writer, until the end of this process at the latest, however that comes."""
        with lock.locked(self.path) as held:
            with contextlib.suppress(OSError):
                self._sweep()
            yield held

    def _sweep(self) -> None:
        """Delete what a kill left half written, or half deleted; nothing else is being written meanwhile."""
        for folder in self.checkpoints.glob(".*.tmp"):
            shutil.rmtree(folder, ignore_errors=True)
        for link in (self.last, self.best):
            for temporary in self.path.glob(f".{link.name}.*.tmp"):
                temporary.unlink(missing_ok=True)

    def holder(self) -> lock.Holder | None:
        return lock.holder(self.path)

    @staticmethod
    def open(path: Path) -> RunDirectory:
        run = RunDirectory(path)
        if not path.exists():
            raise UsageError(f"there is no run at {path}{_similar(path)}")
        if not path.is_dir():
            raise UsageError(f"{path} is not a run directory: it is a file")
        if seeds := seeds_in(path):
            raise UsageError(f"{path} holds the runs of {len(seeds)} seeds: name one, such as {seeds[0]}")
        if not run.config.is_file():
            raise UsageError(f"{path} is not a run directory: it has no config.yaml")
        return run

    def event(self, kind: str, /, **facts: Any) -> None:
        told = {"time": time.time(), "event": kind, **facts}
        line = json.dumps(told).encode() + b"\n"
        if self.heard is not None:
            self.heard(told)
        try:
            if self.journal is not None:
                self.journal.append(self.events, line)
            else:
                with self.events.open("ab") as file:
                    file.write(line)
        except OSError as error:
            raise cannot_write(self.events, error) from error

    def save(self, step: int, parts: dict[str, Tree], keep: int, keep_nth: int = 0) -> Saved:
        """Write a whole checkpoint, point `last` to it, and delete those that are not to be kept.

        Kept are the newest `keep`, and for good each whose number is a multiple of `keep_nth`. It may run in a thread
        of its own beside all else. Whatever goes wrong is a `RaynforceError`, and older ones are untouched.
        """
        with self._saving:
            history = self._history()
            folder, newest = self.checkpoints / SEGMENTS, self._newest.items()
            self._newest = {file: stated for file, stated in newest if checkpoint.present(folder / file, stated)}
            path = self._free(f"step_{step:012d}")
            # How many there were before, those included that are deleted.
            number = 1 + max(((manifest or {}).get("number", i) for i, (_, manifest) in enumerate(history)), default=-1)
            size = checkpoint.save(path, parts, known=self._newest, number=number, **self._facts(step))
            self._newest = checkpoint.stated_in(checkpoint.manifest(path), SEGMENTS)
            checkpoint.point(self.last, path)
            with contextlib.suppress(OSError, CheckpointError):  # what is left over goes the next time
                self._prune(path, keep, keep_nth)
        return Saved(path, size)

    def _facts(self, step: int) -> dict[str, Any]:
        return {"step": step, "time": time.time(), **provenance(), **self.made_on}

    def finish(self) -> None:
        """All that belongs to the run is written: bring it to where others see it, if that is elsewhere."""

    def send_live(self, text: str) -> None:
        """Let others see what the run tells, if that is elsewhere."""

    def known(self, part: str) -> set[str]:
        """Names of a part's segments that the checkpoint saved or loaded last refers to.

        The next one may have them as `{}`: see `trees.without`. Training asks, so the disk is not: should one be gone,
        that checkpoint fails, and the segment is not known any more.
        """
        return {name for owner, name, *_ in (file.split(".") for file in self._newest) if owner == part}

    def save_best(self, step: int, policy: Tree, score: float) -> Saved:
        with self._saving:
            path = self._free(f"best_{step:012d}")
            size = checkpoint.save(path, {"policy": policy}, eval_return=score, **self._facts(step))
            checkpoint.point(self.best, path)
            with contextlib.suppress(OSError, CheckpointError):
                for old in set(self._named("best")) - {path}:
                    _remove(old)
                self._sweep()
        return Saved(path, size)

    def load_best(self) -> tuple[float, Tree]:
        """The policy that evaluated best, and its score."""
        policy = checkpoint.load(self.best, only=["policy"])["policy"]
        score = checkpoint.manifest(self.best).get("eval_return")
        if not isinstance(score, int | float):  # a user may have set the link
            raise CheckpointError(f"{self.best} leads to a checkpoint that was not evaluated")
        return float(score), policy

    def load_newest(self) -> Loaded | None:
        """The newest whole checkpoint, `last` first; else the newest without its damaged segments; else None."""
        paths = self.candidates()
        if not paths and not self.last.is_symlink():
            return None
        notes: list[str] = []
        if self.last.is_symlink() and not self.last.exists():
            notes.append(f"{self.last} names no checkpoint")
        for path in paths:
            try:
                return self._loaded(path, notes)
            except CheckpointError as error:
                notes.append(f"skipped: {error}")
        for path in paths:
            with contextlib.suppress(CheckpointError):
                return self._loaded(path, notes, damaged={})
        raise CheckpointError(f"{self.path} has no checkpoint that can be used: {'; '.join(notes)}")

    def _loaded(self, path: Path, notes: list[str], damaged: dict[str, str] | None = None) -> Loaded:
        parts, manifest = checkpoint.load(path, damaged=damaged), checkpoint.manifest(path)
        segments = checkpoint.stated_in(manifest, SEGMENTS)
        self._newest = {file: stated for file, stated in segments.items() if file not in (damaged or {})}
        where = f"{path}, at step {manifest.get('step', 0)}"
        if damaged:
            example = f"{min(damaged)} {damaged[min(damaged)]}"
            loss = f"{len(damaged)} of its {len(segments)} segments, which are lost ({example})"
            notes = [*notes, f"WARNING: nothing is whole: going on from {where}, WITHOUT {loss}"]
        elif notes:
            notes = [*notes, f"taken instead: {where}"]
        return Loaded(path, parts, manifest, notes)

    def _named(self, kind: str) -> list[Path]:
        """Checkpoints of a kind, by step; strangers in the folder are left alone."""
        try:
            found = [path for path in self.checkpoints.iterdir() if _NAME.fullmatch(path.name)]
        except FileNotFoundError:
            return []
        except OSError as error:  # that is not to say that there are none
            raise CheckpointError(f"cannot list {self.checkpoints}: {error.strerror or error}") from error
        return sorted((path for path in found if path.name.startswith(kind)), key=_age)

    def _free(self, name: str) -> Path:
        """A name of its own: the same step again, after a resume, must not touch what `last` or `best` names."""
        taken = [_age(path)[1] for path in self._named(name)]
        return self.checkpoints / (f"{name}.{max(taken) + 1}" if taken else name)

    def _history(self, *, sure: bool = False) -> list[tuple[Path, dict[str, Any] | None]]:
        """Checkpoints as they were written, those without a true manifest first; `sure`: the disk must give each."""
        paths = self._named("step")
        manifests: dict[str, dict[str, Any] | None] = {}
        for path in paths:
            manifests[path.name] = self._manifests.get(path.name)
            if manifests[path.name] is None:
                try:
                    manifests[path.name] = checkpoint.manifest(path)
                except CheckpointError as error:
                    if sure and isinstance(error.__cause__, Unavailable):
                        raise
        self._manifests = manifests  # they never change

        found = [(path, manifests[path.name]) for path in paths]
        return sorted(found, key=lambda one: (one[1] is not None, (one[1] or {}).get("number", -1)))

    def candidates(self) -> list[Path]:
        """What to resume from, in order: `last`, those without a true manifest (to be reported), from the newest on."""
        history = self._history()[::-1]
        history.sort(key=lambda found: found[1] is not None)
        paths = [path for path, _ in history]
        if not self.last.is_dir():
            return paths
        named = [path for path in paths if path.resolve() == self.last.resolve()]
        return [*(named or [self.last]), *(path for path in paths if path not in named)]

    def _prune(self, newest: Path, keep: int, keep_nth: int) -> None:
        """Delete checkpoints that are not to be kept, then the segments that none refers to any more."""
        for path, manifest in self._history(sure=True)[:-keep]:
            number = (manifest or {}).get("number")
            if path != newest and not (keep_nth and number is not None and number % keep_nth == 0):
                _remove(path)
        self._sweep()
        # Without a true manifest none can be used.
        used = {file for _, manifest in self._history(sure=True) for file in (manifest or {}).get(SEGMENTS, {})}
        for file in (self.checkpoints / SEGMENTS).glob("*"):
            if file.name not in used and (checkpoint.SEGMENT.fullmatch(file.name) or _UNFINISHED.fullmatch(file.name)):
                with contextlib.suppress(OSError):
                    file.unlink()


def _remove(path: Path) -> None:
    """Delete a checkpoint: it loses its name first, so that none is ever seen in part."""
    gone = path.with_name(f".{path.name}.gone.tmp")
    shutil.rmtree(gone, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


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
    if seeds := seeds_in(path):
        raise CheckpointError(f"{path} holds the runs of {len(seeds)} seeds: name one, such as {seeds[0]}")
    raise CheckpointError(f"{path} holds no checkpoint: it is not a run, or was stopped before its first checkpoint")


def seeds_in(folder: str | Path) -> list[Path]:
    """The runs of several seeds that were trained into one folder, `seed0` and so on; nothing if it is none."""
    path = Path(folder).expanduser()
    if not path.is_dir() or (path / "config.yaml").exists():
        return []
    found = [run for run in path.glob("seed*") if run.name[4:].isdigit() and (run / "config.yaml").is_file()]
    return sorted(found, key=lambda run: int(run.name[4:]))


def _similar(path: Path) -> str:
    with contextlib.suppress(OSError):
        return nearest(path.name, os.listdir(path.parent))
    return ""
