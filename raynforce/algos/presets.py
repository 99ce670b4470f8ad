"""Tuned settings, the defaults for their environment; `preset: none` leaves them out.

Values that are marked "zoo" are those of rl-baselines3-zoo (`hyperparams/*.yml`), translated: `n_envs`, `n_steps` and
`batch_size` are `sampling.envs`, `sampling.fragment` and `algorithm.minibatch_size` of PPO; `train_freq` and
`gradient_steps` become `samples_per_insert`, updates per step times the batch; `normalize` is normalised observations
and scaled rewards, which are PPO's defaults here. `vf_coef` is `value_coef` unchanged, which counts half as much here
(docs/algorithms/ppo.md), and `ortho_init` is left out. What zoo does not name has our defaults: DQN's are double
Q-learning and three-step returns, where zoo has neither. What came of those that were run is in docs/benchmarks.md,
which also lists those that were not: these are as good as their source and the translation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MUJOCO = ("Hopper-v5", "HalfCheetah-v5", "Walker2d-v5", "Ant-v5", "Humanoid-v5")
_ATARI = ("raynforce.envs.atari:make",)  # Pong, Breakout, …: env_args.game says which
_IN_TRAINING = ["raynforce.envs.atari:episodic_life", {"ClipReward": {"min_reward": -1, "max_reward": 1}}]
_GAME = {"env_args.fire": True, "env_args.wrappers": _IN_TRAINING}
_PLAIN = {"network.normalize_obs": False, "learner.scale_rewards": False}

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
    ("ppo", "Pendulum-v1"): {  # zoo, without its gSDE; normalised, some seeds are at -400 after 100,000 steps
        "sampling.envs": 4,
        "sampling.fragment": 1024,
        "algorithm.learning_rate": 1e-3,
        "algorithm.gamma": 0.9,
        **_PLAIN,
    },
    ("ppo", "MountainCar-v0"): {  # the goal is found by the bonus: without it, or luck, every return is -200
        "sampling.envs": 16,
        "algorithm.rnd_coef": 1.0,
    },
    ("ppo", "MountainCarContinuous-v0"): {  # zoo; where ours differ it has one environment of 8 steps,
        # minibatches of 256, a step size of 7.77e-5 and a log_std_init of -3.29
        "sampling.envs": 8,
        "sampling.fragment": 64,
        "algorithm.gamma": 0.9999,
        "algorithm.gae_lambda": 0.9,
        "algorithm.clip": 0.1,
        "algorithm.max_grad_norm": 5.0,
        "algorithm.value_coef": 0.19,
        "algorithm.entropy_coef": 0.00429,
        "algorithm.gsde": True,
        "algorithm.log_std_init": -0.5,
    },
    ("ppo", "BipedalWalker-v3"): {  # zoo, whose 32 environments of 2,048 steps are 16 of 512 here
        "sampling.envs": 16,
        "sampling.fragment": 512,
        "algorithm.gamma": 0.999,
        "algorithm.clip": 0.18,
    },
    # With zoo's settings Hopper stands still for 1,000, and Walker2d has 725 after 400,000 steps, with these 3,628.
    **{("ppo", env): {"sampling.envs": 8, "sampling.fragment": 256} for env in ("Hopper-v5", "Walker2d-v5")},
    **{
        ("ppo", env): {  # zoo's for HalfCheetah, whose single environment of 512 steps is four of 128 here
            "sampling.envs": 4,
            "sampling.fragment": 128,
            "network.hidden": (256, 256),
            "network.activation": "relu",
            "algorithm.log_std_init": -2.0,
            "algorithm.gamma": 0.98,
            "algorithm.gae_lambda": 0.92,
            "algorithm.learning_rate": 2.06e-5,
            "algorithm.entropy_coef": 0.0004,
            "algorithm.clip": 0.1,
            "algorithm.epochs": 20,
            "algorithm.max_grad_norm": 0.8,
            "algorithm.value_coef": 0.58,
        }
        for env in ("HalfCheetah-v5", "Ant-v5")  # with zoo's for Ant, its defaults, Ant has 171 after 400,000 steps
    },
    **{
        ("ppo", env): {  # zoo's for all Atari games
            "sampling.envs": 8,
            "sampling.fragment": 128,
            "algorithm.learning_rate": 2.5e-4,
            "algorithm.anneal_learning_rate": "linear",
            "algorithm.clip": 0.1,
            "algorithm.anneal_clip": "linear",
            "algorithm.epochs": 4,
            "algorithm.minibatch_size": 256,
            "algorithm.entropy_coef": 0.01,
            "network.hidden": (512,),
            "network.activation": "relu",
            **_GAME,
            **_PLAIN,
        }
        for env in _ATARI
    },
    **{
        ("dqn", env): {  # an older zoo's for all Atari games, with a fifth of its buffer and first steps and
            # a tenth of its target's interval; now it has a buffer of 100,000 and an epsilon_end of 0.01.
            "algorithm.learning_rate": 1e-4,
            "algorithm.buffer_size": 200_000,
            "algorithm.learning_starts": 20_000,
            "algorithm.batch_size": 32,
            "algorithm.samples_per_insert": 8.0,
            "algorithm.epsilon_fraction": 0.1,
            "algorithm.epsilon_end": 0.1,
            "network.hidden": (512,),
            **_GAME,
        }
        for env in _ATARI
    },
    **{
        ("ppo", env): {  # zoo, with the entropy bonus of lcswillems/rl-starter-files; for Empty that of Empty-Random
            "sampling.envs": 8,
            "sampling.fragment": 128,
            "algorithm.learning_rate": 2.5e-4,
            "algorithm.entropy_coef": 0.01,
        }
        for env in ("MiniGrid-Empty-5x5-v0", "MiniGrid-DoorKey-5x5-v0")
    },
    ("ppo", "LunarLander-v3"): {  # these three are zoo's, all else the defaults
        "algorithm.gamma": 0.999,  # an episode is up to 1,000 steps, and landing pays at its end
        "algorithm.gae_lambda": 0.98,
        "algorithm.entropy_coef": 0.01,
    },
    ("impala", "CartPole-v1"): {  # without scaled rewards its critic lags behind the returns, and the policy collapses
        "algorithm.learning_rate": 1.5e-3,
        "algorithm.anneal_learning_rate": "linear",
        "algorithm.gamma": 0.98,
        "algorithm.entropy_coef": 0.02,
        "algorithm.minibatch_size": 80,
        "learner.scale_rewards": True,
    },
    ("dqn", "CartPole-v1"): {"algorithm.n_step": 5, "algorithm.epsilon_fraction": 0.1, "network.hidden": (128, 128)},
    ("dqn", "CartPole-v1", "shared-agent"): {"algorithm.epsilon_fraction": 0.04},
    ("dqn", "Acrobot-v1"): {"network.hidden": (128, 128)},
    ("dqn", "MountainCar-v0"): {  # zoo: 8 updates of 128 every 16 steps; n_step is ours: with 1 the goal is not found
        "algorithm.learning_rate": 4e-3,
        "algorithm.batch_size": 128,
        "algorithm.buffer_size": 10_000,
        "algorithm.gamma": 0.98,
        "algorithm.samples_per_insert": 64.0,
        "algorithm.n_step": 10,
        "algorithm.epsilon_fraction": 0.2,
        "algorithm.epsilon_end": 0.07,
        "algorithm.target_update": "hard",
        "algorithm.target_every": 300,  # 600 steps
        "network.hidden": (256, 256),
    },
    # An older zoo's: an update of 32 for every step; its target, buffer and first steps are not taken over. Now it has
    # 6.3e-4, batches of 128, and epsilon falling over 0.12 of the run.
    ("dqn", "LunarLander-v3"): {
        "algorithm.learning_rate": 8.8e-4,
        "algorithm.batch_size": 32,
        "algorithm.samples_per_insert": 32.0,
        "algorithm.epsilon_fraction": 0.2,
        "algorithm.epsilon_end": 0.1,
        "network.hidden": (256, 256),
    },
    ("sac", "MountainCarContinuous-v0"): {  # zoo, which has no first steps, and draws noise every 32
        "algorithm.buffer_size": 50_000,
        "algorithm.batch_size": 512,
        "algorithm.samples_per_insert": 512.0,
        "algorithm.initial_alpha": 0.1,
        "algorithm.learn_alpha": False,
        "algorithm.gamma": 0.9999,
        "algorithm.target_tau": 0.01,
        "algorithm.learning_starts": 512,
        "algorithm.gsde": True,
        "algorithm.log_std_init": -3.67,
        "sampling.envs": 1,
        "sampling.fragment": 32,
        "network.hidden": (64, 64),
        "eval.every": 2_000,
    },
    ("sac", "BipedalWalker-v3"): {  # zoo
        "algorithm.learning_rate": 7.3e-4,
        "algorithm.buffer_size": 300_000,
        "algorithm.gamma": 0.98,
        "algorithm.target_tau": 0.02,
        "algorithm.learning_starts": 10_000,
        "algorithm.gsde": True,
        "sampling.envs": 1,
        "sampling.fragment": 64,
        "network.hidden": (400, 300),
        "eval.every": 10_000,
    },
    ("sac", "Pendulum-v1"): {
        "algorithm.learning_rate": 1e-3,
        "algorithm.learning_starts": 500,
        "network.hidden": (64, 64),
        "eval.every": 1_000,
    },
    ("td3", "Pendulum-v1"): {
        "algorithm.learning_rate": 1e-3,
        "algorithm.learning_starts": 500,
        "network.hidden": (64, 64),
        "eval.every": 1_000,
    },
    # The defaults, and 10,000 steps without learning: zoo's of SAC, the paper's of TD3 for HalfCheetah and Ant.
    **{
        (algo, env): {"algorithm.learning_starts": 10_000, "eval.every": 10_000}
        for algo in ("sac", "td3")
        for env in _MUJOCO
    },
}


CLONED = ("algorithm.gamma", "network.", "learner.")  # of PPO's presets: what bc has to have for PPO to go on with it


def preset_for(algo: str, env: str, topology: str) -> dict[str, Any]:
    """The tuned settings (dotted) of a built-in algorithm on an environment; empty if there are none.

    A name without a version is the newest, which presets are for.
    """
    if algo == "bc":
        return {key: value for key, value in preset_for("ppo", env, "").items() if key.startswith(CLONED)}
    if not any(name == env for _, name, *_ in PRESETS):
        env = env.rpartition(":")[2]  # `minigrid:MiniGrid-Empty-5x5-v0` is registered by its module
    env = next((name for _, name, *_ in PRESETS if name.rpartition("-v")[0] == env), env)
    return {**PRESETS.get((algo, env), {}), **PRESETS.get((algo, env, topology), {})}
