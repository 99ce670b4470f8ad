"""The journal: nobody waits for the disk, nothing is torn, doubled or lost silently, whatever the disk does."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from disks import small_disk

from raynforce.errors import RaynforceError
from raynforce.runs import journal as journal_module
from raynforce.runs.directory import RunDirectory
from raynforce.runs.journal import Journal


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "RETRY", 0.01)


class Alarms:
    """What was told, and that it was told in the thread of the one who appends."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.thread = threading.get_ident()

    def __call__(self, text: str) -> None:
        assert threading.get_ident() == self.thread
        assert "\n" not in text
        self.told.append(text)


@pytest.fixture
def alarms() -> Alarms:
    return Alarms()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


class Disk:
    """Makes `os.write`, `os.fsync` and `os.ftruncate` of files in a directory fail, as long as `error` is set."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = str(folder)
        self.error: int | None = None
        self.failing = {"write"}
        self.partial = 0  # bytes that are written before it fails
        self.blocked = threading.Event()
        self.blocked.set()
        self.entered = 0  # writes that were begun
        self.attempts: list[float] = []
        self.synced = 0
        self._write, self._fsync, self._ftruncate = os.write, os.fsync, os.ftruncate
        for name in ("write", "fsync", "ftruncate"):
            patch.setattr(os, name, getattr(self, name))

    def _fails(self, name: str, fd: int) -> bool:
        return (
            self.error is not None
            and name in self.failing
            and os.readlink(f"/proc/self/fd/{fd}").startswith(self.folder)
        )

    def write(self, fd: int, data: bytes) -> int:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(self.folder):
            self.entered += 1
            self.blocked.wait()
        if self._fails("write", fd):
            if self.partial:
                count = self._write(fd, memoryview(data)[: self.partial])
                self.partial = 0
                return count
            self.attempts.append(time.monotonic())
            raise OSError(self.error, os.strerror(self.error or 0))
        return self._write(fd, data)

    def fsync(self, fd: int) -> None:
        if self._fails("fsync", fd):
            self.attempts.append(time.monotonic())
            raise OSError(self.error, os.strerror(self.error or 0))
        self.synced += 1
        self._fsync(fd)

    def ftruncate(self, fd: int, size: int) -> None:
        if self._fails("ftruncate", fd):
            raise OSError(self.error, os.strerror(self.error or 0))
        self._ftruncate(fd, size)


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    disk = Disk(tmp_path, monkeypatch)
    yield disk
    disk.error = None
    disk.blocked.set()


def wait_until(what: Callable[[], Any], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def line(number: int) -> bytes:
    return json.dumps({"step": number}).encode() + b"\n"


def lines(count: int) -> bytes:
    return b"".join(line(i) for i in range(count))


def test_lines_are_in_order_in_several_files_and_synced_by_a_flush(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "SYNC", 1000.0)
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_bytes(b"before\n")
    journal = Journal()
    for i in range(300):
        journal.append(one, line(i))
        journal.append(other, line(i + 1000))
    assert journal.position(one) == 7 + len(lines(300))  # whether it is there already or not
    assert journal.flush(30.0)
    assert disk.synced >= 2
    assert one.read_bytes() == b"before\n" + lines(300)
    assert other.read_bytes() == b"".join(line(i + 1000) for i in range(300))
    assert (journal.position(one), journal.position(other)) == (one.stat().st_size, other.stat().st_size)
    assert journal.close()
    assert journal.close()
    with pytest.raises(RuntimeError, match="closed"):
        journal.append(one, b"x\n")


def test_what_is_appended_is_written_and_later_synced_without_being_asked(
    path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "SYNC", 0.05)
    journal = Journal()
    journal.append(path, line(0))
    wait_until(lambda: path.read_bytes() == line(0))
    wait_until(lambda: disk.synced == 1)
    assert journal.flush(1.0)
    assert disk.synced == 1  # once is enough
    journal.close()


def test_a_disk_that_does_not_answer_holds_nobody_up(
    path: Path, disk: Disk, alarms: Alarms, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "STALL", 0.1)
    journal = Journal(alarms)
    disk.blocked.clear()
    journal.append(path, line(0))
    wait_until(lambda: disk.entered)
    time.sleep(0.15)
    began = time.monotonic()
    for i in range(1, 100):
        journal.append(path, line(i))
    assert not journal.flush(0.05)
    assert time.monotonic() - began < 1.0
    assert len(alarms.told) == 1
    assert alarms.told[0].startswith(f"cannot write {path}: the disk has not answered for 0 s; 2 lines kept")
    disk.blocked.set()
    assert journal.flush(30.0)
    journal.report()
    assert alarms.told[1:] == [f"{path} can be written again: nothing was lost"]
    assert path.read_bytes() == lines(100)
    journal.close()
    assert len(alarms.told) == 2


@pytest.mark.parametrize("failing", ["write", "fsync"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.ESTALE])
def test_an_outage_is_told_of_twice_and_costs_nothing(
    path: Path, disk: Disk, alarms: Alarms, error: int, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "SYNC", 0.0)
    journal = Journal(alarms)
    for i in range(5):
        journal.append(path, line(i))
    assert journal.flush(30.0)
    disk.error, disk.failing = error, {failing}
    journal.append(path, line(5))
    wait_until(lambda: len(disk.attempts) > 3)
    for i in range(6, 20):
        journal.append(path, line(i))
    assert not journal.flush(0.05)
    wait_until(lambda: path.read_bytes() == lines(5))  # what could not be synced is not relied on
    assert journal.position(path) == len(lines(20))
    kept = f"cannot write {path}: {os.strerror(error)}; 1 line kept in memory until it can be written"
    assert alarms.told == [kept]
    disk.error = None
    assert journal.flush(30.0)
    journal.append(path, line(20))
    assert alarms.told == [kept, f"{path} can be written again: nothing was lost"]
    assert journal.close()
    assert path.read_bytes() == lines(21)
    assert len(alarms.told) == 2


@pytest.mark.parametrize("cannot_cut", [False, True])
def test_half_a_line_is_neither_left_nor_doubled(path: Path, disk: Disk, cannot_cut: bool) -> None:
    journal = Journal()
    journal.append(path, line(0))
    assert journal.flush(30.0)
    disk.failing = {"write", "ftruncate"} if cannot_cut else {"write"}
    disk.partial, disk.error = 5, errno.ENOSPC
    journal.append(path, line(1))
    wait_until(lambda: disk.attempts)
    if cannot_cut:
        assert path.read_bytes() == line(0) + line(1)[:5]
    else:  # a kill at this moment finds whole lines
        wait_until(lambda: path.read_bytes() == line(0))
    journal.append(path, line(2))
    disk.error = None
    assert journal.close()
    assert path.read_bytes() == lines(3)


def test_a_flush_does_not_wait_for_the_next_attempt(path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "RETRY", 1000.0)
    disk.error = errno.EIO
    journal = Journal()
    journal.append(path, line(0))
    wait_until(lambda: disk.attempts)
    disk.error = None
    assert journal.flush(30.0)
    journal.close()


def test_one_file_that_fails_does_not_keep_another_waiting(tmp_path: Path, alarms: Alarms) -> None:
    good, bad = tmp_path / "good", tmp_path / "folder" / "bad"
    bad.parent.mkdir()
    journal = Journal(alarms)
    journal.add(bad)
    bad.unlink()
    bad.parent.rmdir()
    journal.append(bad, line(0))
    while not alarms.told:
        journal.report()
        time.sleep(0.002)
    for i in range(3):
        journal.append(good, line(i))
    wait_until(lambda: good.read_bytes() == lines(3))
    assert alarms.told == [
        f"cannot write {bad}: No such file or directory; 1 line kept in memory until it can be written"
    ]
    bad.parent.mkdir()
    assert journal.close()
    assert bad.read_bytes() == line(0)
    assert alarms.told[1:] == [f"{bad} can be written again: nothing was lost"]


def test_beyond_the_limit_lines_are_dropped_and_counted(
    path: Path, disk: Disk, alarms: Alarms, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = len(b"0000\n")
    monkeypatch.setattr(journal_module, "LIMIT", 10 * size)
    journal = Journal(alarms)
    journal.append(path, b"kept\n")
    assert journal.flush(30.0)
    disk.error = errno.ENOSPC
    for i in range(35):
        journal.append(path, b"%04d\n" % i)
        if i == 0:
            wait_until(lambda: disk.attempts)
    assert journal.position(path) == 11 * size
    disk.error = None
    assert journal.close()
    assert path.read_bytes() == b"kept\n" + b"".join(b"%04d\n" % i for i in range(10))
    assert alarms.told[1:] == [f"{path} can be written again: lost: 25 lines, for lack of memory"]


def test_a_disk_that_is_too_slow_is_told_of(
    path: Path, disk: Disk, alarms: Alarms, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "LIMIT", 50)
    journal = Journal(alarms)
    disk.blocked.clear()
    for i in range(30):
        journal.append(path, b"%04d\n" % i)
    assert alarms.told == [
        f"cannot write {path}: the disk is too slow; 10 lines kept in memory until it can be written"
    ]
    disk.blocked.set()
    journal.close()
    assert path.read_bytes() == b"".join(b"%04d\n" % i for i in range(10))
    assert alarms.told[1:] == [f"{path} can be written again: lost: 20 lines, for lack of memory"]


def test_the_end_is_not_put_off_for_long_and_says_what_is_lost(path: Path, disk: Disk, alarms: Alarms) -> None:
    journal = Journal(alarms)
    disk.error = errno.ENOSPC
    for i in range(7):
        journal.append(path, line(i))
    began = time.monotonic()
    assert not journal.close(0.1)
    assert 0.1 <= time.monotonic() - began < 2.0
    assert alarms.told[-1] == (f"cannot write {path}: No space left on device; lost: 7 lines of metrics.jsonl")
    assert [text.split(":")[0] for text in alarms.told[:-1]] == [f"cannot write {path}"]


def test_a_file_that_others_have_cut_goes_on_where_it_ends(path: Path, disk: Disk) -> None:
    journal = Journal()
    journal.append(path, line(0))
    journal.append(path, line(1))
    assert journal.flush(30.0)
    disk.error = errno.ESTALE
    journal.append(path, line(2))
    wait_until(lambda: disk.attempts)
    os.truncate(path, len(line(0)))
    disk.error = None
    assert journal.flush(30.0)
    assert path.read_bytes() == line(0) + line(2)
    assert journal.position(path) == path.stat().st_size
    journal.close()


def test_a_file_has_one_writer(path: Path) -> None:
    journal = Journal()
    journal.add(path)
    with pytest.raises(ValueError, match="already"):
        journal.add(path)
    journal.close()


def test_what_is_not_a_file_or_cannot_be_opened_is_refused_at_once(tmp_path: Path) -> None:
    journal = Journal()
    os.mkfifo(tmp_path / "pipe")
    for name in ("missing/file", "pipe", "/dev/full", ""):
        with pytest.raises(OSError):  # noqa: PT011  (of several kinds)
            journal.add(tmp_path / name)
    journal.close()


def test_a_thread_that_hangs_does_not_keep_the_process() -> None:
    code = (
        "import os, time, tempfile, pathlib\n"
        "from raynforce.runs.journal import Journal\n"
        "folder = tempfile.TemporaryDirectory()\n"
        "os.write = lambda fd, data: time.sleep(60)\n"
        "journal = Journal(lambda text: print(text.split('; ')[0].split(': ')[-1], flush=True))\n"
        "journal.append(pathlib.Path(folder.name) / 'file', b'x\\n')\n"
        "journal.close(0.1)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout == "the disk does not answer\n"


def test_a_disk_that_is_really_full(tmp_path: Path, alarms: Alarms) -> None:
    written = [json.dumps({"step": i, "text": "x" * 100}).encode() + b"\n" for i in range(1500)]
    whole = b"".join(written)
    with small_disk(tmp_path / "disk") as small:
        path, ballast = small.path / "metrics.jsonl", small.path / "filler"
        journal = Journal(alarms)
        journal.append(path, written[0])
        assert journal.flush(30.0)
        small.fill()
        for text in written[1:]:
            journal.append(path, text)
        assert not journal.flush(0.1)
        journal.report()
        assert "No space left on device" in alarms.told[0]
        assert whole.startswith(path.read_bytes())
        assert path.stat().st_size <= 4096
        os.truncate(ballast, 0)
        assert journal.close()
        assert path.read_bytes() == whole
        assert alarms.told[1:] == [f"{path} can be written again: nothing was lost"]


def test_events_go_through_the_journal_while_there_is_one(tmp_path: Path, disk: Disk, alarms: Alarms) -> None:
    run = RunDirectory(tmp_path / "run")
    run.create("env: x\n")
    run.event("first")
    run.journal = Journal(alarms)
    disk.error = errno.ENOSPC
    run.event("started", steps=0)
    wait_until(lambda: disk.attempts)
    disk.error = None
    run.event("stopped", steps=5)
    assert run.journal.close()
    run.journal = None
    run.event("last")
    assert [json.loads(text)["event"] for text in run.events.read_text().splitlines()] == [
        *("first", "started", "stopped", "last")
    ]
    run.events.unlink()
    run.events.mkdir()
    run.journal = Journal()
    with pytest.raises(RaynforceError, match=r"cannot write .*events\.jsonl: Is a directory"):
        run.event("started")
    run.journal.close()
