"""The two sides of `ppo_vs_sb3`, one per process: the same PPO on the same environments, here and in Stable-Baselines3.

    python -m benchmarks.ppo_work raynforce|raynforce-loop|sb3 STEPS SEED

Prints one JSON object. It runs in the virtual environment of its side.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from benchmarks.clocked import learn_theirs, train_ours

ENV = "CartPole-v1"
ENVS, FRAGMENT, EPOCHS, MINIBATCH = 8, 128, 4, 256
LEARNING_RATE, ADAM_EPSILON, MAX_GRAD_NORM = 3e-4, 1e-5, 0.5
GAMMA, GAE_LAMBDA, CLIP, ENTROPY_COEF = 0.99, 0.95, 0.2, 0.0
VALUE_COEF = 0.5  # of half the squared error
WARM_UP = 8 * ENVS * FRAGMENT  # environment steps before the clock starts


def raynforce(steps: int, seed: int, env: str = ENV) -> dict[str, Any]:
    settings = {
        "sampling.envs": ENVS,
        "sampling.fragment": FRAGMENT,
        "algorithm.epochs": EPOCHS,
        "algorithm.minibatch_size": MINIBATCH,
        "algorithm.learning_rate": LEARNING_RATE,
        "algorithm.adam_epsilon": ADAM_EPSILON,
        "algorithm.max_grad_norm": MAX_GRAD_NORM,
        "algorithm.gamma": GAMMA,
        "algorithm.gae_lambda": GAE_LAMBDA,
        "algorithm.clip": CLIP,
        "algorithm.entropy_coef": ENTROPY_COEF,
        "algorithm.value_coef": VALUE_COEF,
        "network.hidden": [64, 64],
        "network.activation": "tanh",
        "network.normalize_obs": False,
        "learner.scale_rewards": False,
    }
    facts, result = train_ours(env, "ppo", warm_up=WARM_UP, steps=steps, seed=seed, settings=settings)
    return facts | {"reported": result.steps_per_second}


def cartpole() -> Any:
    """One CartPole; named as `module:factory`, so that Raynforce steps single environments in a loop too."""
    import gymnasium

    return gymnasium.make(ENV)


def sb3(steps: int, seed: int) -> dict[str, Any]:
    import torch
    from stable_baselines3 import PPO  # type: ignore[import-not-found]
    from stable_baselines3.common.env_util import make_vec_env  # type: ignore[import-not-found]

    torch.set_num_threads(1)
    model = PPO(
        "MlpPolicy",
        make_vec_env(ENV, ENVS, seed=seed),
        n_steps=FRAGMENT,
        n_epochs=EPOCHS,
        batch_size=MINIBATCH,
        learning_rate=LEARNING_RATE,
        gamma=GAMMA,
        gae_lambda=GAE_LAMBDA,
        clip_range=CLIP,
        ent_coef=ENTROPY_COEF,
        vf_coef=VALUE_COEF / 2,  # its value loss is the whole squared error
        max_grad_norm=MAX_GRAD_NORM,
        policy_kwargs={
            "net_arch": {"pi": [64, 64], "vf": [64, 64]},
            "activation_fn": torch.nn.Tanh,
            "optimizer_kwargs": {"eps": ADAM_EPSILON},
        },
        seed=seed,
        device="cpu",
        verbose=0,
    )

    def updates() -> int:
        return int(next(iter(model.policy.optimizer.state.values()), {"step": 0})["step"])

    return learn_theirs(model, updates, warm_up=WARM_UP, steps=steps)


if __name__ == "__main__":
    side, count, start = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if side == "sb3":
        facts = sb3(count, start)
    else:
        facts = raynforce(count, start, ENV if side == "raynforce" else "benchmarks.ppo_work:cartpole")
    print(json.dumps(facts))
