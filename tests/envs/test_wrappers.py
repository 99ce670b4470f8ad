"""Wrappers by name, and parts of an observation that nothing learns from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import raynforce
from raynforce.envs.doctor import check_env
from raynforce.envs.frames import FrameStack
from raynforce.envs.make import make, make_described
from raynforce.envs.vector import make_vector
from raynforce.envs.wrappers import for_evaluation
from raynforce.errors import UsageError

TOLD = "tests.envs.wrapped_envs:Told"
HALF = "tests.envs.wrapped_envs:Half"
CLIP = {"ClipReward": {"min_reward": -1, "max_reward": 1}}


def test_wrappers_are_put_around_in_the_order_of_the_list() -> None:
    env = make("CartPole-v1", {"wrappers": [{"TimeLimit": {"max_episode_steps": 7}}, {"FrameStack": {"frames": 2}}]})
    assert isinstance(env, FrameStack)
    assert isinstance(env.env, gymnasium.wrappers.TimeLimit)
    env.reset(seed=0)
    assert [env.step(0)[3] for _ in range(7)][-1]
    env.close()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["ClipRewrd"], r"no wrapper 'ClipRewrd' \(did you mean 'ClipReward'\?\)"),
        (
            ["Nothing"],
            "no wrapper 'Nothing'; it is one of gymnasium.wrappers, FrameStack, SkipObservation, or module:C",
        ),
        ([3], "has 3, which is neither a name nor one name with its arguments"),
        (3, "env_args.wrappers = 3 must be a list of names"),
        ([{"ClipReward": {"foo": 1}}], r"ClipReward does not take .*'foo'; it takes min_reward, max_reward"),
        ([{"ClipReward": {}, "FrameStack": {}}], "neither a name nor one name"),
        ([{"ClipReward": {"min_reward": 2, "max_reward": 1}}], r"ClipReward cannot wrap env .*: it raised"),
        (["NormalizeReward"], "use --set learner.scale_rewards=true"),
        (["NormalizeObservation"], "use --set network.normalize_obs=true"),
        (
            [{"SkipObservation": {"keys": ["nois"]}}],
            r"no 'nois' \(did you mean 'noise'\?\): it has mission, noise, pos",
        ),
        (["tests.envs.wrapped_envs:Nope"], "has no 'Nope'"),
        (["ClipAction"], "it raised AssertionError: assert isinstance"),
        (["tests.envs.wrapped_envs:Bare"], "Bare takes no environment; it must be a subclass of gymnasium.Wrapper"),
        (["tests.envs.wrapped_envs:not_a_wrapper"], "is a int; it must be a subclass of gymnasium.Wrapper"),
    ],
)
def test_what_is_wrong_with_wrappers_is_one_line(given: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        make(TOLD, {"wrappers": given})
    assert "\n" not in str(caught.value)


def test_text_is_skipped_with_a_line_and_other_parts_by_name() -> None:
    made, spec = make_described(TOLD)
    assert [leaf.path for leaf in spec.obs] == ["obs/noise", "obs/pos"]
    made.close()
    vector = make_vector(TOLD, {"wrappers": [{"SkipObservation": {"keys": ["noise"]}}]}, 2, seed=0)
    assert [leaf.path for leaf in vector.spec.obs] == ["obs/pos"]
    assert vector.note == f"mission of env {TOLD!r} is skipped: no network reads such a space"
    assert list(vector.reset()) == ["obs/pos"]
    vector.close()
    warned = [f.detail for f in check_env(TOLD, steps=50).findings if f.level == "warning"]
    assert any("mission of env" in detail for detail in warned)


def test_an_observation_of_text_alone_is_refused() -> None:
    with pytest.raises(UsageError, match=r"observation space Text.*allowed: Box"):
        make_described(TOLD, {"wrappers": [{"SkipObservation": {"keys": ["pos", "noise"]}}]})


def test_evaluation_is_without_wrappers_of_rewards() -> None:
    both, doubled = "tests.envs.wrapped_envs:HalfOfBoth", "tests.envs.wrapped_envs:Doubled"
    args = {"wrappers": [CLIP, HALF, both, doubled, {"FrameStack": {"frames": 2}}], "more": 1}
    assert for_evaluation(args) == {"wrappers": [{both: {}}, {"FrameStack": {"frames": 2}}], "more": 1}
    assert for_evaluation({"wrappers": [CLIP]}) == {}
    assert for_evaluation({"more": 1}) == {"more": 1}


def test_a_stack_of_vectors_shows_the_newest_last() -> None:
    env = FrameStack(gymnasium.make("CartPole-v1"), 3)
    first, _ = env.reset(seed=1)
    assert env.observation_space.shape == (12,)
    assert (first.reshape(3, 4) == first[:4]).all()
    second, *_ = env.step(0)
    assert (second[:8] == first[4:]).all()
    assert (second[8:] != first[:4]).any()
    env.close()


def _weights(out: Path, **more: Any) -> tuple[np.ndarray, float]:
    settings = {"sampling.envs": 4, "sampling.fragment": 32, "eval.final_episodes": 20, "eval.episodes": 5}
    wrapped = {"env_args.wrappers": [{"SkipObservation": {"keys": ["noise"]}}, HALF]}
    steps = more.pop("steps", 512)
    run = raynforce.train(TOLD, algo="ppo", steps=steps, out=out, settings=settings | wrapped, progress="quiet", **more)
    return raynforce.load(run.path, "last").version.params, float(raynforce.evaluate(run.path, seed=3)[0].max())


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["process", "ray"])
def test_runs_are_equal_on_every_runtime(tmp_path: Path, runtime: str) -> None:
    inline, _ = _weights(tmp_path / "inline", runtime="inline")
    other, _ = _weights(tmp_path / runtime, runtime=runtime)
    assert (inline == other).all()


def test_a_resumed_run_is_the_one_that_went_through_and_evaluation_has_the_environments_own_rewards(
    tmp_path: Path,
) -> None:
    whole, best = _weights(tmp_path / "whole", runtime="inline")
    assert best > 15  # halved, 15 is the most there is
    _weights(tmp_path / "part", runtime="inline", steps=256)
    run = raynforce.resume(tmp_path / "part", steps=512)
    assert (raynforce.load(run.path, "last").version.params == whole).all()


def test_replay_keeps_stacked_vectors_once(tmp_path: Path) -> None:
    small = {"env_args.wrappers": [{"FrameStack": {"frames": 3}}], "algorithm.learning_starts": 64}
    run = raynforce.train("CartPole-v1", algo="dqn", steps=256, out=tmp_path / "run", settings=small, progress="quiet")
    acting = raynforce.load(run.path, "last").spec
    assert (acting.env.obs[0].shape, acting.env.obs[0].stack) == ((12,), 3)
