"""A simulator in another Python, which needs numpy and raynforce_sim.py alone: a ball to be kept in the middle.

raynforce train ppo "sim:python3 examples/other_python.py" --envs 16
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "sdk" / "python"))
import raynforce_sim as sim


class Ball:
    observation_space = sim.box((2,))
    action_space = sim.box((1,), low=-1, high=1)

    def __init__(self, length=100):
        self.length = length

    def reset(self, seed):
        self.place, self.speed = np.random.default_rng(seed).uniform(-1, 1, 2)
        self.steps = 0
        return self.place, self.speed

    def step(self, action):
        self.speed += 0.1 * float(action[0])
        self.place += 0.1 * self.speed
        self.steps += 1
        gone = abs(self.place) > 2
        return (self.place, self.speed), 1 - abs(self.place), gone, self.steps >= self.length, {"is_success": not gone}


if __name__ == "__main__":
    sim.serve(Ball)
