"""Dictionaries from end to end: an image and a vector, learned from together, saved, resumed, evaluated, acted on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import raynforce

SCENE = "test_dictionaries:Scene"
STACKED = "raynforce.envs.frames:stacked"
LENGTH = 8


class Scene(gymnasium.Env[Any, int]):
    """Each step pays 1 for the side of the bright spot in the image, or for the other one if the number is negative.

    Neither image nor vector alone tells anything: the mean return is then `LENGTH / 2`, as it is at random.
    """

    def __init__(self) -> None:
        self.observation_space = spaces.Dict(
            camera=spaces.Box(0, 255, (6, 6, 1), np.uint8), speed=spaces.Box(-1, 1, (2,), np.float32)
        )
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self._show(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        paid = float(int(action) == self.side ^ self.negative)
        return self._show(), paid, self.steps >= LENGTH, False, {}

    def _show(self) -> dict[str, np.ndarray]:
        self.side, self.negative, row, column = (int(x) for x in self.np_random.integers((2, 2, 6, 3)))
        image = np.zeros((6, 6, 1), np.uint8)
        image[row, 3 * self.side + column] = 255
        return {"camera": image, "speed": np.array([-1 if self.negative else 1, 0.5], np.float32)}


SETTINGS: dict[str, Any] = {
    "runtime": "inline",
    "topology": "sync",
    "sampling.envs": 4,
    "sampling.fragment": 16,
    "network.hidden": (32,),
    "eval.every": 0,
    "eval.episodes": 4,
    "eval.final_episodes": 0,
}
OF: dict[str, dict[str, Any]] = {
    "ppo": {},
    "dqn": {
        "algorithm.learning_starts": 128,
        "algorithm.buffer_size": 400,  # it comes around
        "algorithm.prioritized": True,
        "algorithm.epsilon_fraction": 0.0,  # else it follows the steps that are left
        "algorithm.priority_beta": 1.0,
    },
}


def train(env: str, algo: str, out: Path, steps: int, **settings: Any) -> raynforce.Run:
    args = {"env_args": {"env": SCENE, "frames": 2}} if env == STACKED else {}
    given = {**SETTINGS, **OF[algo], **args, **settings}
    return raynforce.train(env, algo, steps=steps, out=out, settings=given, progress="quiet")


@pytest.mark.parametrize("env", [SCENE, STACKED])
@pytest.mark.parametrize("algo", ["ppo", "dqn"])
def test_a_run_resumes_exactly_evaluates_and_acts(env: str, algo: str, tmp_path: Path) -> None:
    straight = train(env, algo, tmp_path / "straight", 768)
    half = train(env, algo, tmp_path / "half", 384)
    resumed = raynforce.resume(half.path, steps=768, progress="quiet")
    assert resumed.result.weights_sha256 == straight.result.weights_sha256 != half.result.weights_sha256

    returns, _ = raynforce.evaluate(resumed.path, episodes=5, seed=1)
    assert returns.shape == (5,)
    policy = raynforce.load(resumed.path)
    channels = (1, 6, 6) if env == SCENE else (2, 6, 6)
    camera = np.random.default_rng(0).integers(256, size=(3, *channels), dtype=np.uint8)
    camera = camera.transpose(0, 2, 3, 1) if env == SCENE else camera
    batch = {"camera": camera, "speed": np.zeros((3, 2), np.float32)}
    several = policy.act(batch)
    one = [policy.act({key: value[i] for key, value in batch.items()}) for i in range(3)]
    assert several.tolist() == [int(action) for action in one]


def test_both_parts_are_learned_from(tmp_path: Path) -> None:
    more = {"algorithm.buffer_size": 10_000, "algorithm.learning_starts": 500, "algorithm.learning_rate": 1e-3}
    run = train(SCENE, "dqn", tmp_path / "run", 6_000, **more)
    returns, _ = raynforce.evaluate(run.path, episodes=40, seed=1)
    assert returns.mean() > 7
