"""A working copy: the directory on this machine that stands for a run at a URL, and what both have in common."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from raynforce.errors import CheckpointError
from raynforce.runs import lock
from raynforce.runs.checkpoint import MANIFEST
from raynforce.runs.store import is_hidden, is_plain

CONFIG, LOCK, RECORD = "config.yaml", lock.NAME, ".remote.json"
CHECKPOINTS, SEGMENTS = "checkpoints/", "checkpoints/segments/"
POINTERS = ("last", "best")
NAME = re.compile(r"(step|best)_(\d{1,18})(?:\.(\d{1,9}))?")  # of a checkpoint

Contents = dict[str, tuple[int, str]]
"""Size and sha256 of each file of a checkpoint, by its path in the run."""


class WorkingCopy:
    """A working copy, and what it has in common with the store."""

    def __init__(self, local: Path) -> None:
        self.local = local
        self.wrote = False
        """Whether it was pushed since it was fetched, and so may be ahead of the store."""
        self.sent: dict[str, str] = {}
        """What is there of each file: the sha256 that a manifest states, or how long and how old a log was."""
        self._right: set[tuple[Path, tuple[int, str]]] = set()  # segments are shared by many checkpoints
        try:
            data = json.loads((local / RECORD).read_text())
            self.wrote, self.sent = bool(data["wrote"]), {str(k): str(v) for k, v in data["sent"].items()}
        except FileNotFoundError:
            self.wrote = (local / CONFIG).exists()  # a run that began here and was not pushed yet
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass  # torn: what is there wins

    def save(self) -> None:
        """Write down what is in common, before anything is done that relies on it."""
        self.local.mkdir(parents=True, exist_ok=True)
        temporary = self.local / f"{RECORD}.tmp"
        temporary.write_text(json.dumps({"wrote": self.wrote, "sent": self.sent}))
        temporary.replace(self.local / RECORD)

    def begin_writing(self) -> None:
        """From here on it may be ahead."""
        if not self.wrote or not (self.local / RECORD).exists():
            self.wrote = True
            self.save()

    def drop(self, prefix: str) -> None:
        """Files that are not there any more."""
        self.sent = {path: stamp for path, stamp in self.sent.items() if not path.startswith(prefix)}
        self.save()

    def names(self) -> list[str]:
        return _newest_first(path.name for path in (self.local / CHECKPOINTS).glob("*_*"))

    def checkpoints(self) -> dict[str, bytes]:
        """The manifest of each checkpoint here that has one, the newest first."""
        found = {}
        for name in self.names():
            with contextlib.suppress(FileNotFoundError, CheckpointError):
                data = (self.local / manifest_of(name)).read_bytes()
                files_of(name, data)
                found[name] = data
        return found

    def logs(self) -> list[str]:
        """Every file here that is not a checkpoint's: config, metrics, events, TensorBoard's, evidence of faults."""
        paths = [path.relative_to(self.local) for path in self.local.rglob("*") if path.is_file()]
        paths = [path for path in paths if not any(is_hidden(part) for part in path.parts)]
        return sorted(str(path) for path in paths if path.parts[0] not in ("checkpoints", LOCK, *POINTERS))

    def stamp(self, path: str) -> str:
        stat = (self.local / path).stat()
        return f"{stat.st_size} {stat.st_mtime_ns}"

    def target(self, link: str) -> str:
        """The name of the checkpoint that `last` or `best` is."""
        try:
            return Path(os.readlink(self.local / link)).name
        except OSError:
            return ""

    def is_ahead(self, newest: str | None, manifests: Mapping[str, bytes]) -> bool:
        """Whether the newest checkpoint in the store came from here, and this has that one or a newer one, whole."""
        if newest is None:
            return not any(path.endswith(f"/{MANIFEST}") for path in self.sent)
        if self.sent.get(manifest_of(newest)) != sha256_of(manifests[newest]):
            return False
        last = self.target("last")
        with contextlib.suppress(OSError, CheckpointError):
            return self.is_whole(last, (self.local / manifest_of(last)).read_bytes())
        return False

    def is_whole(self, name: str, data: bytes) -> bool:
        """Whether a checkpoint with this manifest is here, each file as stated."""
        manifest = self.local / manifest_of(name)
        files = files_of(name, data).items()
        return (
            manifest.is_file()
            and manifest.read_bytes() == data
            and all(self.is_right(self.local / path, stated) for path, stated in files)
        )

    def is_right(self, path: Path, stated: tuple[int, str]) -> bool:
        if (path, stated) in self._right:
            return True
        if not path.is_file() or path.stat().st_size != stated[0]:
            return False
        with path.open("rb") as file:
            right = hashlib.file_digest(file, "sha256").hexdigest() == stated[1]
        if right and path.parent.name == "segments":
            self._right.add((path, stated))
        return right

    def forget_others(self, checkpoints: Collection[str], files: Collection[str]) -> None:
        """Delete all checkpoints, segments and logs here but these."""
        for folder in (self.local / CHECKPOINTS).glob("*_*"):
            if folder.name not in checkpoints:
                shutil.rmtree(folder, ignore_errors=True)
        segments = [f"{SEGMENTS}{path.name}" for path in (self.local / SEGMENTS).glob("*")]
        for path in (*segments, *self.logs()):
            if path not in files:
                (self.local / path).unlink(missing_ok=True)


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def manifest_of(name: str) -> str:
    return f"{CHECKPOINTS}{name}/{MANIFEST}"


def _newest_first(names: Iterable[str]) -> list[str]:
    matches = [match for name in names if (match := NAME.fullmatch(name))]
    matches.sort(key=lambda match: (int(match[2]), int(match[3] or 1)), reverse=True)
    return [match[0] for match in matches]


def names_in(there: Iterable[str]) -> list[str]:
    """The checkpoints of which there is anything, the newest first."""
    return _newest_first({path.split("/")[1] for path in there if path.startswith(CHECKPOINTS)})


def files_of(name: str, data: bytes) -> Contents:
    """What a manifest refers to."""
    found: Contents = {}
    try:
        manifest = json.loads(data)
        for folder, files in ((name, manifest["files"]), ("segments", manifest["segments"])):
            for file, stated in files.items():
                if not is_plain(file) or is_hidden(file) or file == MANIFEST:
                    raise CheckpointError(f"checkpoint {name}: its {MANIFEST} names {file!r}, which is no file of it")
                found[f"{CHECKPOINTS}{folder}/{file}"] = (int(stated["size"]), str(stated["sha256"]))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        raise CheckpointError(f"checkpoint {name} is torn: its {MANIFEST} is not one") from None
    return found


def is_manifest(data: bytes) -> bool:
    try:
        return bool(files_of("", data))
    except CheckpointError:
        return False
