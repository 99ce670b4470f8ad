"""Environments side by side: whoever is ready is told, and one that breaks, hangs or dies is replaced."""

from __future__ import annotations

import gc
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import lane_envs
import numpy as np
import pytest

from raynforce.envs import executors
from raynforce.envs.lanes import BrokenLane, Lanes
from raynforce.envs.local import LocalVector
from raynforce.envs.vector import derive_seed, first_of_attempt
from raynforce.errors import EnvError, UsageError

SEED = 6
SIDE_BY_SIDE = ("threads", "processes")
ALL = ("no", *SIDE_BY_SIDE)
opened: list[Lanes] = []


def lanes_of(env: str, args: Any, count: int, **more: Any) -> Lanes:
    opened.append(Lanes(env, args, count, **more))
    return opened[-1]


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """No thread, no process and no descriptor is left behind."""
    lane_envs.awake.clear()
    gc.collect()
    before, others, born = len(os.listdir("/proc/self/fd")), threading.enumerate(), children()
    yield
    lane_envs.awake.set()
    while opened:
        opened.pop().close()
    until = time.monotonic() + 60
    while (
        left := [t for t in threading.enumerate() if t.name.startswith("lane ") and t not in others]
    ) and time.monotonic() < until:
        left[0].join(0.1)
    assert not left
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
    assert children() <= born


def children() -> set[str]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return set(file.read().split())


def scripted(parallel: Any, script: dict[tuple[int, int], dict[int, Any]], count: int = 3, **more: Any) -> Lanes:
    """`script` says by (lane, episode) what is done at which step."""
    by_seed = {derive_seed(SEED, 0, lane, episode): what for (lane, episode), what in script.items()}
    args = {"script": by_seed}
    return lanes_of("lane_envs:Scripted", args, count, seed=SEED, parallel=parallel, **more)


def wait(lanes: Lanes, seconds: float = 5.0) -> bool:
    poll = select.poll()
    poll.register(lanes.fileno(), select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def gather(lanes: Lanes, count: int, seconds: float = 5.0) -> tuple[list[int], list[BrokenLane]]:
    """Collect until `count` lanes were told of."""
    done: list[int] = []
    broken: list[BrokenLane] = []
    until = time.monotonic() + seconds
    while len(done) + len(broken) < count:
        assert time.monotonic() < until
        wait(lanes, 0.02)
        lanes.overdue(time.monotonic())
        some, more = lanes.collect()
        done += some.tolist()
        broken += more
    return done, broken


def step_all(lanes: Lanes, action: int = 0) -> tuple[list[int], list[BrokenLane]]:
    lanes.step(np.arange(lanes.count), np.full(lanes.count, action))
    return gather(lanes, lanes.count)


@pytest.mark.parametrize("parallel", SIDE_BY_SIDE)
def test_whoever_is_ready_is_told_while_others_are_at_it(parallel: Any) -> None:
    lanes = scripted(parallel, {(0, 0): {1: 0.9}, (1, 0): {1: 0.3}, (2, 0): {1: 0.6}})
    assert lanes.collect()[0].tolist() == []  # the bell may have been rung once more
    lanes.step(np.array([0, 1, 2]), np.zeros(3, np.int64))
    assert np.isfinite(lanes.busy_since()).all()
    assert gather(lanes, 1) == ([1], [])
    assert np.isfinite(lanes.busy_since()).tolist() == [True, False, True]
    assert lanes.collect()[0].tolist() == []  # the bell may have been rung once more
    lanes.step(np.array([1]), np.zeros(1, np.int64))
    assert gather(lanes, 3) == ([1, 2, 0], [])
    assert lanes.obs["obs"][:, 1].tolist() == [1, 2, 1]
    assert lanes.reward.tolist() == [1, 2, 1]
    assert 0.9 <= lanes.seconds[0] < 1.8
    assert lanes.seconds[1] < 0.3


def test_one_after_another_they_are_done_in_the_order_that_was_asked_for() -> None:
    lanes = scripted("no", {(2, 0): {1: 0.05}})
    lanes.step(np.array([2, 0]), np.zeros(2, np.int64))
    assert wait(lanes, 0.0)
    assert lanes.collect()[0].tolist() == [2, 0]
    assert lanes.obs["obs"][:, 1].tolist() == [1, 0, 1]


@pytest.mark.parametrize("parallel", ALL)
def test_an_end_shows_the_last_observation_and_the_next_ones_first(parallel: Any) -> None:
    lanes = scripted(parallel, {}, 2, first=4)
    vector = LocalVector("lane_envs:Scripted", {}, 6, seed=SEED)
    np.testing.assert_array_equal(lanes.obs["obs"], vector.reset()["obs"][4:])
    for _ in range(5):
        lanes.step(np.arange(2), np.zeros(2, np.int64))
        gather(lanes, 2)
        step = vector.step(np.zeros(6, np.int64))
    assert lanes.terminated.all()
    assert not lanes.truncated.any()
    np.testing.assert_array_equal(lanes.final["obs"], step.final_obs["obs"][4:])
    np.testing.assert_array_equal(lanes.obs["obs"], step.obs["obs"][4:])
    step_all(lanes)
    assert not lanes.terminated.any()


@pytest.mark.parametrize("parallel", ALL)
def test_one_that_breaks_is_told_with_its_facts_and_the_others_go_on(parallel: Any) -> None:
    script = {(1, 0): {2: "raise"}, (2, 0): {3: "nan"}, (0, 1): {0: "raise"}}
    lanes = scripted(parallel, script, record=True)
    first = lanes.obs["obs"].copy()
    assert step_all(lanes)[1] == []
    done, (broken,) = step_all(lanes, 1)
    assert sorted(done) == [0, 2]
    assert broken[:3] == (1, "raised", "step raised ZeroDivisionError: division by zero")
    facts = {"lane": 1, "seed": derive_seed(SEED, 0, 1, 0), "step": 2, "actions": [0, 1], "kind": "raised"}
    assert facts.items() <= broken.facts.items()
    assert "ZeroDivisionError" in broken.facts["trace"]
    assert lanes.reward.tolist() == [2, 0, 2]
    assert lanes.obs["obs"][1, 1] == 0  # of a new episode
    assert lanes.obs["obs"][1, 0] != first[1, 0]
    ((lane, code, text, _),) = step_all(lanes)[1]
    assert (lane, code, text) == (2, "garbage", "obs = nan; observations and rewards must be finite numbers")
    assert [fault.lane for fault in lanes.take_faults()] == [1, 2]
    step_all(lanes)
    assert step_all(lanes)[1] == []  # lane 0 ends; its next reset breaks, but the step counts
    assert lanes.terminated.tolist() == [True, False, False]
    assert [(fault.lane, fault.step) for fault in lanes.take_faults()] == [(0, 0)]
    assert step_all(lanes)[1] == []


@pytest.mark.parametrize("parallel", SIDE_BY_SIDE)
def test_one_that_hangs_is_replaced_and_told_when_the_new_one_is_there(parallel: Any) -> None:
    lanes = scripted(parallel, {(1, 0): {2: "hang"}}, hang_seconds=1.5)
    step_all(lanes)
    lanes.step(np.arange(3), np.zeros(3, np.int64))
    assert sorted(gather(lanes, 2)[0]) == [0, 2]
    assert lanes.overdue(time.monotonic()) == []
    time.sleep(1.5)
    assert lanes.collect()[0].tolist() == []  # the bell may have been rung once more
    (begun,) = lanes.overdue(time.monotonic())
    assert lanes.overdue(time.monotonic()) == []
    assert gather(lanes, 1) == ([], [begun])
    assert begun[:3] == (1, "hung", "it did not come back within 1.5 s")
    facts = {"lane": 1, "seed": derive_seed(SEED, 0, 1, 0), "step": 2, "kind": "hung", "env": "lane_envs:Scripted"}
    assert facts.items() <= begun.facts.items()
    assert [fault.kind for fault in lanes.take_faults()] == ["hung"]
    vector = LocalVector("lane_envs:Scripted", {}, 3, seed=SEED)
    vector.reset()
    np.testing.assert_array_equal(lanes.obs["obs"][1], vector.reset()["obs"][1])  # its next episode
    seen = lanes.obs["obs"].copy()
    lane_envs.awake.set()  # what it does now is nobody's concern
    time.sleep(0.05)
    assert lanes.collect()[0].tolist() == []
    np.testing.assert_array_equal(lanes.obs["obs"], seen)
    assert step_all(lanes)[1] == []


ALWAYS = [
    *((parallel, "hang", "hung", "it did not come back") for parallel in SIDE_BY_SIDE),
    *((parallel, "raise", "raised", "") for parallel in ALL),
    ("processes", "exit", "died", "its process ended with exit code 3"),
]


@pytest.mark.parametrize(("parallel", "does", "kind", "text"), ALWAYS)
def test_one_that_always_breaks_is_an_error(parallel: Any, does: str, kind: str, text: str) -> None:
    args, seconds = {"script": {-1: {1: does}}}, 1.0 if does == "hang" else math.inf
    lanes = lanes_of("lane_envs:Scripted", args, 2, seed=0, parallel=parallel, first=7, hang_seconds=seconds)

    def play() -> None:
        while True:
            step_all(lanes)

    with pytest.raises(EnvError, match=rf"broke in lane [78], 4 times in a row within 10 steps .*: {text}") as raised:
        play()
    assert raised.value.facts["kind"] == kind


@pytest.mark.parametrize("parallel", ["no", "threads"])
def test_another_attempt_has_other_episodes(parallel: Any) -> None:
    lanes = scripted(parallel, {}, 2, attempt=3)
    vector = LocalVector("lane_envs:Scripted", {}, 2, seed=SEED)
    np.testing.assert_array_equal(lanes.obs["obs"], vector.start_fresh(3)["obs"])
    assert lanes.executor.rows.episode.tolist() == [first_of_attempt(3)] * 2


@pytest.mark.parametrize("parallel", ALL)
@pytest.mark.parametrize(
    ("env", "args", "error"),
    [
        ("lane_envs:Nothing", {}, UsageError),
        ("bad_envs:Bad", {"fault": "make"}, UsageError),
        ("bad_envs:Bad", {"fault": "reset raises"}, EnvError),
    ],
)
def test_what_cannot_be_made_is_told_as_one_env_tells_it(parallel: Any, env: str, args: Any, error: Any) -> None:
    with pytest.raises(error) as alone:
        LocalVector(env, args, 1, seed=0).reset()
    with pytest.raises(error) as together:
        Lanes(env, args, 1, seed=0, parallel=parallel)
    assert str(together.value) == str(alone.value)


@pytest.mark.parametrize("place", ["make", "reset", "step"])
def test_one_that_cannot_be_in_a_thread_is_sent_to_a_process(place: str) -> None:
    def play() -> None:
        lanes = lanes_of("lane_envs:MainThread", {"place": place}, 2, seed=0, parallel="threads")
        step_all(lanes)

    with pytest.raises(UsageError, match=r"cannot run in a thread .*main thread.*--set sampling.parallel=processes "):
        play()


def test_more_lanes_than_threads_are_one_line(monkeypatch: Any) -> None:
    start, started = threading.Thread.start, []

    def limited(thread: threading.Thread) -> None:
        if len(started) == 3:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(executors.threading.Thread, "start", limited)
    with pytest.raises(UsageError, match=r"^3 of 5 threads for envs could be started \(.*\): use fewer --envs"):
        scripted("threads", {}, 5)


@pytest.mark.parametrize(("way", "how"), [("exit", "ended with exit code 3"), ("kill", "was killed by SIGKILL")])
def test_one_whose_process_ends_is_replaced(way: str, how: str) -> None:
    lanes = scripted("processes", {(1, 0): {2: way}})
    step_all(lanes)
    done, (broken,) = step_all(lanes)
    assert sorted(done) == [0, 2]
    assert broken[:3] == (1, "died", f"its process {how}")
    assert (broken.facts["step"], broken.facts["seed"]) == (2, derive_seed(SEED, 0, 1, 0))
    vector = LocalVector("lane_envs:Scripted", {}, 3, seed=SEED)
    vector.reset()
    np.testing.assert_array_equal(lanes.obs["obs"][1], vector.reset()["obs"][1])  # its next episode
    assert step_all(lanes)[1] == []
    assert lanes.reward.tolist() == [3, 1, 3]


def children_of(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as children:
        return [int(child) for child in children.read().split()]


def test_one_that_dies_between_its_steps_is_told_once_it_is_asked() -> None:
    lanes = scripted("processes", {}, 1)
    step_all(lanes)
    (pid,) = children_of(lanes.executor.server.pid)  # type: ignore[attr-defined]
    os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + 60
    while lanes.executor.rows.episode[0] == 0 or lanes._making:
        assert time.monotonic() < until
        wait(lanes, 0.1)
        assert lanes.collect()[1] == []
    ((lane, code, _, _),) = step_all(lanes)[1]
    assert (lane, code) == (0, "died")
    assert step_all(lanes) == ([0], [])


def test_one_that_dies_when_it_is_made_is_an_error() -> None:
    args = {"script": {-1: {0: "kill"}}}
    with pytest.raises(EnvError, match=r"could not be made: its process was killed by SIGKILL"):
        Lanes("lane_envs:Scripted", args, 2, seed=0, parallel="processes")


def test_one_that_needs_a_main_thread_has_it_in_a_process() -> None:
    lanes = lanes_of("lane_envs:MainThread", {"place": "step"}, 1, seed=0, parallel="processes")
    assert step_all(lanes) == ([0], [])


ORPHANS = """
import os, sys, lane_envs
from raynforce.envs.lanes import Lanes
import numpy as np
lanes = Lanes("lane_envs:Scripted", {"script": {-1: {1: "hang"}}}, 3, seed=0, parallel="processes")
if sys.argv[1] == "hung":
    lanes.step(np.arange(3), np.zeros(3, np.int64))
print(lanes.executor.server.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("state", ["idle", "hung"])
def test_processes_end_with_the_one_that_started_them(state: str) -> None:
    path = os.pathsep.join(filter(None, sys.path))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command, env = [sys.executable, "-c", ORPHANS, state], {**os.environ, "PYTHONPATH": path}
    with subprocess.Popen(command, env=env, **pipes) as process:  # type: ignore[call-overload]
        server = int(process.stdout.readline())
        family = [server, *children_of(server)]
        assert len(family) == 4
        assert {os.getpgid(pid) for pid in family} == {os.getpgid(process.pid)}
        process.kill()
    until = time.monotonic() + 10
    while any(os.path.exists(f"/proc/{pid}/cwd") and alive(pid) for pid in family):
        assert time.monotonic() < until
        time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_too_many_for_the_limits_are_one_line(monkeypatch: Any) -> None:
    limit = (100, 100)
    monkeypatch.setattr(executors.resource, "getrlimit", lambda kind: limit)
    with pytest.raises(UsageError, match=r"^200 processes for envs need \d+ open files, and 100 are allowed: .*ulimit"):
        scripted("processes", {}, 200)
    monkeypatch.setattr(executors, "_left_in_group", lambda: 150)
    with pytest.raises(UsageError, match=r"^200 threads for envs are more than the 150 that this container"):
        scripted("threads", {}, 200)
    monkeypatch.setattr(executors.os, "geteuid", lambda: 1000)
    with pytest.raises(UsageError, match=r"^200 threads for envs are more than the 100 allowed: .*ulimit -u"):
        scripted("threads", {}, 200)


def test_the_end_of_what_forks_the_processes_is_an_error() -> None:
    lanes = scripted("processes", {}, 2)
    lanes.executor.server.kill()  # type: ignore[attr-defined]
    lanes.executor.server.wait()  # type: ignore[attr-defined]
    with pytest.raises(EnvError, match="'lane_envs:Scripted' come from has died"):
        step_all(lanes)


def test_many_processes_use_the_memory_that_is_shared() -> None:
    lanes = lanes_of("lane_envs:Turning", {}, 5, seed=SEED, parallel="processes")
    loop = LocalVector("lane_envs:Turning", {}, 5, seed=SEED)
    loop.reset()
    action = np.arange(15, dtype=np.float32).reshape(5, 3) / 15
    lanes.step(np.arange(5), action)
    gather(lanes, 5)
    step = loop.step(action)
    for path, column in lanes.obs.items():
        np.testing.assert_array_equal(column, step.obs[path])


@pytest.mark.parametrize("parallel", ALL)
def test_one_that_is_back_does_not_hang(parallel: Any) -> None:
    lanes = scripted(parallel, {}, 1, hang_seconds=0.05)
    lanes.step(np.array([0]), np.zeros(1, np.int64))
    assert wait(lanes)
    assert lanes.overdue(time.monotonic() + 1) == []
    assert gather(lanes, 1) == ([0], [])
