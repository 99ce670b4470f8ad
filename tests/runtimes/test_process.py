"""Processes of the `process` runtime: how they die, and that nothing of them stays behind."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
from commands import shared_memory
from marks import slowly
from roles_for_tests import alive, descriptors
from spawning import DEADLINE, PATH, spawn, until

from raynforce.runtimes import process
from raynforce.runtimes.base import RoleDied, RoleError, Runtime
from raynforce.runtimes.messages import Packed
from raynforce.runtimes.process import ProcessRuntime


def gone(*pids: int) -> bool:
    """Whether none of them runs any more."""
    return not any(map(alive, pids))


# -- death --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "words", "reason"),
    [
        ("kill", "", "mortal was killed by SIGKILL"),
        ("kill", "about to go\n", "mortal was killed by SIGKILL; the last it said: about to go"),
        ("kill", "not a whole line", "mortal was killed by SIGKILL; the last it said: not a whole line"),
        ("exit", "licence expired\n\n  \n", "mortal ended with exit code 3; the last it said: licence expired"),
        ("quiet", "", "mortal ended before it had answered"),
        ("segfault", "", "mortal was killed by SIGSEGV"),
        ("abort", "assertion failed\n", "mortal was killed by SIGABRT; the last it said: assertion failed"),
    ],
)
def test_the_reason_of_a_death_is_one_line(runtime: Runtime, how: str, words: str, reason: str) -> None:
    role = spawn(runtime, "Mortal")
    calls = [role.call("pids"), role.call("die", how, words), role.call("pids"), role.call("hang", "loop")]
    began = time.monotonic()
    assert runtime.wait(calls, timeout=DEADLINE)[1] == []
    assert time.monotonic() - began < 15
    assert calls[0].result()[1] == 0
    for call in [*calls[1:], role.call("pids")]:
        with pytest.raises(RoleDied) as caught:
            call.result()
        assert str(caught.value) == reason


def test_endless_last_words_are_cut(runtime: Runtime) -> None:
    role = spawn(runtime, "Mortal")
    with pytest.raises(RoleDied, match="mortal ended with exit code 3; the last it said: ") as caught:
        role.call("die", "exit", "x" * 30_000).result()
    assert len(str(caught.value)) < 600


def test_exit_in_a_role_says_why(runtime: Runtime) -> None:
    role = runtime.spawn("roles_for_tests:Failing", name="failing")
    with pytest.raises((RoleDied, RoleError), match="licence has expired"):
        role.call("fail", "exit").result()


def test_memory_error_is_an_answer_and_the_role_goes_on(runtime: Runtime) -> None:
    role = runtime.spawn("roles_for_tests:Failing", name="failing")
    with pytest.raises(RoleError, match=r"^failing: MemoryError: cannot allocate 1 EB$"):
        role.call("fail", "memory").result()
    assert role.call("fine").result() == "fine"


def test_a_death_fails_only_what_needs_the_dead(runtime: Runtime) -> None:
    dead, alive = spawn(runtime, "Mortal"), spawn(runtime, "Notebook")
    held = dead.call("pids")
    lost = dead.call("die", "kill")
    calls = [alive.call("note", held), alive.call("note", lost), alive.call("note", 3)]
    assert runtime.wait(calls, timeout=DEADLINE)[1] == []
    assert (calls[0].result(), calls[2].result()) == (1, 2)
    with pytest.raises(RoleDied, match="mortal was killed"):
        calls[1].result()


def test_a_death_while_a_long_message_is_on_its_way(runtime: Runtime) -> None:
    dead = spawn(runtime, "Mortal")
    dead.call("die", "kill")
    calls = [dead.call("pids", "x" * 30_000, np.zeros(10_000)) for _ in range(100)]
    assert runtime.wait(calls, timeout=DEADLINE)[1] == []
    with pytest.raises(RoleDied):
        calls[-1].result()


def test_an_answer_given_before_death_is_kept(runtime: Runtime) -> None:
    role = spawn(runtime, "Notebook")
    large = role.call("array", 100_000)
    runtime.wait([large])
    os.kill(role.call("pid").result(), signal.SIGKILL)
    with pytest.raises(RoleDied):
        role.call("read").result()
    assert large.result().sum() == 100_000
    assert spawn(runtime, "Notebook").call("total", large).result() == 100_000


def test_a_worker_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with (
        ProcessRuntime({}, lambda text: None) as runtime,
        pytest.raises(RoleDied, match="notebook ended with exit code 1"),
    ):
        spawn(runtime, "Notebook").call("read").result()


# -- children -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["kill", *slowly("exit", "segfault")])
def test_children_die_with_their_worker(runtime: Runtime, how: str) -> None:
    role = spawn(runtime, "Mortal", True)
    worker, child = role.call("pids").result()
    assert not gone(child)
    with pytest.raises(RoleDied):
        role.call("die", how).result()
    assert until(lambda: gone(worker, child), 2)


@pytest.mark.parametrize(
    ("busy", "now"),
    [
        ("", False),
        ("c", False),
        ("loop", True),
        *slowly(("", True), ("c", True), ("loop", False), ("sleep", False), ("sleep", True)),
    ],
)
def test_children_die_with_close(runtime: Runtime, busy: str, now: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "GRACE", 0.4)
    role = spawn(runtime, "Mortal", True)
    worker, child = role.call("pids").result()
    if busy:
        role.call("hang", busy)
        time.sleep(0.1)
    began = time.monotonic()
    runtime.close(now=now)
    assert time.monotonic() - began < 30
    assert until(lambda: gone(worker, child), 30)


def test_a_death_is_noticed_though_a_forked_child_lives_on(runtime: Runtime) -> None:
    began = time.monotonic()
    with pytest.raises(RoleDied, match="was killed by SIGKILL"):
        spawn(runtime, "Mortal").call("die", "forked").result()
    assert time.monotonic() - began < 15


DRIVER = """
    import sys, time
    from raynforce.runtimes.process import ProcessRuntime
    with ProcessRuntime({}, print) as runtime:
        roles = [runtime.spawn("roles_for_tests:Mortal", True, name=f"mortal {n}") for n in range(2)]
        for role in roles:
            print(*role.call("pids").result(), flush=True)
        if sys.argv[1]:
            for role in roles:
                role.call("hang", sys.argv[1])
        time.sleep(0.2)
        print("ready", flush=True)
        time.sleep(1000)
"""


@pytest.mark.parametrize("busy", [*slowly("", "loop"), "c", *slowly("sleep")])
def test_nothing_outlives_kill_9_of_the_driver(busy: str) -> None:
    driver = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DRIVER), busy],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": PATH},
        text=True,
    )
    pids: list[int] = []
    try:
        assert driver.stdout is not None
        while (line := driver.stdout.readline().split()) != ["ready"]:
            assert line
            pids += map(int, line)
        assert len(pids) == 4
        assert not any(gone(pid) for pid in pids)
        driver.kill()
        driver.wait()
        assert until(lambda: gone(*pids), 2)
    finally:
        driver.kill()
        driver.communicate()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_a_terminals_ctrl_c_is_not_for_workers(runtime: Runtime) -> None:
    role = spawn(runtime, "Notebook")
    pid = role.call("pid").result()
    assert os.getpgid(pid) == pid != os.getpgrp()
    os.kill(pid, signal.SIGINT)
    assert role.call("note", 1).result() == 1


# -- nothing stays behind -----------------------------------------------------------------------------------


def test_nothing_is_left_after_close() -> None:
    gc.collect()
    gc.collect()  # what an earlier test has left in cycles
    fds, memory, held = descriptors(), shared_memory(), Packed.held
    for round_ in range(2):
        with ProcessRuntime({}, lambda text: None) as runtime:
            roles = [spawn(runtime, "Notebook") for _ in range(2)]
            pids = [role.call("pid").result() for role in roles]
            parts = [roles[0].call("array", 10_000) for _ in range(20)]
            assert roles[1].call("total", *parts, runtime.share(np.ones(1000))).result() == 201_000
            unopened = roles[1].call("array", 10_000)
            runtime.wait([unopened])
            if round_:
                with contextlib.suppress(RoleDied):
                    spawn(runtime, "Mortal").call("die", "kill").result()
                roles[0].call("sleep", 0.1)
        del parts, unopened, roles
        gc.collect()
        assert gone(*pids)
        assert (descriptors(), shared_memory() - memory, Packed.held) == (fds, set(), held)


def test_values_are_given_back_while_a_run_goes_on(runtime: Runtime) -> None:
    """Neither driver nor workers gather descriptors or memory."""
    maker, user = spawn(runtime, "Notebook"), runtime.spawn("roles_for_tests:Mirror", name="user")
    for _ in range(3):
        user.call("touch", *[maker.call("array", 5000) for _ in range(5)]).result()
    gc.collect()
    gc.collect()  # what an earlier test has left in cycles
    ours, theirs, held = len(descriptors()), len(user.call("descriptors").result()), Packed.held
    for _ in range(50):
        user.call("touch", *[maker.call("array", 5000) for _ in range(5)]).result()
    gc.collect()
    assert (len(descriptors()), Packed.held) == (ours, held)
    assert len(user.call("descriptors").result()) == theirs
    assert user.call("held").result() == 0


def test_workers_see_no_descriptors_of_the_driver(runtime: Runtime) -> None:
    """Otherwise one that lives would keep another's pipe open, and its death would go unnoticed."""
    for _ in range(3):
        role = spawn(runtime, "Mirror")
    seen = role.call("descriptors").result()
    assert sum(what.startswith("socket:") for what in seen) == 1
    assert sum(what.startswith("pipe:") for what in seen) <= 3  # the guard; its output, twice


def test_a_failed_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # what an earlier test has left in cycles
    fds = descriptors()
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with ProcessRuntime({}, lambda text: None) as runtime, pytest.raises(FileNotFoundError):
        spawn(runtime, "Notebook")
    assert descriptors() == fds


FEW = """
    import resource, signal
    import numpy as np
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    signal.alarm(20)
    from raynforce.runtimes.process import ProcessRuntime
    with ProcessRuntime({}, lambda text: None) as runtime:
        role = runtime.spawn("roles_for_tests:Notebook", name="notebook")
        MANY
"""


@pytest.mark.parametrize(
    "many",
    [
        "[call.result() for call in [role.call('array', 5000) for _ in range(100)]]",
        "role.call('total', *[part for part in [runtime.share(np.ones(5000)) for _ in range(25)] * 4]).result()",
    ],
)
def test_too_few_descriptors_are_an_error_and_no_silence(many: str) -> None:
    """In the driver, and in a role."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FEW).replace("MANY", many)],
        env={**os.environ, "PYTHONPATH": PATH},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    last = done.stderr.splitlines()[-1]
    assert "Too many open files" in last or "ulimit -n" in last
