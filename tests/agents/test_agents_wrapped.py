"""Wrappers by name around each of several agents: what it sees and earns, with a state of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from marks import slow

import raynforce
from raynforce.envs.make import make
from raynforce.envs.vector import EnvArgs
from raynforce.errors import UsageError

TINY, OURS = "raynforce.envs.tiny_agents:", "tests.envs.wrapped_envs:"
HALF = f"{OURS}Half"
STACK = {"FrameStack": {"frames": 2}}


def test_each_agent_sees_and_earns_through_its_own() -> None:
    clip = {"ClipReward": {"min_reward": -0.5, "max_reward": 0}}
    plain, wrapped = (EnvArgs(f"{TINY}Aim", 2, 3, args).vector(0) for args in ({}, {"wrappers": [STACK, clip, HALF]}))
    before, seen = plain.reset()["obs"], wrapped.reset()["obs"]
    assert np.array_equal(seen, np.repeat(before, 2, axis=1))  # [4, 2]
    for _ in range(6):
        said = np.linspace(-1, 1, 4, dtype=np.float32)[:, None]
        now, shown = plain.step(said), wrapped.step(said)
        assert np.allclose(shown.reward, np.maximum(now.reward, -0.5) / 2)
        first = before if not now.terminated.any() else now.obs["obs"]  # an episode begins with repeats
        assert np.array_equal(shown.obs["obs"], np.concatenate([first, now.obs["obs"]], axis=1))
        before = now.obs["obs"]


def test_one_that_comes_later_begins_later() -> None:
    envs = EnvArgs(f"{TINY}Leaving", 1, 0, {"late": 1, "wrappers": [f"{OURS}Counted"]}).vector(0)
    assert envs.reset()["obs"].ravel().tolist() == [1, 1, 0]
    assert envs.step(np.zeros(3, np.int64)).obs["obs"].ravel()[1:].tolist() == [2, 1]
    assert envs.step(np.zeros(3, np.int64)).obs["obs"].ravel()[2] == 2


def test_wrappers_random_numbers_go_by_the_seed() -> None:
    def seen(seed: int, wrappers: list[str]) -> np.ndarray:
        envs = EnvArgs(f"{TINY}Aim", 2, seed, {"wrappers": wrappers}).vector(0)
        begun = envs.reset()["obs"]
        return np.stack([begun, *(envs.step(np.zeros((4, 1), np.float32)).obs["obs"] for _ in range(9))])

    noise = seen(3, [f"{OURS}Noisy"]) - seen(3, [])
    assert len(np.unique(noise)) == noise.size  # each agent has its own, in each episode
    assert np.array_equal(noise, seen(3, [f"{OURS}Noisy"]) - seen(3, []))
    assert not np.isin(noise, seen(4, [f"{OURS}Noisy"]) - seen(4, [])).any()


def test_in_turns_each_reward_is_halved_and_masks_stay() -> None:
    envs = EnvArgs(f"{TINY}Nim", 1, 3, {"masked": True, "wrappers": [f"{OURS}Counted", HALF]}).vector(0)
    seen = envs.reset()
    assert {path: array.shape for path, array in seen.items()} == {"obs/observation": (2, 1), "obs/action_mask": (2, 3)}
    earned = np.zeros(2)
    while True:
        step = envs.step(np.zeros(2, np.int64))
        earned += step.reward
        if step.terminated.any():
            break
    assert sorted(earned) == [-0.5, 0.5]


def test_masks_are_not_stacked() -> None:
    envs = EnvArgs(f"{OURS}MaskedAim", 1, 0, {"wrappers": [STACK]}).vector(0)
    seen = envs.reset()
    assert seen["obs/observation"].shape == (2, 2)
    assert seen["obs/action_mask"].tolist() == [[1, 1, 0, 1]] * 2


@pytest.mark.parametrize(
    "policies", [{name: {"agents": [f"agent_{i}"]} for i, name in enumerate("ab")}, pytest.param({}, marks=slow)]
)
def test_resume_is_exact_and_evaluation_has_the_environments_own_rewards(
    policies: dict[str, Any], tmp_path: Path
) -> None:
    config = {"env_args": {"wrappers": [STACK, HALF]}, "policies": policies, "sampling": {"envs": 2, "fragment": 7}}
    config["eval"] = {"every": 0, "episodes": 4, "final_episodes": 0}
    how: dict[str, Any] = {"config": config, "runtime": "inline", "topology": "sync", "progress": "quiet"}
    whole = raynforce.train(f"{OURS}MaskedAim", "ppo", steps=300, out=tmp_path / "whole", **how)
    assert whole.result.return_mean == 6  # 4 steps of 3, halved
    assert raynforce.evaluate(whole.path, episodes=2, which="last").returns.mean() == 12

    def stop(status: Any) -> None:
        if status.steps >= 150:
            status.stop_reason = "enough"

    raynforce.train(f"{OURS}MaskedAim", "ppo", steps=300, out=tmp_path / "parts", callbacks=[stop], **how)
    resumed = raynforce.resume(tmp_path / "parts", progress="quiet")
    assert resumed.result.weights_sha256 == whole.result.weights_sha256


@pytest.mark.parametrize("given", [{"TimeLimit": {"max_episode_steps": 3}}, "ClipAction"])
def test_wrappers_of_steps_and_actions_are_refused(given: Any) -> None:
    with pytest.raises(UsageError, match=r"is for environments of one agent, and env .*FrameStack") as error:
        make(f"{TINY}Aim", {"wrappers": [given]})
    assert "\n" not in str(error.value)


def test_one_that_comes_back_begins_anew() -> None:
    """Its stack has no frame of its last life."""
    envs = EnvArgs("leaving_envs:Leaves", 1, 0, {"back": True, "wrappers": [STACK]}).vector(0)
    envs.reset()
    seen = [envs.step(np.zeros(2, np.int64)).obs["obs"] for _ in range(6)]  # [2, 2] each
    assert seen[4].tolist() == [[4, 5], [5, 5]]
    assert seen[5].tolist() == [[5, 6], [5, 6]]
