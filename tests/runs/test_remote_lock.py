"""One writer for a run at a URL: others are refused by name, and who is gone stands in nobody's way."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from odd_store import OddStore, empty_stores
from pushed_runs import stored

from raynforce.errors import RaynforceError, UsageError
from raynforce.runs import lock
from raynforce.runs.lock import Holder
from raynforce.runs.remote import Remote
from raynforce.runs.remote_lock import InStore, claim, holder


@pytest.fixture(autouse=True)
def _empty_stores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(lock, "SETTLE", 0.0)
    yield
    empty_stores()


def elsewhere(there: Remote, **changes: Any) -> None:
    """Another machine's lock."""
    given = {"host": "far", "pid": 7, "boot": "b", "started": 0.0, "token": "t", "beat": time.time(), **changes}
    there.store.fs.makedirs(there.store.root, exist_ok=True)
    there.store.fs.pipe_file(there.store.full("run.lock"), json.dumps(given).encode())


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_one_holds_it_and_another_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/store/run" if kind == "file" else "memory://bucket/run"
    there = Remote.open(url)
    store = there.store
    assert holder(store) is None
    first = claim(store)
    found = holder(Remote.open(url).store)
    assert isinstance(found, Holder)
    assert found.pid == os.getpid()
    says = rf"in use by process {os.getpid()} on host .* since .*: wait, or end it first"
    with pytest.raises(UsageError, match=says):
        claim(Remote.open(url).store)
    first.beat()
    first.release()
    assert stored(there) == set()
    first.beat()  # too late: it must not come back
    assert stored(there) == set()
    second = claim(store)
    with pytest.raises(RaynforceError, match="was taken over by process"):
        first.beat()
    first.release()  # is not its own
    assert stored(there) == {"run.lock"}
    second.release()


def test_a_process_of_this_machine_that_has_ended_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Remote.open("memory://bucket/run")
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: child)
        InStore(there.store).touch(Holder.me())
    assert holder(there.store) is None
    held = claim(there.store)
    assert stored(there) == {"run.lock"}
    held.release()


def test_what_this_process_could_not_give_back_is_free() -> None:
    store = Remote.open("memory://bucket/run").store
    InStore(store).touch(Holder.me())
    assert holder(store) is None
    claim(store).release()


def test_the_clock_of_the_store_decides_not_the_one_that_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Remote.open("odd://bucket/run")
    elsewhere(there, beat=time.time() - 5000)  # its clock is slow, but it was written just now
    with pytest.raises(UsageError, match="in use by process 7 on host far"):
        claim(there.store)
    monkeypatch.setattr(lock, "STALE", 0.0)
    elsewhere(there, beat=time.time() + 5000)
    held = claim(there.store)
    assert stored(there) == {"run.lock"}
    held.release()


def test_without_a_clock_a_lock_is_watched() -> None:
    OddStore.dated = False
    there = Remote.open("odd://bucket/run")
    elsewhere(there, beat=5.0)
    assert str(holder(there.store)).startswith("process 7 on host far")
    beating = threading.Timer(0.1, lambda: elsewhere(there, beat=6.0))
    beating.start()
    with pytest.raises(UsageError, match="in use by process 7"):
        claim(there.store, watch=0.3)
    beating.join()
    held = claim(there.store, watch=0.05)
    held.release()


def test_of_two_that_claim_at_once_the_first_to_write_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "SETTLE", 0.4)
    store = Remote.open("odd://bucket/run").store
    second = Holder.me()
    late = threading.Timer(0.1, InStore(store).touch, [second])  # it has looked before the first wrote
    late.start()
    with pytest.raises(UsageError, match="at the same moment"):
        claim(store)
    late.join()
    assert InStore(store).read() == second


@pytest.mark.parametrize("data", [b"", b"{}", b'{"pid": [', b'{"pid": 1e999}', b"null"])
def test_a_torn_lock_is_someones(data: bytes) -> None:
    there = Remote.open("odd://bucket/run")
    there.store.fs.pipe_file("/bucket/run/run.lock", data)
    with pytest.raises(UsageError, match="in use by another process: wait"):
        claim(there.store)
