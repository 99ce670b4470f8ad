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
        "algorithm.minibatch_size": 256,
        "sampling.fragment": 64,
        "network.normalize_obs": False,
        "learner.scale_rewards": False,
    },
    ("ppo", "Acrobot-v1"): {
        "algorithm.learning_rate": 1e-3,
        "algorithm.gae_lambda": 0.94,
        "algorithm.entropy_coef": 0.01,
        "algorithm.epochs": 4,
        "algorithm.minibatch_size": 256,
        "sampling.envs": 16,
        "sampling.fragment": 64,
        "network.normalize_obs": False,
        "learner.scale_rewards": False,
    },
    ("ppo", "Pendulum-v1"): {
        "algorithm.learning_rate": 1e-3,
        "algorithm.gamma": 0.9,
        "algorithm.epochs": 10,
        "algorithm.minibatch_size": 128,
        "sampling.fragment": 128,
    },
    ("ppo", "LunarLander-v3"): {
        "algorithm.gamma": 0.999,  # an episode is up to 1,000 steps, and landing pays at its end
        "algorithm.gae_lambda": 0.98,
        "algorithm.entropy_coef": 0.01,
    },
    ("impala", "CartPole-v1"): {  # without scaled rewards its critic lags behind the returns, and the policy collapses
        "algorithm.learning_rate": 1.5e-3,
        "algorithm.anneal_learning_rate": True,
        "algorithm.gamma": 0.98,
        "algorithm.entropy_coef": 0.02,
        "algorithm.minibatch_size": 80,
        "learner.scale_rewards": True,
    },
    ("dqn", "CartPole-v1"): {"algorithm.n_step": 5, "algorithm.epsilon_fraction": 0.1, "network.hidden": (128, 128)},
    ("dqn", "CartPole-v1", "shared-agent"): {"algorithm.epsilon_fraction": 0.04},
    ("dqn", "Acrobot-v1"): {"network.hidden": (128, 128)},
}


def preset_for(algo: str, env: str, topology: str) -> dict[str, Any]:
    """The tuned settings (dotted) of a built-in algorithm on an environment; empty if there are none.

    A name without a version is the newest, which presets are for.
    """
    env = next((name for _, name, *_ in PRESETS if name.rpartition("-v")[0] == env), env)
    return {**PRESETS.get((algo, env), {}), **PRESETS.get((algo, env, topology), {})}
