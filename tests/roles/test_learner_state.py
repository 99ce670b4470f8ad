"""A learner's state: without what is saved already, and taken over by one with other samplers."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest

from raynforce.envs.vector import EnvArgs, probe
from raynforce.experiment import resolve
from raynforce.roles.learner import Learner
from raynforce.roles.sampler import Sampler
from raynforce.trees import without

DQN = {"algo": "dqn", "algorithm": {"learning_starts": 10, "prioritized": True, "buffer_size": 2000}}
SCALED = {"learner": {"scale_rewards": True}}


def roles(samplers: int, envs: int, **more: Any) -> tuple[Learner, list[Sampler]]:
    layers = {"env": "CartPole-v1", "preset": "none", "sampling": {"samplers": samplers, "envs": envs, "fragment": 7}}
    config = resolve(layers, more)[0]
    learner = Learner(config, probe(config.env, config.env_args))
    args = EnvArgs(config.env, envs, config.seed)
    acting = learner._algo.acting()
    return learner, [Sampler(acting, args, 7, i) for i in range(samplers)]


def rounds(learner: Learner, samplers: list[Sampler], count: int) -> None:
    for _ in range(count):
        version = learner.publish()
        learner.learn(*(s.sample(version) for s in samplers))


def test_segments_that_are_known_come_empty() -> None:
    learner, samplers = roles(1, 3, **DQN)
    rounds(learner, samplers, 10)
    whole = deepcopy(learner.state())
    names = list(whole["algo"]["replay"]["segments"])
    assert names == ["0-10"]
    short = learner.state(["0-9", "0-10", "7-10"])
    assert short["algo"]["replay"]["segments"] == {"0-10": {}}
    whole["algo"]["replay"]["segments"] = {"0-10": {}}
    np.testing.assert_equal(short, whole)
    assert learner.state(["0-9"])["algo"]["replay"]["segments"]["0-10"]


def test_without_leaves_the_tree_as_it_was() -> None:
    one, two = np.ones(1), np.full(1, 2)
    tree = {"a": {"segments": {"x": {"y": one}, "z": {"y": two}}}, "segments": {"x": {}}, "x": {"y": one}}
    before = deepcopy(tree)
    expected = {"a": {"segments": {"x": {}, "z": {"y": two}}}, "segments": {"x": {}}, "x": {"y": one}}
    np.testing.assert_equal(without(tree, {"x"}), expected)
    np.testing.assert_equal(tree, before)


@pytest.mark.parametrize("settings", [DQN, SCALED, {**DQN, **SCALED}])
@pytest.mark.parametrize(("count", "envs"), [(2, 3), (1, 3), (3, 3), (2, 2), (1, 7)])
def test_a_learner_goes_on_with_other_samplers(settings: dict[str, Any], count: int, envs: int) -> None:
    learner, samplers = roles(2, 3, **settings)
    rounds(learner, samplers, 12)
    state = deepcopy(learner.state())
    other, others = roles(count, envs, **settings)
    other.load(state)
    assert np.array_equal(other.publish().params, learner.publish().params)
    if (count, envs) == (2, 3):  # nothing is another
        others = samplers
        np.testing.assert_equal(other.state(), state)
        fragments = [s.sample(learner.publish()) for s in samplers]
        learner.learn(*fragments)
        other.learn(*fragments)
        assert np.array_equal(other.publish().params, learner.publish().params)
    rounds(other, others, 3)
    kept = other.state()["running_returns"]
    assert all(int(k) < count and len(v) == envs for k, v in kept.items())
