"""The two sides of `ppo_vs_sb3`, one per process: the same PPO on the same environments, here and in Stable-Baselines3.

    python ppo_work.py raynforce|raynforce-loop|sb3 STEPS SEED

Prints one JSON object. It is run by path, in the virtual environment of its side, so it imports neither the other
side nor the rest of this package.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from typing import Any

ENV = "CartPole-v1"
ENVS, FRAGMENT, EPOCHS, MINIBATCH = 8, 128, 4, 256
LEARNING_RATE, ADAM_EPSILON, MAX_GRAD_NORM = 3e-4, 1e-5, 0.5
GAMMA, GAE_LAMBDA, CLIP, ENTROPY_COEF = 0.99, 0.95, 0.2, 0.0
VALUE_COEF = 0.5  # of half the squared error
WARM_UP = 8 * ENVS * FRAGMENT  # environment steps before the clock starts

Mark = tuple[float, float, int, int]  # wall seconds, CPU seconds, environment steps, optimiser steps


def raynforce(steps: int, seed: int, env: str = ENV) -> dict[str, Any]:
    """Train with Raynforce; the clock runs from the end of the warm-up to the end of the last round."""
    from tempfile import TemporaryDirectory

    from raynforce import Status, train

    settings = {
        "preset": "none",
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
        "learner.device": "cpu",
        "learner.threads": 1,
        "learner.scale_rewards": False,
        "eval.every": 0,
        "eval.final_episodes": 0,
        "checkpoint.every": 0,
    }
    marks: list[Mark] = []

    def mark(status: Status) -> None:
        if status.steps >= WARM_UP:
            marks.append((time.monotonic(), time.process_time(), status.steps, status.updates))

    with TemporaryDirectory() as folder:
        out = f"{folder}/run"
        total = WARM_UP + steps
        done = train(env, "ppo", steps=total, seed=seed, out=out, settings=settings, callbacks=[mark], progress="quiet")
    result = done.result
    return _facts(marks[0], marks[-1], result.return_mean) | {"reported": result.steps_per_second}


def cartpole() -> Any:
    """One CartPole; named as `module:factory`, so that Raynforce steps single environments in a loop too."""
    import gymnasium

    return gymnasium.make(ENV)


def sb3(steps: int, seed: int) -> dict[str, Any]:
    """Train with Stable-Baselines3; the clock runs during `learn()`, after a first `learn()` as warm-up."""
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

    def mark() -> Mark:
        taken = next(iter(model.policy.optimizer.state.values()))["step"]
        return time.monotonic(), time.process_time(), model.num_timesteps, int(taken)

    model.learn(WARM_UP)
    first = mark()
    model.learn(steps, reset_num_timesteps=False)
    last = mark()
    episodes = [episode["r"] for episode in model.ep_info_buffer]
    return _facts(first, last, sum(episodes) / len(episodes))


def _facts(first: Mark, last: Mark, return_mean: float | None) -> dict[str, Any]:
    seconds, cpu_seconds, steps, updates = (b - a for a, b in zip(first, last, strict=True))
    return {
        "per_second": steps / seconds,
        "per_cpu_second": steps / cpu_seconds,
        "steps": steps,
        "updates": updates,
        "return_mean": return_mean,
        "versions": {name: version(name) for name in ("torch", "numpy", "gymnasium")},
    }


if __name__ == "__main__":
    side, count, start = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if side == "sb3":
        facts = sb3(count, start)
    else:
        facts = raynforce(count, start, ENV if side == "raynforce" else "benchmarks.ppo_work:cartpole")
    print(json.dumps(facts))
