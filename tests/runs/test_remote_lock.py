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
from raynforce.runs import remote_lock
from raynforce.runs.lock import Holder
from raynforce.runs.remote import Remote


@pytest.fixture(autouse=True)
def _empty_stores() -> Iterator[None]:
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
    first, second = Remote.open(url), Remote.open(url)
    assert first.lock.holder() is None
    first.lock.claim(moment=0)
    holder = second.lock.holder()
    assert isinstance(holder, Holder)
    assert holder.pid == os.getpid()
    with pytest.raises(
        UsageError, match=rf"in use by process {os.getpid()} on host .* since .*: wait, or end it first"
    ):
        second.lock.claim(moment=0)
    second.lock.release()  # is not its own
    first.lock.beat()
    first.lock.release()
    assert stored(first) == set()
    second.lock.claim(moment=0)
    with pytest.raises(RaynforceError, match="was taken over by process"):
        first.lock.beat()


def test_a_process_of_this_machine_that_has_ended_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    second = Remote.open("memory://bucket/run")
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: child)
        Remote.open("memory://bucket/run").lock.claim(moment=0)
    assert second.lock.holder() is None
    second.lock.claim(moment=0)
    assert stored(second) == {"run.lock"}


def test_the_clock_of_the_store_decides_not_the_one_that_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Remote.open("odd://bucket/run")
    elsewhere(there, beat=time.time() - 5000)  # its clock is slow, but it was written just now
    with pytest.raises(UsageError, match="in use by process 7 on host far"):
        there.lock.claim(moment=0)
    monkeypatch.setattr(remote_lock, "FRESH_SECONDS", 0.0)
    elsewhere(there, beat=time.time() + 5000)
    there.lock.claim(moment=0)
    assert stored(there) == {"run.lock"}


def test_without_a_clock_a_lock_that_looks_old_is_watched() -> None:
    OddStore.dated = False
    there = Remote.open("odd://bucket/run")
    elsewhere(there)
    assert str(there.lock.holder()).startswith("process 7 on host far")
    with pytest.raises(UsageError, match="in use by process 7"):
        there.lock.claim(moment=0, watch=60)  # no need to watch
    elsewhere(there, beat=5.0)
    assert there.lock.holder() is None
    beating = threading.Timer(0.1, lambda: elsewhere(there, beat=6.0))
    beating.start()
    with pytest.raises(UsageError, match="in use by process 7"):
        there.lock.claim(moment=0, watch=0.3)
    beating.join()
    there.lock.claim(moment=0, watch=0.05)
    assert there.lock.holder() is not None


def test_of_two_that_claim_at_once_the_first_to_write_gives_way() -> None:
    first, second = Remote.open("odd://bucket/run"), Remote.open("odd://bucket/run")
    late = threading.Timer(0.1, second.lock.write)  # it has looked before the first wrote
    late.start()
    with pytest.raises(UsageError, match="at the same moment"):
        first.lock.claim(moment=0.4)
    late.join()
    second.lock.beat()


@pytest.mark.parametrize("data", [b"", b"{}", b'{"pid": [', b'{"pid": 1e999}', b"null"])
def test_a_torn_lock_is_someones(data: bytes) -> None:
    there = Remote.open("odd://bucket/run")
    there.store.fs.pipe_file("/bucket/run/run.lock", data)
    with pytest.raises(UsageError, match="in use by another process: wait"):
        there.lock.claim(moment=0)
