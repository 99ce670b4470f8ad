"""The run directory: never overwrites, prunes what it should and nothing else, and `best` and `last` always load."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from disks import fail_to_write_config

from raynforce.errors import CheckpointError, RaynforceError, UsageError
from raynforce.runs import checkpoint
from raynforce.runs.directory import RunDirectory, find_policy
from raynforce.trees import Tree


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create("env: CartPole-v1\n")
    return directory


def save(run: RunDirectory, step: int, keep: int = 2) -> None:
    run.save(step, {"part": {"x": np.full(3, step)}}, keep)


def newest(run: RunDirectory) -> dict[str, Tree]:
    loaded = run.load_newest()
    assert loaded is not None
    assert loaded.notes == []
    return loaded.parts


def kept(run: RunDirectory) -> list[str]:
    return sorted(os.listdir(run.checkpoints))


# -- making one -------------------------------------------------------------------------------------------


def test_create_writes_the_config_and_makes_missing_parents(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "a" / "b" / "run")
    run.create("env: x\n")
    assert run.config.read_text() == "env: x\n"
    assert run.events.read_text() == ""
    assert kept(run) == []


def test_an_empty_directory_may_be_used(tmp_path: Path) -> None:
    RunDirectory(tmp_path).create("env: x\n")
    assert (tmp_path / "config.yaml").exists()


@pytest.mark.parametrize("name", ["notes.txt", ".hidden", "config.yaml"])
def test_a_directory_that_holds_anything_is_refused_and_untouched(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("precious")
    for refuse in (RunDirectory(tmp_path).must_be_new, lambda: RunDirectory(tmp_path).create("env: x\n")):
        with pytest.raises(UsageError, match=r"exists already: choose another with --out") as caught:
            refuse()
        assert ("raynforce resume" in str(caught.value)) == (name == "config.yaml")
    assert os.listdir(tmp_path) == [name]
    assert (tmp_path / name).read_text() == "precious"


def test_a_file_that_has_the_name_of_our_events_is_not_emptied(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text("precious\n")
    with pytest.raises(UsageError, match="exists already"):
        RunDirectory(tmp_path).create("env: x\n")
    assert (tmp_path / "events.jsonl").read_text() == "precious\n"


def test_a_file_in_its_place_is_refused_and_untouched(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("precious")
    with pytest.raises(UsageError, match="exists already"):
        RunDirectory(file).create("env: x\n")
    with pytest.raises(UsageError, match=r"cannot write to output directory .*Not a directory"):
        RunDirectory(file / "below").create("env: x\n")
    assert file.read_text() == "precious"


def test_a_name_that_is_too_long_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="File name too long"):
        RunDirectory(tmp_path / ("x" * 300)).must_be_new()


def test_a_dangling_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "deep")
    with pytest.raises(UsageError):
        RunDirectory(tmp_path / "link").create("env: x\n")
    assert os.listdir(tmp_path) == ["link"]


def test_a_directory_that_could_not_be_made_can_be_tried_again(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    with pytest.MonkeyPatch.context() as patch:
        fail_to_write_config(patch)
        with pytest.raises(UsageError, match=r"cannot write to output directory .*No space left"):
            run.create("env: x\n")
    run.create("env: x\n")


def create_at_once(path: Path, count: int, *, numbered: bool) -> list[RunDirectory | UsageError]:
    """What becomes of so many threads that create the same directory at the same moment."""
    begin = threading.Barrier(count)

    def create(index: int) -> RunDirectory | UsageError:
        run = RunDirectory(path, numbered=numbered)
        begin.wait()
        try:
            run.create(f"env: number{index}\n")
            return run
        except UsageError as error:
            return error

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(create, range(count)))


def test_runs_that_begin_at_once_get_names_of_their_own(tmp_path: Path) -> None:
    made = [run for run in create_at_once(tmp_path / "runs" / "run", 8, numbered=True) if isinstance(run, RunDirectory)]
    assert sorted(run.path.name for run in made) == ["run", *(f"run-{number}" for number in range(2, 9))]
    assert sorted(run.config.read_text() for run in made) == [f"env: number{index}\n" for index in range(8)]
    assert all(run.shown == str(run.path) for run in made)


@pytest.mark.parametrize("exists", [False, True])
def test_a_directory_that_several_ask_for_goes_to_one(tmp_path: Path, exists: bool) -> None:
    path = tmp_path / "run"
    if exists:
        path.mkdir()
    found = create_at_once(path, 8, numbered=False)
    (winner,) = [index for index, run in enumerate(found) if isinstance(run, RunDirectory)]
    assert (path / "config.yaml").read_text() == f"env: number{winner}\n"
    refused = [str(error) for error in found if isinstance(error, UsageError)]
    assert all("exists already: choose another with --out" in line for line in refused)


@pytest.mark.parametrize("exists", [False, True])
def test_a_directory_that_could_not_be_made_is_not_left_behind(tmp_path: Path, exists: bool) -> None:
    path = tmp_path / "run"
    if exists:
        path.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        fail_to_write_config(patch)
        with pytest.raises(UsageError, match="cannot write to output directory"):
            RunDirectory(path).create("env: x\n")
    assert path.exists() == exists
    assert not exists or os.listdir(path) == []


# -- opening one ------------------------------------------------------------------------------------------


def test_open_wants_a_run(run: RunDirectory, tmp_path: Path) -> None:
    assert RunDirectory.open(run.path).path == run.path
    with pytest.raises(UsageError, match=r"there is no run at .*rum \(did you mean 'run'\?\)"):
        RunDirectory.open(tmp_path / "rum")
    with pytest.raises(UsageError, match=r"not a run directory: it has no config.yaml"):
        RunDirectory.open(tmp_path)
    with pytest.raises(UsageError, match="there is no run at"):
        RunDirectory.open(tmp_path / "no" / "such" / "parent")


def test_a_run_without_a_checkpoint_says_so(run: RunDirectory) -> None:
    assert run.load_newest() is None
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        find_policy(run.path)


def test_events_are_json_lines(run: RunDirectory) -> None:
    run.event("started", steps=0)
    run.event("stopped", reason="steps done", steps=5)
    events = [json.loads(line) for line in run.events.read_text().splitlines()]
    assert [(e["event"], e["steps"]) for e in events] == [("started", 0), ("stopped", 5)]
    assert events[1]["reason"] == "steps done"


def test_an_event_that_cannot_be_written_names_the_file(run: RunDirectory) -> None:
    run.events.unlink()
    run.events.mkdir()
    with pytest.raises(RaynforceError, match=r"events\.jsonl"):
        run.event("started", steps=0)


# -- keeping the newest -----------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_checkpoints_are_kept(run: RunDirectory, keep: int) -> None:
    for step in (5, 40, 300, 2_000):
        save(run, step, keep)
        assert checkpoint.manifest(run.last)["step"] == step
    assert kept(run) == [f"step_{step:012d}" for step in (5, 40, 300, 2_000)][-keep:]
    assert (newest(run)["part"]["x"] == 2_000).all()


def test_pruning_spares_the_best_policy_and_strangers(run: RunDirectory) -> None:
    run.save_best(5, {"x": np.ones(1)}, 1.0)
    (run.checkpoints / "notes.txt").write_text("mine")
    for step in (10, 20, 30):
        save(run, step, keep=1)
    assert kept(run) == ["best_000000000005", "notes.txt", "step_000000000030"]


def test_a_checkpoint_of_an_abandoned_future_never_costs_the_newest(run: RunDirectory) -> None:
    """Going back to an older checkpoint leaves one with a higher number behind."""
    save(run, 500, keep=1)
    save(run, 100, keep=1)
    assert checkpoint.manifest(run.last)["step"] == 100
    save(run, 200, keep=1)
    assert (newest(run)["part"]["x"] == 200).all()


def test_the_same_step_twice(run: RunDirectory) -> None:
    run.save(7, {"part": {"x": np.zeros(2)}}, 2)
    run.save(7, {"part": {"x": np.ones(2)}}, 2)
    assert (newest(run)["part"]["x"] == 1).all()
    run.save_best(7, {"x": np.zeros(2)}, 1.0)
    run.save_best(7, {"x": np.ones(2)}, 2.0)
    assert checkpoint.manifest(run.best)["eval_return"] == 2.0
    assert (checkpoint.load(run.best)["policy"]["x"] == 1).all()
    assert not [name for name in kept(run) if name.startswith(".")]


@pytest.mark.parametrize("again", [7, 8])
def test_last_and_best_can_be_read_at_every_moment(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, again: int
) -> None:
    """A power cut may come after each call that changes a name."""
    policy = {"x": np.ones(2)}
    save(run, 7)
    run.save_best(7, policy, 1.0)
    moments: list[bool] = []

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            moments.append(all((link / "manifest.json").exists() for link in (run.last, run.best)))
            return result

        return call

    for name in ("rename", "replace", "unlink", "symlink_to"):
        monkeypatch.setattr(Path, name, watched(getattr(Path, name)))
    save(run, again)
    run.save_best(again, policy, 2.0)
    assert len(moments) >= 4
    assert all(moments)


def test_what_a_killed_process_left_behind_is_cleared_away(run: RunDirectory) -> None:
    save(run, 1)
    abandoned = run.checkpoints / ".step_000000000002.999999999.tmp"  # no process has this id: Linux ends at 4194304
    abandoned.mkdir()
    (abandoned / "replay.safetensors").write_bytes(b"x" * 1000)
    (run.path / ".last.999999999.tmp").symlink_to("checkpoints/step_000000000002")
    with RunDirectory.open(run.path).locked():
        assert kept(run) == ["step_000000000001"]
        assert not list(run.path.glob(".last*"))
    assert newest(run)["part"]["x"][0] == 1


def test_a_second_ctrl_c_while_the_same_step_is_saved_again_loses_nothing(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run, 7)
    rename, calls = Path.rename, 0

    def interrupted(self: Path, target: Path) -> Path:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(Path, "rename", interrupted)
        save(run, 7)
    assert (newest(RunDirectory.open(run.path))["part"]["x"] == 7).all()


def test_a_copy_that_followed_the_links_can_go_on(run: RunDirectory, tmp_path: Path) -> None:
    save(run, 1)
    copy = RunDirectory(tmp_path / "copy")
    shutil.copytree(run.path, copy.path, symlinks=False)
    assert not copy.last.is_symlink()
    with copy.locked():
        save(copy, 2)
    with copy.locked():
        assert (newest(copy)["part"]["x"] == 2).all()
        assert copy.last.is_symlink()
        assert not [name for name in kept(copy) if name.startswith(".")]


def test_a_link_that_cannot_be_moved_is_one_line(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, target: Path) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(RaynforceError, match="last: Read-only"):
        save(run, 1)


def test_a_file_system_that_cannot_sync_folders_has_checkpoints(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = os.fsync

    def refuse(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        synced(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    save(run, 1)
    run.write_config("env: x\n")
    assert newest(run)["part"]["x"][0] == 1


def test_a_disk_that_does_not_answer_is_one_line(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    save(run, 1)

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "open", broken)
    monkeypatch.setattr(Path, "is_dir", broken)
    with pytest.raises(CheckpointError, match="Input/output error"):
        checkpoint.manifest(run.last)


def test_a_best_that_a_user_has_set_to_what_was_not_evaluated(run: RunDirectory) -> None:
    run.save(1, {"policy": {"x": 1}}, keep=2)
    checkpoint.point(run.best, run.checkpoints / "step_000000000001")
    with pytest.raises(CheckpointError, match="best leads to a checkpoint that was not evaluated"):
        run.load_best()


# -- which policy a path stands for -----------------------------------------------------------------------


def test_find_policy(run: RunDirectory, tmp_path: Path) -> None:
    save(run, 10)
    assert find_policy(run.path) == run.last  # there is no best one yet
    run.save_best(10, {"x": np.ones(1)}, 1.0)
    assert find_policy(run.path) == run.best
    assert find_policy(run.path, "last") == run.last
    assert find_policy(run.last) == run.last
    assert find_policy(run.checkpoints / "step_000000000010").is_dir()
    with pytest.raises(CheckpointError, match=r"no run or checkpoint at .*rum \(did you mean 'run'\?\)"):
        find_policy(tmp_path / "rum")
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        find_policy(run.config)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        find_policy(run.checkpoints)
