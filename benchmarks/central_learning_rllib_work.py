"""RLlib's side of `central_learning`: PPO on the slow CartPole until it is solved, or so many steps are over.

    python central_learning_rllib_work.py SEED RUNNERS ENVS FRAGMENT STEPS EVERY TARGET sync|async

ENVS are those of each runner. After EVERY so many steps 20 greedy episodes are played in environments that do not
sleep, while the clock stands still. It prints one line of JSON, and is run by path, as `central_rllib_work`.
"""

from __future__ import annotations

import json
import sys
import time
from importlib import import_module
from typing import Any

EPISODES = 20


def main(seed: int, runners: int, envs: int, fragment: int, steps: int, every: int, target: float, mode: str) -> None:
    began = time.monotonic()
    ppo = import_module("central_rllib_work").ppo
    preset = {"lr": 2e-3, "gamma": 0.98, "lambda_": 0.9, "num_epochs": 10}
    algorithm = ppo("SlowCartPole", {}, runners, envs, fragment, mode, seed, **preset)
    done, first, up, due, solved = 0, 0, 0.0, every, False
    while done < steps and not solved:
        done = algorithm.train()["num_env_steps_sampled_lifetime"]
        if not first:
            first, up = done, time.monotonic() - began
        if done >= due:
            due = (done // every + 1) * every
            paused = time.monotonic()
            solved = score(algorithm.get_module(), seed) >= target
            began += time.monotonic() - paused
    took = time.monotonic() - began
    import_module("ray").shutdown()
    speed = (done - first) / (took - up)
    print(json.dumps({"steps": done, "seconds": took, "solved": solved, "speed": speed, "up": up}))


def score(module: Any, seed: int) -> float:
    """Mean return of greedy episodes."""
    import gymnasium
    import numpy as np
    import torch

    envs = [gymnasium.make("CartPole-v1") for _ in range(EPISODES)]
    obs = [env.reset(seed=1000 * seed + i)[0] for i, env in enumerate(envs)]
    total, playing = 0.0, list(range(EPISODES))
    while playing:
        with torch.no_grad():
            batch = {"obs": torch.as_tensor(np.stack([obs[i] for i in playing]))}
            choices = module.forward_inference(batch)["action_dist_inputs"].argmax(1).tolist()
        going = []
        for i, choice in zip(playing, choices, strict=True):
            obs[i], reward, terminated, truncated, _ = envs[i].step(choice)
            total += float(reward)
            if not (terminated or truncated):
                going.append(i)
        playing = going
    return total / EPISODES


if __name__ == "__main__":
    seed, runners, envs, fragment, steps, every = map(int, sys.argv[1:7])
    main(seed, runners, envs, fragment, steps, every, float(sys.argv[7]), sys.argv[8])
