"""Runs at a URL: a local working copy in which everything happens as always, and its mirror in a store."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from raynforce.errors import CheckpointError, RaynforceError, UsageError, summary
from raynforce.runs import lock
from raynforce.runs.checkpoint import MANIFEST, point
from raynforce.runs.disk import cache_folder
from raynforce.runs.store import Missing, Store, is_hidden, is_plain

CONFIG, LOCK, RECORD = "config.yaml", lock.NAME, ".remote.json"
CHECKPOINTS, SEGMENTS = "checkpoints/", "checkpoints/segments/"
POINTERS = ("last", "best")
NAME = re.compile(r"(step|best)_(\d{1,18})(?:\.(\d{1,9}))?")  # of a checkpoint
_ATTEMPTS = 10

Contents = dict[str, tuple[int, str]]  # size and sha256 of each file of a checkpoint, by its path in the run


class Remote:
    """A run at a URL.

    There it has the files of a run directory under the same names; only `last` and `best` are small text files with the
    name of a checkpoint. A checkpoint is there once its manifest is, which comes after everything it refers to;
    `last` moves after that, and only then are old checkpoints deleted. So a reader finds a whole one at any moment.

    A push replaces and deletes nothing that was not pushed from, or fetched into, this working copy.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.url = store.url

    @staticmethod
    def open(url: str) -> Remote:
        return Remote(Store.open(url))

    def working_copy(self) -> Path:
        """The directory on this machine that stands for the run, always the same for one URL."""
        name = re.sub(r"[^\w.-]", "_", self.store.given.rpartition("/")[2])
        return cache_folder() / "runs" / f"{name}-{_sha256(self.store.given.encode())[:12]}"

    def exists(self) -> bool:
        return self.store.has(CONFIG)

    def strangers(self) -> list[str]:
        """Names of what is at the URL and no lock; of no run, if none `exists`."""
        return [name for name in self.store.entries() if name != LOCK]

    def begin_writing(self, local: Path) -> None:
        """From here on the working copy may be ahead; the run there must be the one that was fetched or pushed."""
        with _working_copy(local) as copy:
            last = self._pointer("last", POINTERS)
            if last is not None and _manifest(last) not in copy.sent:
                raise UsageError(f"run {self.url} was continued elsewhere a moment ago: try again")
            copy.begin_writing()

    def _list(self) -> dict[str, int]:
        return self.store.list(later=SEGMENTS)  # so that what a manifest refers to is seen if the manifest is

    def _pointer(self, link: str, there: Collection[str]) -> str | None:
        """The checkpoint that `last` or `best` names, if it does."""
        name = ""
        with contextlib.suppress(Missing):
            name = self.store.read(link).decode(errors="replace").strip() if link in there else ""
        return name if NAME.fullmatch(name) else None

    def _manifests(self, there: Iterable[str], notes: list[str], but: Collection[str] = ()) -> dict[str, bytes]:
        """The manifest of each checkpoint there that has one, the newest first, without those of these paths."""
        found: dict[str, bytes] = {}
        for name in _newest_first({path.split("/")[1] for path in there if path.startswith(CHECKPOINTS)}):
            if _manifest(name) in there and _manifest(name) not in but:
                data = self.store.read(_manifest(name))
                try:
                    _contents(name, data)
                    found[name] = data
                except CheckpointError as error:
                    notes.append(f"skipped {error}")
        return found

    # -- up -----------------------------------------------------------------------------------------------

    def push(self, local: Path) -> WorkingCopy:
        """Upload what is new or changed in the working copy, then delete what was deleted in it; can be interrupted."""
        with _working_copy(local) as copy:
            checkpoints = copy.checkpoints()  # before the logs, so that those reach as far as the checkpoints say
            targets = {link: name for link in POINTERS if (name := copy.target(link)) in checkpoints}
            copy.begin_writing()
            there = self._list()
            pointers = {link: self._pointer(link, there) for link in POINTERS}
            foreign = self._foreign(copy, checkpoints, pointers["last"], there)
            logs = copy.logs()
            for path in logs:
                with contextlib.suppress(FileNotFoundError):  # it was there a moment ago
                    stamp = copy.stamp(path)
                    if copy.sent.get(path) != stamp or path not in there:
                        self._upload(copy, path, stamp, there)
            for name, data in checkpoints.items():
                try:
                    self._push_checkpoint(copy, name, data, there)
                except FileNotFoundError as error:  # deleted meanwhile, which is well if it is an old one
                    if name in targets.values():
                        raise RaynforceError(f"cannot push {name} of {local}: it was deleted meanwhile") from error
            for link, name in targets.items():
                if pointers[link] != name:
                    self.store.write(link, f"{name}\n".encode())
            if "last" in targets and checkpoints.keys() >= set(copy.names()):  # else one is torn or being deleted here
                self._prune(copy, {**checkpoints, **foreign}, logs, there)
            return copy

    def _foreign(
        self, copy: WorkingCopy, checkpoints: Mapping[str, bytes], last: str | None, there: Mapping[str, int]
    ) -> dict[str, bytes]:
        """Checkpoints there that never were in this working copy: they stay, and the run there must not be another."""
        found = self._manifests(there, [], copy.sent)
        for name, data in tuple(found.items()):
            if data == checkpoints.get(name):  # a push was interrupted right after it
                copy.sent[_manifest(name)] = _sha256(found.pop(name))
            elif name == last or name in checkpoints:
                told = f"cannot push to {self.url}: another process has written {name} there; nothing was changed"
                raise RaynforceError(f"{told}, resume from the URL to go on with that run")
        return found

    def _push_checkpoint(self, copy: WorkingCopy, name: str, data: bytes, there: dict[str, int]) -> None:
        path, stamp = _manifest(name), _sha256(data)
        if path in there:
            if copy.sent.get(path) == stamp:
                return
            self.store.delete(path)  # that one is torn, or a fetch has left it out as damaged
        for file, (size, sha256) in _contents(name, data).items():
            if copy.sent.get(file) != sha256 or there.get(file) != size:
                self._upload(copy, file, sha256, there)
        self._upload(copy, path, stamp, there)

    def _prune(
        self, copy: WorkingCopy, checkpoints: Mapping[str, bytes], logs: Collection[str], there: Collection[str]
    ) -> None:
        """Delete what is gone from the working copy, a checkpoint's manifest first."""
        folders = {path.split("/")[1] for path in there if path.startswith(CHECKPOINTS)}
        for name in _newest_first(folders - checkpoints.keys()):
            self.store.delete(_manifest(name))
            self.store.delete(f"{CHECKPOINTS}{name}", folder=True)
            copy.drop(f"{CHECKPOINTS}{name}/")
        used = {file for name, data in checkpoints.items() for file in _contents(name, data)}
        for path in there:
            old_log = path in copy.sent and path not in logs and not path.startswith(CHECKPOINTS)
            if old_log or (path.startswith(SEGMENTS) and path not in used):
                self.store.delete(path)
                copy.drop(path)

    def _upload(self, copy: WorkingCopy, path: str, stamp: str, there: dict[str, int]) -> None:
        size = (copy.local / path).stat().st_size
        try:
            self.store.write(path, copy.local / path)
        except Missing:
            (copy.local / path).stat()  # deleted meanwhile: a FileNotFoundError, which the caller knows
            raise
        there[path], copy.sent[path] = size, stamp
        copy.save()
        copy.moved += 1

    # -- down ---------------------------------------------------------------------------------------------

    def fetch(self, local: Path, *, all: bool = False) -> WorkingCopy:
        """Bring the run into the working copy: its logs, `last` and `best`; with `all` every checkpoint, to resume it.

        Files that are there already and are what their manifest says are not downloaded again. If the store is as this
        working copy has left it, the working copy may be ahead, and stays as it is. Otherwise the store wins: once its
        newest whole checkpoint is here, the checkpoints, segments and logs that were not fetched now are deleted.
        """
        there = self._list()
        for attempt in range(_ATTEMPTS + 1):
            with _working_copy(local) as copy:
                try:
                    self._fetch(copy, all, there)
                    break
                except CheckpointError:
                    before, there = there, self._list()
                    if there == before or attempt == _ATTEMPTS:
                        raise  # it was not deleted since it was listed, as it is when the run goes on
        return copy

    def _fetch(self, copy: WorkingCopy, all: bool, there: Mapping[str, int]) -> None:
        if CONFIG not in there:
            if copy.wrote and not copy.sent:
                copy.notes.append(f"nothing was pushed to {self.url} yet: the run goes on from {copy.local}")
                return
            hint = f"; what this machine has of it is in {copy.local}" if (copy.local / CONFIG).exists() else ""
            raise UsageError(f"there is no run at {self.url}{hint}")
        manifests = self._manifests(there, copy.notes)
        pointers = {link: self._pointer(link, there) for link in POINTERS}
        steps = [name for name in manifests if name.startswith("step_")]
        steps.sort(key=lambda name: name != pointers["last"])  # that one first, then from the newest to the oldest
        if copy.wrote and copy.is_ahead(steps[0] if steps else None, manifests):
            copy.notes[:] = [f"{self.url} is as {copy.local} has left it: the run goes on from there"]
            return
        copy.wrote, copy.sent = False, {}
        copy.save()  # an interrupted fetch begins again
        whole: dict[str, Contents] = {}
        for name in [*steps, *(name for name in manifests if name not in steps)]:
            if all or name == pointers["best"] or (name in steps and not whole.keys() & set(steps)):
                # Also of a damaged one, for a push to replace.
                copy.sent[_manifest(name)] = _sha256(manifests[name])
                try:
                    whole[name] = self._fetch_checkpoint(copy, name, manifests[name], there)
                except CheckpointError as error:
                    copy.notes.append(f"skipped {error}")
        newest = next((name for name in steps if name in whole), None)
        if not newest and (steps or "last" in there):
            raise CheckpointError(f"no checkpoint at {self.url} is whole: {'; '.join(copy.notes)}")
        for link, target in (("last", newest), ("best", pointers["best"])):
            if target in whole:
                point(copy.local / link, copy.local / CHECKPOINTS / str(target))
            else:
                (copy.local / link).unlink(missing_ok=True)
        logs = [path for path in there if path not in (*POINTERS, LOCK) and not path.startswith(CHECKPOINTS)]
        for path in logs:  # after the checkpoints, so that they reach as far as those say
            self._download(copy, path, copy.local / path)
            copy.sent[path] = copy.stamp(path)
        files = {path: sha256 for contents in whole.values() for path, (_, sha256) in contents.items()}
        copy.sent |= files
        copy.forget_others(whole, {*logs, *files})
        copy.save()

    def _fetch_checkpoint(self, copy: WorkingCopy, name: str, data: bytes, there: Mapping[str, int]) -> Contents:
        """Bring a checkpoint under its name, whole or not at all."""
        contents = _contents(name, data)
        for path, (size, _) in contents.items():
            if there.get(path) != size:
                raise CheckpointError(f"{self.url}/{path}: its manifest says {size} bytes, there are {there.get(path)}")
        if copy.is_whole(name, data):
            return contents
        folder = copy.local / CHECKPOINTS / name
        temporary = folder.with_name(f".{name}.fetch.tmp")
        if folder.exists():  # what is right of it is not fetched again
            shutil.rmtree(temporary, ignore_errors=True)
            folder.rename(temporary)
        temporary.mkdir(parents=True, exist_ok=True)
        for path, stated in contents.items():
            target = copy.local / path if path.startswith(SEGMENTS) else temporary / Path(path).name
            if not copy.is_right(target, stated):
                self._download(copy, path, target)
                if not copy.is_right(target, stated):
                    raise CheckpointError(f"{self.url}/{path}: it is not what its manifest says")
        (temporary / MANIFEST).write_bytes(data)
        temporary.rename(folder)
        return contents

    def _download(self, copy: WorkingCopy, path: str, target: Path) -> None:
        self.store.download(path, target)
        copy.moved += 1


# -- on this machine --------------------------------------------------------------------------------------


class WorkingCopy:
    """The directory on this machine that stands for a run at a URL, and in `.remote.json` what both have in common."""

    def __init__(self, local: Path) -> None:
        self.local = local
        self.moved = 0  # files that were uploaded or downloaded
        self.notes: list[str] = []  # what was skipped or left as it is, and why
        self.wrote = False  # whether it was pushed since it was fetched, and so may be ahead of the store
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
        self.sent = {path: stamp for path, stamp in self.sent.items() if not path.startswith(prefix)}
        self.save()

    def names(self) -> list[str]:
        return _newest_first(path.name for path in (self.local / CHECKPOINTS).glob("*_*"))

    def checkpoints(self) -> dict[str, bytes]:
        """The manifest of each checkpoint here that has one, the newest first."""
        found = {}
        for name in self.names():
            with contextlib.suppress(FileNotFoundError, CheckpointError):
                data = (self.local / _manifest(name)).read_bytes()
                _contents(name, data)
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
        with contextlib.suppress(OSError):
            return Path(os.readlink(self.local / link)).name
        return ""

    def is_ahead(self, newest: str | None, manifests: Mapping[str, bytes]) -> bool:
        """Whether the newest checkpoint in the store came from here, and this has that one or a newer one, whole."""
        if newest is None:
            return not any(path.endswith(f"/{MANIFEST}") for path in self.sent)
        if self.sent.get(_manifest(newest)) != _sha256(manifests[newest]):
            return False
        last = self.target("last")
        with contextlib.suppress(OSError, CheckpointError):
            return self.is_whole(last, (self.local / _manifest(last)).read_bytes())
        return False

    def is_whole(self, name: str, data: bytes) -> bool:
        """Whether a checkpoint with this manifest is here, each file as stated."""
        manifest, files = self.local / _manifest(name), _contents(name, data)
        same = manifest.is_file() and manifest.read_bytes() == data
        return same and all(self.is_right(self.local / path, stated) for path, stated in files.items())

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


@contextlib.contextmanager
def _working_copy(local: Path) -> Iterator[WorkingCopy]:
    """Failures of the disk on this side, in one line."""
    try:
        yield WorkingCopy(local)
    except OSError as error:
        raise RaynforceError(f"cannot use working copy {local}: {summary(error)}") from error


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _manifest(name: str) -> str:
    return f"{CHECKPOINTS}{name}/{MANIFEST}"


def _newest_first(names: Iterable[str]) -> list[str]:
    matches = [match for name in names if (match := NAME.fullmatch(name))]
    matches.sort(key=lambda match: (int(match[2]), int(match[3] or 1)), reverse=True)
    return [match[0] for match in matches]


def _contents(name: str, data: bytes) -> Contents:
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
