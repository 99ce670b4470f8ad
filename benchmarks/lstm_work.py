"""The sides of `lstm_vs_sb3`, one per process: the same PPO with an LSTM here and in sb3-contrib.

    python -m benchmarks.lstm_work raynforce|contrib STEPS SEED

Prints one JSON object. It runs in the virtual environment of its side.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from benchmarks.clocked import learn_theirs, train_ours

ENVS, FRAGMENT, EPOCHS, MINIBATCH = 8, 128, 4, 256
HIDDEN, MEMORY = 64, 64
LEARNING_RATE, GAMMA, GAE_LAMBDA, CLIP = 3e-4, 0.99, 0.95, 0.2
WARM_UP = 2_048  # environment steps before the clock starts


def raynforce(steps: int, seed: int) -> dict[str, Any]:
    settings = {
        "runtime": "inline",
        "topology": "sync",
        "sampling.envs": ENVS,
        "sampling.fragment": FRAGMENT,
        "algorithm.sequence": FRAGMENT,
        "algorithm.learning_rate": LEARNING_RATE,
        "algorithm.gamma": GAMMA,
        "algorithm.gae_lambda": GAE_LAMBDA,
        "algorithm.clip": CLIP,
        "algorithm.epochs": EPOCHS,
        "algorithm.minibatch_size": MINIBATCH,
        "network.hidden": [HIDDEN],
        "network.memory": "lstm",
        "network.memory_size": MEMORY,
        "network.normalize_obs": False,
        "learner.scale_rewards": False,
    }
    env = "raynforce.envs.tiny:blind_cartpole"
    return train_ours(env, "ppo", warm_up=WARM_UP, steps=steps, seed=seed, settings=settings)[0]


def contrib(steps: int, seed: int) -> dict[str, Any]:
    import gymnasium
    import torch
    from sb3_contrib import RecurrentPPO  # type: ignore[import-not-found]
    from stable_baselines3.common.env_util import make_vec_env  # type: ignore[import-not-found]

    def blind(**_: Any) -> gymnasium.Env[Any, Any]:  # as raynforce.envs.tiny:blind_cartpole
        made = gymnasium.make("CartPole-v1")
        whole: Any = made.observation_space
        space = gymnasium.spaces.Box(whole.low[[0, 2]], whole.high[[0, 2]])
        return gymnasium.wrappers.TransformObservation(made, lambda obs: obs[[0, 2]], space)

    torch.set_num_threads(1)
    model = RecurrentPPO(
        "MlpLstmPolicy",
        make_vec_env(blind, ENVS, seed=seed),
        learning_rate=LEARNING_RATE,
        n_steps=FRAGMENT,
        batch_size=MINIBATCH,
        n_epochs=EPOCHS,
        gamma=GAMMA,
        gae_lambda=GAE_LAMBDA,
        clip_range=CLIP,
        policy_kwargs={
            "net_arch": [HIDDEN],
            "lstm_hidden_size": MEMORY,
            "shared_lstm": True,
            "enable_critic_lstm": False,
        },
        seed=seed,
        device="cpu",
        verbose=0,
    )
    return learn_theirs(model, lambda: model._n_updates, warm_up=WARM_UP, steps=steps)


if __name__ == "__main__":
    side, numbers = sys.argv[1], [int(word) for word in sys.argv[2:]]
    print(json.dumps({"raynforce": raynforce, "contrib": contrib}[side](*numbers)))
