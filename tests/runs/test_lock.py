"""One writer for a run: others are refused by name, and no kind of end leaves a run that cannot be taken."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from raynforce.errors import RaynforceError, UsageError
from raynforce.runs import lock
from raynforce.runs.lock import NAME, Holder, holder, locked

HOLD = """
import sys, pathlib
from raynforce.runs.lock import locked
with locked(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""
FAR = Holder("far", 4321, "another boot", 1_800_000_000.0, "token of far")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "SETTLE", 0.05)


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the run until it reads a line."""
    process = start(HOLD, tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def start(code: str, path: Path) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", code, str(path)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def write(path: Path, who: Holder, idle: float = 0.0) -> None:
    (path / NAME).write_text(json.dumps(asdict(who)))
    os.utime(path / NAME, (time.time() - idle,) * 2)


def wait_until(what: Callable[[], Any], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_second_process_is_refused_by_name(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    content = json.loads((tmp_path / NAME).read_text())
    assert sorted(content) == ["boot", "host", "pid", "started", "token"]
    assert (content["pid"], content["host"]) == (other.pid, os.uname().nodename)
    for _ in range(2):  # trying does not help
        with pytest.raises(UsageError) as caught, locked(tmp_path):
            pass
    since = time.strftime("%H:%M (%Y-%m-%d)", time.localtime(content["started"]))
    where = f"process {other.pid} on host {os.uname().nodename} since {since}"
    assert str(caught.value) == f"run {tmp_path} is in use by {where}: wait, or end it first"
    found = holder(tmp_path)
    assert found is not None
    assert found.pid == other.pid
    assert time.time() - 60 < found.started <= time.time()
    other.communicate("end\n", timeout=10)
    assert (tmp_path / NAME).read_text() == ""
    assert holder(tmp_path) is None
    with locked(tmp_path) as held:
        assert held.lost is None
        held.check()


def test_after_a_kill_it_is_taken_without_a_word(
    tmp_path: Path, other: subprocess.Popen[str], capfd: pytest.CaptureFixture[str]
) -> None:
    other.kill()
    other.wait()
    assert json.loads((tmp_path / NAME).read_text())["pid"] == other.pid
    assert holder(tmp_path) is None
    with locked(tmp_path):
        assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()
    assert capfd.readouterr() == ("", "")
    assert os.listdir(tmp_path) == [NAME]


def test_the_name_is_written_through_for_other_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, fsync = [], os.fsync

    def watched(descriptor: int) -> None:
        seen.append(json.loads(os.pread(descriptor, 4096, 0))["pid"])
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    with locked(tmp_path):
        assert seen == [os.getpid()]


def test_a_clock_that_was_set_back_keeps_nobody_out(tmp_path: Path) -> None:
    write(tmp_path, FAR, idle=-86400.0)
    assert holder(tmp_path) is None
    with locked(tmp_path) as held:
        assert held.lost is None


def test_a_number_that_another_process_has_now_is_no_holder(tmp_path: Path) -> None:
    write(tmp_path, Holder(os.uname().nodename, os.getppid(), lock._boot(), time.time(), "killed"))
    assert holder(tmp_path) is None
    with locked(tmp_path):
        pass


def test_a_child_that_outlives_its_parent_does_not_keep_the_lock(tmp_path: Path) -> None:
    code = HOLD.replace('print("held"', "import os, time\n    child = os.fork() or time.sleep(30)\n    print(child")
    process = start(code, tmp_path)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        with pytest.raises(UsageError, match=f"process {process.pid} "), locked(tmp_path):
            pass  # the child has not freed it either
        process.kill()
        process.wait()
        os.kill(child, 0)
        with locked(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        process.kill()
        process.communicate()


def test_the_same_process_cannot_have_it_twice(tmp_path: Path) -> None:
    with locked(tmp_path):
        with pytest.raises(UsageError, match=f"in use by process {os.getpid()} "), locked(tmp_path):
            pass
        assert holder(tmp_path) is not None
    with locked(tmp_path):
        pass


def test_an_error_inside_releases_it(tmp_path: Path) -> None:
    with pytest.raises(KeyError), locked(tmp_path):
        raise KeyError
    assert (tmp_path / NAME).read_text() == ""


def test_another_host_that_shows_life_is_refused_even_if_its_flock_is_not_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, FAR, idle=50.0)
    before = (tmp_path / NAME).read_text(), (tmp_path / NAME).stat().st_mtime_ns
    assert holder(tmp_path) == FAR
    says = re.escape(f"process 4321 on host far since {time.strftime('%H:%M (%Y-%m-%d)', time.localtime(FAR.started))}")
    with monkeypatch.context() as patch:
        now = time.time
        patch.setattr(time, "time", lambda: now() + 3600.0)  # the clock of this host is wrong
        with pytest.raises(UsageError, match=says), locked(tmp_path):
            pass
    assert before == ((tmp_path / NAME).read_text(), (tmp_path / NAME).stat().st_mtime_ns)
    assert os.listdir(tmp_path) == [NAME]


def test_another_host_that_shows_no_life_loses_it(tmp_path: Path) -> None:
    write(tmp_path, FAR, idle=61.0)
    assert holder(tmp_path) is None
    with locked(tmp_path):
        found = holder(tmp_path)
        assert found is not None
        assert found.pid == os.getpid()


def test_of_two_hosts_that_break_a_lock_the_last_one_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, Holder("gone", 1, "a third boot", 0.0, "x"), idle=1000.0)
    monkeypatch.setattr(time, "sleep", lambda seconds: write(tmp_path, FAR))
    with pytest.raises(UsageError, match="process 4321 on host far"), locked(tmp_path):
        pass
    assert json.loads((tmp_path / NAME).read_text())["host"] == "far"


@pytest.mark.parametrize(
    "content",
    [b"", b"\0\0\0", b"{", b"[]", b"null", b'{"host": "h", "pid": 1}', b"[" * 4096, b"\xff" * 100_000]
    + [json.dumps(asdict(FAR) | {"pid": pid}).encode() for pid in ("x", None, 1e400)],
)
def test_garbage_is_no_holder(tmp_path: Path, content: bytes) -> None:
    (tmp_path / NAME).write_bytes(content)
    assert holder(tmp_path) is None
    with locked(tmp_path):
        assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()


def test_a_holder_without_a_name_is_refused_too(tmp_path: Path) -> None:
    with open(tmp_path / NAME, "wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert holder(tmp_path) == Holder()
        with pytest.raises(UsageError, match=r"is in use by another process: wait, or end it first"), locked(tmp_path):
            pass


def test_who_only_looks_changes_nothing_and_hinders_nobody(tmp_path: Path) -> None:
    assert holder(tmp_path) is None
    assert os.listdir(tmp_path) == []
    (tmp_path / NAME).touch()
    with open(tmp_path / NAME, "rb") as file:  # somebody is looking at this moment
        fcntl.flock(file, fcntl.LOCK_SH)
        looked = threading.Timer(0.08, file.close)
        looked.start()
        with locked(tmp_path):
            pass
        looked.join()


def test_it_shows_life_and_sees_when_it_was_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT", 0.02)
    with locked(tmp_path) as held:
        os.utime(tmp_path / NAME, (0, 0))
        wait_until(lambda: (tmp_path / NAME).stat().st_mtime > 1e9)
        held.check()
        write(tmp_path, FAR)
        wait_until(lambda: held.lost)
        assert held.lost == FAR
        with pytest.raises(RaynforceError, match=r"was taken over by process 4321 on host far since .*") as caught:
            held.check()
        assert "\n" not in str(caught.value)
    assert json.loads((tmp_path / NAME).read_text())["host"] == "far"  # theirs now


def test_showing_life_does_not_keep_the_process(tmp_path: Path) -> None:
    code = "import sys, pathlib\nfrom raynforce.runs import lock\nheld = lock._acquire(pathlib.Path(sys.argv[1]))\n"
    assert start(code, tmp_path).communicate(timeout=10)[0] == ""
    assert holder(tmp_path) is None


@pytest.mark.parametrize("number", [errno.ENOTSUP, errno.ENOLCK])
def test_a_file_system_without_flock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def flock(file: int, how: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    near = Holder(os.uname().nodename, os.getppid(), lock._boot(), time.time(), "near")
    for fresh in (near, FAR):
        write(tmp_path, fresh)
        assert holder(tmp_path) == fresh
        with pytest.raises(UsageError, match=f"process {fresh.pid} "), locked(tmp_path):
            pass
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for who, idle in ((FAR, 61.0), (Holder(near.host, ended.pid, near.boot, 0.0, "ended"), 0.0)):
        write(tmp_path, who, idle)
        assert holder(tmp_path) is None
        with locked(tmp_path):
            assert json.loads((tmp_path / NAME).read_text())["pid"] == os.getpid()


def test_what_cannot_be_locked_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, says: str) -> None:
        with (
            pytest.raises(RaynforceError, match=rf"^cannot lock run {path}: {says}; make it writable") as caught,
            locked(path),
        ):
            pass
        assert "\n" not in str(caught.value)
        assert holder(path) is None

    for name, make in (
        ("directory", os.mkdir),
        ("pipe", os.mkfifo),
        ("link", lambda file: os.symlink(tmp_path / "elsewhere", file)),
    ):
        (tmp_path / name).mkdir()
        make(tmp_path / name / NAME)
    refused(tmp_path / "directory", "Is a directory")
    refused(tmp_path / "pipe", "Illegal seek")
    refused(tmp_path / "link", "Too many levels of symbolic links")
    assert not (tmp_path / "elsewhere").exists()
    refused(tmp_path / "missing", "No such file or directory")

    def full(descriptor: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "full").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        refused(tmp_path / "full", "No space left on device")
    with locked(tmp_path / "full"):  # nothing of it is left
        pass


def test_a_read_only_directory_is_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.getuid() == 0:
        mount = ["mount", "-t", "tmpfs", "-o", "ro,size=64k", "none", str(folder)]
        if subprocess.run(mount, capture_output=True).returncode:
            pytest.skip("nothing can be mounted here")
    else:
        folder.chmod(0o500)
    try:
        with (
            pytest.raises(RaynforceError, match=rf"cannot lock run {folder}: (Read-only|Permission denied)"),
            locked(folder),
        ):
            pass
    finally:
        if os.getuid() == 0:
            subprocess.run(["umount", str(folder)], check=True)
        else:
            folder.chmod(0o700)
