"""Processes of the `process` runtime: what they say, where they live, and what they see there."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from spawning import DEADLINE, PATH, spawn, until

from raynforce.config import Config
from raynforce.experiment import resolve
from raynforce.runtimes import process
from raynforce.runtimes.base import Place, Runtime
from raynforce.runtimes.open import open_runtime
from raynforce.runtimes.placing import BACKGROUND, BESIDE
from raynforce.runtimes.process import ProcessRuntime


def memory() -> int:
    """Bytes that this process takes now; its greatest ever may have been in another test."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


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
    assert time.monotonic() - began < 30


def test_nobody_types_for_a_role(runtime: Runtime) -> None:
    assert spawn(runtime, "Mirror").call("stdin").result() == ""


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
    ours = [name for name in environ if name.startswith("RAYNFORCE")]
    assert sorted(ours) == sorted(name for name in os.environ if name.startswith("RAYNFORCE"))


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
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert nice == {"learner": own, "sampler": BACKGROUND, "shard": own, "evaluator": BESIDE, "policy": own}
    assert threads == {"learner": "2", "sampler": "1", "shard": "1", "evaluator": "1", "policy": "1"}


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
