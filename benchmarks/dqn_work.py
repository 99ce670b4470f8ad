"""The sides of `dqn_vs_peers`, one per process: the same DQN here, in Stable-Baselines3 and in RLlib.

    python dqn_work.py inline|process|ray|sb3|rllib STEPS SEED ENVS

Prints one JSON object. It is run by path, in the virtual environment of its side, so it imports neither the other
sides nor the rest of this package.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from importlib import import_module
from importlib.metadata import version
from typing import Any

ENV, HIDDEN = "CartPole-v1", (64, 64)
BATCH, STEPS_PER_UPDATE = 64, 4
BUFFER, LEARNING_STARTS = 100_000, 1_000
LEARNING_RATE, GAMMA, MAX_GRAD_NORM = 1e-3, 0.99, 10.0
TARGET_UPDATES = 250  # between two copies of the network into its target
EPSILON, EPSILON_STEPS = 0.05, 6_000  # it falls from 1 to this, over so many steps
WARM_UP = 2_000  # environment steps before the clock starts
FRAGMENT, RLLIB_FRAGMENT = 16, 4  # steps of each environment that are sampled at a time

Mark = tuple[float, float, int, int]  # wall seconds, CPU seconds, environment steps, updates


def raynforce(runtime: str, steps: int, seed: int, envs: int) -> dict[str, Any]:
    """Train with Raynforce; the clock runs from the end of the warm-up to the end of the last round."""
    from tempfile import TemporaryDirectory

    from raynforce import Status, train

    total = WARM_UP + steps
    settings = {
        "preset": "none",
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
        "algorithm.epsilon_fraction": EPSILON_STEPS / total,
        "algorithm.epsilon_ladder": 1,
        "network.hidden": list(HIDDEN),
        "network.activation": "relu",
        "learner.device": "cpu",
        "learner.threads": 1,
        "eval.every": 0,
        "eval.episodes": 1,  # there is always an evaluation at the end: of one step
        "eval.max_length": 1,
        "eval.final_episodes": 0,
        "checkpoint.every": 0,
        "checkpoint.seconds": 0,
    }
    marks: list[Mark] = []

    def mark(status: Status) -> None:
        if status.steps >= WARM_UP:
            marks.append((time.monotonic(), time.process_time(), status.steps, status.updates))

    with TemporaryDirectory() as folder:
        out = f"{folder}/run"
        done = train(ENV, "dqn", steps=total, seed=seed, out=out, settings=settings, callbacks=[mark], progress="quiet")
    return _facts(marks[0], marks[-1], done.result.return_mean or 0.0)


def sb3(steps: int, seed: int, envs: int) -> dict[str, Any]:
    """Train with Stable-Baselines3; the clock runs during `learn()`, after a first `learn()` as warm-up."""
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

    def mark() -> Mark:
        return time.monotonic(), time.process_time(), model.num_timesteps, model._n_updates

    model.learn(WARM_UP)
    first = mark()
    model.learn(steps, reset_num_timesteps=False)
    last = mark()
    episodes = [episode["r"] for episode in model.ep_info_buffer]
    return _facts(first, last, sum(episodes) / len(episodes))


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
        mark = time.monotonic(), time.process_time(), steps, round(trained / BATCH)
        return mark, found["env_runners"]["episode_return_mean"]

    first, _ = train_until(WARM_UP)
    last, return_mean = train_until(WARM_UP + steps)
    ray.shutdown()
    return _facts(first, last, return_mean)


def _facts(first: Mark, last: Mark, return_mean: float) -> dict[str, Any]:
    seconds, cpu_seconds, steps, updates = (b - a for a, b in zip(first, last, strict=True))
    return {
        "steps_per_second": steps / seconds,
        "steps_per_cpu_second": steps / cpu_seconds,
        "updates_per_step": updates / steps,
        "return_mean": float(return_mean),
        "versions": {name: version(name) for name in ("torch", "numpy", "gymnasium")},
    }


if __name__ == "__main__":
    side, numbers = sys.argv[1], [int(word) for word in sys.argv[2:]]
    if side in ("sb3", "rllib"):
        facts = {"sb3": sb3, "rllib": rllib}[side](*numbers)
    else:
        facts = raynforce(side, *numbers)
    print(json.dumps(facts))
