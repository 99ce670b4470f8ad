"""RLlib's side of `central_vs_rllib`: PPO on environments that take their time, until so many seconds are over.

    python central_rllib_work.py RUNNERS ENVS FRAGMENT SECONDS sync|async COUNTS

ENVS are those of each runner; COUNTS is the folder in which they keep how many steps they took. It is run by path, in
RLlib's virtual environment, so it finds the environments by their folder and nothing else of this package.
"""

from __future__ import annotations

import logging
import sys
import time
from importlib import import_module
from typing import Any

HIDDEN = (64, 64)
TRAINING = {
    "num_epochs": 4,
    "minibatch_size": 256,
    "lr": 3e-4,
    "gamma": 0.99,
    "lambda_": 0.95,
    "clip_param": 0.2,
    "vf_loss_coeff": 0.5,
    "entropy_coeff": 0.0,
    "use_kl_loss": False,
    "grad_clip": 0.5,
}


def ppo(
    env: str, args: dict[str, Any], runners: int, envs: int, fragment: int, mode: str, seed: int = 0, **training: Any
) -> Any:
    """RLlib's PPO on one of `slow_envs`, ready to train."""
    import ray
    import torch

    algorithms: Any = import_module("ray.rllib.algorithms.ppo")
    models: Any = import_module("ray.rllib.core.rl_module.default_model_config")
    registry: Any = import_module("ray.tune.registry")
    torch.set_num_threads(1)
    cpus = runners + 1  # whatever the machine has: runners mostly wait
    ray.init(num_cpus=cpus, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    registry.register_env(env, lambda settings: getattr(import_module("slow_envs"), env)(**settings))
    config = (
        algorithms.PPOConfig()
        .environment(env, env_config=args)
        .env_runners(
            num_env_runners=runners,
            num_envs_per_env_runner=envs,
            rollout_fragment_length=fragment,
            gym_env_vectorize_mode=mode,
        )
        .learners(num_learners=0)
        .debugging(seed=seed)
        .training(train_batch_size_per_learner=runners * envs * fragment, **(TRAINING | training))
        .rl_module(
            model_config=models.DefaultModelConfig(
                fcnet_hiddens=list(HIDDEN), fcnet_activation="tanh", vf_share_layers=False
            )
        )
    )
    return config.build_algo()


def main(runners: int, envs: int, fragment: int, seconds: int, mode: str, counts: str) -> None:
    algorithm = ppo("Uniform", {"counts": counts}, runners, envs, fragment, mode)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        algorithm.train()
    import_module("ray").shutdown()


if __name__ == "__main__":
    runners, envs, fragment, seconds = map(int, sys.argv[1:5])
    main(runners, envs, fragment, seconds, *sys.argv[5:])
