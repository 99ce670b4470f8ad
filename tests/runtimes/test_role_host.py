"""The host that a role lives in: its watchdog."""

from __future__ import annotations

import sys
import time

import pytest

from raynforce.runtimes.base import Place, RoleDied
from raynforce.runtimes.process import ProcessRuntime
from raynforce.runtimes.role_host import LastLines, RoleHost, hung, pack

REPORT = """before
Timeout (0:05:00)!
Thread 0x00007fb5ab7fe6c0 (most recent call first):
  File "/lib/threading.py", line 327 in wait

Thread 0x00007fb5f187bb80 (most recent call first):
  File "/home/me/my sims/arm.py", line 167 in step
  File "/tmp/host.py", line 62 in call
"""


def test_a_report_says_what_hung_and_for_how_long() -> None:
    assert hung(REPORT.splitlines()) == "it hung for 0:05:00 in step (arm.py:167)"
    assert hung(["Timeout (0:05:00)!"]) == "it hung for 0:05:00"
    assert hung(["Timeout (waiting for the simulator)", "killed"]) is None


def test_last_lines_keep_the_whole_report() -> None:
    lines = LastLines()
    for n in range(100):
        lines.append(f"line {n}")
    assert list(lines) == [f"line {n}" for n in range(60, 100)]
    report = ["Timeout (0:05:00)!", "Thread 0x1 (most recent call first):", '  File "a.py", line 1 in step']
    for line in [*report, *['  File "b.py", line 2 in deep'] * 99]:
        lines.append(line)
    assert list(lines)[40:43] == report
    assert hung(lines) == "it hung for 0:05:00 in step (a.py:1)"


@pytest.mark.parametrize(
    ("place", "role", "method", "dies"),
    [
        (Place(call_seconds=0.6), "roles_for_tests:Sleepy", "", False),  # building has its own limit
        (Place(start_seconds=0.6), "roles_for_tests:Sleepy", "", True),
        (Place(start_seconds=0.6), "roles_for_tests:Notebook", "sleep", False),
        (Place(call_seconds=0.6), "roles_for_tests:Notebook", "sleep", True),
        (Place(call_seconds=0.6, start_seconds=20), "roles_for_tests:Sleepy", "state", False),  # as slow as building
        (Place(call_seconds=0.6, start_seconds=20), "roles_for_tests:Sleepy", "advance", True),
    ],
)
def test_each_limit_is_for_its_own(place: Place, role: str, method: str, dies: bool) -> None:
    runtime = ProcessRuntime({}, lambda text: None)
    with runtime:
        handle = runtime.spawn(role, 1.5, name="sampler 0", place=place)
        call = handle.call(method or "__repr__", *([1.5] if method in ("sleep", "advance") else []))
        if not dies:
            call.result()
            return
        with pytest.raises(RoleDied) as raised:
            call.result()
        assert raised.value.role == "sampler 0"
        assert (hung(raised.value.said.splitlines()) or "").startswith("it hung for 0:00:00.600000 in ")


def test_the_watchdog_is_cheap_and_sleeps_between_calls() -> None:
    host = RoleHost()
    host.build(pack("roles_for_tests:Notebook", [], "notebook", Place(call_seconds=0.5), path=list(sys.path)))
    times = []
    for _ in range(2000):
        began = time.perf_counter()
        host.call("read")
        times.append(time.perf_counter() - began)
    assert sorted(times)[len(times) // 2] < 150e-6  # on a busy machine
    time.sleep(0.7)
    host.call("read")
