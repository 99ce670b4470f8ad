"""Files that mean harm: no code runs, nothing large is allocated, and one line says what is wrong."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raynforce.errors import CheckpointError
from raynforce.runs import checkpoint, files
from raynforce.runs.directory import RunDirectory
from raynforce.trees import SEGMENTS, Tree

Change = Callable[[dict[str, Any]], Any]


def parts() -> dict[str, Tree]:
    segment = {"obs": np.arange(8, dtype=np.float32), "valid": np.ones(8, bool)}
    return {
        "policy": {"weights": np.arange(6, dtype=np.float32).reshape(2, 3), "name": "p"},
        "run": {"steps": 7, "recent": np.ones(3)},
        "learner": {"replay": {SEGMENTS: {"0-1": segment}}},
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "step_1"
    checkpoint.save(path, parts(), step=1)
    return path


@pytest.fixture
def segment(saved: Path) -> Path:
    (path,) = (saved.parent / SEGMENTS).iterdir()
    return path


def complaint(path: Path) -> str:
    """The one line that refuses it, found without taking much memory."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as caught:
            checkpoint.load(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert peak < 30e6
    assert "\n" not in message
    assert str(path) in message
    assert len(message) < 600
    return message


def edit(path: Path, change: Change) -> None:
    """Change a manifest, as one who can also seal it again."""
    result = change(json.loads((path / "manifest.json").read_text()))
    text = result if isinstance(result, str) else json.dumps(checkpoint.sealed(result))
    (path / "manifest.json").write_text(text)


# -- manifests --------------------------------------------------------------------------------------------


def entries(value: Any) -> Change:
    return lambda m: {**m, "files": dict.fromkeys(m["files"], value)}


def resized(size: Any) -> Change:
    return lambda m: {**m, "files": {k: {**v, "size": size} for k, v in m["files"].items()}}


def also(kind: str, name: str) -> Change:
    return lambda m: {**m, kind: {**m[kind], name: {"size": 1, "sha256": "0" * 64}}}


MANIFESTS: dict[str, Change] = {
    "not JSON": lambda m: "#!/bin/sh",
    "not a mapping": lambda m: "[1, 2]",
    "null": lambda m: "null",
    "nested without end": lambda m: "[" * 100_000,
    "nested objects without end": lambda m: '{"a":' * 100_000,
    "a number without end": lambda m: '{"format_version": ' + "9" * 100_000 + "}",
    "no version": lambda m: {k: v for k, v in m.items() if k != "format_version"},
    "a later version": lambda m: {**m, "format_version": 3},
    "version 0": lambda m: {**m, "format_version": 0},
    "version as text": lambda m: {**m, "format_version": "2" * 10_000},
    "version as a fraction": lambda m: {**m, "format_version": 2.0},
    "version null": lambda m: {**m, "format_version": None},
    "version true": lambda m: {**m, "format_version": True},
    "no files": lambda m: {k: v for k, v in m.items() if k != "files"},
    "no segments": lambda m: {k: v for k, v in m.items() if k != SEGMENTS},
    "segments empty": lambda m: {**m, SEGMENTS: {}},
    "segments a list": lambda m: {**m, SEGMENTS: [1]},
    "files a number": lambda m: {**m, "files": 3},
    "files null": lambda m: {**m, "files": None},
    "entries null": entries(None),
    "entries empty": entries({}),
    "entries text": entries("x"),
    "a petabyte": resized(10**15),
    "huge sizes": resized(10**30),
    "sizes as infinity": resized(float("inf")),
    "negative sizes": resized(-1),
    "sizes as text": resized("x"),
    "a step as text": lambda m: {**m, "step": "1"},
    "a file above": also("files", "../../passwd.json"),
    "an absolute file": also("files", "/etc/passwd.json"),
    "a file below": also("files", "a/b.json"),
    "a hidden file": also("files", "..json"),
    "a name with a line": also("files", "a\n.json"),
    "a name with a null": also("files", "a\0.json"),
    "a file without a kind": also("files", "README"),
    "a segment above": also(SEGMENTS, "../learner.0-2.0000000000000000.safetensors"),
    "an absolute segment": also(SEGMENTS, "/etc/learner.0-2.0000000000000000.safetensors"),
    "a segment of another hash": also(SEGMENTS, "learner.0-2.1111111111111111.safetensors"),
    "half of a part": lambda m: {**m, "files": {k: v for k, v in m["files"].items() if k != "run.json"}},
}


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_hostile_manifest_is_refused_in_one_line(saved: Path, name: str) -> None:
    edit(saved, MANIFESTS[name])
    complaint(saved)


def test_another_format_says_which_are_read(saved: Path) -> None:
    edit(saved, lambda m: {**m, "format_version": 3})
    assert "format 3; this release reads 2" in complaint(saved)


def test_a_manifest_that_was_changed_by_hand_is_refused(saved: Path) -> None:
    manifest = json.loads((saved / "manifest.json").read_text())
    (saved / "manifest.json").write_text(json.dumps({**manifest, "step": 2}))
    assert "changed" in complaint(saved)


def test_a_manifest_of_a_terabyte_is_not_read(saved: Path) -> None:
    os.truncate(saved / "manifest.json", 10**12)  # takes no place on disk
    assert "too large" in complaint(saved)


# -- files that the manifest vouches for ------------------------------------------------------------------


def vouch(path: Path, file: Path, data: bytes | None = None) -> Path:
    """Let the manifest state what a file is now; returns where it is (a segment's name has its hash)."""
    if data is not None:
        file.write_bytes(data)
    size = file.stat().st_size
    content = file.read_bytes() if size < 10**8 else b""
    stated = {"size": size, "sha256": hashlib.sha256(content).hexdigest()}
    if file.parent == path:
        edit(path, lambda m: {**m, "files": {**m["files"], file.name: stated}})
        return file
    named = file.with_name(f"learner.0-1.{stated['sha256'][:16]}.safetensors")
    file.rename(named)
    edit(path, lambda m: {**m, SEGMENTS: {named.name: stated}})
    return named


def tensors(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def one(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8), data: bytes = bytes(8)) -> bytes:
    return tensors({"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}, data)


ARRAYS = {
    "empty": b"",
    "short": b"1234567",
    "text": b"x" * 100,
    "a header that would fill the memory": (2**62).to_bytes(8, "little") + b"{}",
    "a header as long as a number can say": (2**64 - 1).to_bytes(8, "little") + b"{}",
    "a header longer than the file": (100).to_bytes(8, "little") + b"{}",
    "a header that is no JSON": tensors(b"\xff\xfe{}"),
    "a header that is a list": tensors(b"[]"),
    "a header that is null": tensors(b"null"),
    "a header nested without end": tensors(b'{"a":' * 50_000),
    "an entry that is none": tensors({"x": 3}),
    "an entry without a shape": tensors({"x": {"dtype": "F32", "data_offsets": [0, 0]}}),
    "a dtype of objects": one("O"),
    "a dtype that is a list": one([]),
    "a dtype of one's own": one("F4"),
    "a petabyte": one("U8", [10**15], [0, 10**15]),
    "a petabyte in few bytes": one("U8", [10**15]),
    "a shape beyond all numbers": one("U8", [2**62, 2**62, 4]),
    "an empty shape beyond all numbers": one("U8", [2**62, 2**62, 0], [0, 0], b""),
    "a hundred dimensions": one("U8", [1] * 100, [0, 1], b"\0"),
    "very many dimensions": one("U8", [1] * 100_000, [0, 1], b"\0"),
    "a negative shape": one("U8", [-2, -4]),
    "a shape of truth values": one("U8", [True], [0, 1], b"\0"),
    "a shape as text": one("U8", "8"),
    "negative places": one("U8", [8], [-8, 0]),
    "places beyond the end": one("U8", [8], [8, 16]),
    "bytes that belong to none": one(data=bytes(9)),
    "three places": one(offsets=[0, 4, 8]),
    "one place for two": tensors(
        {k: {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]} for k in ("x", "y")}, bytes(8)
    ),
    "a gap": tensors(
        {k: {"dtype": "U8", "shape": [2], "data_offsets": [i, i + 2]} for k, i in (("x", 0), ("y", 6))}, bytes(8)
    ),
    "truth values that are none": one("BOOL", [8], [0, 8], b"\2" * 8),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_hostile_arrays_are_refused(saved: Path, segment: Path, name: str) -> None:
    whole = (saved / "policy.safetensors").read_bytes()
    vouch(saved, saved / "policy.safetensors", ARRAYS[name])
    assert "policy" in complaint(saved)
    vouch(saved, saved / "policy.safetensors", whole)
    named = vouch(saved, segment, ARRAYS[name])
    assert named.name in complaint(saved)


JSONS = {
    "text": b"nope",
    "no text": b"\xff\xfe",
    "a list": b"[]",
    "null": b"null",
    "nested without end": b'{"a":' * 50_000,
    "arrays below a number": b'{"weights": {"x": 1}, "a": 3}',
    "a segment that there is not": b'{"segments": {"7-7": {}}}',
    "a segment above": b'{"segments": {"../../x": {}}}',
    "a segment with no end": b'{"segments": {"' + b"x" * 100_000 + b'": {}}}',
}


@pytest.mark.parametrize("name", JSONS)
def test_hostile_json_is_refused(saved: Path, name: str) -> None:
    arrays = {"a/b": np.ones(2)} if name == "arrays below a number" else {}
    vouch(saved, saved / "policy.safetensors", b"".join(files.pack(arrays)))
    vouch(saved, saved / "policy.json", JSONS[name])
    assert "policy" in complaint(saved)


class Payload:
    """Runs code where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("name", ["manifest.json", "policy.json", "policy.safetensors", "segment"])
@pytest.mark.parametrize("protocol", [0, 5])
def test_a_pickle_in_any_place_runs_nothing(
    saved: Path, segment: Path, tmp_path: Path, name: str, protocol: int
) -> None:
    marker = tmp_path / "it ran"
    data = pickle.dumps(Payload(marker), protocol)
    if name == "manifest.json":
        (saved / name).write_bytes(data)
    else:
        vouch(saved, segment if name == "segment" else saved / name, data)
    complaint(saved)
    assert not marker.exists()
    pickle.loads(data)  # it would have
    assert marker.exists()


def test_a_file_of_a_terabyte_is_not_read(saved: Path) -> None:
    """It takes no place on disk, its header is true and its manifest vouches for it."""
    for name, size in (("policy.json", 10**12), ("policy.safetensors", 10**15)):
        file = saved / name
        whole = file.read_bytes()
        head = tensors({"x": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}})
        file.write_bytes(head)
        try:
            os.truncate(file, len(head) + size)
        except OSError:  # this file system has no files of that size
            os.truncate(file, len(head) + 10**12)
        vouch(saved, file)
        assert name in complaint(saved)
        vouch(saved, file, whole)
    checkpoint.load(saved)


SLOTS = ["manifest.json", "policy.json", "policy.safetensors", "segment"]


@pytest.mark.parametrize("name", SLOTS)
def test_what_is_no_regular_file_is_refused_and_not_waited_for(saved: Path, segment: Path, name: str) -> None:
    file = segment if name == "segment" else saved / name
    elsewhere = saved.parent / "elsewhere"
    file.rename(elsewhere)
    os.mkfifo(file)
    assert "not a regular file" in complaint(saved)
    file.unlink()
    file.symlink_to(elsewhere)  # even to the very file
    assert "symbolic link" in complaint(saved)
    file.unlink()
    file.symlink_to("/dev/zero")
    assert "symbolic link" in complaint(saved)
    file.unlink()
    file.mkdir()
    assert "not a regular file" in complaint(saved)


def test_a_run_that_names_strangers_deletes_none_of_them(tmp_path: Path) -> None:
    """Links where checkpoints and segments are, out of the run to what is not its own."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "notes.txt").write_text("mine")
    (precious / "model.safetensors").write_text("mine")
    run = RunDirectory(tmp_path / "run")
    run.create("env: x\n")
    (run.checkpoints / SEGMENTS).symlink_to(precious)
    for name in ("step_000000000000", "best_000000000000"):
        (run.checkpoints / name).symlink_to(precious)
    for step in range(1, 4):
        run.save(step, parts(), keep=1)
        run.save_best(step, parts()["policy"], 1.0)
    assert {"notes.txt", "model.safetensors"} <= {path.name for path in precious.iterdir()}
    loaded = run.load_newest()
    assert loaded is not None
    assert loaded.manifest["step"] == 3
