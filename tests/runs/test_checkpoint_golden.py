"""Runs of older releases go on: their checkpoints load through the migrations, and end where they would have ended."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import raynforce
from raynforce.errors import CheckpointError
from raynforce.runs import checkpoint
from raynforce.runs.directory import RunDirectory
from raynforce.runs.migrations import MIGRATIONS

GOLDEN = Path(__file__).parents[1] / "golden"
RUNS = sorted(path for path in GOLDEN.glob("v*/*") if path.is_dir())


def test_there_are_some_of_every_older_format() -> None:
    assert {path.parent.name for path in RUNS} == {f"v{version}" for version in MIGRATIONS}
    assert {path.name for path in RUNS if path.parent.name == "v1"} == {"ppo", "dqn", "dqn-prioritized", "pendulum"}
    assert sorted(MIGRATIONS) == list(range(1, checkpoint.FORMAT_VERSION))


@pytest.mark.parametrize("golden", RUNS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_a_run_of_an_older_release_ends_as_it_would_have(golden: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    shutil.copytree(golden, path, symlinks=True)
    resumed = raynforce.resume(path, progress="quiet").result
    last = raynforce.load(path, "last").version
    expected = json.loads((golden / "expected.json").read_text())
    counted = {"steps": resumed.steps, "episodes": resumed.episodes, "updates": resumed.updates, "version": last.number}
    assert counted == {name: expected[name] for name in counted}
    # CPUs round apart by some 1e-7, and an optimiser that begins again, or another order of minibatches, by 1e-3.
    np.testing.assert_allclose(last.params, expected["params"], rtol=0, atol=1e-5)
    assert checkpoint.manifest(path / "last")["format_version"] == checkpoint.FORMAT_VERSION


def test_the_ring_of_format_1_becomes_a_segment() -> None:
    ring = {
        "obs": {"a": np.ones((3, 2, 4)), "b": np.zeros((3, 2))},
        "action": np.arange(6).reshape(3, 2),
        "reward": np.ones((3, 2), np.float32),
        "terminated": np.zeros((3, 2), bool),
        "end": np.zeros((3, 2), bool),
        "valid": np.ones((3, 2), bool),
    }
    final = {"index": np.array([1, 4]), "obs": {"a": np.ones((2, 4)), "b": np.ones(2)}}
    layout = {"rows": 9, "samplers": 1, "lanes": 2}
    counts = {"layout": layout, "head": [2], "sequence": [0], "max_priority": 1.5, "priority": np.arange(6.0)}
    other = {"algo": {"replay": {**counts, "ring": ring, "final": final}, "updates": 3}, "steps": 7}
    segment = {**ring, "final_index": final["index"], "final": {"obs": final["obs"]}}
    expected = {**counts, "stamp": 0, "segments": {"0-0": segment}}
    migrated = MIGRATIONS[1]({"learner": other, "run": {"steps": 7}})
    np.testing.assert_equal(
        migrated, {"learner": {"algo": {"replay": expected, "updates": 3}, "steps": 7}, "run": {"steps": 7}}
    )
    assert MIGRATIONS[1]({"policy": {}}) == {"policy": {}}


def test_the_ring_of_the_golden_run_is_all_there() -> None:
    loaded = RunDirectory(GOLDEN / "v1" / "dqn-prioritized").load_newest()
    assert loaded is not None
    assert loaded.manifest["format_version"] == 1
    replay = loaded.parts["learner"]["algo"]["replay"]
    assert set(replay) == {"layout", "head", "sequence", "max_priority", "stamp", "priority", "segments"}
    (segment,) = replay["segments"].values()
    assert {name: segment[name].shape for name in ("obs", "action", "valid", "final_index")} == {
        "obs": (97, 2, 4), "action": (97, 2), "valid": (97, 2), "final_index": (0,),
    }  # fmt: skip
    assert segment["valid"].sum() == 177


def test_a_checkpoint_of_format_1_with_a_ring_that_is_none_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "c"
    shutil.copytree(GOLDEN / "v1" / "dqn" / "last", path)
    rest = json.loads((path / "learner.json").read_text())
    rest["algo"] = {"replay": {"layout": 1, "head": 1, "sequence": 1, "ring": 1, "final": 1}}
    data = json.dumps(rest).encode()
    (path / "learner.json").write_bytes(data)
    (path / "learner.safetensors").write_bytes(b"\x08" + bytes(7) + b"{}      ")
    manifest = json.loads((path / "manifest.json").read_text())
    for name in ("learner.json", "learner.safetensors"):
        content = (path / name).read_bytes()
        manifest["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="format 1 cannot be understood"):
        checkpoint.load(path)
