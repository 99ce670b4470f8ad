"""The ray runtime: what the contract of all runtimes leaves open."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from roles_for_tests import alive

from raynforce.config import Config, SamplingConfig
from raynforce.driver import live
from raynforce.errors import EnvError
from raynforce.runtimes.base import Handle, Place, RoleDied, RoleError, Runtime
from raynforce.runtimes.member import Member, Rules
from raynforce.runtimes.ray.failures import REMEMBERED, Failures
from raynforce.runtimes.ray.runtime import RayRuntime
from raynforce.runtimes.ray.state import workers
from raynforce.runtimes.ray.watching import Voices

MIRROR, NOTEBOOK = "roles_for_tests:Mirror", "roles_for_tests:Notebook"


@pytest.fixture
def runtime(make_ray: Callable[[], Runtime]) -> Iterator[Runtime]:
    with make_ray() as opened:
        yield opened


def mortal(runtime: Runtime, name: str) -> Handle:
    return runtime.spawn("roles_for_tests:Mortal", name=name)


def test_roles_have_one_thread_and_the_learner_goes_first(runtime: Runtime) -> None:
    sampler = runtime.spawn(MIRROR, name="sampler 0", place=runtime.places["sampler"])
    learner = runtime.spawn(MIRROR, name="learner", place=runtime.places["learner"])
    assert sampler.call("environ").result()["OMP_NUM_THREADS"] == "1"
    assert sampler.call("nice").result() == learner.call("nice").result() + 5


def test_the_page_is_told_a_roles_host_by_name_and_its_process(runtime: Runtime) -> None:
    role = runtime.spawn("roles_for_tests:Notebook", name="sampler 0")
    pid = role.call("pid").result()
    member = Member("sampler 0", 0, "sampler", lambda _: role, Rules(), handle=role, proven=True)
    told = live._role(member)
    assert (told["node"], told["pid"]) == (os.uname().nodename, pid)


def test_the_role_that_died_is_named_also_where_its_answer_was_awaited(runtime: Runtime) -> None:
    sampler, learner = mortal(runtime, "sampler 3"), runtime.spawn(NOTEBOOK, name="learner")
    pid, _ = sampler.call("pids").result()
    lost = sampler.call("hang", "sleep")
    used = learner.call("note", lost)
    os.kill(pid, signal.SIGKILL)
    for pending in (lost, used, sampler.call("pids")):
        with pytest.raises(RoleDied, match=r"^sampler 3 died: its process ended") as raised:
            pending.result()
        assert "\n" not in str(raised.value)
    assert learner.call("read").result() == []


def test_a_role_that_hangs_tells_where_and_one_that_dies_what_it_said(no_ray: None) -> None:
    said: list[str] = []
    with RayRuntime(Config(env="CartPole-v1", runtime="ray"), said.append) as runtime:
        place = Place(call_seconds=0.3)
        role = runtime.spawn("roles_for_tests:Mortal", name="sampler 3", place=place)
        role.call("pids").result()
        time.sleep(0.5)  # between calls, there is no limit
        role.call("pids").result()
        hanging = role.call("hang", "c")
        used = runtime.spawn(NOTEBOOK, name="learner").call("note", hanging)
        for pending in (hanging, used):
            with pytest.raises(
                RoleDied, match=r"^sampler 3 died: it hung for 0:00:00.300000 in hang \(roles_"
            ) as raised:
                pending.result()
            assert raised.value.role == "sampler 3"
            assert 'roles_for_tests.py", line' in raised.value.said
        assert not any("Timeout" in line for line in said)  # its stack is for the report
        role.end()

        for words in ("first", "second"):  # its successor has the same name
            role = mortal(runtime, "sampler 0")
            lines = "\n".join(f"{words} {n}" for n in range(50))
            with pytest.raises(RoleDied) as raised:
                role.call("die", "kill", lines).result()
            assert raised.value.role == "sampler 0"
            assert raised.value.said.splitlines() == [f"{words} {n}" for n in range(10, 50)], "the last has no end"
            role.end()
        assert [handle.name for handle in runtime._handles] == ["learner"]
        logs = (runtime._cluster.folder or Path()) / "r/session_latest/logs"
        deadline = time.monotonic() + 15
        while len(list(logs.glob("worker-*"))) > 2 * len(workers()):
            assert time.monotonic() < deadline, "files of workers that are gone pile up"
            time.sleep(0.1)


def test_ending_does_not_wait_and_forgets(runtime: Runtime) -> None:
    assert isinstance(runtime, RayRuntime)
    busy = mortal(runtime, "sampler 0")
    busy.call("pids").result()
    call = busy.call("hang", "c")
    began = time.monotonic()
    busy.end()
    assert time.monotonic() - began < 20
    with pytest.raises(RoleDied, match=r"^sampler 0 died: it was ended$") as raised:
        call.result()
    assert raised.value.role == "sampler 0"
    never = runtime.spawn(NOTEBOOK, name="sampler 1", place=Place(resources={"CPU": 10_000}))
    assert not never.has_room()
    never.end()
    assert runtime._handles == {}
    assert runtime.pending_reason() == ""


def test_names_of_the_ended_are_kept_for_a_while() -> None:
    failures = Failures(Voices(lambda text: None))
    for n in range(3 * REMEMBERED):
        failures.begin(str(n), f"sampler {n % 8}")
        failures.end(str(n))
    assert len(failures._names) == REMEMBERED


def test_a_dependency_that_fails_keeps_its_own_name(runtime: Runtime) -> None:
    sampler = runtime.spawn("roles_for_tests:Failing", name="sampler 0")
    learner = runtime.spawn(NOTEBOOK, name="learner")
    with pytest.raises(EnvError, match=r"^sampler 0: reward is NaN$") as raised:
        learner.call("note", sampler.call("fail", "env")).result()
    assert raised.value.role == "sampler 0"
    with pytest.raises(RoleError, match=r"^sampler 0: ValueError: two$") as plain:
        learner.call("note", sampler.call("fail", "plain")).result()
    assert plain.value.role == "sampler 0"


def test_waiting_keeps_the_order_and_takes_any_count(runtime: Runtime) -> None:
    role = runtime.spawn(NOTEBOOK, name="notebook")
    one, two = role.call("echo", 1), role.call("echo", 2)
    assert runtime.wait([two, one, two], count=9) == ([two, one, two], [])
    assert runtime.wait([two, one], count=1) == ([two, one], [])
    slow = role.call("sleep", 0.5)
    assert runtime.wait([slow, one], count=1) == ([one], [slow])
    assert runtime.wait([slow, one], count=0) == ([one], [slow])
    assert runtime.wait([slow], timeout=0.01) == ([], [slow])
    assert runtime.wait([]) == ([], [])


def test_the_object_store_stays_flat(runtime: Runtime) -> None:
    sampler, learner = runtime.spawn(NOTEBOOK, name="sampler 0"), runtime.spawn(NOTEBOOK, name="learner")
    version = runtime.share(np.zeros(50_000))  # 0.4 MB
    for _ in range(300):
        fragment = sampler.call("array", 125_000)  # 1 MB, 300 MB in all
        learner.call("total", fragment, version).result()
        version = runtime.share(np.zeros(50_000))
    fragment = sampler.call("array", 125_000)  # the one that is left
    fragment.result()
    time.sleep(1.1)  # one look a second
    used = runtime.health()["health/object_store_mb"]
    assert 0.3 < used < 10


def test_a_look_at_the_store_is_cheap(runtime: Runtime) -> None:
    runtime.health()
    began = time.thread_time()
    for _ in range(1000):
        runtime.health()
    assert time.thread_time() - began < 0.5


def test_a_runtime_of_its_own_leaves_nothing_and_passes_on_what_roles_print(
    no_ray: None, capfd: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    config = Config(env="CartPole-v1", runtime="ray", sampling=SamplingConfig(samplers=2))
    before = dict(os.environ)
    with RayRuntime(config, said.append) as runtime:
        folder = runtime._cluster.folder
        assert folder is not None
        talker = runtime.spawn("roles_for_tests:Talker", name="sampler 1", place=runtime.places["sampler"])
        talker.call("say", "to stdout").result()
        talker.call("complain", "to stderr").result()
        busy = mortal(runtime, "busy")
        pids = [busy.call("pids").result()[0], *(process.pid for process in workers()), *_processes(folder)]
        assert len(pids) > 7, "two workers ahead, one more, two agents, gcs, raylet, janitor"
        busy.call("hang", "c")
        time.sleep(0.2)
        began = time.monotonic()
        runtime.close(now=True)
        assert time.monotonic() - began < 30
    assert not folder.exists()
    assert [pid for pid in pids if alive(pid)] == []
    assert {"sampler 1: to stdout", "sampler 1: to stderr"} <= set(said)
    assert dict(os.environ) == before
    assert capfd.readouterr() == ("", ""), "stdout carries the result, stderr is not Ray's"


def _processes(folder: Path) -> list[int]:
    """Processes that were started with the name of this directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes() + (path / "environ").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in words:
            found.append(int(path.name))
    return found
