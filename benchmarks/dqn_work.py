"""The sides of `dqn_vs_peers`, one per process: the same DQN here, in Stable-Baselines3 and in RLlib.

    python -m benchmarks.dqn_work inline|process|ray|sb3|rllib STEPS SEED ENVS

Prints one JSON object. It runs in the virtual environment of its side.
"""

from __future__ import annotations

import json
import logging
import sys
from importlib import import_module
from typing import Any

from benchmarks.clocked import Mark, facts, learn_theirs, mark, train_ours

ENV, HIDDEN = "CartPole-v1", (64, 64)
BATCH, STEPS_PER_UPDATE = 64, 4
BUFFER, LEARNING_STARTS = 100_000, 1_000
LEARNING_RATE, GAMMA, MAX_GRAD_NORM = 1e-3, 0.99, 10.0
TARGET_UPDATES = 250  # between two copies of the network into its target
EPSILON, EPSILON_STEPS = 0.05, 6_000  # it falls from 1 to this, over so many steps
WARM_UP = 2_000  # environment steps before the clock starts
FRAGMENT, RLLIB_FRAGMENT = 16, 4  # steps of each environment that are sampled at a time


def raynforce(runtime: str, steps: int, seed: int, envs: int) -> dict[str, Any]:
    settings = {
        "runtime": runtime,
        "topology": "sync" if runtime == "inline" else "replay",
        "sampling.envs": envs,
        "sampling.fragment": FRAGMENT,
        "algorithm.learning_rate": LEARNING_RATE,
        "algorithm.gamma": GAMMA,
        "algorithm.max_grad_norm": MAX_GRAD_NORM,
        "algorithm.buffer_size": BUFFER,
        "algorithm.learning_starts": LEARNING_STARTS,
        "algorithm.batch_size": BATCH,
        "algorithm.samples_per_insert": BATCH / STEPS_PER_UPDATE,
        "algorithm.n_step": 1,
        "algorithm.double": False,
        "algorithm.target_every": TARGET_UPDATES,
        "algorithm.epsilon_end": EPSILON,
        "algorithm.epsilon_fraction": EPSILON_STEPS / (WARM_UP + steps),
        "algorithm.epsilon_ladder": 1,
        "network.hidden": list(HIDDEN),
        "network.activation": "relu",
    }
    return train_ours(ENV, "dqn", warm_up=WARM_UP, steps=steps, seed=seed, settings=settings)[0]


def sb3(steps: int, seed: int, envs: int) -> dict[str, Any]:
    import torch
    from stable_baselines3 import DQN  # type: ignore[import-not-found]
    from stable_baselines3.common.env_util import make_vec_env  # type: ignore[import-not-found]

    torch.set_num_threads(1)
    model = DQN(
        "MlpPolicy",
        make_vec_env(ENV, envs, seed=seed),
        learning_rate=LEARNING_RATE,
        buffer_size=BUFFER,
        learning_starts=LEARNING_STARTS,
        batch_size=BATCH,
        gamma=GAMMA,
        train_freq=max(1, STEPS_PER_UPDATE // envs),
        gradient_steps=max(1, envs // STEPS_PER_UPDATE),
        target_update_interval=TARGET_UPDATES * STEPS_PER_UPDATE,
        exploration_fraction=EPSILON_STEPS / (WARM_UP + steps),
        exploration_final_eps=EPSILON,
        max_grad_norm=MAX_GRAD_NORM,
        policy_kwargs={"net_arch": list(HIDDEN), "activation_fn": torch.nn.ReLU},
        seed=seed,
        device="cpu",
        verbose=0,
    )
    return learn_theirs(model, lambda: model._n_updates, warm_up=WARM_UP, steps=steps)


def rllib(steps: int, seed: int, envs: int) -> dict[str, Any]:
    """Train with RLlib; the clock runs from one result to another."""
    import ray
    import torch

    dqn: Any = import_module("ray.rllib.algorithms.dqn")
    models: Any = import_module("ray.rllib.core.rl_module.default_model_config")
    torch.set_num_threads(1)
    ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    config = (
        dqn.DQNConfig()
        .environment(ENV)
        .env_runners(num_env_runners=0, num_envs_per_env_runner=envs, rollout_fragment_length=RLLIB_FRAGMENT)
        .learners(num_learners=0)
        .training(
            lr=LEARNING_RATE,
            gamma=GAMMA,
            train_batch_size_per_learner=BATCH,
            training_intensity=BATCH / STEPS_PER_UPDATE,
            num_steps_sampled_before_learning_starts=LEARNING_STARTS,
            replay_buffer_config={"type": "EpisodeReplayBuffer", "capacity": BUFFER},
            double_q=False,
            dueling=False,
            n_step=1,
            target_network_update_freq=TARGET_UPDATES * STEPS_PER_UPDATE,
            epsilon=[(0, 1.0), (EPSILON_STEPS, EPSILON)],
            grad_clip=MAX_GRAD_NORM,
        )
        .rl_module(
            model_config=models.DefaultModelConfig(
                fcnet_hiddens=list(HIDDEN), fcnet_activation="relu", head_fcnet_hiddens=[]
            )
        )
        .reporting(min_sample_timesteps_per_iteration=500)
        .debugging(seed=seed)
    )
    algorithm = config.build_algo()

    def train_until(step: int) -> tuple[Mark, float]:
        while (found := algorithm.train())["num_env_steps_sampled_lifetime"] < step:
            pass
        trained = found["learners"]["__all_modules__"]["num_env_steps_trained_lifetime"]
        steps = int(found["num_env_steps_sampled_lifetime"])
        return mark(steps, round(trained / BATCH)), found["env_runners"]["episode_return_mean"]

    first, _ = train_until(WARM_UP)
    last, return_mean = train_until(WARM_UP + steps)
    ray.shutdown()
    return facts(first, last, return_mean)


if __name__ == "__main__":
    side, numbers = sys.argv[1], [int(word) for word in sys.argv[2:]]
    peers = {"sb3": sb3, "rllib": rllib}
    print(json.dumps(peers[side](*numbers) if side in peers else raynforce(side, *numbers)))
