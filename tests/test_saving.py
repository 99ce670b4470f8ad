"""The saver: what it writes beside training, and what it does when the disk fails."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from raynforce.driver import saving
from raynforce.driver.saving import Saver
from raynforce.errors import RaynforceError


class Told:
    """A saver, and what it said."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.events: list[dict[str, Any]] = []
        self.saver = Saver(self.lines.append, lambda kind, **facts: self.events.append({"event": kind, **facts}))


def fail() -> int:
    raise RaynforceError("cannot write it: No space left on device")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    monkeypatch.setattr(saving, "BACKOFF", (0.05, 0.1))
    monkeypatch.setattr(saving, "LAST_SECONDS", 0.5)
    told = Told()
    yield told
    told.saver.close()


def test_training_does_not_wait_for_what_is_written(told: Told) -> None:
    go_on = threading.Event()
    began = time.monotonic()
    told.saver.write("the checkpoint of step 5", 5, lambda: 10 * go_on.wait(10))
    told.saver.look()
    assert time.monotonic() - began < 9
    assert told.saver.busy
    assert told.saver.last is None
    go_on.set()
    assert told.saver.wait(timeout=10)
    assert not told.saver.busy
    assert told.saver.last is not None
    assert (told.saver.last.step, told.saver.last.bytes) == (5, 10)
    assert told.lines == []


def test_a_failure_is_told_and_tried_again_later(told: Told) -> None:
    saver = told.saver
    saver.write("the checkpoint of step 1", 1, fail)
    assert saver.wait(timeout=10)
    assert saver.failing
    assert saver.failures == 1
    assert "ALARM: cannot write it: No space left on device" in told.lines[0]
    with pytest.raises(RaynforceError, match="No space left"):
        saver.require()
    until = time.monotonic() + 5
    while not saver.retry_is_due:
        assert time.monotonic() < until
        time.sleep(0.01)
    saver.write("the checkpoint of step 2", 2, lambda: 7)
    assert saver.wait(timeout=10)
    assert not saver.failing
    assert not saver.retry_is_due
    assert told.lines[-1] == "the checkpoint of step 2 is written: the storage works again"
    assert [event["state"] for event in told.events] == ["failed", "works again"]
    saver.require()


@pytest.mark.parametrize("fails", [False, True])
def test_what_was_written_is_not_kept_in_memory(told: Told, fails: bool) -> None:
    """Until the next checkpoint it would be a second copy of all that is learned from."""

    class State:
        """As large as a replay buffer."""

    def begin() -> weakref.ref[State]:
        state = State()

        def write() -> int:
            assert isinstance(state, State)
            return fail() if fails else 1

        told.saver.write("the checkpoint of step 1", 1, write)
        return weakref.ref(state)

    kept = begin()
    assert told.saver.wait(timeout=10)
    until = time.monotonic() + 5
    while kept() is not None and time.monotonic() < until:
        gc.collect()
        time.sleep(0.01)
    assert kept() is None


def test_a_small_file_that_still_fits_does_not_end_the_alarm(told: Told) -> None:
    told.saver.write("the checkpoint of step 1", 1, fail)
    told.saver.write("the best policy", 1, lambda: 1, whole=False)
    assert told.saver.wait(timeout=10)
    assert told.saver.failing


def test_slow_storage_is_told_once(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "SLOW", 0.05)
    go_on = threading.Event()
    told.saver.write("the checkpoint of step 3", 3, lambda: go_on.wait(10))
    assert not told.saver.wait(timeout=0.3)
    go_on.set()
    assert told.saver.wait(timeout=10)
    assert len(told.lines) == 1
    assert "the checkpoint of step 3 has been under way for" in told.lines[0]


def test_the_last_checkpoint_is_insisted_on(told: Told) -> None:
    attempts = iter([fail, fail, lambda: 9])
    told.saver.insist(lambda: told.saver.write("the checkpoint of step 4", 4, next(attempts)), lambda doing: None)
    assert told.saver.last is not None
    assert told.saver.last.bytes == 9


def test_the_last_checkpoint_is_given_up_in_the_end(told: Told) -> None:
    told.saver.write("the checkpoint of step 3", 3, lambda: 1)
    with pytest.raises(RaynforceError, match=r"could not be written.*No space.*the newest is of step 3"):
        told.saver.insist(lambda: told.saver.write("the checkpoint of step 4", 4, fail), lambda doing: None)
    assert told.saver.failures > 2
    assert len(told.lines) == 1, "the first attempt is told, not those after it"


def test_who_closes_it_finds_all_written(told: Told) -> None:
    """A run that fails while a checkpoint is being written has it, and nobody writes after the lock is given back."""
    written: list[int] = []

    def write() -> int:
        time.sleep(0.3)
        written.append(5)
        return 1

    told.saver.write("the checkpoint of step 5", 5, write)
    told.saver.close()
    assert written == [5]


def test_storage_that_hangs_is_not_waited_for_when_it_is_closed(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "CLOSE_SECONDS", 0.1)
    go_on = threading.Event()
    told.saver.write("the checkpoint of step 5", 5, lambda: go_on.wait(30))
    began = time.monotonic()
    told.saver.close()
    assert time.monotonic() - began < 10
    go_on.set()


def test_storage_that_hangs_does_not_keep_the_run_for_ever(told: Told) -> None:
    go_on = threading.Event()
    with pytest.raises(RaynforceError, match="slow storage"):
        told.saver.insist(
            lambda: told.saver.write("the checkpoint of step 4", 4, lambda: go_on.wait(30)), lambda doing: None
        )
    go_on.set()
