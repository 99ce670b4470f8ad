"""Runs at a URL, as far as a page shows them: copies of their small files in a folder that goes with the server."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

from raynforce.errors import RaynforceError
from raynforce.runs import asking, lock, remote_lock
from raynforce.runs.store import Missing, Store

EVERY, EVERY_LARGE, LARGE = 5.0, 60.0, 8 << 20  # seconds between looks; of files with more bytes, between copies
EVERY_LIVE = 1.0  # seconds between looks at what running runs tell
_WANTED = re.compile(
    r"(?:.*/)?(config\.yaml|(metrics|events)\.jsonl|live\.json|notes\.txt|last|best|run\.lock"
    r"|(tune|trials|importance)\.json|faults/\d+\.json|episodes/[^/]+|checkpoints/[^/]+/(manifest|run)\.json)"
)
_POINTED = re.compile(r"(step|best)_[0-9.]+")


class Mirror:
    """A folder of runs at a URL, or a single one, and its copy in `local`."""

    def __init__(self, url: str, local: Path) -> None:
        self.store, self.local = Store.open(url), local
        self.url = self.store.url
        self.trouble = ""
        self._seen: dict[str, tuple[int, float]] = {}  # size, and when it was copied
        self._holders: dict[str, lock.Holder] = {}  # by the folder of their run
        self._next = 0.0
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def looked(self) -> bool:
        return self._next > 0

    def start(self, wanted: Callable[[], bool]) -> None:
        """Look in a thread of its own, which a slow store may hold up, while it is wanted."""
        self._thread = threading.Thread(target=self._work, args=(wanted,), name="raynforce-mirror", daemon=True)
        self._thread.start()

    def _work(self, wanted: Callable[[], bool]) -> None:
        while not self._end.is_set():
            if wanted():
                with contextlib.suppress(Exception):  # whatever the disk has, the page goes on
                    self.look()
            self._end.wait(EVERY_LIVE)

    def close(self) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join(5.0)

    def look(self) -> None:
        """Copy what has changed, if it is time; a store that fails is told of, and asked again."""
        try:
            if time.monotonic() >= self._next:
                self._copy()
                self._holders = {folder: found for folder in self._locked() if (found := self._holder(folder))}
                self._next = time.monotonic() + EVERY
            else:
                self._copy_live()
            self.trouble = ""
        except (RaynforceError, OSError) as error:
            self.trouble, self._next = str(error), time.monotonic() + EVERY

    def _locked(self) -> list[str]:
        return [path.removesuffix(lock.NAME).rstrip("/") for path in self._seen if path.endswith(lock.NAME)]

    def _copy_live(self) -> None:
        for folder in self._holders:
            if (path := f"{folder}/{asking.LIVE}".lstrip("/")) in self._seen:
                with contextlib.suppress(Missing):
                    self.store.download(path, self.local / path)

    def _copy(self) -> None:
        there, now = (
            {path: size for path, size in self.store.list().items() if _WANTED.fullmatch(path)},
            time.monotonic(),
        )
        for path, size in there.items():
            before, at = self._seen.get(path, (-1, 0.0))
            small = path.endswith((".json", ".txt", "last", "best", ".lock")) and "/manifest" not in path
            if size == before and not small:
                continue
            if size > LARGE and now - at < EVERY_LARGE:
                continue
            self._seen[path] = (size, now)
            target = self.local / path
            if target.name in ("last", "best"):
                self._point(target, self.store.read(path).decode(errors="replace").strip())
            else:
                self.store.download(path, target)
        for path in self._seen.keys() - there.keys():
            del self._seen[path]
            with contextlib.suppress(OSError):
                (self.local / path).unlink()

    @staticmethod
    def _point(link: Path, name: str) -> None:
        if _POINTED.fullmatch(name):
            link.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(OSError):
                if os.readlink(link) == f"checkpoints/{name}":
                    return
            link.unlink(missing_ok=True)
            link.symlink_to(f"checkpoints/{name}")

    def holder(self, run: Path) -> lock.Holder | None:
        """Who writes to a run there, as of the last look."""
        return self._holders.get("" if run == self.local else run.relative_to(self.local).as_posix())

    def _holder(self, folder: str) -> lock.Holder | None:
        with contextlib.suppress(RaynforceError):
            return remote_lock.holder(self._at(self.local / folder))
        return None

    def write(self, run: Path, name: str, text: str) -> None:
        self._at(run).write(name, text.encode())

    def shown(self, run: Path) -> str:
        within = run.relative_to(self.local)
        return self.url if within == Path() else f"{self.url}/{within}"

    def _at(self, run: Path) -> Store:
        within = run.relative_to(self.local)
        root = self.store.root if within == Path() else f"{self.store.root}/{within}"
        return Store(self.shown(run), self.store.fs, root)
