"""Several policies that learn from replay: each has a buffer and a ratio of its own, and all are saved together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from marks import slow
from rays import needs
from running import metrics, solve

import raynforce
from raynforce import trees
from raynforce.errors import UsageError
from raynforce.runs import checkpoint

TINY = "raynforce.envs.tiny_agents:"
PAIR = {
    "quick": {"agents": ["agent_0"], "algorithm": {"samples_per_insert": 8, "batch_size": 16}},
    "other": {"agents": ["agent_1"], "network": {"hidden": [16]}, "algorithm": {"buffer_size": 1_000}},
}
SELF_PLAY = {"hero": {"agents": ["*"], "opponents": 4, "opponents_every": 2}}
LEARNING = {"learning_starts": 100, "batch_size": 32, "buffer_size": 1_500, "samples_per_insert": 4}


def config(policies: dict[str, Any], **algorithm: Any) -> dict[str, Any]:
    small = {"sampling": {"envs": 4, "fragment": 8}, "eval": {"every": 0, "episodes": 4, "final_episodes": 0}}
    return {**small, "policies": policies, "network": {"hidden": [32]}, "algorithm": {**LEARNING, **algorithm}}


def short(env: str, algo: str, out: Path, settings: dict[str, Any], steps: int = 600, **more: Any) -> raynforce.Run:
    how = {"runtime": "inline", "topology": "sync", "progress": "quiet", **more}
    return raynforce.train(TINY + env, algo, steps=steps, out=out, config=settings, **how)


@pytest.mark.parametrize(
    ("env", "algo", "best", "algorithm"),
    [
        ("Together", "dqn", 4.0, {"prioritized": True}),
        ("Aim", "sac", -0.8, {}),  # at random: -2.7
        pytest.param("Aim", "td3", -0.4, {}, marks=slow),
        pytest.param("Together", "sac", 4.0, {"discrete": True}, marks=slow),
    ],
)
def test_both_learn(env: str, algo: str, best: float, algorithm: dict[str, Any], tmp_path: Path) -> None:
    pair = {name: {"agents": [f"agent_{i}"]} for i, name in enumerate("ab")}
    learning = {"samples_per_insert": 16, "gamma": 0.5, "learning_rate": 3e-3, **algorithm}
    settings = config(pair, **learning) | {"eval": {"every": 500}, "log_every": 250}
    run = solve(TINY + env, algo, tmp_path / "run", steps=6_000, target=best, config=settings, runtime="inline")
    assert {f"{name}/replay/size" for name in pair} <= {name for line in metrics(run.path) for name in line}


@pytest.mark.slow
def test_self_play_with_masks_beats_a_random_player(tmp_path: Path) -> None:
    settings = config(SELF_PLAY, prioritized=True, samples_per_insert=16, buffer_size=4_000)
    settings |= {"env_args": {"masked": True}, "eval": {"every": 1_000, "episodes": 100}}
    run = solve(f"{TINY}Nim", "dqn", tmp_path / "run", steps=20_000, target=0.7, config=settings, runtime="inline")
    hero = raynforce.load(run.path, policy="hero")
    assert [int(hero.act({"observation": n, "action_mask": np.arange(3) < n})) for n in (1, 2, 3)] == [0, 1, 2]


CELLS = [
    ("Together", "dqn", config(PAIR, prioritized=True), "sync"),
    pytest.param("Together", "dqn", config(PAIR), "overlap", marks=slow),
    pytest.param("Aim", "sac", config(PAIR, gsde=True, gsde_every=7), "overlap", marks=slow),
    pytest.param("Aim", "td3", config(PAIR), "sync", marks=slow),
    pytest.param("Nim", "dqn", config(SELF_PLAY, prioritized=True), "sync", marks=slow),
    pytest.param("Together", "sac", config(SELF_PLAY, discrete=True), "overlap", marks=slow),
]


@pytest.mark.parametrize(("env", "algo", "settings", "topology"), CELLS)
@pytest.mark.parametrize("runtime", ["process", "ray"])
def test_equal_seeds_give_equal_runs_on_every_runtime(
    env: str,
    algo: str,
    settings: dict[str, Any],
    topology: str,
    runtime: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    needs(runtime, request)
    settings = settings | {"sampling": {"samplers": 2, "envs": 2, "fragment": 8}}
    here, there = (
        short(env, algo, tmp_path / where, settings, topology=topology, runtime=where) for where in ("inline", runtime)
    )
    assert here.result.updates > 20
    assert here.result.weights_sha256 == there.result.weights_sha256


@pytest.mark.parametrize(
    ("env", "algo", "settings", "topology"),
    [
        ("Together", "dqn", config(PAIR, prioritized=True), "overlap"),
        ("Aim", "sac", config(SELF_PLAY, gsde=True, gsde_every=7), "sync"),
        pytest.param(
            "Nim", "dqn", config(SELF_PLAY, prioritized=True) | {"env_args": {"masked": True}}, "sync", marks=slow
        ),
        pytest.param("Aim", "td3", config(PAIR), "overlap", marks=slow),
        pytest.param("Together", "sac", config(PAIR, discrete=True), "sync", marks=slow),
        pytest.param(
            "Aim", "ppo", {**config(SELF_PLAY), "algorithm": {"gsde": True, "gsde_every": 7}}, "sync", marks=slow
        ),
    ],
)
def test_resume_is_exact(
    env: str, algo: str, settings: dict[str, Any], topology: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raynforce.experience.ring.LEAST_SEGMENT", 64)  # so that some are kept as they were saved
    settings = settings | {"checkpoint": {"every": 300}}
    whole = short(env, algo, tmp_path / "whole", settings, 1_400, topology=topology)

    def stop(status: Any) -> None:
        if status.steps >= 800:
            status.stop_reason = "enough"

    short(env, algo, tmp_path / "parts", settings, 1_400, topology=topology, callbacks=[stop])
    resumed = raynforce.resume(tmp_path / "parts", progress="quiet")
    assert resumed.result.weights_sha256 == whole.result.weights_sha256
    assert resumed.result.episodes == whole.result.episodes
    assert resumed.result.updates == whole.result.updates
    assert players(resumed) == players(whole)


def players(run: raynforce.Run) -> Any:
    """Random streams of those that do not learn, and how long their noise is kept."""
    saved = checkpoint.load(run.path / "last", only=["sampler_0"])["sampler_0"]
    return trees.split(saved["actors"])[1]


def test_each_has_its_own_buffer_and_ratio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raynforce.experience.ring.LEAST_SEGMENT", 64)
    run = short("Together", "dqn", tmp_path / "run", config(PAIR) | {"checkpoint": {"every": 300}}, 1_200)
    (saved,) = checkpoint.load(run.path / "last", only=["learner"]).values()
    parts = {name: part["learner"]["algo"] for name, part in saved["policies"].items()}
    for name, ratio, batch in (("quick", 8, 16), ("other", 4, 32)):
        counts = parts[name]["limiter"]
        assert counts["inserted"] == 608
        assert 0 <= ratio * (counts["inserted"] - 100) - counts["sampled"] < batch
        assert all(segment.startswith(f"{name}-") for segment in parts[name]["replay"]["segments"])
    assert len(parts["quick"]["replay"]["segments"]) > 2
    assert parts["other"]["replay"]["layout"]["rows"] < parts["quick"]["replay"]["layout"]["rows"]


def test_a_frozen_policy_of_replay_plays_and_stays(tmp_path: Path) -> None:
    first = short("Together", "dqn", tmp_path / "first", config(PAIR))
    frozen = PAIR | {"quick": {"agents": ["agent_0"], "frozen": f"{first.path}:quick"}}
    second = short("Together", "dqn", tmp_path / "second", config(frozen))
    before, after = (raynforce.load(run.path, "last").policies for run in (first, second))
    assert np.array_equal(before["quick"].version.params, after["quick"].version.params)
    assert not np.array_equal(before["other"].version.params, after["other"].version.params)


def test_buffers_that_do_not_fit_together_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raynforce.memory.available_bytes", lambda: 80_000)  # they take 42,000 and 28,000
    with pytest.raises(UsageError, match=r"the buffers of 2 policies .*lower algorithm.buffer_size"):
        short("Together", "dqn", tmp_path / "run", config(PAIR))


@pytest.mark.parametrize(
    ("env", "algo", "told"),
    [("Aim", "dqn", "policies.quick: "), ("Together", "td3", "policies.quick: "), ("Together", "bc", "recorded")],
)
def test_what_does_not_fit_is_said_in_one_line(env: str, algo: str, told: str, tmp_path: Path) -> None:
    settings = {name: part for name, part in config(PAIR).items() if name != "algorithm"}
    settings["policies"] = {name: {"agents": part["agents"]} for name, part in PAIR.items()}
    with pytest.raises(UsageError, match=told) as error:
        raynforce.train(TINY + env, algo, config=settings, out=tmp_path / "run", progress="quiet", runtime="inline")
    assert "\n" not in str(error.value)
