"""Same seed, same run; and a run stopped at a checkpoint and resumed is the run that was never stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import raynforce

SMALL = {"eval.episodes": 2, "eval.final_episodes": 0, "checkpoint.every": 0, "eval.every": 700, "log_every": 100}
PPO = SMALL | {"sampling.envs": 4, "sampling.fragment": 32, "algorithm.minibatch_size": 64, "algorithm.epochs": 2}
DQN = SMALL | {
    "sampling.envs": 4,
    "sampling.fragment": 8,
    "algorithm.learning_starts": 100,
    "algorithm.buffer_size": 1200,  # smaller than the run: the ring has gone round when it is saved
    "algorithm.target_every": 10,
}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ppo-native-env": ("CartPole-v1", "ppo", PPO | {"algorithm.anneal_learning_rate": True}),
    "ppo-normalised-continuous": (
        "Pendulum-v1",
        "ppo",
        PPO | {"network.normalize_obs": True, "learner.scale_rewards": True, "sampling.samplers": 2},
    ),
    "dqn-uniform": ("CartPole-v1", "dqn", DQN),
    "dqn-everything": (
        "Acrobot-v1",
        "dqn",
        DQN | {"algorithm.prioritized": True, "algorithm.dueling": True, "algorithm.n_step": 3, "sampling.samplers": 2},
    ),
    "dqn-dict-observations": ("raynforce.envs.tiny:DictIdentity", "dqn", DQN),
    "own-algorithm": ("CartPole-v1", "examples.own_algorithm:Reinforce", SMALL),
}


def train(case: str, out: Path, steps: int, seed: int = 3) -> raynforce.Run:
    env, algo, settings = CASES[case]
    return raynforce.train(env, algo, steps=steps, seed=seed, out=out, settings=settings, progress="quiet")


@pytest.mark.parametrize("case", CASES)
def test_resumed_run_equals_one_never_stopped(case: str, tmp_path: Path) -> None:
    whole = train(case, tmp_path / "whole", 2000)

    def stop_half_way(status: raynforce.Status) -> None:
        if status.steps >= 1000:
            status.stop("half way")

    env, algo, settings = CASES[case]
    path = tmp_path / "halves"
    half = raynforce.train(
        env, algo, steps=2000, seed=3, out=path, settings=settings, callbacks=[stop_half_way], progress="quiet"
    )
    assert half.result.stopped == "half way"
    assert half.result.steps < whole.result.steps
    resumed = raynforce.resume(path, progress="quiet")

    assert resumed.result.weights_sha256 == whole.result.weights_sha256
    for count in ("steps", "episodes", "updates", "return_mean"):
        assert getattr(resumed.result, count) == getattr(whole.result, count), count
    assert metrics(tmp_path / "whole") == metrics(path)


def metrics(run: Path) -> list[dict[str, Any]]:
    """Every line of metrics but for the clock; the halves have an evaluation more, at the stop."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    clock = ("time", "charts/SPS", "eval/")
    plain = [{k: v for k, v in line.items() if not k.startswith(clock)} for line in lines]
    return [x for x in plain if len(x) > 1]


@pytest.mark.parametrize("case", ["ppo-native-env", "dqn-everything"])
def test_equal_seeds_are_equal_runs_and_others_are_not(case: str, tmp_path: Path) -> None:
    first = train(case, tmp_path / "a", 800).result
    again = train(case, tmp_path / "b", 800).result
    other = train(case, tmp_path / "c", 800, seed=4).result
    assert first.weights_sha256 == again.weights_sha256
    assert first.weights_sha256 != other.weights_sha256


def test_saving_and_evaluating_do_not_change_the_run(tmp_path: Path) -> None:
    env, algo, settings = CASES["ppo-native-env"]
    quiet = raynforce.train(env, algo, steps=1500, out=tmp_path / "a", settings=settings, progress="quiet")
    busy = settings | {"checkpoint.every": 100, "eval.every": 100, "log_every": 1}
    noisy = raynforce.train(env, algo, steps=1500, out=tmp_path / "b", settings=busy, progress="quiet")
    assert quiet.result.weights_sha256 == noisy.result.weights_sha256
