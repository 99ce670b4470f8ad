"""Roles of a pool that hang or have no room, and how long anybody waits for them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from pools import kill
from walkers import DEADLINE, Scene, expected

from raynforce.errors import EnvError
from raynforce.runtimes import pool as pool_module
from raynforce.runtimes.base import Handle, Pending, Place, RoleDied
from raynforce.runtimes.inline import InlineRuntime
from raynforce.runtimes.member import Fault, Rules

# -- hanging ------------------------------------------------------------------------------------------------


def test_one_that_hangs_ends_itself_and_shows_where(process: Scene, tmp_path: Path) -> None:
    place = Place(start_seconds=20, call_seconds=1)
    member = process.add(job_seconds=1, start_seconds=20, place=place, hint=": raise faults.sample_seconds")
    process.work(member)
    (tmp_path / "once").touch()
    assert process.work(member, 0, "hang", str(tmp_path / "once")) == expected(2)[-1]
    (fault,) = process.witness.faults
    assert (fault.kind, fault.action) == ("hung", "restarted")
    assert fault.cause.startswith("sampler 0 has not answered for 1 s: it hangs in do (walkers.py:")
    assert fault.cause.endswith(": raise faults.sample_seconds")
    assert "in do\n" in fault.error.said


def test_one_that_cannot_even_do_that_is_killed(
    process: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "GRACE", 0.2)
    member = process.add(job_seconds=1, start_seconds=20)
    process.work(member)
    (tmp_path / "once").touch()
    began = time.monotonic()
    assert process.work(member, 0, "hang", str(tmp_path / "once")) == expected(2)[-1]
    assert 1.2 < time.monotonic() - began < DEADLINE
    assert process.witness.kinds == [("hung", "restarted")]


def test_one_that_hangs_from_the_start_ends_the_run(process: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "GRACE", 0.2)
    member = process.add(job_seconds=0.5, start_seconds=0.5, hint="; see faults")
    with pytest.raises(RoleDied, match=r"sampler 0 has not started within 0.5 s: it does not answer; see faults"):
        process.work(member, 0, "hang")
    assert process.witness.kinds == [("hung", "stopped")]
    process.pool.remove(member)


def test_one_that_is_idle_or_waits_for_others_does_not_hang(process: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    idle, other = process.add(job_seconds=1.2, start_seconds=1.2), process.add("learner")
    process.wait(process.pool.submit(idle, "work"), process.pool.submit(other, "work"))
    monkeypatch.setattr(pool_module, "GRACE", 0.6)
    slow = process.pool.submit(other, "work", 0, "sleep2.2")
    process.wait(slow, process.pool.submit(idle, "work", slow))
    time.sleep(1.1)
    monkeypatch.setattr(pool_module, "GRACE", 3.0)  # its next process may need it
    process.pool.replace(idle, Fault(idle.name, "memory", RoleDied("it has grown"), "restarted"))
    process.pool.next([], 0.01)
    assert [fault.kind for fault in process.witness.faults if fault.kind != "memory"] == []
    assert process.pool._limit(idle) > time.monotonic() + 1


# -- being away ---------------------------------------------------------------------------------------------


class Roomless(Handle):
    """A role whose machine is still being looked for; what it is asked waits until there is one."""

    def __init__(self, handle: Handle, runtime: Waiting) -> None:
        self.name, self._handle, self._runtime = handle.name, handle, runtime
        self.room = True

    def call_parts(self, method: str, args: Sequence[Any], parts: int) -> list[Pending]:
        if self.room:
            return self._handle.call_parts(method, args, parts)
        return [Later(self, method, args, parts)]

    def end(self) -> None:
        self._handle.end()

    def has_room(self) -> bool:
        return self.room


class Later(Pending):
    """A call that is made when there is room."""

    def __init__(self, handle: Roomless, method: str, args: Sequence[Any], parts: int) -> None:
        self.name, self._handle, self._what = handle.name, handle, (method, args, parts)
        self._made: Pending | None = None

    def look(self) -> bool:
        if self._made is None and self._handle.room:
            self._made = self._handle._handle.call_parts(*self._what)[-1]
        return self._made is not None

    def result(self) -> Any:
        assert self._made is not None
        return self._made.result()

    def failure(self) -> BaseException | None:
        assert self._made is not None
        return self._made.failure()


class Waiting(InlineRuntime):
    """Inline, but answers of roles without room do not come, and waiting takes time and is counted."""

    def __init__(self) -> None:
        super().__init__({})
        self.handles: list[Roomless] = []
        self.rooms = True
        self.waits = 0

    def spawn(self, role: str, *args: Any, name: str, place: Place | None = None) -> Handle:
        self.handles.append(Roomless(super().spawn(role, *args, name=name, place=place), self))
        self.handles[-1].room = self.rooms
        return self.handles[-1]

    def wait(
        self, pendings: Sequence[Pending], count: int | None = None, timeout: float | None = None
    ) -> tuple[list[Pending], list[Pending]]:
        self.waits += 1
        there = [p for p in pendings if not isinstance(p, Later) or p.look()]
        if not there and timeout:
            time.sleep(timeout)
        return there, [p for p in pendings if p not in there]

    def pending_reason(self) -> str:
        return "" if self.rooms else " to find room"


@pytest.fixture
def waiting() -> Iterator[Scene]:
    with Waiting() as runtime:
        yield Scene(runtime)


def runtime_of(scene: Scene) -> Waiting:
    assert isinstance(scene.runtime, Waiting)
    return scene.runtime


@pytest.mark.parametrize("greeting", ["", "greet"])
def test_one_without_room_is_left_out_and_comes_back(waiting: Scene, tmp_path: Path, greeting: str) -> None:
    runtime = runtime_of(waiting)
    first, second = waiting.add(count=2, restartable=(EnvError,), absent_seconds=0.2, greeting=greeting)
    waiting.wait(*(waiting.pool.submit(m, "work") for m in ((first, second) if greeting else (second,))))
    first.proven = True
    runtime.rooms = False
    (tmp_path / "once").touch()
    lost = waiting.pool.submit(first, "work", 0, "env", str(tmp_path / "once"))
    assert waiting.pool.wait([lost], DEADLINE)
    assert lost.fault is not None
    assert lost.fault.kind == "absent"
    assert waiting.pool.present([first, second]) == [second]
    assert ("absent", "sampler 0") in waiting.witness.said
    assert waiting.work(second) == expected(2, 2)[-1], "the others go on"
    runtime.handles[-1].room = True
    waiting.until(lambda: not first.absent)
    assert ("back", "sampler 0") in waiting.witness.said
    assert waiting.work(first) == expected(1 if not greeting else 2)[-1]


def test_one_that_never_had_room_is_left_out_and_joins(waiting: Scene) -> None:
    waiting.pool.add("sampler", lambda i: waiting.runtime.spawn("walkers:Walker", 1, name="sampler 0"), 1,
                                Rules(absent_seconds=0.2))  # fmt: skip
    runtime_of(waiting).rooms = False
    (late,) = waiting.pool.add("sampler", lambda i: waiting.runtime.spawn("walkers:Walker", 2, name="sampler 1"), 1,
                               Rules(absent_seconds=0.2, start_seconds=0.5))  # fmt: skip
    greeted = waiting.pool.submit(late, "greet")
    assert waiting.pool.wait([greeted], DEADLINE)
    assert (late.absent, greeted.fault is not None) == (True, True)
    waiting.pool.next([], 1.0)
    runtime_of(waiting).handles[-1].room = True
    waiting.until(lambda: not late.absent)
    assert waiting.work(late) == expected(1, 2)[-1], "it was not taken for one that hangs"
    assert waiting.witness.faults == []


@pytest.mark.parametrize("grows", [False, True])
def test_where_room_is_added_a_run_begins_with_those_who_have_some(waiting: Scene, grows: bool) -> None:
    runtime_of(waiting).grows = grows
    rules = {"absent_seconds": 0.1, "start_seconds": 0.3, "quorum": 3}
    waiting.add(count=1, **rules)
    runtime_of(waiting).rooms = False
    late = waiting.pool.add("sampler", lambda i: waiting.runtime.spawn("walkers:Walker", 2, name="late"), 3,
                            Rules(absent_seconds=0.1, start_seconds=0.3, quorum=3))  # fmt: skip
    greetings = [waiting.pool.submit(member, "greet") for member in late]
    if not grows:
        with pytest.raises(RoleDied, match="could not be replaced to find room"):
            waiting.pool.wait(greetings, DEADLINE)
        return
    assert waiting.pool.wait(greetings, DEADLINE)
    assert [member.absent for member in late] == [True, True, True]
    runtime_of(waiting).handles[-1].room = True
    waiting.until(lambda: not late[-1].absent)
    assert waiting.witness.faults == []


def test_too_few_to_go_on_without_it(waiting: Scene, tmp_path: Path) -> None:
    member = waiting.add(restartable=(EnvError,), absent_seconds=0.1, start_seconds=0.6)
    waiting.work(member)
    runtime_of(waiting).rooms = False
    (tmp_path / "once").touch()
    with pytest.raises(RoleDied, match="sampler 0 could not be replaced to find room"):
        waiting.work(member, 0, "env", str(tmp_path / "once"))
    assert not member.absent


@pytest.mark.slow
def test_one_that_takes_long_after_its_return_is_not_left_out(process: Scene) -> None:
    first, _ = process.add(count=2, absent_seconds=6.0)
    process.work(first)
    kill(first)
    assert process.work(first, 0, "sleep7") == expected(2)[-1]
    assert ("absent", "sampler 0") not in process.witness.said


# -- waiting ------------------------------------------------------------------------------------------------


def test_waiting_does_not_spin(waiting: Scene) -> None:
    runtime_of(waiting).rooms = False
    member = waiting.add()
    job = waiting.pool.submit(member, "work")
    runtime_of(waiting).waits = 0
    began = time.monotonic()
    assert waiting.pool.next([job], 1.0) == []
    assert 0.9 < time.monotonic() - began < 30
    assert 0 < runtime_of(waiting).waits < 10


@pytest.mark.parametrize("seconds", [0.0, 0.3])
def test_next_does_not_wait_longer_than_it_may(process: Scene, seconds: float) -> None:
    member = process.add()
    process.work(member)
    job = process.pool.submit(member, "work", 0, "sleep30")
    began = time.monotonic()
    assert process.pool.next([job], seconds) == []
    assert process.pool.wait([job], seconds) is False
    assert 2 * seconds <= time.monotonic() - began < 2 * seconds + 5
    began = time.monotonic()
    assert process.pool.next([], seconds) == []
    assert seconds <= time.monotonic() - began < seconds + 5
    process.pool.remove(member)


def test_next_returns_while_one_backs_off(process: Scene) -> None:
    member = process.add(backoff=30)
    process.work(member)
    failing = process.pool.submit(member, "work", 0, "die")
    process.until(lambda: len(process.witness.faults) == 2, failing)
    began = time.monotonic()
    assert process.pool.next([failing], 0.2) == []
    assert time.monotonic() - began < 5
    assert member.handle is None


def test_next_takes_what_has_come_of_any_job(process: Scene) -> None:
    member = process.add()
    process.work(member)
    job = process.pool.submit(member, "work", 0, "sleep1")
    assert process.pool.next([], 0.01) == []
    assert not job.settled
    process.until(lambda: job.settled)
    assert process.pool.next([job], 0) == [job]
