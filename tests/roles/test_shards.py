"""A replay shard: what it draws, and what it does when it has lost everything."""

from __future__ import annotations

import numpy as np

from raynforce.algos import algorithm_class
from raynforce.config import Config
from raynforce.envs.vector import EnvArgs, probe
from raynforce.experiment import resolve
from raynforce.roles.learner import Learner
from raynforce.roles.replay_shard import ReplayShard
from raynforce.roles.sampler import Sampler

ENV = "CartPole-v1"


def config(prioritized: bool) -> Config:
    return resolve(
        {
            "env": ENV,
            "algo": "dqn",
            "runtime": "inline",
            "topology": "replay",
            "steps": 10_000,
            "sampling": {"samplers": 2, "envs": 2, "fragment": 16},
            "replay": {"shards": 2},
            "algorithm": {"prioritized": prioritized, "buffer_size": 1000, "batch_size": 8},
        }
    )[0]


def test_a_shard_is_filled_drawn_from_and_told_the_errors() -> None:
    given, env = config(True), probe(ENV, {})
    acting = algorithm_class("dqn")(given, env).acting()
    learner, shards = Learner(given, env), [ReplayShard(given, env, index) for index in range(2)]
    samplers = [Sampler(acting, EnvArgs(ENV, 2, 0), 16, index, 2) for index in range(2)]
    for sampler, shard in zip(samplers, shards, strict=True):
        fragment, _ = sampler.produce(learner.publish())
        mass, metrics = shard.insert(fragment)
        assert mass > 0
        assert metrics["replay/size"] > 0
    counts = np.array([[5, 3], [2, 6]])
    drawn = [shard.draw(counts[:, index], shard.told()[0])[0] for index, shard in enumerate(shards)]
    assert [len(draw["reward"]) for draw in drawn if draw is not None] == [7, 9]
    errors, learned = learner.learn_drawn([], counts, [0, 1], *drawn)
    assert learned.updates == 2
    before = [shard.told()[0] for shard in shards]
    after = [shard.update(errors)[0] for shard in shards]
    assert all(a != b for a, b in zip(before, after, strict=True))


def test_one_that_has_lost_everything_gives_nothing_and_the_others_go_on() -> None:
    given, env = config(False), probe(ENV, {})
    acting = algorithm_class("dqn")(given, env).acting()
    learner, full, empty = Learner(given, env), ReplayShard(given, env, 0), ReplayShard(given, env, 1)
    empty.start_fresh(1)
    full.insert(Sampler(acting, EnvArgs(ENV, 2, 0), 16, 0, 2).produce(learner.publish())[0])
    counts = np.array([[5, 3], [0, 8]])
    nothing, (mass, _) = empty.draw(counts[:, 1], 10.0)
    assert nothing is None
    assert mass == 0
    drawn, _ = full.draw(counts[:, 0], 10.0)
    _, learned = learner.learn_drawn([], counts, [0, 1], drawn, nothing)
    assert learned.updates == 1, "nothing is left of the second"
