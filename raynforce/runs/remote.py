"""Runs at a URL: a local working copy in which everything happens as always, and its mirror in a store."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from raynforce.errors import CheckpointError, RaynforceError, UsageError, summary
from raynforce.runs.checkpoint import MANIFEST, point
from raynforce.runs.disk import cache_folder
from raynforce.runs.store import Missing, Store
from raynforce.runs.working_copy import (
    CHECKPOINTS,
    CONFIG,
    LOCK,
    NAME,
    POINTERS,
    SEGMENTS,
    Contents,
    WorkingCopy,
    files_of,
    is_manifest,
    manifest_of,
    names_in,
    sha256_of,
)

_ATTEMPTS = 10


@dataclass
class Moved:
    """What a push has uploaded or a fetch downloaded."""

    files: int = 0
    bytes: int = 0
    notes: list[str] = field(default_factory=list)
    """What was skipped or left as it is, and why."""

    def count(self, size: int) -> None:
        self.files += 1
        self.bytes += size


class Remote:
    """A run at a URL.

    There it has the files of a run directory under the same names; only `last` and `best` are small text files with the
    name of a checkpoint. A checkpoint is there once its manifest is, which comes after everything it refers to;
    `last` moves after that, and only then are old checkpoints deleted. So a reader finds a whole one at any moment.

    `.remote.json` in the working copy tells what it has in common with the store. A push replaces and deletes nothing
    that was not pushed from, or fetched into, this working copy.
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
        return cache_folder() / "runs" / f"{name}-{sha256_of(self.store.given.encode())[:12]}"

    def exists(self) -> bool:
        """Whether there is a run at the URL."""
        return self.store.has(CONFIG)

    def strangers(self) -> list[str]:
        """Names of what is at the URL and no lock; of no run, if none `exists`."""
        return [name for name in self.store.entries() if name != LOCK]

    def begin_writing(self, local: Path) -> None:
        """From here on the working copy may be ahead; the run there must be the one that was fetched or pushed."""
        with _working_copy(local):
            copy = WorkingCopy(local)
            last = self._pointer("last", POINTERS)
            if last is not None and manifest_of(last) not in copy.sent:
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

    # -- up -----------------------------------------------------------------------------------------------

    def push(self, local: Path) -> Moved:
        """Upload what is new or changed in the working copy, then delete what was deleted in it.

        Whatever was interrupted is continued by the next push; a file of a checkpoint is uploaded once.
        """
        with _working_copy(local):
            return self._push(WorkingCopy(local))

    def _push(self, copy: WorkingCopy) -> Moved:
        done = Moved()
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
                    self._upload(copy, path, stamp, there, done)
        for name, data in checkpoints.items():
            try:
                self._push_checkpoint(copy, name, data, there, done)
            except FileNotFoundError as error:  # deleted meanwhile, which is well if it is an old one
                if name in targets.values():
                    raise RaynforceError(f"cannot push {name} of {copy.local}: it was deleted meanwhile") from error
        for link, name in targets.items():
            if pointers[link] != name:
                self.store.write(link, f"{name}\n".encode())
        if "last" in targets and checkpoints.keys() >= set(copy.names()):  # else one is torn or being deleted here
            self._prune(copy, {**checkpoints, **foreign}, logs, there)
        return done

    def _foreign(
        self, copy: WorkingCopy, checkpoints: Mapping[str, bytes], last: str | None, there: dict[str, int]
    ) -> dict[str, bytes]:
        """Checkpoints there that never were in this working copy: they stay, and the run there must not be another."""
        found: dict[str, bytes] = {}
        for name in names_in(there):
            path = manifest_of(name)
            if path not in there or path in copy.sent:
                continue
            data = self.store.read(path)
            if data == checkpoints.get(name):  # a push was interrupted right after it
                copy.sent[path] = sha256_of(data)
            elif not is_manifest(data):  # torn
                del there[path]
            elif name == last or name in checkpoints:
                raise RaynforceError(
                    f"cannot push to {self.url}: another process has written {name} there; nothing was changed, "
                    "resume from the URL to go on with that run"
                )
            else:
                found[name] = data
        return found

    def _push_checkpoint(self, copy: WorkingCopy, name: str, data: bytes, there: dict[str, int], done: Moved) -> None:
        path, stamp = manifest_of(name), sha256_of(data)
        if path in there:
            if copy.sent.get(path) == stamp:
                return
            self.store.delete(path)  # a fetch has found that one damaged, and left it out
        for file, (size, sha256) in files_of(name, data).items():
            if copy.sent.get(file) != sha256 or there.get(file) != size:
                self._upload(copy, file, sha256, there, done)
        self._upload(copy, path, stamp, there, done)

    def _prune(
        self, copy: WorkingCopy, checkpoints: Mapping[str, bytes], logs: Collection[str], there: Mapping[str, int]
    ) -> None:
        """Delete what is gone from the working copy, a checkpoint's manifest first."""
        for name in names_in(there):
            if name not in checkpoints:
                self.store.delete(manifest_of(name))
                self.store.delete_folder(f"{CHECKPOINTS}{name}")
                copy.drop(f"{CHECKPOINTS}{name}/")
        used = {file for name, data in checkpoints.items() for file in files_of(name, data)}
        for path in there:
            old_log = path in copy.sent and path not in logs and not path.startswith(CHECKPOINTS)
            if old_log or (path.startswith(SEGMENTS) and path not in used):
                self.store.delete(path)
                copy.drop(path)

    def _upload(self, copy: WorkingCopy, path: str, stamp: str, there: dict[str, int], done: Moved) -> None:
        size = (copy.local / path).stat().st_size
        try:
            self.store.write(path, copy.local / path)
        except Missing:
            (copy.local / path).stat()  # deleted meanwhile: a FileNotFoundError, which the caller knows
            raise
        there[path], copy.sent[path] = size, stamp
        copy.save()
        done.count(size)

    # -- down ---------------------------------------------------------------------------------------------

    def fetch(self, local: Path, *, all: bool = False) -> Moved:
        """Bring the run into the working copy: its logs, `last` and `best`; with `all` every checkpoint, to resume it.

        Files that are there already and are what their manifest says are not downloaded again. If the store is as this
        working copy has left it, the working copy may be ahead, and stays as it is. Otherwise the store wins: once its
        newest whole checkpoint is here, the checkpoints, segments and logs that were not fetched now are deleted.
        """
        there = self._list()
        with _working_copy(local):
            for _ in range(_ATTEMPTS):
                try:
                    return self._fetch(WorkingCopy(local), all, there)
                except CheckpointError:
                    before, there = there, self._list()
                    if there == before:
                        raise  # it was not deleted since it was listed, as it is when the run goes on
            return self._fetch(WorkingCopy(local), all, there)

    def _fetch(self, copy: WorkingCopy, all: bool, there: Mapping[str, int]) -> Moved:
        done = Moved()
        if CONFIG not in there:
            if copy.wrote and not copy.sent:
                return Moved(notes=[f"nothing was pushed to {self.url} yet: the run goes on from {copy.local}"])
            hint = f"; what this machine has of it is in {copy.local}" if (copy.local / CONFIG).exists() else ""
            raise UsageError(f"there is no run at {self.url}{hint}")
        manifests = self._manifests(there, done)
        pointers = {link: self._pointer(link, there) for link in POINTERS}
        steps = [name for name in manifests if name.startswith("step_")]
        steps.sort(key=lambda name: name != pointers["last"])  # that one first, then from the newest to the oldest
        if copy.wrote and copy.is_ahead(steps[0] if steps else None, manifests):
            return Moved(notes=[f"{self.url} is as {copy.local} has left it: the run goes on from there"])
        copy.wrote, copy.sent = False, {}
        copy.save()  # an interrupted fetch begins again
        whole: dict[str, Contents] = {}
        for name in [*steps, *(name for name in manifests if name not in steps)]:
            if all or name == pointers["best"] or (name in steps and not whole.keys() & set(steps)):
                # Also of a damaged one, for a push to replace.
                copy.sent[manifest_of(name)] = sha256_of(manifests[name])
                try:
                    whole[name] = self._fetch_checkpoint(copy, name, manifests[name], there, done)
                except CheckpointError as error:
                    done.notes.append(f"skipped {error}")
        newest = next((name for name in steps if name in whole), None)
        if not newest and (steps or "last" in there):
            raise CheckpointError(f"no checkpoint at {self.url} is whole: {'; '.join(done.notes)}")
        for link, target in (("last", newest), ("best", pointers["best"])):
            if target in whole:
                point(copy.local / link, copy.local / CHECKPOINTS / str(target))
            else:
                (copy.local / link).unlink(missing_ok=True)
        logs = [path for path in there if path not in (*POINTERS, LOCK) and not path.startswith(CHECKPOINTS)]
        for path in logs:  # after the checkpoints, so that they reach as far as those say
            done.count(self.store.download(path, copy.local / path))
            copy.sent[path] = copy.stamp(path)
        for contents in whole.values():
            copy.sent |= {path: sha256 for path, (_, sha256) in contents.items()}
        copy.forget_others(whole, {*logs, *(path for contents in whole.values() for path in contents)})
        copy.save()
        return done

    def _manifests(self, there: Collection[str], done: Moved) -> dict[str, bytes]:
        """The manifest of each checkpoint there that has one, the newest first."""
        found: dict[str, bytes] = {}
        for name in names_in(there):
            if manifest_of(name) in there:
                data = self.store.read(manifest_of(name))
                try:
                    files_of(name, data)
                    found[name] = data
                except CheckpointError as error:
                    done.notes.append(f"skipped {error}")
        return found

    def _fetch_checkpoint(
        self, copy: WorkingCopy, name: str, data: bytes, there: Mapping[str, int], done: Moved
    ) -> Contents:
        """Bring a checkpoint under its name, whole or not at all."""
        contents = files_of(name, data)
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
                done.count(self.store.download(path, target))
                if not copy.is_right(target, stated):
                    raise CheckpointError(f"{self.url}/{path}: it is not what its manifest says")
        (temporary / MANIFEST).write_bytes(data)
        temporary.rename(folder)
        return contents


@contextlib.contextmanager
def _working_copy(local: Path) -> Iterator[None]:
    """Failures of the disk on this side, in one line."""
    try:
        yield
    except OSError as error:
        raise RaynforceError(f"cannot use working copy {local}: {summary(error)}") from error
