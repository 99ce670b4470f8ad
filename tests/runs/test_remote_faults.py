"""Runs at a URL: whatever happens to a push or fetch, whoever reads there finds a whole checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from marks import slowly
from odd_store import Killed, OddStore
from pushed_runs import DOWN, facts, save, stored, tree, verified

from raynforce.errors import CheckpointError, RaynforceError
from raynforce.runs import remote_lock
from raynforce.runs.checkpoint import point
from raynforce.runs.remote import Remote

pytestmark = pytest.mark.usefixtures("stores")


# -- interrupted ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wrong", "every"), [(Killed(), 5), (DOWN, 7), *slowly((Killed(), 1), (DOWN, 1))])
def test_a_push_that_ends_at_any_operation_leaves_a_whole_run_and_is_continued(
    wrong: BaseException, every: int, local: Path, tmp_path: Path
) -> None:
    before, during, seen = tmp_path / "before", tmp_path / "during", set()
    save(local, 1000)
    save(local, 2000)
    Remote.open("odd://bucket/run").push(local)
    begun = {path: file.getvalue() for path, file in OddStore.store.items()}
    save(local, 3000)
    save(local, 4000)
    save(local, 4000, link="best")
    for number in range(0, 100, every):
        OddStore.reset()
        for path, data in begun.items():
            fsspec.filesystem("odd").pipe_file(path, data)
        shutil.rmtree(before, ignore_errors=True)
        shutil.rmtree(during, ignore_errors=True)
        shutil.copytree(local, before, symlinks=True)
        OddStore.wrong, OddStore.left = wrong, number
        try:
            Remote.open("odd://bucket/run").push(before)
            ended = True
        except (Killed, RaynforceError) as error:
            ended = False
            said = str(error)
        assert ended or said == str(wrong) or ("\n" not in said and "OSError: the network" in said)
        OddStore.left = -1
        Remote.open("odd://bucket/run").fetch(during, all=True)  # on another machine
        seen.add(verified(during))
        assert "goes on from there" in Remote.open("odd://bucket/run").fetch(before, all=True).notes[0]
        assert verified(before) == 4000
        Remote.open("odd://bucket/run").push(before)
        Remote.open("odd://bucket/run").fetch(during, all=True)
        assert tree(during) == tree(before)
        assert stored(Remote.open("odd://bucket/run")) == set(tree(before))
        if ended:
            break
    assert ended
    assert number > 25
    assert seen == {2000, 4000}


def test_a_first_push_that_is_killed_at_any_operation_is_continued(local: Path, tmp_path: Path) -> None:
    save(local, 1000)
    for number in range(100):
        OddStore.reset()
        (local / ".remote.json").unlink(missing_ok=True)
        OddStore.left = number
        try:
            Remote.open("odd://bucket/run").push(local)
            ended = True
        except Killed:
            ended = False
        OddStore.left = -1
        Remote.open("odd://bucket/run").fetch(local, all=True)
        assert verified(local) == 1000
        Remote.open("odd://bucket/run").push(local)
        Remote.open("odd://bucket/run").fetch(tmp_path / f"{number}", all=True)
        assert tree(tmp_path / f"{number}") == tree(local)
        if ended:
            break
    assert ended
    assert number >= 10


def test_a_push_that_is_continued_uploads_no_file_twice(local: Path) -> None:
    save(local, 1000)
    uploads: list[str] = []
    for number in range(3, 40, 4):
        OddStore.log.clear()
        OddStore.left = number
        try:
            Remote.open("odd://bucket/run").push(local)
        except Killed:
            OddStore.log.pop()  # was not done
        uploads += [path for what, path in OddStore.log if what == "put"]
    assert len(uploads) == len(set(uploads)) == len(tree(local)) - 1


def test_a_fetch_that_is_killed_at_any_operation_is_continued(local: Path, tmp_path: Path) -> None:
    old, copy = tmp_path / "old", tmp_path / "copy"
    save(local, 1000)
    Remote.open("odd://bucket/run").push(local)
    Remote.open("odd://bucket/run").fetch(old, all=True)
    save(old, 2000, text="never pushed")
    Remote.open("odd://bucket/run").push(old)
    Remote.open("odd://bucket/run").fetch(local, all=True)
    save(local, 3000)
    Remote.open("odd://bucket/run").push(local)
    for number in range(100):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(old, copy, symlinks=True)
        OddStore.left = number
        try:
            Remote.open("odd://bucket/run").fetch(copy, all=True)
            break
        except Killed:
            OddStore.left = -1
            verified(copy)
        Remote.open("odd://bucket/run").fetch(copy, all=True)
        assert tree(copy) == tree(local)
    assert number > 10


def test_a_first_fetch_that_is_killed_before_there_are_checkpoints_is_continued(local: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    Remote.open("odd://bucket/run").push(local)
    OddStore.log.clear()
    Remote.open("odd://bucket/run").fetch(copy)
    for number in range(len(OddStore.log)):
        shutil.rmtree(copy, ignore_errors=True)
        OddStore.left = number
        with pytest.raises(Killed):
            Remote.open("odd://bucket/run").fetch(copy)
        OddStore.left = -1
        Remote.open("odd://bucket/run").fetch(copy)
        assert tree(copy) == tree(local)


def test_what_another_left_half_pushed_is_not_taken_for_ones_own(local: Path, tmp_path: Path) -> None:
    there = Remote.open("memory://bucket/run")
    save(local, 1000)
    there.push(local)
    name = save(local, 2000)
    for path in (f"{name}/policy.json", "segments/learner.2000.safetensors"):
        data = (local / "checkpoints" / path).read_bytes()
        there.store.fs.pipe_file(f"/bucket/run/checkpoints/{path}", data.swapcase())
    there.push(local)
    there.fetch(tmp_path / "copy")
    assert verified(tmp_path / "copy") == 2000


def test_segments_are_listed_after_the_manifests_that_name_them(local: Path) -> None:
    save(local, 1000)
    there = Remote.open("odd://bucket/run")
    there.push(local)
    OddStore.log.clear()
    there._list()
    listed = [path for what, path in OddStore.log if "checkpoints/" in path]
    assert listed == ["/bucket/run/checkpoints/step_000000001000", "/bucket/run/checkpoints/segments"]


def test_a_reader_beside_a_slow_writer_always_finds_a_whole_checkpoint(local: Path, tmp_path: Path) -> None:
    save(local, 1000, keep=1)
    Remote.open("odd://bucket/run").push(local)
    OddStore.delay = 0.002
    failures: list[BaseException] = []

    def write() -> None:
        try:
            for step in range(2000, 12000, 1000):
                save(local, step, keep=1)
                Remote.open("odd://bucket/run").push(local)
        except BaseException as error:
            failures.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    seen = []
    while writer.is_alive():
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        Remote.open("odd://bucket/run").fetch(tmp_path / "copy")
        seen.append(verified(tmp_path / "copy"))
    writer.join()
    assert failures == []
    assert seen == sorted(seen)
    assert len(set(seen)) > 2


def test_checkpoints_that_are_deleted_while_they_are_pushed_are_left_out(
    local: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = Remote.open("odd://bucket/run")
    old, new = save(local, 1000), save(local, 2000)

    def gone(name: str) -> Callable[..., None]:
        put = OddStore.put_file

        def deleting(self: OddStore, source: str, path: str, *args: Any) -> None:
            shutil.rmtree(local / "checkpoints" / name, ignore_errors=True)
            put(self, source, path)

        return deleting

    with monkeypatch.context() as patch:
        patch.setattr(OddStore, "put_file", gone(old))
        there.push(local)
    assert there.store.fs.cat_file("/bucket/run/last") == f"{new}\n".encode()
    newest = save(local, 3000)
    with monkeypatch.context() as patch:
        patch.setattr(OddStore, "put_file", gone(newest))
        with pytest.raises(RaynforceError, match=f"{newest} of .*: it was deleted meanwhile"):
            there.push(local)
    assert there.store.fs.cat_file("/bucket/run/last") == f"{new}\n".encode()


# -- damaged and hostile ----------------------------------------------------------------------------------


def test_a_damaged_checkpoint_is_skipped_said_and_replaced(local: Path, tmp_path: Path) -> None:
    there, copy = Remote.open("memory://bucket/run"), tmp_path / "copy"
    save(local, 1000)
    newest = save(local, 2000)
    there.push(local)
    path = f"/bucket/run/checkpoints/{newest}/policy.json"
    there.store.fs.pipe_file(path, there.store.fs.cat_file(path).swapcase())
    notes = there.fetch(copy, all=True).notes
    assert notes == [f"skipped memory:/{path}: it is not what its manifest says"]
    assert verified(copy) == 1000
    save(copy, 2000, text="again")
    there.push(copy)
    there.fetch(tmp_path / "third")
    assert tree(tmp_path / "third")["last"] == newest
    assert verified(tmp_path / "third") == 2000


def test_a_checkpoint_that_is_torn_here_stays_whole_there(local: Path, tmp_path: Path) -> None:
    there = Remote.open("memory://bucket/run")
    old = save(local, 1000, keep=3)
    save(local, 2000, keep=3)
    there.push(local)
    (local / "checkpoints" / old / "manifest.json").write_text("{")
    (local / "checkpoints" / "segments" / "learner.0.safetensors").unlink()
    there.push(local)
    there.fetch(tmp_path / "copy", all=True)
    point(tmp_path / "copy" / "last", tmp_path / "copy" / "checkpoints" / old)
    assert verified(tmp_path / "copy") == 1000


def test_when_nothing_is_whole_the_working_copy_is_left_alone(local: Path) -> None:
    there = Remote.open("memory://bucket/run")
    save(local, 1000)
    there.push(local)
    for path in there.store.fs.find("/bucket/run/checkpoints/segments"):
        there.store.fs.rm_file(path)
    (local / ".remote.json").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint at .* is whole: .*says .* bytes, there are None"):
        there.fetch(local, all=True)
    assert verified(local) == 1000


@pytest.mark.parametrize("name", ["..", "/etc/passwd", "../../x", "a\\b", "a\nb"])
def test_a_listing_that_leads_elsewhere_is_refused(
    name: str, local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = Remote.open("odd://bucket/run")
    save(local, 1000)
    there.push(local)
    ls = OddStore.ls

    def hostile(self: OddStore, path: str, **options: Any) -> Any:
        full = name if name.startswith("/") else f"{path}/{name}"
        return [*ls(self, path, **options), {"name": full, "size": 1, "type": "file"}]

    monkeypatch.setattr(OddStore, "ls", hostile)
    with pytest.raises(RaynforceError, match="which is no file of a run"):
        there.fetch(tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize("name", ["../../stolen", "/tmp/stolen", "..", "a/b", "manifest.json", ""])
@pytest.mark.parametrize("kind", ["files", "segments"])
def test_a_manifest_that_leads_elsewhere_is_refused(name: str, kind: str, local: Path, tmp_path: Path) -> None:
    there = Remote.open("memory://bucket/run")
    save(local, 1000)
    newest = save(local, 2000)
    there.push(local)
    path = f"/bucket/run/checkpoints/{newest}/manifest.json"
    manifest = json.loads(there.store.fs.cat_file(path))
    manifest[kind][name] = facts(b"x")
    there.store.fs.pipe_file(path, json.dumps(manifest).encode())
    notes = there.fetch(tmp_path / "a" / "copy").notes
    assert "which is no file of it" in notes[0]
    assert verified(tmp_path / "a" / "copy") == 1000
    assert sorted(os.listdir(tmp_path / "a")) == ["copy"]


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"files": {"a": 1}}', b'{"files": 3}', b"[" * 99999, b"\xff"])
def test_a_torn_manifest_is_no_checkpoint(data: bytes, local: Path, tmp_path: Path) -> None:
    there = Remote.open("memory://bucket/run")
    save(local, 1000)
    newest = save(local, 2000)
    there.push(local)
    there.store.fs.pipe_file(f"/bucket/run/checkpoints/{newest}/manifest.json", data)
    assert "torn" in there.fetch(tmp_path / "copy").notes[0]
    assert verified(tmp_path / "copy") == 1000


@pytest.mark.parametrize("data", [b"", b"../../etc\n", b"step_000000009000\n", b"\xff\xfe", b"step_0000"])
def test_a_pointer_that_names_nothing_is_passed_over(data: bytes, local: Path, tmp_path: Path) -> None:
    there = Remote.open("memory://bucket/run")
    save(local, 1000)
    there.push(local)
    there.store.fs.pipe_file("/bucket/run/last", data)
    there.fetch(tmp_path / "copy")
    assert verified(tmp_path / "copy") == 1000


def test_failures_of_the_store_are_one_line(local: Path, tmp_path: Path) -> None:
    save(local, 1000)
    OddStore.wrong, OddStore.left = KeyError("no\ncredentials"), 0
    there = Remote.open("odd://bucket/run")
    for call in (
        lambda: there.push(local),
        lambda: there.fetch(tmp_path / "copy"),
        lambda: remote_lock.holder(there.store),
        lambda: remote_lock.claim(there.store),
    ):
        with pytest.raises(RaynforceError, match=r"^cannot (list|read) odd://bucket/run/[a-z.]*: KeyError: ") as error:
            call()
        assert "\n" not in str(error.value)


def test_failures_of_the_disk_are_one_line(local: Path, tmp_path: Path) -> None:
    there = Remote.open("memory://bucket/run")
    save(local, 1000)
    there.push(local)
    (tmp_path / "copy").write_text("in the way")
    with pytest.raises(RaynforceError, match=r"^cannot use working copy .*/copy: \w+Error: "):
        there.fetch(tmp_path / "copy")


def test_an_outage_is_not_taken_for_a_run_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def down(*args: Any, **options: Any) -> Any:
        raise TimeoutError("no answer")

    monkeypatch.setattr(OddStore, "info", down)
    with pytest.raises(RaynforceError, match="no answer"):
        Remote.open("odd://bucket/run").exists()
