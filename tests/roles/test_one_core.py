"""Threads on one core: put there when they fit, let go when they do not, and before a process is started."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from raynforce.roles import one_core
from raynforce.roles.one_core import OneCore

CORES = sorted(os.sched_getaffinity(0))
pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="there is but one core")


@pytest.fixture
def thread() -> Iterator[int]:
    """Another one, asleep."""
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    assert thread.native_id is not None
    yield thread.native_id
    over.set()
    thread.join()


@pytest.fixture
def kept(thread: int, load: list[float]) -> Iterator[OneCore]:
    core = OneCore(lambda: [thread], 1)
    load[0] = one_core.FITS - 0.1
    core.look(time.monotonic() + 2)
    assert core.kept
    yield core
    core.close()


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How busy the core is, from one look to the next."""
    share, total = [0.0], [0.0]

    def process_time() -> float:
        total[0] += share[0] * 2
        return total[0]

    monkeypatch.setattr(one_core.time, "process_time", process_time)
    return share


def where(thread: int) -> tuple[list[int], int]:
    return sorted(os.sched_getaffinity(thread)), os.sched_getscheduler(thread)


def test_they_are_kept_where_they_fit(kept: OneCore, thread: int) -> None:
    for one in (thread, threading.get_native_id()):
        assert where(one) == ([CORES[1]], os.SCHED_BATCH)
    kept.close()
    for one in (thread, threading.get_native_id()):
        assert where(one) == (CORES, os.SCHED_OTHER)


def test_another_number_is_another_core(thread: int, load: list[float]) -> None:
    core = OneCore(lambda: [thread], len(CORES) * 7)
    core.look(time.monotonic() + 2)
    try:
        assert where(thread)[0] == [CORES[0]]
    finally:
        core.close()


def test_a_moment_says_nothing(thread: int, load: list[float]) -> None:
    core = OneCore(lambda: [thread], 0)
    core.look(time.monotonic() + 0.5)
    assert not core.kept
    assert where(thread) == (CORES, os.SCHED_OTHER)


def test_those_who_compute_are_not_kept(thread: int, load: list[float]) -> None:
    core = OneCore(lambda: [thread], 0)
    load[0] = one_core.FITS + 0.1
    core.look(time.monotonic() + 2)
    assert not core.kept
    load[0] = 0.1
    core.look(time.monotonic() + 4)
    assert core.kept  # they compute no more
    core.close()


def test_those_whom_a_core_is_too_small_for_are_let_go_for_good(kept: OneCore, thread: int, load: list[float]) -> None:
    now = time.monotonic() + 2
    load[0] = one_core.FULL - 0.05
    kept.look(now := now + 2)
    assert kept.kept
    load[0] = 1.0
    kept.look(now := now + 2)
    assert not kept.kept
    assert where(thread) == (CORES, os.SCHED_OTHER)
    load[0] = 0.1
    kept.look(now + 2)
    assert not kept.kept


def test_a_process_that_is_started_has_all_cores(kept: OneCore, thread: int) -> None:
    code = "import os; print(sorted(os.sched_getaffinity(0)), os.sched_getscheduler(0))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == f"{CORES} {os.SCHED_OTHER}"
    assert not kept.kept
    assert where(thread) == (CORES, os.SCHED_OTHER)


def test_a_process_that_python_does_not_see_being_started(kept: OneCore, load: list[float]) -> None:
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    child.start()  # no audit hook is told
    try:
        assert child.pid is not None
        assert where(child.pid)[0] == [CORES[1]]
        kept.look(time.monotonic() + 4)
        assert not kept.kept
        assert where(child.pid) == (CORES, os.SCHED_OTHER)
    finally:
        child.kill()
        child.join()


def test_threads_that_were_started_there_are_let_go_as_well(kept: OneCore, load: list[float]) -> None:
    over = threading.Event()
    pool = threading.Thread(target=over.wait)
    pool.start()
    assert pool.native_id is not None
    try:
        assert where(pool.native_id)[0] == [CORES[1]]
        load[0] = 1.0
        kept.look(time.monotonic() + 4)
        assert where(pool.native_id) == (CORES, os.SCHED_OTHER)
    finally:
        over.set()
        pool.join()


def test_a_thread_that_is_gone_holds_nobody_up(load: list[float]) -> None:
    gone = threading.Thread(target=lambda: None)
    gone.start()
    gone.join()
    assert gone.native_id is not None
    ids = [gone.native_id]
    core = OneCore(lambda: ids, 0)
    core.look(time.monotonic() + 2)
    assert core.kept
    core.close()
    assert where(threading.get_native_id()) == (CORES, os.SCHED_OTHER)
