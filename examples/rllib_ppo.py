"""PPO of RLlib on CartPole: train, save, restore, train on, evaluate, act.

python examples/rllib_ppo.py [STEPS]
"""

from __future__ import annotations

import sys

import gymnasium

import raynforce

STEPS = 10_000  # environment steps, twice: about a minute


def main(steps: int = STEPS) -> float:
    """Returns the mean return of the evaluation at the end."""
    settings = {
        "sampling.samplers": 1,
        "sampling.envs": 8,
        "sampling.fragment": 128,
        "eval.final_episodes": 10,
        "rllib.training.vf_clip_param": 1000.0,  # any argument of RLlib's own config
    }
    run = raynforce.train("CartPole-v1", "ppo", engine="rllib", steps=steps, settings=settings)

    # Optimiser, counters and connectors go on from the last checkpoint; environments begin new episodes.
    run = raynforce.resume(run.path, steps=2 * steps)
    print(f"{run.result.steps:,} steps in all, {run.result.updates:,} updates")

    returns, checkpoint = raynforce.evaluate(run.path, episodes=20)
    print(f"{checkpoint}: mean return {returns.mean():.1f} over {len(returns)} greedy episodes")

    policy = raynforce.load(run.path)  # numpy alone: neither Ray nor torch
    env = gymnasium.make("CartPole-v1")
    obs, _ = env.reset(seed=0)
    total, over = 0.0, False
    while not over:
        obs, reward, terminated, truncated, _ = env.step(policy.act(obs))
        total, over = total + float(reward), terminated or truncated
    print(f"one more episode, played by hand: {total:.0f}")
    return float(returns.mean())


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
