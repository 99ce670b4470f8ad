"""Whatever ends the writing of a checkpoint, a kill or a disk, at any moment: what was there before loads."""

from __future__ import annotations

import errno
import io
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disks import Disk
from writer_for_tests import save, state

from raynforce.errors import RaynforceError
from raynforce.runs import files
from raynforce.runs.directory import RunDirectory
from raynforce.trees import SEGMENTS

WRITER = Path(__file__).with_name("writer_for_tests.py")


def loaded(path: Path) -> int:
    """Load as another process does; returns which one it is. It is consistent, and nothing had to be skipped."""
    found = RunDirectory(path).load_newest()
    assert found is not None
    assert found.notes == []
    count: int = found.parts["learner"]["count"]
    np.testing.assert_equal(found.parts, state(count))
    return count


def kill_in_mid_writing(run: Path, first: int, seconds: float) -> int:
    """Write checkpoints in a loop, `kill -9` it, and return the last count that was surely saved."""
    command = [sys.executable, str(WRITER), str(run), str(first)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        count = int(process.stdout.readline())
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(seconds)
        process.send_signal(signal.SIGKILL)
        process.wait()
        return max([count, *(int(line) for line in process.stdout if line.endswith("\n"))])


@pytest.mark.parametrize("kills", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_a_checkpoint_always_loads_after_kill_9(tmp_path: Path, kills: int) -> None:
    clock = random.Random(kills)
    done = 0
    for _ in range(kills):
        done = kill_in_mid_writing(tmp_path, done + 1, clock.uniform(0, 0.1))
        count = loaded(tmp_path)
        assert count in (done, done + 1)  # what was reported is there, or the one after it
        done = count
    # Nothing that the kills left behind stays.
    run = RunDirectory(tmp_path)
    run.load_newest()
    save(run, done + 1)
    kept = [path.name for path in run.checkpoints.iterdir() if path.name.startswith(".")]
    kept += [path.name for path in (run.checkpoints / SEGMENTS).iterdir() if path.name.startswith(".")]
    assert kept == []


# -- disks that fail --------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create("env: CartPole-v1\n")
    for count in range(3):
        save(directory, count)
    return directory


def contents(path: Path) -> dict[str, bytes | str]:
    return {
        str(p.relative_to(path)): f"-> {p.readlink()}" if p.is_symlink() else p.read_bytes() if p.is_file() else ""
        for p in path.rglob("*")
    }


def refusal(run: RunDirectory, count: int) -> str:
    """The one line that says why this could not be saved, or nothing."""
    try:
        save(run, count)
    except RaynforceError as error:
        return str(error)
    return ""


NEED_ROOM = ("mkdir", "rename", "replace", "symlink", "fsync")


@pytest.mark.parametrize(("code", "calls"), [(errno.ENOSPC, NEED_ROOM), (errno.EROFS, (*NEED_ROOM, "unlink", "rmdir"))])
def test_a_disk_that_fails_at_any_call_leaves_the_older_ones_and_the_link(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, code: int, calls: Sequence[str]
) -> None:
    """From the first call of the operating system that writes on, until it fails too late to matter."""
    left: int | None = None  # calls that go well before all others fail

    def failing(original: Callable[..., Any], reads: Callable[..., bool]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if left is not None and not reads(*args, **kwargs):
                if left == 0:
                    raise OSError(code, os.strerror(code))
                left -= 1
            return original(*args, **kwargs)

        return call

    for name in calls:
        monkeypatch.setattr(os, name, failing(getattr(os, name), lambda *_, **__: False))
    monkeypatch.setattr(io, "open", failing(io.open, lambda file, mode="r", *_, **__: not set(mode) & set("xwa")))

    before = contents(run.path)
    link = before.pop("last")
    refused = 0
    while True:
        left = refused
        message = refusal(run, 3)
        left = None
        if not message:
            break
        refused += 1
        assert os.strerror(code) in message
        assert "\n" not in message
        assert loaded(run.path) in (2, 3)
        after = contents(run.path)
        assert after == {**after, **before}
        extra = [path for path in run.checkpoints.iterdir() if str(path.relative_to(run.path)) not in before]
        for path in extra:
            if code == errno.ENOSPC or not path.name.startswith("."):
                assert path.name == "step_000000000003"  # whole, but the link could not be moved
            shutil.rmtree(path)
        assert after["last"] in (link, *(f"-> checkpoints/{path.name}" for path in extra))
        run.last.unlink()
        run.last.symlink_to(str(link).removeprefix("-> "))
        run = RunDirectory(run.path)
        run.load_newest()
    assert refused > 10
    assert loaded(run.path) == 3
    for count in (4, 5):
        save(run, count)
    assert loaded(run.path) == 5
    assert not list(run.path.rglob(".*"))


def test_a_disk_that_is_full_to_any_degree(disk: Disk) -> None:
    """The room that is left is taken away page by page; with room again the run goes on."""
    run = RunDirectory(disk.path / "run")
    run.create("env: CartPole-v1\n")
    for count in range(2):
        save(run, count)
    before, refused = contents(run.path), 0
    # The next one takes about 16 pages for what is new.
    for pages in range(40):
        filler = disk.path / "filler"
        room = shutil.disk_usage(disk.path).free
        with filler.open("wb") as file:
            file.write(bytes(max(0, room - 4096 * pages - 4096)))
        message = refusal(run, 2)
        filler.unlink()
        if not message:
            break
        refused += 1
        assert "No space left on device" in message
        assert contents(run.path) == before
        assert loaded(run.path) == 1
    assert refused > 5
    assert loaded(run.path) == 2
    save(run, 3)
    assert loaded(run.path) == 3


def test_a_disk_that_cannot_be_written_any_more(disk: Disk) -> None:
    run = RunDirectory(disk.path / "run")
    run.create("env: CartPole-v1\n")
    for count in range(2):
        save(run, count)
    before = contents(run.path)
    disk.remount("ro")
    with pytest.raises(RaynforceError, match=r"cannot write checkpoint .*Read-only file system; older"):
        save(run, 2)
    with pytest.raises(RaynforceError, match=r"cannot write checkpoint .*Read-only file system; older"):
        run.save_best(2, {"x": np.ones(2)}, 1.0)
    assert contents(run.path) == before
    assert loaded(run.path) == 1  # reading needs no writing
    disk.remount("rw")
    save(run, 2)
    assert loaded(run.path) == 2


def test_a_directory_that_may_not_be_written(run: RunDirectory) -> None:
    if os.geteuid() == 0:
        pytest.skip("everything may be written by root")
    before = contents(run.path)
    for folder in (run.checkpoints, run.path):
        folder.chmod(0o555)
        try:
            with pytest.raises(RaynforceError, match="Permission denied"):
                save(run, 3)
        finally:
            folder.chmod(0o755)
        assert {name: contents(run.path)[name] for name in before} == before


def test_what_the_disk_did_not_keep_is_found_before_anything_is_deleted(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that takes everything and returns something else."""
    write = files.write

    def lying(path: Path, chunks: Any) -> files.Stated:
        stated = write(path, chunks)
        if path.name.endswith((".safetensors", ".tmp")):
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
        return stated

    before = contents(run.path)
    with monkeypatch.context() as patch:
        patch.setattr(files, "write", lying)
        with pytest.raises(RaynforceError, match=r"cannot write checkpoint .*its hash is another after it was written"):
            save(run, 3)
    assert contents(run.path) == before
    assert loaded(run.path) == 2
