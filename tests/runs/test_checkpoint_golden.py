"""Runs that were made before go on: their checkpoints load, and they end where they would have ended."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import raynforce
from raynforce.runs import checkpoint
from raynforce.runs.directory import RunDirectory

GOLDEN = Path(__file__).parents[1] / "golden"
RUNS = sorted(path for path in GOLDEN.glob("v*/*") if path.is_dir())


def test_there_are_some_of_this_format() -> None:
    names = {path.name for path in RUNS if path.parent.name == f"v{checkpoint.FORMAT_VERSION}"}
    assert names == {"ppo", "dqn", "dqn-prioritized", "pendulum"}


@pytest.mark.parametrize("golden", RUNS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_a_run_that_was_made_before_ends_as_it_would_have(golden: Path, tmp_path: Path) -> None:
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


def test_the_ring_of_the_golden_run_is_all_there() -> None:
    loaded = RunDirectory(GOLDEN / "v2" / "dqn-prioritized").load_newest()
    assert loaded is not None
    replay = loaded.parts["learner"]["algo"]["replay"]
    assert set(replay) == {
        *("layout", "head", "sequence", "max_priority", "stamp", "priority", "segments", "late", "drawn")
    }
    (segment,) = replay["segments"].values()
    assert {name: segment[name].shape for name in ("obs", "action", "valid", "final_index")} == {
        "obs": (97, 2, 4), "action": (97, 2), "valid": (97, 2), "final_index": (0,),
    }  # fmt: skip
    assert segment["valid"].sum() == 177
