"""Segments are stored once and as long as they are needed; the newest checkpoint that is whole is found."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from raynforce import trees
from raynforce.errors import CheckpointError, RaynforceError
from raynforce.runs import checkpoint, files
from raynforce.runs.directory import Loaded, RunDirectory
from raynforce.trees import SEGMENTS, Tree

ROWS = 1000


def segment(value: int) -> Tree:
    """Eight kilobytes, and a nested array."""
    return {"obs": {"x": np.full(ROWS, value, np.int64)}, "final": np.arange(value % 3)}


def state(*stamps: int) -> dict[str, Tree]:
    """A learner whose segments have these stamps, by place."""
    ring = {f"{place}-{stamp}": segment(stamp) for place, stamp in enumerate(stamps)}
    replay = {"head": [max(stamps)], "priority": np.ones(3), SEGMENTS: ring}
    return {"learner": {"algo": {"replay": replay}, "params": np.full(4, max(stamps))}, "run": {"steps": max(stamps)}}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create("env: CartPole-v1\n")
    return directory


def save(run: RunDirectory, step: int, *stamps: int, keep: int = 2, keep_nth: int = 0) -> int:
    """Save as a run does, with what is on disk left out; returns the bytes that were written."""
    parts = state(*stamps)
    parts["learner"] = trees.without(parts["learner"], run.known("learner"))
    return run.save(step, parts, keep, keep_nth).bytes_written


def on_disk(run: RunDirectory) -> list[str]:
    folder = run.checkpoints / SEGMENTS
    return sorted(".".join(name.split(".")[:2]) for name in os.listdir(folder)) if folder.is_dir() else []


def steps(run: RunDirectory) -> list[int]:
    return sorted(int(p.name[5:17]) for p in run.checkpoints.glob("step_*"))


def load(run: RunDirectory) -> Loaded:
    """As another process finds it."""
    loaded = RunDirectory(run.path).load_newest()
    assert loaded is not None
    return loaded


# -- trees ------------------------------------------------------------------------------------------------


def test_segments_are_found_wherever_they_are_and_emptied_by_name() -> None:
    tree = state(3, 4)["learner"]
    assert list(trees.segments(tree)) == ["0-3", "1-4"]
    emptied = trees.without(tree, {"0-3", "7-7"})
    ring = emptied["algo"]["replay"][SEGMENTS]
    assert ring["0-3"] == {}
    assert ring["1-4"] is tree["algo"]["replay"][SEGMENTS]["1-4"]
    assert emptied["algo"]["replay"]["head"] == [4]
    assert tree["algo"]["replay"][SEGMENTS]["0-3"]  # the tree itself is as it was


def test_what_is_put_in_again_leaves_out_what_is_lost() -> None:
    tree = state(3, 4)["learner"]
    again = trees.with_segments(trees.without(tree, {"0-3", "1-4"}), {"1-4": segment(4)})
    assert list(again["algo"]["replay"][SEGMENTS]) == ["1-4"]


@pytest.mark.parametrize("value", [3, "text", [1], np.ones(2), {"a": 1}, {"a": {"b": 1}}, {"a": {"b": {"c": None}}}])
def test_data_of_ones_own_may_have_that_key(tmp_path: Path, value: Any) -> None:
    tree = {"obs": {SEGMENTS: value}}
    assert trees.segments(tree) == {}
    checkpoint.save(tmp_path / "c", {"part": tree})
    np.testing.assert_equal(checkpoint.load(tmp_path / "c")["part"], tree)


def test_two_segments_of_one_name_are_refused(run: RunDirectory) -> None:
    twice = {"a": {SEGMENTS: {"0-1": segment(1)}}, "b": {SEGMENTS: {"0-1": segment(2)}}}
    with pytest.raises(RaynforceError, match="two segments have the name '0-1'"):
        run.save(1, {"learner": twice}, keep=2)


@pytest.mark.parametrize("name", ["../x", "a/b", "a.b", "", "a\n", "ä", "x" * 101])
def test_a_name_that_is_no_plain_word_is_refused(run: RunDirectory, name: str) -> None:
    for parts in ({"learner": {SEGMENTS: {name: segment(1)}}}, {name: {}}):
        with pytest.raises(RaynforceError, match="cannot write checkpoint"):
            run.save(1, parts, keep=2)
    assert steps(run) == []
    assert on_disk(run) == []


# -- stored once ------------------------------------------------------------------------------------------


def test_what_was_saved_comes_back_with_its_segments(run: RunDirectory) -> None:
    save(run, 1, 1, 2, 3)
    save(run, 2, 1, 4, 3)
    loaded = load(run)
    np.testing.assert_equal(loaded.parts, state(1, 4, 3))
    assert loaded.notes == []
    assert loaded.path == run.checkpoints / "step_000000000002"
    first = checkpoint.load(run.checkpoints / "step_000000000001")
    np.testing.assert_equal(first, state(1, 2, 3))


def test_files_are_those_of_the_safetensors_library(run: RunDirectory, tmp_path: Path) -> None:
    arrays = {"a": np.ones((2, 3), np.float32), "b/c": np.arange(5), "flag": np.array([True, False]), "no": np.ones(0)}
    stated = files.write(tmp_path / "ours", files.pack(arrays))
    np.testing.assert_equal(load_file(tmp_path / "ours"), arrays)
    save_file(arrays, tmp_path / "theirs")
    theirs = (tmp_path / "theirs").read_bytes()
    assert stated == files.state([(tmp_path / "ours").read_bytes()])
    np.testing.assert_equal(files.read_arrays(tmp_path / "theirs", files.state([theirs])), arrays)


def test_a_segment_that_is_on_disk_is_not_written_again(run: RunDirectory) -> None:
    first = save(run, 1, *range(1, 21))
    assert first > 20 * 8 * ROWS
    before = {path: path.stat() for path in (run.checkpoints / SEGMENTS).iterdir()}
    second = save(run, 2, *range(1, 20), 99)
    assert second < first / 5
    for path, stat in before.items():
        assert (path.stat().st_ino, path.stat().st_mtime_ns) == (stat.st_ino, stat.st_mtime_ns)
    assert run.save(3, state(*range(1, 20), 99), keep=2).bytes_written < first / 5  # given in full, and still known
    np.testing.assert_equal(load(run).parts, state(*range(1, 20), 99))


def test_what_is_known_is_what_the_newest_refers_to(run: RunDirectory) -> None:
    assert run.known("learner") == set()
    save(run, 1, 1, 2)
    save(run, 2, 1, 3)
    assert run.known("learner") == {"0-1", "1-3"}
    assert run.known("run") == run.known("sampler_0") == set()
    again = RunDirectory(run.path)
    assert again.known("learner") == set()  # nothing was loaded: nobody holds these segments
    again.load_newest()
    assert again.known("learner") == {"0-1", "1-3"}
    lost = next(p for p in (run.checkpoints / SEGMENTS).iterdir() if p.name.startswith("learner.0-1."))
    lost.unlink()
    with pytest.raises(RaynforceError, match="segment '0-1' of learner is not on disk any more"):
        save(run, 3, 1, 3)
    assert run.known("learner") == {"1-3"}
    save(run, 3, 1, 3)
    np.testing.assert_equal(load(run).parts, state(1, 3))


def test_what_is_known_is_told_without_asking_the_disk(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    save(run, 1, 1)

    def stalled(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("training would wait for it")

    with monkeypatch.context() as patch:
        for name in ("stat", "lstat", "open", "scandir", "listdir"):
            patch.setattr(os, name, stalled)
        known = run.known("learner")
    assert known == {"0-1"}


def test_an_empty_segment_that_is_not_on_disk_is_refused(run: RunDirectory) -> None:
    save(run, 1, 1)
    with pytest.raises(RaynforceError, match="segment '0-2' of learner is not on disk"):
        run.save(2, {"learner": {SEGMENTS: {"0-2": {}}}}, keep=2)
    assert load(run).manifest["step"] == 1
    assert steps(run) == [1]


def test_one_name_for_two_things_after_going_back_mixes_nothing(run: RunDirectory) -> None:
    """A run that goes on from an older checkpoint, not as before, may come to the same names."""
    save(run, 1, 1)
    save(run, 2, 2)
    run.last.unlink()
    run.last.symlink_to("checkpoints/step_000000000001")
    again = RunDirectory(run.path)
    again.load_newest()
    other = {"learner": {SEGMENTS: {"0-2": segment(77)}}}
    again.save(2, other, keep=3)
    np.testing.assert_equal(checkpoint.load(run.checkpoints / "step_000000000002"), state(2))
    np.testing.assert_equal(load(run).parts, other)
    again.save(3, other, keep=1)
    assert len(on_disk(run)) == 1
    np.testing.assert_equal(load(run).parts, other)


# -- kept as long as needed -------------------------------------------------------------------------------


def test_segments_go_when_no_checkpoint_refers_to_them(run: RunDirectory) -> None:
    save(run, 1, 1, 2)
    save(run, 2, 1, 3)
    assert on_disk(run) == ["learner.0-1", "learner.1-2", "learner.1-3"]
    save(run, 3, 1, 4)
    assert on_disk(run) == ["learner.0-1", "learner.1-3", "learner.1-4"]
    (run.checkpoints / SEGMENTS / ".learner.1-5.123.tmp").write_bytes(b"of a kill")
    (run.checkpoints / SEGMENTS / "learner.1-5.0123456789abcdef.safetensors").write_bytes(b"of a kill")
    (run.checkpoints / SEGMENTS / "README").write_text("mine")
    save(run, 4, 1, 4, keep=1)
    assert on_disk(run) == ["README", "learner.0-1", "learner.1-4"]


def test_every_nth_is_kept_for_good_with_its_segments(run: RunDirectory) -> None:
    for step in range(8):
        save(run, 10 * step, step + 1, keep=2, keep_nth=3)
    assert steps(run) == [0, 30, 60, 70]
    assert on_disk(run) == [f"learner.0-{stamp}" for stamp in (1, 4, 7, 8)]
    for step in (0, 3, 6, 7):
        np.testing.assert_equal(checkpoint.load(run.checkpoints / f"step_{10 * step:012d}"), state(step + 1))
    again = RunDirectory(run.path)  # the count goes on in another process
    for step in range(8, 11):
        save(again, 10 * step, step + 1, keep=1, keep_nth=3)
    assert steps(run) == [0, 30, 60, 90, 100]
    assert load(run).manifest["number"] == 10


def test_the_manifest_says_where_and_with_what(run: RunDirectory) -> None:
    save(run, 7, 1)
    facts = load(run).manifest
    assert (facts["step"], facts["number"]) == (7, 0)
    assert facts["time"] > 1e9
    assert all(isinstance(facts[name], str) for name in ("raynforce", "torch", "numpy", "python", "cpu", "host"))
    assert facts["numpy"] == np.__version__


def test_best_is_saved_beside_a_checkpoint_that_is_being_written(run: RunDirectory) -> None:
    def write() -> None:
        for step in range(20):
            save(run, step, step + 1, 1)

    writer = threading.Thread(target=write)
    writer.start()
    for step in range(20):
        run.save_best(step, {"x": np.full(100, step)}, float(step))
        run.known("learner")
    writer.join()
    np.testing.assert_equal(load(run).parts, state(20, 1))
    assert (checkpoint.load(run.best)["policy"]["x"] == 19).all()
    assert sorted(p.name for p in run.checkpoints.iterdir()) == [
        "best_000000000019", "segments", "step_000000000018", "step_000000000019",
    ]  # fmt: skip


def test_nothing_is_deleted_while_the_disk_does_not_say_what_it_is(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(4):
        save(run, step, step + 1, keep=1, keep_nth=1)
    opened, hidden = os.open, run.checkpoints / "step_000000000001" / "manifest.json"

    def failing(path: Any, *args: Any, **kwargs: Any) -> int:
        if path == hidden:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return opened(path, *args, **kwargs)

    again = RunDirectory(run.path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", failing)
        save(again, 4, 5, keep=1)
    assert steps(run) == [0, 1, 2, 3, 4]
    assert len(on_disk(run)) == 5
    save(again, 5, 6, keep=1)
    assert steps(run) == [5]
    assert on_disk(run) == ["learner.0-6"]


def test_segments_stay_if_checkpoints_cannot_be_listed(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3):
        save(run, step, step, 9)
    listed, before, fails = Path.iterdir, on_disk(run), False

    def failing(self: Path) -> Any:
        nonlocal fails
        fails |= self == run.checkpoints and (run.checkpoints / "step_000000000004").is_dir()
        if fails and self == run.checkpoints:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return listed(self)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", failing)
        save(run, 4, 4, 9)
        assert fails
        with pytest.raises(CheckpointError, match=r"cannot list .*checkpoints: Input/output error"):
            RunDirectory(run.path).load_newest()  # that is not to begin from the start
        with pytest.raises(RaynforceError, match="cannot list"):
            save(run, 5, 5, 9)
    assert set(on_disk(run)) == {*before, "learner.0-4"}
    assert load(run).manifest["step"] == 4


# -- which one is taken -----------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def own_segment(run: RunDirectory, name: str) -> Path:
    return next((run.checkpoints / SEGMENTS).glob(f"learner.{name}.*"))


KINDS: dict[str, Callable[[RunDirectory], Path]] = {
    "manifest": lambda run: run.last / "manifest.json",
    "json": lambda run: run.last / "learner.json",
    "arrays": lambda run: run.last / "learner.safetensors",
    "segment": lambda run: own_segment(run, "1-3"),
}
DAMAGES: dict[str, Callable[[Path], None]] = {
    "flipped": flip,
    "missing": lambda path: path.unlink(),
    "torn": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_found_reported_and_the_older_one_taken(run: RunDirectory, kind: str, damage: str) -> None:
    save(run, 1, 1, 2)
    save(run, 2, 1, 3)
    file = KINDS[kind](run)
    DAMAGES[damage](file)
    loaded = load(run)
    assert loaded.path == run.checkpoints / "step_000000000001"
    np.testing.assert_equal(loaded.parts, state(1, 2))
    skipped, taken = loaded.notes
    assert skipped.startswith("skipped: ")
    assert "step_000000000002 is torn" in skipped
    assert file.name in skipped
    assert taken == f"taken instead: {loaded.path}, at step 1"
    # And the run goes on from there, as whole as before.
    again = RunDirectory(run.path)
    again.load_newest()
    save(again, 2, 1, 3)
    np.testing.assert_equal(load(run).parts, state(1, 3))
    assert load(run).notes == []


def test_torn_directories_are_skipped(run: RunDirectory) -> None:
    save(run, 1, 1)
    (run.checkpoints / "step_000000000009").mkdir()
    half = run.checkpoints / "step_000000000008"
    shutil.copytree(run.last, half)
    (half / "manifest.json").unlink()
    assert load(run).notes == []  # `last` names a whole one
    run.last.unlink()
    loaded = load(run)
    assert loaded.manifest["step"] == 1
    assert ["000009 is torn" in loaded.notes[0], "000008 is torn" in loaded.notes[1]] == [True, True]
    save(run, 2, 2)
    assert load(run).manifest["step"] == 2


def test_the_link_that_a_user_has_set_back_is_followed(run: RunDirectory) -> None:
    for step in (1, 2, 3):
        save(run, step, step, keep=3)
    run.last.unlink()
    run.last.symlink_to("checkpoints/step_000000000001")
    assert load(run).manifest["step"] == 1
    flip(run.last / "learner.json")
    assert load(run).manifest["step"] == 3  # the newest, then


def test_a_link_to_nowhere_is_said_and_the_newest_taken(run: RunDirectory) -> None:
    save(run, 1, 1)
    run.last.unlink()
    run.last.symlink_to("checkpoints/step_000000000004")
    loaded = load(run)
    assert "names no checkpoint" in loaded.notes[0]
    assert loaded.manifest["step"] == 1
    run.last.unlink()
    assert load(run).notes == []  # killed before there was a link at all


def test_the_newest_is_the_one_written_last(run: RunDirectory) -> None:
    """Not the one of most steps, which is of a future that was given up."""
    for step in (1, 500, 100, 200):
        save(run, step, step, keep=3)
    run.last.unlink()
    assert load(run).manifest["step"] == 200
    assert steps(run) == [100, 200, 500]


def test_lost_segments_are_left_out_if_nothing_whole_is_left(run: RunDirectory) -> None:
    save(run, 1, 1, 2)
    save(run, 2, 1, 3)
    flip(own_segment(run, "0-1"))  # which both refer to
    again = RunDirectory(run.path)
    loaded = again.load_newest()
    assert loaded is not None
    assert loaded.manifest["step"] == 2
    expected = state(1, 3)
    del expected["learner"]["algo"]["replay"][SEGMENTS]["0-1"]
    np.testing.assert_equal(loaded.parts, expected)
    assert "WARNING" in loaded.notes[-1]
    assert "step_000000000002, at step 2, WITHOUT 1 of its 2 segments" in loaded.notes[-1]
    assert "learner.0-1." in loaded.notes[-1]
    assert again.known("learner") == {"1-3"}
    save(again, 3, 1, 3)  # the very same, in full again
    np.testing.assert_equal(load(run).parts, state(1, 3))


def test_nothing_usable_lists_each(run: RunDirectory) -> None:
    for step in (1, 2):
        save(run, step, step)
        flip(run.last / "run.json")
    with pytest.raises(CheckpointError, match=r"that can be used: .*000002 is torn.*000001 is torn") as it:
        run.load_newest()
    assert "\n" not in str(it.value)


def test_no_checkpoint_at_all_is_a_run_at_its_start(run: RunDirectory) -> None:
    assert run.load_newest() is None
    run.last.symlink_to("checkpoints/step_000000000004")  # but there was one
    with pytest.raises(CheckpointError, match="no checkpoint that can be used"):
        run.load_newest()


def test_a_copy_that_followed_the_links_has_its_segments(run: RunDirectory, tmp_path: Path) -> None:
    save(run, 1, 1, 2)
    shutil.copytree(run.path, tmp_path / "copy", symlinks=False)
    copy = RunDirectory(tmp_path / "copy")
    shutil.rmtree(copy.checkpoints / "step_000000000001")
    np.testing.assert_equal(load(copy).parts, state(1, 2))
    assert checkpoint.load(copy.last, only=["run"]) == {"run": {"steps": 2}}
