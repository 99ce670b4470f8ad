"""The sides of `sac_vs_sb3`, one per process: the same SAC here and in Stable-Baselines3.

    python -m benchmarks.sac_work raynforce|native|sb3 UPDATES SEED HIDDEN BATCH

Prints one JSON object. It runs in the virtual environment of its side.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from benchmarks.clocked import learn_theirs, train_ours

ENV, ENVS = "Pendulum-v1", 4
BUFFER, LEARNING_STARTS = 100_000, 500
LEARNING_RATE, GAMMA, TAU = 3e-4, 0.99, 0.005
WARM_UP = 1_000  # environment steps before the clock starts


def raynforce(updates: int, seed: int, hidden: int, batch: int, kernels: str = "portable") -> dict[str, Any]:
    settings = {
        "kernels": kernels,
        "runtime": "inline",
        "topology": "sync",
        "sampling.envs": ENVS,
        "algorithm.learning_rate": LEARNING_RATE,
        "algorithm.gamma": GAMMA,
        "algorithm.target_tau": TAU,
        "algorithm.buffer_size": BUFFER,
        "algorithm.learning_starts": LEARNING_STARTS,
        "algorithm.batch_size": batch,
        "algorithm.samples_per_insert": batch,  # an update for every step
        "network.hidden": [hidden, hidden],
        "network.activation": "relu",
    }
    return train_ours(ENV, "sac", warm_up=WARM_UP, steps=updates, seed=seed, settings=settings)[0]


def native(updates: int, seed: int, hidden: int, batch: int) -> dict[str, Any]:
    import numpy  # noqa: F401  # before anything is held to AVX2

    return raynforce(updates, seed, hidden, batch, "native")


def sb3(updates: int, seed: int, hidden: int, batch: int) -> dict[str, Any]:
    import torch
    from stable_baselines3 import SAC  # type: ignore[import-not-found]
    from stable_baselines3.common.env_util import make_vec_env  # type: ignore[import-not-found]

    torch.set_num_threads(1)
    model = SAC(
        "MlpPolicy",
        make_vec_env(ENV, ENVS, seed=seed),
        learning_rate=LEARNING_RATE,
        buffer_size=BUFFER,
        learning_starts=LEARNING_STARTS,
        batch_size=batch,
        tau=TAU,
        gamma=GAMMA,
        train_freq=1,
        gradient_steps=ENVS,
        policy_kwargs={"net_arch": [hidden, hidden], "activation_fn": torch.nn.ReLU},
        seed=seed,
        device="cpu",
        verbose=0,
    )
    return learn_theirs(model, lambda: model._n_updates, warm_up=WARM_UP, steps=updates)


if __name__ == "__main__":
    side, numbers = sys.argv[1], [int(word) for word in sys.argv[2:]]
    print(json.dumps({"raynforce": raynforce, "native": native, "sb3": sb3}[side](*numbers)))
