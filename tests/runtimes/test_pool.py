"""Roles that are killed, hang, fail or are away: what was asked of them is answered once, as if nothing had been."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from roles_for_tests import descriptors

from raynforce.errors import CheckpointError, ContractError, EnvError, RaynforceError, UsageError
from raynforce.runtimes import pool as pool_module
from raynforce.runtimes.base import Handle, Pending, Place, RoleDied, RoleError, Runtime
from raynforce.runtimes.inline import InlineRuntime
from raynforce.runtimes.member import Fault, Job, Member, Rules
from raynforce.runtimes.pool import Pool
from raynforce.runtimes.process import ProcessRuntime
from raynforce.runtimes.wire import Packed

DEADLINE = 30.0
ERRORS: dict[str, Callable[[str], Exception]] = {
    "usage": UsageError,
    "contract": ContractError,
    "checkpoint": CheckpointError,
    "env": EnvError,
    "plain": ValueError,
}


class Walker:
    """Its answers follow from its state and what it was given; it fails when it is told to, once or always."""

    def __init__(self, start: int = 1, pad: int = 0) -> None:
        self.total = np.array([start])  # changed in place: what it gave away before changes too, inline
        self.sequence = 0
        self.pad = np.zeros(pad, np.uint8)

    def work(self, value: Any = 0, do: str = "", flag: str = "") -> int:
        if do and (not flag or take(flag)):
            self.do(do)
        self.total[0] = (self.total[0] * 31 + int(np.sum(value)) + 7) % 1_000_003
        self.sequence += 1
        return int(self.total[0])

    def produce(self, value: Any = 0, do: str = "", flag: str = "") -> tuple[np.ndarray, tuple[int, int]]:
        answer = self.work(value, do, flag)
        return np.full(1000, answer), (self.sequence - 1, answer)

    def learn(self, *values: Any) -> int:
        return self.work(sum(int(np.sum(value)) for value in values))

    def publish(self) -> np.ndarray:
        return self.total.copy()

    def do(self, what: str) -> None:
        if what == "die":
            print("famous last words", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "hang":
            time.sleep(1000)
        if what.startswith("sleep"):
            time.sleep(float(what[5:]))
            return
        raise ERRORS[what](f"{what} is wrong")

    def state(self) -> dict[str, Any]:
        self.slowly("state")
        return {"total": self.total, "sequence": self.sequence, "pad": self.pad}

    def load(self, tree: dict[str, Any]) -> list[str]:
        self.slowly("load")
        self.total, self.sequence = tree["total"].copy(), tree["sequence"]
        return []

    def slowly(self, method: str) -> None:
        """Dies in it, or takes a while, if files say so."""
        folder = os.environ.get("RNF_TEST_FLAGS")
        if folder and take(f"{folder}/die_in_{method}"):
            os.kill(os.getpid(), signal.SIGKILL)
        if folder and Path(f"{folder}/slow_{method}").exists():
            time.sleep(0.3)

    def begin_anew(self, sequence: int, attempt: int) -> None:
        self.total, self.sequence = np.array([1000 * attempt]), sequence

    def greet(self) -> list[str]:
        return ["hello"]

    def pid(self) -> int:
        return os.getpid()


def take(flag: str) -> bool:
    """Whether a file was there; it is not any more."""
    try:
        os.unlink(flag)
    except FileNotFoundError:
        return False
    return True


class Witness:
    """Remembers what happened in a pool."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.said: list[tuple[str, ...]] = []
        self.seconds: list[float] = []
        self.redos: list[Job] = []

    def fault(self, fault: Fault, member: Member) -> None:
        self.faults.append(fault)

    def recovered(self, role: str, seconds: float) -> None:
        self.said.append(("recovered", role))
        self.seconds.append(seconds)

    def absent(self, role: str, cause: str) -> None:
        self.said.append(("absent", role))

    def back(self, role: str) -> None:
        self.said.append(("back", role))

    def note(self, text: str) -> None:
        self.said.append(("note", text))

    def redone(self, job: Job) -> None:
        self.redos.append(job)

    @property
    def kinds(self) -> list[tuple[str, str]]:
        return [(fault.kind, fault.action) for fault in self.faults]


class Scene:
    """A pool of walkers on one runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.witness = Witness()
        self.pool = Pool(runtime, self.witness)

    def add(self, kind: str = "sampler", count: int = 1, pad: int = 0, place: Place | None = None, **rules: Any) -> Any:
        def make(index: int) -> Handle:
            name = f"sampler {index}" if kind == "sampler" else kind
            return self.runtime.spawn("test_pool:Walker", index + 1, pad, name=name, place=place)

        rules = {"work": "work", "backoff": 0.01} | rules
        members = self.pool.add(kind, make, count, Rules(**rules))
        return members if count > 1 else members[0]

    def wait(self, *jobs: Job) -> list[Any]:
        assert self.pool.wait(jobs, DEADLINE)
        return [job.result() for job in jobs]

    def work(self, member: Member, *args: Any) -> int:
        return int(self.wait(self.pool.submit(member, "work", *args))[0])


def expected(count: int, start: int = 1, value: int = 0) -> list[int]:
    walker = Walker(start)
    return [walker.work(value) for _ in range(count)]


def kill(member: Member) -> None:
    handle: Any = member.handle
    os.kill(handle.process.pid, signal.SIGKILL)


@pytest.fixture
def flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RNF_TEST_FLAGS", str(tmp_path))
    return tmp_path


@pytest.fixture
def process() -> Iterator[Scene]:
    with ProcessRuntime({}, lambda text: None) as runtime:
        yield Scene(runtime)


@pytest.fixture
def inline() -> Iterator[Scene]:
    with InlineRuntime({}) as runtime:
        yield Scene(runtime)


@pytest.fixture(params=["inline", "process", pytest.param("ray", marks=pytest.mark.slow)])
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    if request.param == "ray":
        with request.getfixturevalue("make_ray")() as runtime:
            yield Scene(runtime)
    else:
        yield request.getfixturevalue(request.param)


@pytest.fixture
def borders(monkeypatch: pytest.MonkeyPatch) -> None:
    """A border is taken after every job."""
    monkeypatch.setattr(pool_module, "BORDER_SECONDS", 0.0)
    monkeypatch.setattr(pool_module, "BORDER_COST", 0.0)


@pytest.fixture
def no_borders(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the start took."""
    monkeypatch.setattr(pool_module, "BORDER_SECONDS", 1000.0)


# -- one that fails is made again where it was --------------------------------------------------------------


@pytest.mark.usefixtures("no_borders")
def test_an_error_that_may_be_an_accident_is_mended(scene: Scene, tmp_path: Path) -> None:
    member = scene.add(accidents=(RoleDied, EnvError))
    (tmp_path / "once").touch()
    jobs = [scene.pool.submit(member, "work") for _ in range(3)]
    scene.wait(*jobs)
    jobs += [scene.pool.submit(member, "work", 0, "env", str(tmp_path / "once"))]
    jobs += [scene.pool.submit(member, "work") for _ in range(2)]
    assert scene.wait(*jobs) == expected(6)
    assert scene.witness.kinds == [("failed", "restarted")]
    assert scene.pool.restarts == 1
    assert [job.method for job in scene.witness.redos] == ["work"] * 3, "those that had been answered"


@pytest.mark.usefixtures("borders")
def test_a_border_is_a_copy(inline: Scene, tmp_path: Path) -> None:
    """A role goes on writing into the arrays that its state was made of."""
    member = inline.add(accidents=(EnvError,))
    inline.work(member)
    for _ in range(3):  # each is made before the border that was asked for has been looked at
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
    assert 0.3 < process.witness.seconds[0] < 5


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


@pytest.mark.usefixtures("no_borders")
def test_killed_while_idle(process: Scene) -> None:
    member = process.add()
    answers = [process.work(member), process.work(member)]
    kill(member)
    assert [*answers, process.work(member)] == expected(3)
    assert [job.method for job in process.witness.redos] == ["work"] * 2
    assert len(process.witness.faults) == 1


@pytest.mark.usefixtures("borders")
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


@pytest.mark.usefixtures("borders")
def test_killed_while_it_saves_and_works(process: Scene, flags: Path) -> None:
    """Two answers are lost at once: that of its next job, and its border."""
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
        until = time.monotonic() + DEADLINE
        handle = member.handle
        while member.handle is handle or member.loading is None:
            assert time.monotonic() < until
            process.pool.next([job], 0.01)
    assert process.wait(job) == expected(2)[-1:]
    assert [fault.attempt for fault in process.witness.faults] == [1, 2]
    assert process.witness.said == [("recovered", "sampler 0")], "once"


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


@pytest.mark.usefixtures("no_borders")
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


# -- borders ------------------------------------------------------------------------------------------------


def test_borders_keep_the_log_short(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "BORDER_SECONDS", 0.02)
    monkeypatch.setattr(pool_module, "BORDER_COST", 1)
    member = scene.add()
    answers, found, until = [], 0, time.monotonic() + DEADLINE
    while found < 5:
        assert time.monotonic() < until
        before = member.border
        answers.append(scene.work(member))
        if member.border is not before:
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
    assert member.border is not None
    assert not set(heavy) & set(member.log)


def test_a_role_without_state_keeps_no_log(process: Scene) -> None:
    member = process.add("evaluator", has_state=False)
    answers = [process.work(member) for _ in range(3)]
    assert (answers, member.log) == (expected(3), [])
    kill(member)
    assert process.work(member) == expected(1)[0], "it begins again"


def test_a_state_that_is_too_large_is_not_kept(process: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "STATE_BYTES", 1_000_000)
    monkeypatch.setattr(pool_module, "BORDER_SECONDS", 0.0)
    member = process.add("learner", pad=2_000_000)
    answers = [process.work(member) for _ in range(20)]
    assert answers == expected(20)
    assert (member.border, member.log) == (None, [])
    assert [text for kind, text in process.witness.said if "not kept beside it" in text] != []
    (state,) = process.pool.states([member])
    assert state["sequence"] == 20, "it can be asked for"
    assert member.border is None
    kill(member)
    with pytest.raises(RoleDied, match="SIGKILL"):
        process.work(member)
    assert process.witness.kinds == [("died", "stopped")]


@pytest.mark.parametrize("restarts", [4, pytest.param(50, marks=pytest.mark.slow)])
def test_restarts_leave_nothing_behind(process: Scene, restarts: int) -> None:
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
    """While the others' are waited for: it is on its way back when its state becomes known as its border."""
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


# -- repeated failure ---------------------------------------------------------------------------------------


def test_backing_off(scene: Scene) -> None:
    member = scene.add(accidents=(EnvError,), restarts=3, backoff=0.1)
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
    member = inline.add(accidents=(EnvError,), restarts=1)
    inline.work(member)
    for _ in range(5):
        (tmp_path / "once").touch()
        inline.work(member, 0, "env", str(tmp_path / "once"))
    assert inline.work(member) == expected(7)[-1]
    assert [fault.attempt for fault in inline.witness.faults] == [1] * 5


def test_while_one_backs_off_others_work(process: Scene) -> None:
    first, second = process.add(count=2, backoff=0.5, restarts=5)
    process.wait(*(process.pool.submit(m, "work") for m in (first, second)))
    failing = process.pool.submit(first, "work", 0, "die")
    while len(process.witness.faults) < 2:
        process.pool.next([failing], 0.1)
    began = time.monotonic()
    assert [process.work(second) for _ in range(3)] == expected(4, 2)[1:]
    assert time.monotonic() - began < 0.4


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
    member = process.add(accidents=(RoleError,), restarts=0)
    process.work(member)
    with pytest.raises(RaynforceError, match="plain is wrong") as caught:
        process.work(member, 0, "plain")
    assert "in do\n" in (caught.value.trace or "")


@pytest.mark.parametrize("what", ["usage", "contract", "checkpoint", "env"])
def test_what_no_restart_can_mend_is_raised_at_once(scene: Scene, what: str) -> None:
    member = scene.add(accidents=(RoleDied,) if what == "env" else (RoleDied, EnvError, RoleError))
    scene.work(member)
    with pytest.raises(ERRORS[what], match=f"{what} is wrong"):  # type: ignore[arg-type]
        scene.work(member, 0, what)
    assert scene.witness.kinds == [("failed", "stopped")]
    assert scene.pool.restarts == 0


def test_an_error_at_the_first_work_is_no_accident(scene: Scene) -> None:
    member = scene.add(accidents=(RoleDied, EnvError))
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
        return "begin_anew", 10 * member.attempts, member.attempts

    member = scene.add(accidents=(EnvError,), restarts=3, anew=anew, work="produce", quorum=0, backoff=0.0)
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
        return "begin_anew", 10, member.attempts

    member = process.add(accidents=(RoleDied, EnvError), anew=anew, work="produce")
    (first,) = process.wait(process.pool.submit(member, "produce", parts=2))
    assert first == (0, expected(1)[0])
    for name in ("one", "two"):
        (tmp_path / name).touch()
    job = process.pool.submit(member, "produce", 0, "env", str(tmp_path / "one"), parts=2)
    process.pool.next([job], 0)
    while member.failures < 1:
        process.pool.next([job], 0.05)
    (tmp_path / "one").touch()
    way = [Walker() for _ in range(1)]
    way[0].begin_anew(10, 1)
    assert process.wait(job) == [way[0].produce()[1]], "a gap in the sequence, and another way"
    kill(member)
    assert process.wait(process.pool.submit(member, "produce", parts=2)) == [way[0].produce()[1]]
    assert asked == [1], "it was lost once"


# -- hanging ------------------------------------------------------------------------------------------------


def test_one_that_hangs_ends_itself_and_shows_where(process: Scene, tmp_path: Path) -> None:
    place = Place(start_seconds=20, call_seconds=0.3)
    member = process.add(job_seconds=0.3, start_seconds=20, place=place, hint=": raise faults.sample_seconds")
    process.work(member)
    (tmp_path / "once").touch()
    assert process.work(member, 0, "hang", str(tmp_path / "once")) == expected(2)[-1]
    (fault,) = process.witness.faults
    assert (fault.kind, fault.action) == ("hung", "restarted")
    assert fault.cause.startswith("sampler 0 has not answered for 0.3 s: it hangs in do (test_pool.py:")
    assert fault.cause.endswith(": raise faults.sample_seconds")
    assert "in do\n" in fault.error.said


def test_one_that_cannot_even_do_that_is_killed(
    process: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "GRACE", 0.2)
    member = process.add(job_seconds=0.3, start_seconds=20)
    process.work(member)
    (tmp_path / "once").touch()
    began = time.monotonic()
    assert process.work(member, 0, "hang", str(tmp_path / "once")) == expected(2)[-1]
    assert 0.5 < time.monotonic() - began < 8
    assert process.witness.kinds == [("hung", "restarted")]


def test_one_that_hangs_from_the_start_ends_the_run(process: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "GRACE", 0.2)
    member = process.add(job_seconds=0.5, start_seconds=0.5, hint="; see faults")
    with pytest.raises(RoleDied, match=r"sampler 0 has not started within 0.5 s: it does not answer; see faults"):
        process.work(member, 0, "hang")
    assert process.witness.kinds == [("hung", "stopped")]
    process.pool.remove(member)


def test_one_that_is_idle_or_waits_for_others_does_not_hang(process: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    idle, other = process.add(job_seconds=0.4, start_seconds=0.4), process.add("learner")
    process.wait(process.pool.submit(idle, "work"), process.pool.submit(other, "work"))
    monkeypatch.setattr(pool_module, "GRACE", 0.1)
    slow = process.pool.submit(other, "work", 0, "sleep0.8")
    process.wait(slow, process.pool.submit(idle, "work", slow))
    time.sleep(0.6)
    monkeypatch.setattr(pool_module, "GRACE", 3.0)  # its next process may need it
    process.pool.replace(idle, Fault(idle.name, "memory", RoleDied("it has grown"), "restarted"))
    process.pool.poll()
    assert [fault.kind for fault in process.witness.faults if fault.kind != "memory"] == []
    assert process.pool._limit(idle) > time.monotonic() + 1


# -- replacing, being away ----------------------------------------------------------------------------------


def test_a_replaced_member_loses_nothing(scene: Scene) -> None:
    member = scene.add()
    handle = member.handle
    answers = [scene.work(member) for _ in range(3)]
    jobs = [scene.pool.submit(member, "work") for _ in range(2)]
    scene.pool.replace(member, Fault(member.name, "memory", RoleDied("it has grown"), "restarted"))
    scene.pool.replace(member, Fault(member.name, "memory", RoleDied("it has grown"), "restarted"))
    jobs += [scene.pool.submit(member, "work") for _ in range(2)]
    answers += scene.wait(*jobs)
    until = time.monotonic() + DEADLINE
    while scene.pool.restarts == 0 and time.monotonic() < until:
        scene.pool.next([], 0.05)
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
    until = time.monotonic() + DEADLINE
    while process.pool.restarts == 0:
        assert time.monotonic() < until
        process.pool.next([], 0.05)


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

    def excuse(self) -> str:
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
    first, second = waiting.add(count=2, accidents=(EnvError,), absent_seconds=0.2, greeting=greeting)
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
    until = time.monotonic() + DEADLINE
    while first.absent:
        assert time.monotonic() < until
        waiting.pool.next([], 0.1)
    assert ("back", "sampler 0") in waiting.witness.said
    assert waiting.work(first) == expected(1 if not greeting else 2)[-1]


def test_one_that_never_had_room_is_left_out_and_joins(waiting: Scene) -> None:
    waiting.pool.add("sampler", lambda i: waiting.runtime.spawn("test_pool:Walker", 1, name="sampler 0"), 1,
                                Rules(absent_seconds=0.2))  # fmt: skip
    runtime_of(waiting).rooms = False
    (late,) = waiting.pool.add("sampler", lambda i: waiting.runtime.spawn("test_pool:Walker", 2, name="sampler 1"), 1,
                               Rules(absent_seconds=0.2, start_seconds=0.5))  # fmt: skip
    greeted = waiting.pool.submit(late, "greet")
    assert waiting.pool.wait([greeted], DEADLINE)
    assert (late.absent, greeted.fault is not None) == (True, True)
    waiting.pool.next([], 1.0)
    runtime_of(waiting).handles[-1].room = True
    waiting.pool.next([], 0.7)
    assert not late.absent
    assert waiting.work(late) == expected(1, 2)[-1], "it was not taken for one that hangs"
    assert waiting.witness.faults == []


def test_too_few_to_go_on_without_it(waiting: Scene, tmp_path: Path) -> None:
    member = waiting.add(accidents=(EnvError,), absent_seconds=0.1, start_seconds=0.6)
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
    assert 0.9 < time.monotonic() - began < 1.5
    assert 0 < runtime_of(waiting).waits < 10


@pytest.mark.parametrize("seconds", [0.0, 0.3])
def test_next_does_not_wait_longer_than_it_may(process: Scene, seconds: float) -> None:
    member = process.add()
    process.work(member)
    job = process.pool.submit(member, "work", 0, "sleep1")
    began = time.monotonic()
    assert process.pool.next([job], seconds) == []
    assert process.pool.wait([job], seconds) is False
    assert 2 * seconds <= time.monotonic() - began < 2 * seconds + 0.3
    began = time.monotonic()
    assert process.pool.next([], seconds) == []
    assert seconds <= time.monotonic() - began < seconds + 0.3


def test_next_returns_while_one_backs_off(process: Scene) -> None:
    member = process.add(backoff=30)
    process.work(member)
    failing = process.pool.submit(member, "work", 0, "die")
    while len(process.witness.faults) < 2:
        process.pool.next([failing], 0.1)
    began = time.monotonic()
    assert process.pool.next([failing], 0.2) == []
    assert time.monotonic() - began < 0.5
    assert member.handle is None


def test_poll_takes_what_has_come(process: Scene) -> None:
    member = process.add()
    process.work(member)
    job = process.pool.submit(member, "work", 0, "sleep0.2")
    began = time.monotonic()
    process.pool.poll()
    assert (job.settled, time.monotonic() - began < 0.1) == (False, True)
    time.sleep(0.4)
    process.pool.poll()
    assert job.settled
    process.pool.poll()


def test_a_member_that_is_removed_is_no_fault(process: Scene) -> None:
    member, other = process.add("evaluator", has_state=False), process.add()
    process.work(member)
    job = process.pool.submit(member, "work", 0, "sleep100")
    process.pool.next([job], 0.1)
    process.pool.remove(member)
    assert job.fault is not None
    assert process.work(other) == expected(1)[0]
    assert (process.witness.faults, process.pool.restarts, process.pool.members) == ([], 0, [other])


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


@pytest.mark.parametrize("border", [0.0, 0.3])
def test_random_kills_change_no_answer(process: Scene, monkeypatch: pytest.MonkeyPatch, border: float) -> None:
    monkeypatch.setattr(pool_module, "BORDER_SECONDS", border)
    monkeypatch.setattr(pool_module, "BORDER_COST", 0.0)
    assert chain(process, 60, 2, killer(1, 0.05, 5)) == undisturbed(60, 2)
    assert len(process.witness.faults) > 1
    assert {kind for kind, _ in process.witness.kinds} == {"died"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_random_kills_change_no_answer_for_long(process: Scene, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(pool_module, "BORDER_SECONDS", [0.0, 0.05, 0.5][seed % 3])
    monkeypatch.setattr(pool_module, "BORDER_COST", 0.0)
    disturb = killer(seed, [0.02, 0.03, 0.1, 0.2][seed % 4], 40)
    assert chain(process, 200, 3, disturb) == undisturbed(200, 3)
    assert len(process.witness.faults) > 2
