"""Roles of a pool that are killed or fail: they are made again as if nothing had been, or given up."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pools import kill
from walkers import DEADLINE, ERRORS, Scene, Walker, expected

from raynforce.errors import EnvError, RaynforceError
from raynforce.runtimes import pool as pool_module
from raynforce.runtimes.base import RoleDied, RoleError, Runtime
from raynforce.runtimes.inline import InlineRuntime
from raynforce.runtimes.member import Job, Member

# -- one that fails is made again where it was --------------------------------------------------------------


@pytest.mark.usefixtures("no_recovery_points")
def test_an_error_that_may_be_an_accident_is_mended(scene: Scene, tmp_path: Path) -> None:
    member = scene.add(restartable=(RoleDied, EnvError))
    (tmp_path / "once").touch()
    jobs = [scene.pool.submit(member, "work") for _ in range(3)]
    scene.wait(*jobs)
    jobs += [scene.pool.submit(member, "work", 0, "env", str(tmp_path / "once"))]
    jobs += [scene.pool.submit(member, "work") for _ in range(2)]
    assert scene.wait(*jobs) == expected(6)
    assert scene.witness.kinds == [("failed", "restarted")]
    assert scene.pool.restarts == 1
    assert [job.method for job in scene.witness.redos] == ["work"] * 3, "those that had been answered"


@pytest.mark.usefixtures("recovery_points")
def test_a_border_is_a_copy(inline: Scene, tmp_path: Path) -> None:
    """A role goes on writing into the arrays that its state was made of."""
    member = inline.add(restartable=(EnvError,))
    inline.work(member)
    for _ in range(3):  # each is made before the recovery point that was asked for has been looked at
        inline.work(member)
    (tmp_path / "once").touch()
    assert inline.work(member, 0, "env", str(tmp_path / "once")) == expected(5)[-1]
    assert inline.work(member) == expected(6)[-1]


def test_killed_while_busy(process: Scene) -> None:
    member = process.add()
    first = process.work(member)
    busy = process.pool.submit(member, "work", 0, "sleep0.3")
    after = process.pool.submit(member, "work")
    process.pool.next([busy], 0.1)
    kill(member)
    assert [first, *process.wait(busy, after)] == expected(3)
    assert process.witness.kinds == [("died", "restarted")]
    assert process.witness.said == [("recovered", "sampler 0")]
    assert 0.3 < process.witness.seconds[0] < DEADLINE


@pytest.mark.slow
def test_killed_on_ray(make_ray: Callable[[], Runtime]) -> None:
    with make_ray() as runtime:
        scene = Scene(runtime)
        sampler, learner = scene.add(work="produce"), scene.add("learner", work="learn")
        made = scene.pool.submit(sampler, "produce", parts=2)
        learned = scene.pool.submit(learner, "learn", made)
        pids = scene.wait(scene.pool.submit(sampler, "pid"), scene.pool.submit(learner, "pid"))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        again = scene.pool.submit(learner, "learn", made, scene.pool.submit(sampler, "produce", learned, parts=2))
        other, way = Walker(), Walker()
        first = other.learn(way.produce()[0])
        assert scene.wait(learned, again) == [first, other.learn(np.full(1000, expected(1)[0]), way.produce(first)[0])]
        assert {fault.role for fault in scene.witness.faults} == {"sampler 0", "learner"}


@pytest.mark.usefixtures("no_recovery_points")
def test_killed_while_idle(process: Scene) -> None:
    member = process.add()
    answers = [process.work(member), process.work(member)]
    kill(member)
    assert [*answers, process.work(member)] == expected(3)
    assert [job.method for job in process.witness.redos] == ["work"] * 2
    assert len(process.witness.faults) == 1


@pytest.mark.usefixtures("recovery_points")
@pytest.mark.parametrize("method", ["state", "load"])
def test_dies_in_its_state_or_load(process: Scene, flags: Path, method: str) -> None:
    member = process.add()
    (flags / f"die_in_{method}").touch()
    answers = [process.work(member) for _ in range(2)]
    if method == "load":
        kill(member)
    answers += [process.work(member) for _ in range(3)]
    assert answers == expected(5)
    assert not (flags / f"die_in_{method}").exists()
    assert {kind for kind, _ in process.witness.kinds} == {"died"}


@pytest.mark.usefixtures("recovery_points")
def test_killed_while_it_saves_and_works(process: Scene, flags: Path) -> None:
    """Two answers are lost at once: that of its next job, and its recovery point."""
    member = process.add()
    process.work(member)
    (flags / "slow_state").touch()
    process.work(member)
    assert member.saving is not None
    job = process.pool.submit(member, "work")
    kill(member)
    (flags / "slow_state").unlink()
    assert process.wait(job) == expected(3)[-1:]
    assert process.witness.kinds == [("died", "restarted")]


def test_killed_again_and_again_while_it_recovers(process: Scene, flags: Path) -> None:
    member = process.add()
    process.work(member)
    process.pool.states([member])
    (flags / "slow_load").touch()
    job = process.pool.submit(member, "work", 0, "sleep0.2")
    for _ in range(2):
        kill(member)
        handle = member.handle
        process.until(lambda before=handle: member.handle is not before and member.loading is not None, job)
    assert process.wait(job) == expected(2)[-1:]
    assert [fault.attempt for fault in process.witness.faults] == [1, 2]
    assert process.witness.said == [("recovered", "sampler 0")], "once"


# -- repeated failure ---------------------------------------------------------------------------------------


def test_backing_off(scene: Scene) -> None:
    member = scene.add(restartable=(EnvError,), restarts=3, backoff=0.1)
    scene.work(member)
    began = time.monotonic()
    with pytest.raises(
        RaynforceError, match=r"failed 4 times in a row \(faults.restarts = 3\): .*env is wrong"
    ) as caught:
        scene.work(member, 0, "env")
    assert time.monotonic() - began > 0.3, "at once, after 0.1 s, after 0.2 s"
    assert scene.witness.kinds == [("failed", "restarted")] * 3 + [("failed", "given up")]
    assert [fault.attempt for fault in scene.witness.faults] == [1, 2, 3, 4]
    assert isinstance(caught.value.__cause__, EnvError)


def test_success_begins_the_count_again(inline: Scene, tmp_path: Path) -> None:
    member = inline.add(restartable=(EnvError,), restarts=1)
    inline.work(member)
    for _ in range(5):
        (tmp_path / "once").touch()
        inline.work(member, 0, "env", str(tmp_path / "once"))
    assert inline.work(member) == expected(7)[-1]
    assert [fault.attempt for fault in inline.witness.faults] == [1] * 5


def test_while_one_backs_off_others_work(process: Scene) -> None:
    first, second = process.add(count=2, backoff=30, restarts=5)
    process.wait(*(process.pool.submit(m, "work") for m in (first, second)))
    failing = process.pool.submit(first, "work", 0, "die")
    process.until(lambda: len(process.witness.faults) == 2, failing)
    began = time.monotonic()
    assert [process.work(second) for _ in range(3)] == expected(4, 2)[1:]
    assert time.monotonic() - began < 20


def test_given_up_and_the_others_go_on_until_they_are_too_few(process: Scene) -> None:
    members = process.add(count=3, restarts=1, quorum=2)
    process.wait(*(process.pool.submit(m, "work") for m in members))
    job = process.pool.submit(members[0], "work", 0, "die")
    assert process.pool.wait([job], DEADLINE)
    assert job.fault is not None
    assert job.fault.action == "given up"
    assert process.pool.present(members) == members[1:]
    assert process.work(members[1]) == expected(2, 2)[-1]
    with pytest.raises(RaynforceError) as caught:
        process.work(members[2], 0, "die")
    text = str(caught.value)
    assert "sampler 2 failed 2 times in a row (faults.restarts = 1), and 1 of 3 samplers are left: " in text
    assert "was killed by SIGKILL" in text
    assert "famous last words" in caught.value.said
    assert caught.value.role == "sampler 2"


def test_the_trace_comes_along(process: Scene) -> None:
    member = process.add(restartable=(RoleError,), restarts=0)
    process.work(member)
    with pytest.raises(RaynforceError, match="plain is wrong") as caught:
        process.work(member, 0, "plain")
    assert "in do\n" in (caught.value.trace or "")


@pytest.mark.parametrize("what", ["usage", "contract", "checkpoint", "env"])
def test_what_no_restart_can_mend_is_raised_at_once(scene: Scene, what: str) -> None:
    member = scene.add(restartable=(RoleDied,) if what == "env" else (RoleDied, EnvError, RoleError))
    scene.work(member)
    with pytest.raises(ERRORS[what], match=f"{what} is wrong"):  # type: ignore[arg-type]
        scene.work(member, 0, what)
    assert scene.witness.kinds == [("failed", "stopped")]
    assert scene.pool.restarts == 0


def test_an_error_at_the_first_work_is_no_accident(scene: Scene) -> None:
    member = scene.add(restartable=(RoleDied, EnvError))
    with pytest.raises(EnvError, match="env is wrong"):
        scene.work(member, 0, "env")
    assert scene.witness.kinds == [("failed", "stopped")]


def test_a_death_at_the_first_work_may_be_one(process: Scene, tmp_path: Path) -> None:
    member = process.add()
    (tmp_path / "once").touch()
    assert process.work(member, 0, "die", str(tmp_path / "once")) == expected(1)[0]


def test_begins_anew_if_the_same_way_leads_to_failure_again(scene: Scene) -> None:
    asked: list[int] = []

    def anew(member: Member) -> Sequence[Any]:
        asked.append(member.attempts)
        return "start_fresh", 10 * member.attempts, member.attempts

    member = scene.add(restartable=(EnvError,), restarts=3, start_fresh=anew, work="produce", quorum=0, backoff=0.0)
    scene.wait(scene.pool.submit(member, "produce", parts=2))
    failing = scene.pool.submit(member, "produce", 0, "env", parts=2)
    assert scene.pool.wait([failing], DEADLINE)
    assert failing.fault is not None
    assert asked == [1, 2], "not after its first failure"
    assert member.gone


def test_one_that_has_begun_anew_comes_back_to_where_it_was_then(process: Scene, tmp_path: Path) -> None:
    asked: list[int] = []

    def anew(member: Member) -> Sequence[Any]:
        asked.append(member.attempts)
        return "start_fresh", 10, member.attempts

    member = process.add(restartable=(RoleDied, EnvError), start_fresh=anew, work="produce")
    (first,) = process.wait(process.pool.submit(member, "produce", parts=2))
    assert first == (0, expected(1)[0])
    for name in ("one", "two"):
        (tmp_path / name).touch()
    job = process.pool.submit(member, "produce", 0, "env", str(tmp_path / "one"), parts=2)
    process.pool.next([job], 0)
    process.until(lambda: member.failures > 0, job)
    (tmp_path / "one").touch()
    way = [Walker() for _ in range(1)]
    way[0].start_fresh(10, 1)
    assert process.wait(job) == [way[0].produce()[1]], "a gap in the sequence, and another way"
    kill(member)
    assert process.wait(process.pool.submit(member, "produce", parts=2)) == [way[0].produce()[1]]
    assert asked == [1], "it was lost once"


# -- all at once --------------------------------------------------------------------------------------------


def chain(scene: Scene, rounds: int, samplers: int, disturb: Callable[[list[Member]], None]) -> list[Any]:
    """Samplers, a learner and its versions, one round ahead of each other; returns all answers."""
    members = scene.add(count=samplers, work="produce", restarts=100, backoff=0.0)
    learner = scene.add("learner", work="learn", restarts=100, backoff=0.0)
    version = scene.pool.submit(learner, "publish")
    found: list[Any] = []
    jobs: list[Job] = []
    until = time.monotonic() + 120
    for number in range(rounds):
        made = [scene.pool.submit(member, "produce", version, parts=2) for member in members]
        learned = scene.pool.submit(learner, "learn", *made)
        version = scene.pool.submit(learner, "publish")
        jobs += [*made, learned, version]
        while [job for job in jobs if not job.settled]:
            assert time.monotonic() < until
            scene.pool.next([job for job in jobs if not job.settled], 0.01)
            disturb([*members, learner])
            if number % 3:
                break  # the next round is asked for before this one is over
        if number % 10 == 5:
            found += [int(state["total"][0]) for state in scene.pool.states([*members, learner])]
    scene.wait(*jobs)
    assert [member.open for member in scene.pool.members] == [[]] * (samplers + 1)
    return found + [int(np.sum(job.result())) if job.method == "publish" else job.result() for job in jobs]


def undisturbed(rounds: int, samplers: int) -> list[Any]:
    with InlineRuntime({}) as runtime:
        return chain(Scene(runtime), rounds, samplers, lambda members: None)


def killer(seed: int, probability: float, most: int) -> Callable[[list[Member]], None]:
    """Kills whomever, whenever: at work, idle, starting, loading."""
    rng = random.Random(seed)
    killed: list[int] = []

    def disturb(members: list[Member]) -> None:
        handle: Any = rng.choice(members).handle
        if rng.random() < probability and len(killed) < most and handle is not None and handle.alive:
            killed.append(handle.process.pid)
            os.kill(handle.process.pid, signal.SIGKILL)

    return disturb


@pytest.mark.parametrize("every", [0.0, 0.3])
def test_random_kills_change_no_answer(process: Scene, monkeypatch: pytest.MonkeyPatch, every: float) -> None:
    monkeypatch.setattr(pool_module, "RECOVERY_SECONDS", every)
    monkeypatch.setattr(pool_module, "RECOVERY_COST", 0.0)
    assert chain(process, 60, 2, killer(1, 0.05, 5)) == undisturbed(60, 2)
    assert len(process.witness.faults) > 1
    assert {kind for kind, _ in process.witness.kinds} == {"died"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_random_kills_change_no_answer_for_long(process: Scene, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(pool_module, "RECOVERY_SECONDS", [0.0, 0.05, 0.5][seed % 3])
    monkeypatch.setattr(pool_module, "RECOVERY_COST", 0.0)
    disturb = killer(seed, [0.02, 0.03, 0.1, 0.2][seed % 4], 40)
    assert chain(process, 200, 3, disturb) == undisturbed(200, 3)
    assert len(process.witness.faults) > 2
