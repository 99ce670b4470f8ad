"""Configurations that nobody would write down: each trains and resumes to the same weights, or is refused."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import raynforce

ENVS = ["CartPole-v1", "Pendulum-v1", "Acrobot-v1", "FrozenLake-v1", "Blackjack-v1", "MountainCarContinuous-v0"]
TINY = ["Identity", "IdentityBox", "MultiIdentity", "DictIdentity", "Corridor", "Endless"]
STEPS = 160
COMMON: dict[str, list[Any]] = {
    "sampling.envs": [1, 2, 5],
    "sampling.fragment": [1, 2, 7, 20],
    "sampling.samplers": [1, 2],
    "eval.every": [0, 50],
    "eval.episodes": [1],
    "eval.final_episodes": [0, 1],
    "eval.max_length": [50],
    "network.hidden": [[], [8], [8, 8]],
    "network.activation": ["tanh", "relu", "elu", "silu"],
    "network.normalize_obs": [False, True],
    "learner.scale_rewards": [False, True],
    "checkpoint.every": [0, 37],
    "log_every": [1, 100],
}
OWN: dict[str, dict[str, list[Any]]] = {
    "ppo": {
        "algorithm.minibatch_size": [1, 5, 64],
        "algorithm.epochs": [1, 3],
        "algorithm.clip_value": [None, 0.2],
        "algorithm.entropy_coef": [0, 0.1],
        "algorithm.target_kl": [None, 1e-4],
        "algorithm.max_grad_norm": [None, 0.5],
    },
    "dqn": {
        "algorithm.n_step": [1, 4],
        "algorithm.prioritized": [False, True],
        "algorithm.dueling": [False, True],
        "algorithm.double": [False, True],
        "algorithm.learning_starts": [0, 30],
        "algorithm.batch_size": [1, 16],
        "algorithm.buffer_size": [60, 300, 5000],
        "algorithm.target_update": ["hard", "soft"],
    },
    "examples.own_algorithm:Reinforce": {},
}


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(n, marks=pytest.mark.slow) for n in range(8, 100))])
def test_odd_configurations(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    algo = draw.choice(list(OWN))
    env = draw.choice([*ENVS, *(f"raynforce.envs.tiny:{name}" for name in TINY)])
    settings = {name: draw.choice(choices) for name, choices in (COMMON | OWN[algo]).items()}
    stop_at = draw.randrange(1, STEPS)

    def train(out: str, *callbacks: Any) -> raynforce.Run:
        return raynforce.train(
            env,
            algo,
            steps=STEPS,
            seed=seed,
            runtime="inline",
            settings=settings,
            out=tmp_path / out,
            callbacks=callbacks,
            progress="quiet",
        )

    try:
        whole = train("whole").result
    except raynforce.UsageError:
        assert not (tmp_path / "whole").exists()
        return
    train("halves", lambda status: status.stop() if status.steps >= stop_at else None)
    halves = raynforce.resume(tmp_path / "halves", progress="quiet").result
    assert halves.weights_sha256 == whole.weights_sha256, (env, algo, settings, stop_at)
    assert (halves.steps, halves.episodes, halves.updates) == (whole.steps, whole.episodes, whole.updates)
