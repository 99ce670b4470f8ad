"""Processes of the `process` runtime: how they die, what they say, and that nothing of them stays behind."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from marks import slowly
from roles_for_tests import alive, descriptors

import raynforce
from raynforce.config import Config
from raynforce.experiment import resolve
from raynforce.runtimes import process
from raynforce.runtimes.base import Handle, Place, RoleDied, RoleError, Runtime
from raynforce.runtimes.open import open_runtime
from raynforce.runtimes.placing import BACKGROUND, BESIDE
from raynforce.runtimes.process import ProcessRuntime
from raynforce.runtimes.wire import Packed

HERE = Path(__file__).parent
PATH = os.pathsep.join([str(Path(raynforce.__file__).parents[1]), str(HERE)])
DEADLINE = 15.0
HERE_TOO = Place()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def runtime(said: list[str]) -> Iterator[Runtime]:
    with ProcessRuntime({}, said.append) as opened:
        yield opened


def spawn(runtime: Runtime, role: str, *args: object, place: Place = HERE_TOO) -> Handle:
    return runtime.spawn(f"roles_for_tests:{role}", *args, name=role.lower(), place=place)


def until(condition: Callable[[], bool], seconds: float = DEADLINE) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def gone(*pids: int) -> bool:
    """Whether none of them runs any more."""
    return not any(map(alive, pids))


def memory() -> int:
    """Bytes that this process takes now; its greatest ever may have been in another test."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def shared_memory() -> list[str]:
    return sorted(os.listdir("/dev/shm"))


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
    assert time.monotonic() - began < 5
    assert until(lambda: gone(worker, child), 5)


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


# -- what roles print ---------------------------------------------------------------------------------------


def test_what_roles_print_arrives_with_their_name(runtime: Runtime, said: list[str]) -> None:
    role = spawn(runtime, "Talker")
    role.call("say", "hello\n\nworld").result()
    role.call("complain", "careful").result()
    role.call("shell", "from a child").result()
    role.call("raw", "ä".encode()[:1] + b"\xff broken\n").result()
    expected = ["talker: hello", "talker: world", "talker: careful", "talker: from a child"]
    until(lambda: runtime.wait([]) is not None and len(said) >= 5, 2)
    assert said[:4] == expected
    assert said[4].startswith("talker: ")
    assert said[4].endswith(" broken")


def test_a_line_that_has_not_ended_waits_for_its_end(runtime: Runtime, said: list[str]) -> None:
    role = spawn(runtime, "Talker")
    role.call("raw", b"half ").result()
    runtime.wait([], timeout=0.1)
    assert said == []
    role.call("raw", b"and half\n").result()
    until(lambda: runtime.wait([]) is not None and bool(said), 2)
    assert said == ["talker: half and half"]


def test_the_last_words_are_said_at_close(said: list[str]) -> None:
    with ProcessRuntime({}, said.append) as runtime:
        role = spawn(runtime, "Mortal")
        role.call("pids").result()
    assert said == ["mortal: closed"]


@pytest.mark.parametrize(("chunk", "count", "end"), [(1_000_000, 20, ""), (100, 200_000, "\n")])
def test_endless_printing_neither_blocks_nor_grows(
    chunk: int, count: int, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 MB of it, with and without lines; meanwhile the driver waits for another role."""
    longest = lines = 0

    def say(text: str) -> None:
        nonlocal longest, lines
        longest, lines = max(longest, len(text)), lines + 1

    with ProcessRuntime({}, say) as runtime:
        talker, other = spawn(runtime, "Talker"), spawn(runtime, "Notebook")
        runtime.wait([talker.call("say", ""), other.call("read")])
        before = memory()
        call = talker.call("endless", chunk, count, end)
        assert runtime.wait([call, other.call("sleep", 0.1)], timeout=DEADLINE)[1] == []
        assert call.result() == chunk * count
        assert memory() - before < 8_000_000
    assert longest < 200_000
    assert lines >= (count if end else 1)


def test_a_role_that_prints_for_ever_can_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "GRACE", 0.5)
    with ProcessRuntime({}, lambda text: None) as runtime:
        role = spawn(runtime, "Talker")
        role.call("say", "").result()
        role.call("endless", 1000, 10**9, "\n")
        time.sleep(0.2)
        began = time.monotonic()
    assert time.monotonic() - began < 5


def test_nobody_types_for_a_role(runtime: Runtime) -> None:
    assert spawn(runtime, "Mirror").call("stdin").result() == ""


# -- nothing stays behind -----------------------------------------------------------------------------------


def test_nothing_is_left_after_close() -> None:
    gc.collect()
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
        assert (descriptors(), shared_memory(), Packed.held) == (fds, memory, held)


def test_values_are_given_back_while_a_run_goes_on(runtime: Runtime) -> None:
    """Neither driver nor workers gather descriptors or memory."""
    maker, user = spawn(runtime, "Notebook"), runtime.spawn("roles_for_tests:Mirror", name="user")
    for _ in range(3):
        user.call("touch", *[maker.call("array", 5000) for _ in range(5)]).result()
    gc.collect()
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
    fds = descriptors()
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with ProcessRuntime({}, lambda text: None) as runtime, pytest.raises(FileNotFoundError):
        spawn(runtime, "Notebook")
    assert descriptors() == fds


# -- where roles live ---------------------------------------------------------------------------------------


def test_threads_and_priority_are_as_asked(runtime: Runtime) -> None:
    role = spawn(runtime, "Mirror", place=Place(threads=3, nice=7))
    environ = role.call("environ").result()
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
        assert environ[name] == "3"
    assert role.call("nice").result() == 7
    assert spawn(runtime, "Mirror").call("nice").result() == os.getpriority(os.PRIO_PROCESS, 0)


def test_a_role_sees_the_users_environment(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """A simulator that it starts with another Python must not find our packages."""
    monkeypatch.setenv("RNF_MINE", "1")
    environ = spawn(runtime, "Mirror").call("environ").result()
    assert environ["RNF_MINE"] == "1"
    assert environ.get("PYTHONPATH") == os.environ.get("PYTHONPATH")
    assert not [name for name in environ if name.startswith("RAYNFORCE")]


def test_the_search_path_is_the_drivers(runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "found_at_run_time.py").write_text("class Role:\n    def answer(self):\n        return 42\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert runtime.spawn("found_at_run_time:Role", name="role").call("answer").result() == 42


@pytest.mark.parametrize("name", ["token", "select"])
def test_files_of_the_current_directory_do_not_hide_the_standard_library(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """They do not for the driver, when it is the `raynforce` command or a script elsewhere."""
    (tmp_path / f"{name}.py").write_text("raise RuntimeError('the wrong module')")
    monkeypatch.chdir(tmp_path)
    assert spawn(runtime, "Notebook").call("note", 1).result() == 1


def small(**settings: object) -> Config:
    given = {"sampling": {"samplers": 1, "envs": 2, "fragment": 16}, "learner": {"threads": 2}}
    return resolve({"env": "CartPole-v1", "algo": "ppo", "runtime": "process", **given, **settings})[0]


def test_the_placing_of_a_run() -> None:
    with open_runtime(small(), lambda text: None) as runtime:
        roles = {kind: spawn(runtime, "Mirror", place=place) for kind, place in runtime.places.items()}
        nice = {kind: role.call("nice").result() for kind, role in roles.items()}
        threads = {kind: role.call("environ").result()["OMP_NUM_THREADS"] for kind, role in roles.items()}
    assert nice == {"learner": os.getpriority(os.PRIO_PROCESS, 0), "sampler": BACKGROUND, "evaluator": BESIDE}
    assert threads == {"learner": "2", "sampler": "1", "evaluator": "1"}


RUN = """
    import glob, os, sys
    import raynforce

    def mapped(pid):
        text = open(f"/proc/{pid}/maps").read()
        return "libtorch" in text

    def look(status):
        me = os.getpid()
        for stat in glob.glob("/proc/[0-9]*/stat"):
            try:
                text = open(stat).read()
                if int(text.rpartition(")")[2].split()[1]) == me:
                    pid = int(text.split()[0])
                    print("worker", mapped(pid), os.getpriority(os.PRIO_PROCESS, pid), flush=True)
            except (FileNotFoundError, ProcessLookupError):
                pass
        print("driver", mapped(me), "torch" in sys.modules, flush=True)
        status.stop("seen")

    raynforce.train("CartPole-v1", "ppo", runtime="process", topology=sys.argv[1], steps=2000, callbacks=[look],
                    out="run", progress="quiet",
                    settings={"sampling.samplers": 2, "sampling.envs": 2, "sampling.fragment": 16,
                              "eval.every": 0, "eval.episodes": 1, "eval.final_episodes": 1})
    print("driver", mapped(os.getpid()), "torch" in sys.modules)
"""


def test_only_the_learner_has_torch(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(RUN), "async"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": PATH},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    normal = os.getpriority(os.PRIO_PROCESS, 0)
    assert sorted(line for line in lines if line.startswith("worker")) == sorted(
        [f"worker True {normal}", *[f"worker False {max(BACKGROUND, normal)}"] * 2]
    )
    assert [line for line in lines if line.startswith("driver")] == ["driver False False"] * 2


def test_a_sampler_imports_no_torch(runtime: Runtime) -> None:
    """A process begins with next to nothing, and the sampler's and evaluator's modules bring no torch with them."""
    role = spawn(runtime, "Mirror")
    assert not {"torch", "ray", "gymnasium", "yaml", "rich"} & set(role.call("modules").result())
    for module in ("raynforce.roles.sampler", "raynforce.roles.evaluator"):
        role.call("load", module).result()
    modules = set(role.call("modules").result())
    assert "raynforce.roles.sampler" in modules
    assert not {"torch", "ray", "rich"} & modules


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
