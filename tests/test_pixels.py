"""Pixels from end to end: a tiny image environment is learned from stacked frames, and its runs resume exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import raynforce

SETTINGS: dict[str, Any] = {
    "runtime": "inline",
    "topology": "sync",
    "env_args": {"env": "raynforce.envs.tiny:Catch", "frames": 2},
    "network.hidden": (64,),
    "eval.final_episodes": 0,
}


def train(out: Path, steps: int, target: float | None = None, **settings: Any) -> raynforce.Run:
    return raynforce.train(
        "raynforce.envs.frames:stacked",
        "dqn",
        steps=steps,
        target=target,
        out=out,
        settings={**SETTINGS, **settings},
        progress="quiet",
    )


@pytest.mark.slow
def test_catch_is_learned_from_stacked_frames(tmp_path: Path) -> None:
    # One image gives 4, whatever is done; two give 7.5.
    stacked = {"env": "raynforce.envs.tiny:Catch", "frames": 2}
    run = raynforce.train(  # as docs/environments.md says it
        "raynforce.envs.frames:stacked",
        "dqn",
        target=7.0,
        out=tmp_path / "run",
        settings={"env_args": stacked},
        progress="quiet",
    )
    assert run.result.solved_steps is not None


FEW: dict[str, Any] = {
    "eval.every": 0,
    "eval.episodes": 1,
    "algorithm.learning_starts": 300,
    "algorithm.epsilon_fraction": 0.0,  # else it follows the steps that are left
    "algorithm.priority_beta": 1.0,
    "algorithm.prioritized": True,
    "algorithm.buffer_size": 700,  # it comes around
}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> raynforce.Run:
    return train(tmp_path_factory.mktemp("straight") / "run", 1600, **FEW)


def test_a_run_on_stacked_frames_resumes_exactly(tmp_path: Path, straight: raynforce.Run) -> None:
    half = train(tmp_path / "half", 800, **FEW)
    resumed = raynforce.resume(half.path, steps=1600, progress="quiet")
    assert resumed.result.weights_sha256 == straight.result.weights_sha256


def test_compressing_changes_nothing_of_what_is_learned(
    tmp_path: Path, straight: raynforce.Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raynforce.experience.ring.LEAST_SEGMENT", 64)  # so that some are kept as they were saved
    run = train(tmp_path / "run", 600, **FEW, **{"replay.compress": True})
    for steps, compress in ((900, False), (1250, True), (1600, False)):
        run = raynforce.resume(run.path, steps=steps, settings={"replay.compress": compress}, progress="plain")
        changed = "false → true" if compress else "true → false"
        assert f"replay.compress {changed}; this changes nothing of what is learned" in capsys.readouterr().out
    assert run.result.weights_sha256 == straight.result.weights_sha256


def test_shards_compress_too(tmp_path: Path) -> None:
    shards = {**FEW, "topology": "replay", "replay.shards": 2, "sampling.samplers": 2}
    plain = train(tmp_path / "plain", 700, **shards)
    packed = train(tmp_path / "packed", 700, **shards, **{"replay.compress": True})
    assert packed.result.weights_sha256 == plain.result.weights_sha256
    assert packed.result.updates > 0
    assert stored(packed.path) < stored(plain.path)


def stored(run: Path) -> int:
    """Bytes of the replay's segments on disk."""
    return sum(file.stat().st_size for file in (run / "checkpoints" / "segments").glob("*.safetensors"))
