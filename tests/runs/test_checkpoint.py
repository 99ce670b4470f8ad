"""Checkpoints: exact round trips, whole or not at all, and a clear line for everything that can be wrong with one."""

from __future__ import annotations

import hashlib
import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raynforce
from raynforce.errors import CheckpointError, RaynforceError
from raynforce.runs import checkpoint
from raynforce.trees import Tree

DTYPES = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32"]
FILES = ["manifest.json", "policy.json", "policy.safetensors", "run.json", "run.safetensors"]


def parts() -> dict[str, Tree]:
    weights = np.arange(6, dtype=np.float32).reshape(2, 3)
    return {"policy": {"weights": weights, "name": "p"}, "run": {"steps": 7, "recent": np.ones(3)}}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "step_1"
    checkpoint.save(path, parts(), step=1)
    return path


def same(a: Any, b: Any) -> bool:
    """Equal in structure, values, shapes and dtypes, NaN included."""
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return type(a) is type(b) and bool(a == b)


def contents(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


@contextmanager
def files_end_at(size: int) -> Iterator[None]:
    """A disk that is full: no file can grow beyond `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# -- round trips ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*DTYPES, "float64"])
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    kind = np.dtype(dtype)
    top = 2 if kind.kind == "b" else 256
    values = np.random.default_rng(0).integers(0, top, 24 * kind.itemsize, np.uint8)  # NaN and infinities among them
    array = values.view(kind).reshape(2, 3, 4)
    tree = {"x": array, "empty": array[:0], "column": array[:, 1], "turned": array.T}
    checkpoint.save(tmp_path / "c", {"part": tree})
    assert same(checkpoint.load(tmp_path / "c")["part"], tree)


def test_an_array_without_dimensions_keeps_its_shape(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c", {"part": {"count": np.array(3.5)}})
    assert checkpoint.load(tmp_path / "c")["part"]["count"].shape == ()


def test_json_values_and_nesting_come_back(tmp_path: Path) -> None:
    tree: Tree = {
        "none": None,
        "flag": True,
        "large": 2**127 + 1,  # the state of a random stream
        "float": 0.1,
        "text": '日本 \n "quoted" \'',
        "list": [1, [2.5, "x"], {"k": None}],
        "empty": {},
        "deep": {"a": {"b": {"c": np.arange(3), "d": 1}}},
    }
    checkpoint.save(tmp_path / "c", {"part": tree, "nothing": {}})
    loaded = checkpoint.load(tmp_path / "c")
    assert same(loaded["part"], tree)
    assert loaded["nothing"] == {}


def test_only_reads_the_parts_asked_for(saved: Path) -> None:
    (saved / "run.safetensors").unlink()
    assert same(checkpoint.load(saved, only=["policy"]), {"policy": parts()["policy"]})


def test_the_manifest_states_facts_sizes_and_hashes(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "c", parts(), step=12, eval_return=3.5)
    manifest = checkpoint.manifest(tmp_path / "c")
    assert (manifest["format_version"], manifest["step"], manifest["eval_return"]) == (2, 12, 3.5)
    assert sorted([*manifest["files"], "manifest.json"]) == sorted(os.listdir(tmp_path / "c")) == FILES
    for name, stated in manifest["files"].items():
        data = (tmp_path / "c" / name).read_bytes()
        assert stated == {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def test_nothing_in_the_package_unpickles() -> None:
    """Loading a stranger's checkpoint must not run their code. Between our own processes it is another matter."""
    forbidden = re.compile(
        r"\b(pickle|cPickle|dill|cloudpickle|joblib|shelve|marshal)\b|torch\.(load|save)|allow_pickle(?!=False)"
    )
    root = Path(raynforce.__file__).parent
    own = ("runtimes/role_host.py", "runtimes/messages.py", "envs/fork_server.py", "given.py", "one_seed.py")
    own += ("engines/rllib/foreign.py",)  # what `import rllib --trust` reads, in a process of its own
    own_processes = {root / name for name in own}
    sources = set(root.rglob("*.py")) - own_processes
    assert len(sources) > 20
    found = [
        f"{path.relative_to(root)}:{number}: {line.strip()}"
        for path in sources
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if forbidden.search(line.partition("#")[0])
    ]
    assert found == []


# -- whole or not at all ----------------------------------------------------------------------------------


def test_a_full_disk_is_one_line_and_the_older_checkpoint_stays(saved: Path) -> None:
    before = contents(saved)
    large = {"policy": {"weights": np.zeros(50_000)}}
    with files_end_at(100_000), pytest.raises(RaynforceError) as caught:
        checkpoint.save(saved.with_name("step_2"), large)
    assert "cannot write checkpoint" in str(caught.value)
    assert "step_2" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 1
    with files_end_at(100_000), pytest.raises(RaynforceError):
        checkpoint.save(saved, large)  # the same step again
    assert os.listdir(saved.parent) == ["step_1"]
    assert contents(saved) == before


def test_what_cannot_be_saved_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RaynforceError, match=r"cannot write checkpoint .*not JSON serializable"):
        checkpoint.save(tmp_path / "c", {"part": {"x": object()}})
    with pytest.raises(RaynforceError, match="cannot write checkpoint"):
        checkpoint.save(tmp_path / "c", {"part": {"x": np.array(["text"])}})
    assert os.listdir(tmp_path) == []


def test_a_link_moves_in_one_step_and_survives_a_move_of_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for step in (1, 2):
        checkpoint.save(run / "checkpoints" / f"step_{step}", parts(), step=step)
        checkpoint.point(run / "last", run / "checkpoints" / f"step_{step}")
    assert sorted(os.listdir(run)) == ["checkpoints", "last"]
    run.rename(tmp_path / "elsewhere")
    assert checkpoint.manifest(tmp_path / "elsewhere" / "last")["step"] == 2


# -- what can be wrong with one ---------------------------------------------------------------------------


def complaint(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    assert caught.value.exit_code == 2
    return message


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(saved: Path, name: str) -> None:
    (saved / name).unlink()
    assert name in complaint(saved)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kept", [0.0, 0.5, 0.99])
def test_a_truncated_file_is_named(saved: Path, name: str, kept: float) -> None:
    data = (saved / name).read_bytes()
    (saved / name).write_bytes(data[: int(len(data) * kept)])
    assert name in complaint(saved)


@pytest.mark.parametrize("name", FILES[1:])
def test_a_flipped_bit_anywhere_is_found_and_the_file_named(saved: Path, name: str) -> None:
    data = (saved / name).read_bytes()
    for place in (0, len(data) // 2, len(data) - 1):
        flipped = bytearray(data)
        flipped[place] ^= 1
        (saved / name).write_bytes(flipped)
        assert name in complaint(saved)


def test_a_flipped_bit_anywhere_in_the_manifest_is_found(saved: Path) -> None:
    data = (saved / "manifest.json").read_bytes()
    for place in range(0, len(data), 3):
        flipped = bytearray(data)
        flipped[place] ^= 1
        (saved / "manifest.json").write_bytes(flipped)
        complaint(saved)


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("nowhere", "file", "dangling"):
        assert "there is no checkpoint at" in complaint(tmp_path / name)
    assert "manifest.json" in complaint(tmp_path / "empty")
