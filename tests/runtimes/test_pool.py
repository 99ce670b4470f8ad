"""Pools: every job is answered once and in order, what is needed to redo it is kept, and no more."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import numpy as np
import pytest
from pools import kill
from roles_for_tests import descriptors
from walkers import DEADLINE, Scene, Walker, expected

from raynforce.runtimes import pool as pool_module
from raynforce.runtimes.base import Pending, RoleDied
from raynforce.runtimes.member import Fault, Job
from raynforce.runtimes.messages import Packed


def test_answers_are_delivered_once(process: Scene) -> None:
    member = process.add()
    jobs = [process.pool.submit(member, "work") for _ in range(20)]
    seen: list[Job] = []
    while len(seen) < 20:
        seen += process.pool.next([job for job in jobs if job not in seen], DEADLINE)
        if len(seen) in (1, 2, 10):
            kill(member)
    assert sorted(map(jobs.index, seen)) == list(range(20))
    assert [job.result() for job in jobs] == expected(20)
    assert (member.open, process.pool.next(jobs, 0)) == ([], jobs)


def test_two_parts(process: Scene) -> None:
    member = process.add(work="produce")
    jobs = [process.pool.submit(member, "produce", parts=2) for _ in range(3)]
    process.pool.next(jobs, DEADLINE)
    kill(member)
    assert process.wait(*jobs) == list(enumerate(expected(3)))
    assert [int(job.value.result()[0]) for job in jobs] == expected(3)


def test_a_member_that_is_removed_is_no_fault(process: Scene) -> None:
    member, other = process.add("evaluator", has_state=False), process.add()
    process.work(member)
    job = process.pool.submit(member, "work", 0, "sleep100")
    process.pool.next([job], 0.1)
    process.pool.remove(member)
    assert job.fault is not None
    assert process.work(other) == expected(1)[0]
    assert (process.witness.faults, process.pool.restarts, process.pool.members) == ([], 0, [other])


# -- jobs that depend on others -----------------------------------------------------------------------------


def test_jobs_that_wait_for_those_of_a_dead_member(process: Scene) -> None:
    sampler, learner = process.add(work="produce"), process.add("learner", work="learn")
    made = process.pool.submit(sampler, "produce", 0, "sleep0.2", parts=2)
    learned = process.pool.submit(learner, "learn", made)
    after = process.pool.submit(learner, "publish")
    process.pool.next([made], 0.1)
    kill(sampler)
    process.wait(made, learned, after)
    fragment = np.full(1000, expected(1)[0])
    assert learned.result() == Walker(1).learn(fragment)
    assert after.result()[0] == learned.result(), "nothing overtakes what has to wait"
    assert [fault.role for fault in process.witness.faults] == ["sampler 0"]


@pytest.mark.usefixtures("no_recovery_points")
def test_a_death_between_an_update_and_its_version(process: Scene) -> None:
    sampler, learner = process.add(work="produce"), process.add("learner", work="learn")
    learned = process.pool.submit(learner, "learn", 5)
    process.wait(learned)
    kill(learner)
    version = process.pool.submit(learner, "publish")
    made = process.pool.submit(sampler, "produce", version, parts=2)
    process.wait(made)
    assert version.result()[0] == learned.result()
    assert made.result() == Walker(1).produce(version.result())[1]
    assert process.witness.redos == [learned]
    assert [fault.role for fault in process.witness.faults] == ["learner"]


def test_what_a_member_was_given_by_one_that_is_gone_is_still_there(process: Scene) -> None:
    sampler, learner = process.add(work="produce", restarts=0, quorum=0), process.add("learner", work="learn")
    made = process.pool.submit(sampler, "produce", parts=2)
    process.wait(made)
    kill(sampler)
    never = process.pool.submit(sampler, "produce", parts=2)
    assert process.pool.wait([never], DEADLINE)
    assert (never.fault is not None, sampler.gone) == (True, True)
    learned, not_learned = process.pool.submit(learner, "learn", made), process.pool.submit(learner, "learn", never)
    assert process.pool.wait([learned, not_learned], DEADLINE)
    assert learned.result() == Walker(1).learn(made.value.result())
    assert not_learned.fault is not None
    late = process.pool.submit(sampler, "produce")
    assert (late.settled, late.fault is not None) == (True, True)


# -- recovery points ------------------------------------------------------------------------------------------------


def test_borders_keep_the_log_short(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "RECOVERY_SECONDS", 0.02)
    monkeypatch.setattr(pool_module, "RECOVERY_COST", 1)
    member = scene.add()
    answers, found, until = [], 0, time.monotonic() + DEADLINE
    while found < 5:
        assert time.monotonic() < until
        before = member.recovery_point
        answers.append(scene.work(member))
        if member.recovery_point is not before:
            found += 1
            assert len(member.log) <= 2
    assert answers == expected(len(answers))
    assert member.open == []


def test_what_jobs_hold_on_to_brings_a_border(process: Scene) -> None:
    member = process.add()
    heavy = [process.pool.submit(member, "work", weight=pool_module.LOG_BYTES // 2) for _ in range(4)]
    process.wait(*heavy)
    process.work(member)
    process.work(member)
    assert member.recovery_point is not None
    assert not set(heavy) & set(member.log)


def test_a_role_without_state_keeps_no_log(process: Scene) -> None:
    member = process.add("evaluator", has_state=False)
    answers = [process.work(member) for _ in range(3)]
    assert (answers, member.log) == (expected(3), [])
    kill(member)
    assert process.work(member) == expected(1)[0], "it begins again"


def test_a_state_that_is_too_large_is_not_kept(process: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "STATE_BYTES", 1_000_000)
    monkeypatch.setattr(pool_module, "RECOVERY_SECONDS", 0.0)
    member = process.add("learner", pad=2_000_000)
    answers = [process.work(member) for _ in range(20)]
    assert answers == expected(20)
    assert (member.recovery_point, member.log) == (None, [])
    assert [text for kind, text in process.witness.said if "not kept beside it" in text] != []
    (state,) = process.pool.states([member])
    assert state["sequence"] == 20, "it can be asked for"
    assert member.recovery_point is None
    kill(member)
    with pytest.raises(RoleDied, match="SIGKILL"):
        process.work(member)
    assert process.witness.kinds == [("died", "stopped")]


@pytest.mark.parametrize("restarts", [4, pytest.param(50, marks=pytest.mark.slow)])
def test_restarts_leave_nothing_behind(process: Scene, restarts: int) -> None:
    gc.collect()  # what an earlier test has left in cycles
    member = process.add(pad=1_000_000)
    process.work(member)
    process.pool.states([member])
    files, memory = descriptors(), Packed.held
    for _ in range(restarts):
        kill(member)
        process.work(member)
        process.pool.states([member])
    assert process.pool.restarts == restarts
    assert len(descriptors()) == len(files)
    assert Packed.held <= memory + 100_000


# -- the states of all --------------------------------------------------------------------------------------


def test_states_are_of_after_all_jobs(scene: Scene) -> None:
    members = scene.add(count=2)
    for member in members:
        scene.pool.submit(member, "work")
    states = scene.pool.states(members)
    assert [int(state["total"][0]) for state in states] == [expected(1)[0], expected(1, 2)[0]]
    assert [member.log for member in members] == [[], []]


def test_states_while_one_is_down(process: Scene) -> None:
    members = process.add(count=2)
    for _ in range(2):
        for member in members:
            process.work(member)
    kill(members[0])
    states = process.pool.states(members)
    assert [state["sequence"] for state in states] == [2, 2]
    assert int(states[0]["total"][0]) == expected(2)[-1]
    assert process.work(members[0]) == expected(3)[-1]


def test_one_that_dies_after_it_has_told_its_state(process: Scene, flags: Path) -> None:
    """While the others' are waited for: it is on its way back when its state becomes known as its recovery point."""
    first, second = process.add(count=2)
    process.wait(*(process.pool.submit(m, "work") for m in (first, second)))
    slow = process.pool.submit(second, "work", 0, "sleep1")
    submit, killed = process.pool._answered, []

    def answered(job: Job, pending: Pending) -> None:
        submit(job, pending)
        if job.member is first and job.method == "state" and not killed:
            killed.append(job)
            kill(first)
            process.pool.submit(first, "work")

    process.pool._answered = answered  # type: ignore[method-assign]
    states = process.pool.states([first, second])
    assert slow.settled
    assert [state["sequence"] for state in states] == [1, 2]
    assert process.work(first) == expected(3)[-1]
    assert killed


def test_states_of_one_that_is_gone(process: Scene) -> None:
    members = process.add(count=2, restarts=0)
    process.pool.states(members)
    kill(members[0])
    process.pool.wait([process.pool.submit(members[0], "work")], DEADLINE)
    assert members[0].gone
    states = process.pool.states(members)
    assert states[0]["sequence"] == 0, "the last that is known"


# -- replacing ----------------------------------------------------------------------------------------------


def test_a_replaced_member_loses_nothing(scene: Scene) -> None:
    member = scene.add()
    handle = member.handle
    answers = [scene.work(member) for _ in range(3)]
    jobs = [scene.pool.submit(member, "work") for _ in range(2)]
    scene.pool.replace(member, Fault(member.name, "memory", RoleDied("it has grown"), "restarted"))
    scene.pool.replace(member, Fault(member.name, "memory", RoleDied("it has grown"), "restarted"))
    jobs += [scene.pool.submit(member, "work") for _ in range(2)]
    answers += scene.wait(*jobs)
    scene.until(lambda: scene.pool.restarts > 0)
    answers.append(scene.work(member))
    assert answers == expected(8)
    assert member.handle is not handle
    assert scene.witness.kinds == [("memory", "restarted")]


def test_states_do_not_forget_that_a_member_is_to_be_replaced(process: Scene) -> None:
    member = process.add()
    process.work(member)
    process.pool.replace(member, Fault(member.name, "memory", RoleDied("it has grown"), "restarted"))
    process.pool.states([member])
    assert process.work(member) == expected(2)[-1]
    process.until(lambda: process.pool.restarts > 0)
