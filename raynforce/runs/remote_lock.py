"""One writer for a run at a URL: a small file there that names its holder, who writes it again and again."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import asdict

from raynforce.errors import RaynforceError, UsageError
from raynforce.runs import lock
from raynforce.runs.lock import NAME, Holder, Lock
from raynforce.runs.store import Missing, Store


class InStore:
    def __init__(self, store: Store) -> None:
        self._store = store

    def read(self) -> Holder | None:
        text = self._text()
        return None if text is None else Holder.parse(text) or Holder()

    def touch(self, own: Holder) -> None:
        self._store.write(NAME, json.dumps({**asdict(own), "beat": time.time()}).encode())

    def free(self, own: Holder | None) -> None:
        if own is not None and self.read() == own:
            self._store.delete(NAME)

    def _text(self) -> bytes | None:
        self._store.fs.invalidate_cache()
        with contextlib.suppress(Missing):
            return self._store.read(NAME)
        return None

    def is_alive(self, found: Holder, watch: float) -> bool:
        """By the store's own clock; where it has none, whether the lock is written again within `watch` seconds."""
        if found.has_ended():
            return False
        store, probe, text = self._store, f".clock-{lock.Holder.me().token}", self._text()
        store.write(probe, b"now")
        try:
            written = store.fs.modified(store.full(NAME))
            return bool((store.fs.modified(store.full(probe)) - written).total_seconds() < lock.STALE)
        except Exception:
            time.sleep(watch)
            return self._text() not in (None, text)
        finally:
            with contextlib.suppress(RaynforceError):
                store.delete(probe)


def holder(store: Store) -> Holder | None:
    """Who writes to the run at present, as far as this machine's clock can tell."""
    found = InStore(store).read()
    if found is None or found.has_ended():
        return None
    with contextlib.suppress(Exception):  # not every store knows it
        written = store.fs.modified(store.full(NAME)).timestamp()
        return found if abs(time.time() - written) < lock.STALE else None
    return found


def claim(store: Store, within: Lock | None = None, *, watch: float = 2.5 * lock.BEAT) -> Lock:
    """Become the one writer, or refuse by the name of who is; two at once see it after `SETTLE` seconds or a beat."""
    own, place = Holder.me(), InStore(store)
    found = place.read()
    if found is not None and place.is_alive(found, watch):
        raise lock.in_use(store.url, found)
    place.touch(own)
    time.sleep(lock.SETTLE)
    if (found := place.read()) != own:
        raise UsageError(f"run {store.url} was taken by {found or Holder()} at the same moment")
    return Lock(store.url, own, place, within)
