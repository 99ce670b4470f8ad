"""Settings that are known to work, the defaults for their environment; `preset: none` leaves them out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PRESETS: Mapping[tuple[str, ...], Mapping[str, Any]] = {
    ("ppo", "CartPole-v1"): {
        "algorithm.learning_rate": 2e-3,
        "algorithm.gamma": 0.98,
        "algorithm.gae_lambda": 0.9,
        "algorithm.epochs": 10,
        "sampling.fragment": 64,
        "eval.every": 5_000,
    },
    ("ppo", "Acrobot-v1"): {
        "algorithm.learning_rate": 1e-3,
        "algorithm.gae_lambda": 0.94,
        "algorithm.entropy_coef": 0.01,
        "sampling.envs": 16,
        "sampling.fragment": 64,
    },
    ("ppo", "Pendulum-v1"): {
        "algorithm.learning_rate": 1e-3,
        "algorithm.gamma": 0.9,
        "algorithm.epochs": 10,
        "algorithm.minibatch_size": 128,
        "network.normalize_obs": True,
        "learner.scale_rewards": True,
    },
    ("dqn", "CartPole-v1"): {
        "algorithm.n_step": 5,
        "algorithm.epsilon_fraction": 0.1,
        "network.hidden": (128, 128),
        "eval.every": 5_000,
    },
    ("dqn", "CartPole-v1", "shared-agent"): {
        "algorithm.epsilon_fraction": 0.04,
    },
    ("dqn", "Acrobot-v1"): {
        "network.hidden": (128, 128),
    },
}


def preset_for(algo: str, env: str, topology: str) -> dict[str, Any]:
    """The tuned settings (dotted) of a built-in algorithm on an environment; empty if there are none."""
    return {**PRESETS.get((algo, env), {}), **PRESETS.get((algo, env, topology), {})}
