"""Runs at a URL: opened, pushed and fetched, each file once; and who wins if both sides have changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from fsspec.registry import known_implementations
from odd_store import OddStore
from pushed_runs import DOWN, save, stored, tree, verified

from raynforce.errors import RaynforceError, UsageError
from raynforce.runs.remote import Remote
from raynforce.runs.store import Store, is_url

pytestmark = pytest.mark.usefixtures("stores")


# -- opening ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["s3://bucket/run", "gs://b/r", "memory://run", "file:///tmp/run", "abfs+x://c/r"])
def test_a_url_is_told_from_a_path(path: str) -> None:
    assert is_url(path)


@pytest.mark.parametrize("path", ["runs/a", "/tmp/run", "C:\\run", "a:b", "./s3:/x", "", "s3:/bucket"])
def test_a_path_is_told_from_a_url(path: str) -> None:
    assert not is_url(path)


def test_what_cannot_be_opened_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"class": "no_such_package_s3.FileSystem", "err": "Install it"}
    monkeypatch.setitem(known_implementations, "lacking", known)
    with pytest.raises(UsageError, match=r"lacking:// needs .*: pip install no_such_package_s3$"):
        Remote.open("lacking://bucket/run")
    with pytest.raises(UsageError, match=r"cannot use nonsense://x/y: ValueError: Protocol not known: nonsense$"):
        Remote.open("nonsense://x/y")
    with pytest.raises(UsageError, match="names no directory"):
        Remote.open("memory://")


def test_the_working_copy_is_stable_and_of_one_url(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = Remote.open("memory://bucket/my run").working_copy()
    assert path == Remote.open("memory://bucket/my run/").working_copy()
    assert path.parent == tmp_path / "raynforce" / "runs"
    assert path.name.startswith("my_run-")
    assert path != Remote.open("memory://other/my run").working_copy()
    assert not path.exists()


def test_a_password_is_not_shown() -> None:
    assert Store("sftp://me:secret@host/run", None, "/run").url == "sftp://host/run"


# -- there and back ---------------------------------------------------------------------------------------


def test_a_run_goes_there_and_back(url: str, local: Path, tmp_path: Path) -> None:
    there = Remote.open(url)
    assert not there.exists()
    save(local, 1000)
    save(local, 1000, link="best")
    save(local, 2000)
    (local / "faults" / "0001").mkdir(parents=True)
    (local / "faults" / "0001" / "actions.json").write_text("[]")
    (local / "run.lock").write_text("mine")
    first = there.push(local)
    assert there.exists()
    assert first.moved == len([x for x in tree(local) if x not in ("last", "best")])
    assert there.store.fs.cat_file(there.store.full("last")) == b"step_000000002000\n"
    assert "run.lock" not in stored(there)
    assert there.push(local).moved == 0

    copy = tmp_path / "copy"
    assert Remote.open(url).fetch(copy, all=True).notes == []
    assert tree(copy) == tree(local)
    assert verified(copy) == 2000
    assert verified(copy, "best") == 1000


def test_a_push_uploads_what_is_new_and_deletes_what_is_gone(url: str, local: Path) -> None:
    there = Remote.open(url)
    for step in (1000, 2000):
        save(local, step)
    there.push(local)
    save(local, 3000)  # and 1000 is gone, with the segment 0
    (local / "tensorboard" / "events.out.tfevents.1").unlink()
    done = there.push(local)
    assert done.moved == 5  # metrics, two files, one segment, the manifest
    assert stored(there) == {x for x in tree(local) if x != "last"} | {"last"}
    assert not any("000000001000" in x or "learner.0." in x or "tensorboard" in x for x in stored(there))


def test_the_manifest_comes_after_its_files_and_the_pointer_after_it(local: Path) -> None:
    there = Remote.open("odd://bucket/run")
    save(local, 1000, keep=1)
    there.push(local)
    save(local, 2000, keep=1)
    OddStore.log.clear()
    there.push(local)
    steps = [(what, path.partition("run/")[2]) for what, path in OddStore.log if what in ("put", "pipe", "rm")]
    paths = [path for what, path in steps if what != "rm"]
    new = "checkpoints/step_000000002000/"
    manifest = paths.index(f"{new}manifest.json")
    others = [i for i, x in enumerate(paths) if x.startswith((new, "checkpoints/segments/")) and i != manifest]
    assert len(others) == 3
    assert max(others) < manifest < paths.index("last")
    first_delete = min(i for i, (what, _) in enumerate(steps) if what == "rm")
    assert steps[first_delete] == ("rm", "checkpoints/step_000000001000/manifest.json")
    assert steps.index(("pipe", "last")) < first_delete


def test_what_is_here_already_is_not_fetched_again(url: str, local: Path, tmp_path: Path) -> None:
    there, copy = Remote.open(url), tmp_path / "copy"
    for step in (1000, 2000):
        save(local, step)
    there.push(local)
    there.fetch(copy, all=True)
    save(local, 3000)
    there.push(local)
    (copy / "checkpoints" / "segments" / "learner.2000.safetensors").write_bytes(b"flipped")
    done = there.fetch(copy, all=True)
    assert done.moved == 3 + 2 + 2  # the logs, two files, the new segment and the one that was wrong
    assert tree(copy) == tree(local)


def test_without_all_only_last_and_best_come_and_the_others_stay_there(local: Path, tmp_path: Path) -> None:
    there, copy = Remote.open("memory://bucket/run"), tmp_path / "copy"
    save(local, 1000, link="best")
    for step in (1000, 2000, 3000):
        save(local, step, keep=3)
    there.push(local)
    there.fetch(copy)
    assert sorted(os.listdir(copy / "checkpoints")) == ["best_000000001000", "segments", "step_000000003000"]
    assert verified(copy) == 3000
    save(copy, 4000, keep=1)
    there.push(copy)  # deletes what this working copy had, and nothing that it never had
    names = {x.split("/")[1] for x in stored(there) if x.startswith("checkpoints/")}
    assert names == {"best_000000001000", "segments", *(f"step_00000000{s}000" for s in (1, 2, 4))}
    there.fetch(tmp_path / "third", all=True)
    assert tree(tmp_path / "third")["last"] == "step_000000004000"
    for link in ("last", "best"):
        verified(tmp_path / "third", link)


# -- who wins ---------------------------------------------------------------------------------------------


def test_a_working_copy_that_is_ahead_stays_as_it_is(url: str, local: Path) -> None:
    there = Remote.open(url)
    save(local, 1000)
    there.push(local)
    for step in (2000, 3000, 4000):  # the store could not be reached, and 1000 is gone here
        save(local, step)
    before = tree(local)
    assert "goes on from there" in there.fetch(local, all=True).notes[0]
    assert tree(local) == before
    there.push(local)
    assert there.store.fs.cat_file(there.store.full("last")) == b"step_000000004000\n"


def test_a_working_copy_that_went_on_and_could_not_be_pushed_is_ahead(local: Path, tmp_path: Path) -> None:
    there, copy = Remote.open("odd://bucket/run"), tmp_path / "copy"
    save(local, 1000)
    there.push(local)
    there.fetch(copy, all=True)
    save(copy, 2000)
    OddStore.wrong, OddStore.left = DOWN, 0
    with pytest.raises(RaynforceError, match="the network"):
        there.push(copy)
    OddStore.left = -1
    assert "goes on from there" in there.fetch(copy, all=True).notes[0]
    assert verified(copy) == 2000


def test_a_run_that_was_never_pushed_goes_on_from_its_working_copy(local: Path) -> None:
    there = Remote.open("memory://bucket/run")
    save(local, 1000)
    assert "nothing was pushed" in there.fetch(local).notes[0]
    assert verified(local) == 1000


def test_a_run_that_was_removed_there_is_not_brought_back(local: Path) -> None:
    there = Remote.open("memory://bucket/run")
    save(local, 1000)
    there.push(local)
    there.store.fs.rm("/bucket/run", recursive=True)
    with pytest.raises(UsageError, match=f"there is no run at memory://bucket/run; .* is in {local}"):
        there.fetch(local)
    assert verified(local) == 1000


def test_what_is_there_wins_over_a_working_copy_that_is_older_or_went_elsewhere(
    url: str, local: Path, tmp_path: Path
) -> None:
    there, other = Remote.open(url), tmp_path / "other"
    save(local, 1000)
    there.push(local)
    there.fetch(other, all=True)
    save(other, 2000, text="other")
    (other / "tensorboard" / "events.out.tfevents.2").write_bytes(b"more")
    Remote.open(url).push(other)
    save(local, 2000, text="mine")
    save(local, 3000, text="mine")
    (local / "notes.txt").write_text("of this machine")
    with pytest.raises(
        RaynforceError, match="another process has written step_000000002000 there; nothing was changed"
    ):
        there.push(local)
    there.fetch(local, all=True)
    assert tree(local) == tree(other)
    save(local, 3000)
    there.push(local)
    assert there.store.fs.cat_file(there.store.full("last")) == b"step_000000003000\n"


def test_a_damaged_working_copy_is_fetched_anew(local: Path) -> None:
    there = Remote.open("memory://bucket/run")
    save(local, 1000)
    there.push(local)
    (local / "last" / "policy.json").write_text("flipped")
    there.fetch(local, all=True)
    assert verified(local) == 1000
