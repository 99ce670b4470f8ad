"""Runs at a URL: whatever happens to a push or fetch, whoever reads there finds a whole checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.registry import known_implementations
from marks import slowly
from odd_store import Killed, OddStore, empty_stores

from raynforce.errors import CheckpointError, RaynforceError, UsageError
from raynforce.runs.checkpoint import point
from raynforce.runs.remote import Remote
from raynforce.runs.store import Store, is_url

DOWN = OSError("the network\nis down")


@pytest.fixture(autouse=True)
def _empty_stores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # hundreds of them, and no power is cut here
    yield
    empty_stores()


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"file://{tmp_path}/store/run" if request.param == "file" else f"{request.param}://bucket/run"


@pytest.fixture
def local(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    (path / "checkpoints" / "segments").mkdir(parents=True)
    (path / "tensorboard").mkdir()
    (path / "config.yaml").write_text("env: CartPole-v1\n")
    (path / "metrics.jsonl").write_text("")
    (path / "tensorboard" / "events.out.tfevents.1").write_bytes(b"begun")
    return path


def facts(data: bytes) -> dict[str, Any]:
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def save(local: Path, step: int, keep: int = 2, link: str = "last", text: str = "weights") -> str:
    """A checkpoint with one segment of its own and one of the step before, as the run directory makes and prunes it."""
    checkpoints = local / "checkpoints"
    name = f"{'step' if link == 'last' else 'best'}_{step:012d}"
    files = {"policy.json": f"{text} {step}".encode(), "policy.safetensors": bytes(range(step % 200 + 1))}
    segments = {f"learner.{i}.safetensors": f"{text} rows {i}".encode() * 9 for i in (step - 1000, step)}
    for file, data in segments.items():
        path = checkpoints / "segments" / file
        if path.exists():
            segments[file] = path.read_bytes()
        else:
            path.write_bytes(data)
    (checkpoints / name).mkdir()
    for file, data in files.items():
        (checkpoints / name / file).write_bytes(data)
    manifest = {"format_version": 2, "step": step, "files": {k: facts(v) for k, v in files.items()}}
    manifest["segments"] = {k: facts(v) for k, v in segments.items()}
    (checkpoints / name / "manifest.json").write_text(json.dumps(manifest))
    point(local / link, checkpoints / name)
    for old in sorted(checkpoints.glob("step_*" if link == "last" else "best_*"))[:-keep]:
        shutil.rmtree(old)
    used = {k for path in checkpoints.glob("*_*/manifest.json") for k in json.loads(path.read_text())["segments"]}
    for path in (checkpoints / "segments").iterdir():
        if path.name not in used:
            path.unlink()
    with (local / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": {step}}}\n')
    return name


def verified(local: Path, link: str = "last") -> int:
    """The step of a checkpoint, every byte of which is what its manifest says."""
    manifest = json.loads((local / link / "manifest.json").read_text())
    for file, stated in manifest["files"].items():
        assert facts((local / link / file).read_bytes()) == stated
    for file, stated in manifest["segments"].items():
        assert facts((local / "checkpoints" / "segments" / file).read_bytes()) == stated
    return int(manifest["step"])


def tree(local: Path) -> dict[str, bytes | str]:
    """All of a run but what is the machine's own."""
    found: dict[str, bytes | str] = {}
    for path in sorted(local.rglob("*")):
        name = path.relative_to(local).as_posix()
        if path.is_symlink():
            found[name] = path.resolve().name
        elif path.is_file() and name not in (".remote.json", "run.lock") and path.parent.resolve() == path.parent:
            found[name] = path.read_bytes()
    return found


def stored(there: Remote) -> set[str]:
    there.store.fs.invalidate_cache()
    return {path.removeprefix(there.store.root + "/") for path in there.store.fs.find(there.store.root)}


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


def test_pyarrow_opens_what_fsspec_lacks_a_package_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class FileSystem:
        type_name = "lacking"

        @staticmethod
        def from_uri(url: str) -> tuple[Any, str]:
            return FileSystem(), url.partition("://")[2]

    known = {"class": "no_such_package_s3.FileSystem", "err": "Install it"}
    monkeypatch.setitem(known_implementations, "lacking", known)
    monkeypatch.setitem(sys.modules, "pyarrow.fs", types.SimpleNamespace(FileSystem=FileSystem))
    assert Store.open("lacking://bucket/run").fs.fs.type_name == "lacking"


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
    assert first.files == len([x for x in tree(local) if x not in ("last", "best")])
    assert there.store.fs.cat_file(there.store.full("last")) == b"step_000000002000\n"
    assert "run.lock" not in stored(there)
    assert there.push(local).files == 0

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
    assert done.files == 5  # metrics, two files, one segment, the manifest
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
    assert done.files == 3 + 2 + 2  # the logs, two files, the new segment and the one that was wrong
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
    lock = there.lock
    for call in (lambda: there.push(local), lambda: there.fetch(tmp_path / "copy"), lock.holder, lock.claim):
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
