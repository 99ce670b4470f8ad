"""One writer for a run at a URL: a small file there that names its holder, who writes it again and again."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import uuid
from dataclasses import asdict
from pathlib import Path

from raynforce.errors import RaynforceError, UsageError
from raynforce.runs.lock import NAME, Holder
from raynforce.runs.store import Missing, Store

BEAT_SECONDS = 10.0
"""How often the holder of a run calls `beat`."""
FRESH_SECONDS = 60.0
"""A lock that was last written longer ago than this is of a run that is gone."""
MOMENT_SECONDS = 1.0
"""In which another that claims at the same time would have written its name."""


_live: set[str] = set()  # tokens that this process has written and not given back


class TakenOver(RaynforceError):
    """Another process holds the run now."""

    def __init__(self, url: str, by: Holder) -> None:
        super().__init__(f"run {url} was taken over by {by}")
        self.by = by


class RemoteLock:
    """The lock of a run in a store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._own = Holder(socket.gethostname(), os.getpid(), _boot(), time.time(), uuid.uuid4().hex)

    def holder(self) -> Holder | None:
        """Who writes to the run at present, as far as this machine's clock can tell."""
        found, written = self._read()
        if found is None or _has_ended(found):
            return None
        with contextlib.suppress(Exception):  # not every store knows it
            written = self._store.fs.modified(self._store.full(NAME)).timestamp()
        return found if abs(time.time() - written) < FRESH_SECONDS else None

    def claim(self, *, moment: float | None = None, watch: float = 2.5 * BEAT_SECONDS) -> None:
        """Become the one writer of the run, or refuse by the name of who is.

        After that `beat` must be called every `BEAT_SECONDS`, whatever a push is doing. Two that claim at the same time
        see it after `moment` seconds, or at the next beat at the latest. Where the store cannot tell when its lock was
        last written, `watch` seconds tell whether it still is.
        """
        found, beat = self._read()
        if found is not None and found.token != self._own.token and self._is_alive(found, beat, watch):
            raise UsageError(f"run {self._store.url} is in use by {found}: wait, or end it first")
        self.write()
        time.sleep(MOMENT_SECONDS if moment is None else moment)
        found, _ = self._read()
        if found is None or found.token != self._own.token:
            raise UsageError(f"run {self._store.url} was taken by {found or Holder()} at the same moment")

    def beat(self) -> None:
        """Say that the writer is alive; `TakenOver` if another is the writer now."""
        found, _ = self._read()
        if found is not None and found.token != self._own.token:
            raise TakenOver(self._store.url, found)
        if self._own.token not in _live:  # a thread that came too late: the lock must not come back
            raise RaynforceError(f"{self._store.url} was released by this process")
        self.write()

    def release(self) -> None:
        """Be its writer no longer; if the store fails meanwhile, at least this process knows."""
        _live.discard(self._own.token)
        found, _ = self._read()
        if found is not None and found.token == self._own.token:
            self._store.delete(NAME)

    def write(self) -> None:
        _live.add(self._own.token)
        self._store.write(NAME, json.dumps({**asdict(self._own), "beat": time.time()}).encode())

    def _read(self) -> tuple[Holder | None, float]:
        """Who is named, and when that was written by the clock of whoever is."""
        self._store.fs.invalidate_cache()
        kinds = {"host": str, "pid": int, "boot": str, "started": float, "token": str}
        try:
            data = json.loads(self._store.read(NAME))
            return Holder(**{name: kind(data[name]) for name, kind in kinds.items()}), float(data["beat"])
        except Missing:
            return None, 0.0
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):  # half written: someone is at it
            return Holder(), 0.0

    def _is_alive(self, found: Holder, beat: float, watch: float) -> bool:
        if _has_ended(found):
            return False
        store, probe = self._store, f".clock-{self._own.token}"
        store.write(probe, b"now")  # two machines' clocks differ; the store's own agrees with itself
        try:
            written = store.fs.modified(store.full(NAME))
            return bool((store.fs.modified(store.full(probe)) - written).total_seconds() < FRESH_SECONDS)
        except Exception:
            if abs(time.time() - beat) < FRESH_SECONDS:
                return True
            time.sleep(watch)
            now = self._read()
            return now[0] is not None and now != (found, beat)
        finally:
            with contextlib.suppress(RaynforceError):
                store.delete(probe)


def _boot() -> str:
    """This boot of this machine, and which of its containers: a process id says nothing elsewhere."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _has_ended(holder: Holder) -> bool:
    """Whether it was a process of this machine that is gone, or this one when it could not say that it was done."""
    if not holder.boot or (holder.host, holder.boot) != (socket.gethostname(), _boot()):
        return False
    if holder.pid == os.getpid():
        return holder.token not in _live
    try:
        os.kill(holder.pid, 0)
    except (OSError, OverflowError) as error:
        return isinstance(error, ProcessLookupError)
    return False
