"""Topologies go by what an algorithm declares, and contradictions are told before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import raynforce
from raynforce.runs import checkpoint

ENV = "raynforce.envs.tiny:Identity"
SETTINGS: dict[str, Any] = {
    "sampling.envs": 2,
    "sampling.fragment": 4,
    "sampling.samplers": 2,
    "eval.every": 0,
    "eval.final_episodes": 0,
}


def train(out: Path, algo: str, topology: str, steps: int = 320, **more: Any) -> raynforce.Run:
    how: dict[str, Any] = {"runtime": "inline", "topology": topology, "steps": steps, "seed": 3, "progress": "quiet"}
    how |= {"settings": SETTINGS | more.pop("settings", {})} | more
    return raynforce.train(ENV, f"own_algos:{algo}", out=out, **how)


@pytest.mark.parametrize("topology", ["sync", "overlap", "async", "replay", "shared-agent"])
def test_an_own_buffer_works_on_every_topology_that_it_declares(topology: str, tmp_path: Path) -> None:
    result = train(tmp_path / "run", "OwnBuffer", topology).result
    assert result.steps >= 320
    assert result.updates > 10


def test_topology_replay_holds_the_declared_ratio_and_resumes_exactly(tmp_path: Path) -> None:
    def stop_half_way(status: raynforce.Status) -> None:
        if status.steps >= 160:
            status.stop("half way")

    whole = train(tmp_path / "whole", "OwnBuffer", "replay")
    assert 0 <= 2 * (whole.result.steps - 32) // 16 - whole.result.updates <= 5  # slack: two fragments of each sampler
    half = train(tmp_path / "half", "OwnBuffer", "replay", callbacks=[stop_half_way])
    assert 0 < half.result.updates < whole.result.updates
    saved = checkpoint.load(tmp_path / "half" / "last")["learner"]["limiter"]
    assert (saved["inserted"], saved["sampled"]) == (half.result.steps, 16 * half.result.updates)
    resumed = raynforce.resume(tmp_path / "half", progress="quiet")
    assert resumed.result.weights_sha256 == whole.result.weights_sha256


def test_another_topology_goes_on_from_where_it_is(tmp_path: Path) -> None:
    train(tmp_path / "run", "OwnBuffer", "sync")
    resumed = raynforce.resume(tmp_path / "run", steps=480, topology="replay", progress="quiet")
    assert resumed.result.updates > 0


@pytest.mark.parametrize("topology", ["sync", "replay"])
def test_one_limiter_counts(topology: str, tmp_path: Path) -> None:
    small = {"algorithm.learning_starts": 32, "algorithm.batch_size": 8, "algorithm.buffer_size": 400}
    how: dict[str, Any] = {"settings": SETTINGS | small, "runtime": "inline", "steps": 200, "progress": "quiet"}
    run = raynforce.train("CartPole-v1", "dqn", topology=topology, out=tmp_path / "run", **how)
    saved = checkpoint.load(tmp_path / "run" / "last")["learner"]["algo"]["limiter"]
    assert (saved["inserted"], saved["sampled"]) == (run.result.steps, 8 * run.result.updates)
    other = {"sync": "replay", "replay": "sync"}[topology]
    more = raynforce.resume(tmp_path / "run", steps=400, topology=other, progress="quiet").result
    assert more.updates * 8 <= 16 * (more.steps - 32) < (more.updates + 72) * 8  # slack as above


@pytest.mark.parametrize(
    ("algo", "topology", "settings", "line"),
    [
        ("OwnBuffer", "replay", {"replay.shards": 2}, "replay.shards = 2 divides a buffer that raynforce makes"),
        ("OwnBuffer", "central", {}, "topology = 'central' needs an algorithm that learns from each step once"),
        ("OwnBufferWithoutSpec", "replay", {}, "does not declare one: define replay_spec, or use --topology async"),
        ("TooYoung", "sync", {}, "declares consumes = 'replay' and max_lag = 0, and what a buffer holds is of any age"),
        ("StreamsReplay", "sync", {}, "declares a replay_spec and consumes = 'stream'"),
        ("ConsumesNothing", "sync", {}, "declares consumes = 'nothing'; it is 'stream', 'replay' or 'data'"),
        ("LagsHalf", "sync", {}, "declares max_lag = 0.5; it is how many policy versions"),
        ("SharesMaybe", "sync", {}, "declares shares_gradients = 'maybe'; it is True or False"),
        ("KeepsAndForgets", "sync", {}, "KeepsAndForgets names 'seen' in keeps and in forgets"),
        ("PlainSettings", "sync", {}, "its Settings have no 'buffer_size': derive them from raynforce.OffPolicyConfig"),
    ],
)
def test_what_cannot_be_is_one_line_before_anything_starts(
    algo: str, topology: str, settings: dict[str, Any], line: str, tmp_path: Path
) -> None:
    with pytest.raises(raynforce.UsageError) as error:
        train(tmp_path / "run", algo, topology, settings=settings)
    assert line in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()
