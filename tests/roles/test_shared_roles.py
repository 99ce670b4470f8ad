"""A shared agent and its workers by themselves: what is computed, applied, refused, counted and remembered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from raynforce.algos import algorithm_class
from raynforce.algos.off_policy import OffPolicy
from raynforce.config import Config
from raynforce.envs.vector import EnvArgs, probe
from raynforce.experience.counts import RECENT, Counts
from raynforce.experience.record import Record
from raynforce.experiment import resolve
from raynforce.policies.normalizer import RunningStats
from raynforce.roles.adam import Adam
from raynforce.roles.gradient_worker import GradientWorker
from raynforce.roles.learned import Contribution
from raynforce.roles.learner import Learner
from raynforce.roles.sampler import Sampler
from raynforce.trees import segments

DQN = {"learning_starts": 60, "buffer_size": 600, "batch_size": 16, "samples_per_insert": 8, "target_every": 10}


def configured(algo: str, env: str = "CartPole-v1", topology: str = "shared-agent", **more: Any) -> Config:
    layers: dict[str, Any] = {"env": env, "algo": algo, "preset": "none", "topology": topology}
    layers |= {"sampling": {"envs": 3, "fragment": 7, "samplers": 2}}
    if algo == "dqn":
        layers["algorithm"] = DQN
    return resolve(layers, more)[0]


def make(config: Config) -> tuple[Learner, list[GradientWorker]]:
    spec = probe(config.env, config.env_args)
    acting = algorithm_class(config.algo)(config, spec).acting()
    args = EnvArgs(config.env, config.sampling.envs, config.seed)
    return Learner(config, spec, gathers_gradients=True), [
        GradientWorker(config, acting, args, i) for i in range(config.sampling.samplers)
    ]


def weights(agent: Learner) -> np.ndarray:
    return agent.publish().params


def gathered(agent: Learner, workers: list[GradientWorker], rounds: int) -> list[Contribution]:
    """Contributions, all of one version, of which the agent knows nothing yet."""
    version = agent.publish()
    return [worker.work(version)[0] for _ in range(rounds) for worker in workers]


# -- what is computed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_one_worker_is_the_algorithm_itself(env: str) -> None:
    """With one worker nothing is ever old: the agent goes the way of a learner that gets the fragments."""
    more: dict[str, Any] = {"sampling": {"samplers": 1}, "network": {"normalize_obs": True}}
    agent, (worker,) = make(configured("a3c", env, **more))
    config = configured("a3c", env, "sync", **more)
    learner = Learner(config, probe(env, {}))
    sampler = Sampler(learner._algo.acting(), EnvArgs(env, 3, config.seed), 7)
    for _ in range(5):
        told = agent.apply_contributions(worker.work(agent.publish())[0])
        expected = learner.learn(sampler.sample(learner.publish()))
        assert (told.number, told.updates, told.steps) == (expected.number, expected.updates, expected.steps)
        assert told.trained[0].returns.tolist() == expected.trained[0].returns.tolist()
        assert [r.key for r in told.trained] == [r.key for r in expected.trained]
        assert told.metrics["losses/value_loss"] == pytest.approx(expected.metrics["losses/value_loss"])
        assert np.array_equal(weights(agent), weights(learner))
    ours, theirs = agent.publish(), learner.publish()
    np.testing.assert_allclose(ours.shift, theirs.shift)
    np.testing.assert_allclose(ours.scale, theirs.scale)


def test_each_worker_has_its_share_of_the_buffer_and_holds_the_ratio() -> None:
    agent, workers = make(configured("dqn"))
    updates, told = 0, None
    for _ in range(40):
        told = agent.apply_contributions(*gathered(agent, workers, 1))
        updates += told.updates
    assert told is not None
    assert told.metrics["replay/samples_per_insert"] == pytest.approx(8, rel=0.1)
    assert updates * 16 == pytest.approx((agent._steps - 60) * 8, rel=0.1)
    for worker in workers:
        algo = worker._algo
        assert isinstance(algo, OffPolicy)
        assert algo.replay is not None
        assert algo.replay.capacity <= 300
        assert algo.replay.samplers == 1
        assert algo.limiter.starts == 30
        assert worker.work(agent.publish())[1].kept == algo.replay.resident > 100
    assert isinstance(agent._algo, OffPolicy)
    assert agent._algo.replay is None


def test_target_networks_follow_the_updates_of_all() -> None:
    agent, (one, other) = make(configured("dqn"))
    while not len(other.work(agent.publish())[0].gradients):
        pass  # its buffer is filled, and its target network that of the beginning
    while agent._algo.updates < 10:  # by gradients of the other worker alone
        agent.apply_contributions(one.work(agent.publish())[0])
    version = agent.publish()
    assert not np.array_equal(other._algo.target.numpy(), version.params)  # type: ignore[attr-defined]
    assert len(other.work(version)[0].gradients) > 0
    assert np.array_equal(other._algo.target.numpy(), version.params)  # type: ignore[attr-defined]


# -- what is applied ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("algo", ["dqn", "a3c"])
@pytest.mark.parametrize("annealed", [False, True])
def test_gradients_of_many_workers_are_applied_one_after_another(algo: str, annealed: bool) -> None:
    """All in one call, each in its own, or by the optimiser alone: it is the same."""
    hp = {"anneal_learning_rate": annealed, "max_grad_norm": 0.01}
    config = configured(algo, steps=2000, sampling={"samplers": 4}, algorithm=hp)
    together, workers = make(config)
    contributions = gathered(together, workers, 4)
    kept = [c.gradients.copy() for c in contributions]
    flat = torch.tensor(weights(together))
    adam, steps, seen = Adam(flat, config.algorithm.adam_epsilon), 0, 0
    for c in contributions:
        rate = config.algorithm.learning_rate * (1 - steps / 2000 if annealed else 1.0)
        for gradient in torch.tensor(c.gradients):
            adam.step(gradient, rate, 0.01)
            seen += 1
        steps += c.record.steps
    assert seen > 10

    told = together.apply_contributions(*contributions)
    assert (told.updates, told.number) == (seen, len(contributions))
    np.testing.assert_array_equal(weights(together), flat.numpy())
    one_by_one, _ = make(config)
    for c in contributions:
        one_by_one.apply_contributions(c)
    np.testing.assert_array_equal(weights(one_by_one), flat.numpy())
    for c, gradients in zip(contributions, kept, strict=True):
        np.testing.assert_array_equal(c.gradients, gradients, "what was received is left as it is")


def test_the_order_counts() -> None:
    agent, workers = make(configured("a3c"))
    contributions = gathered(agent, workers, 1)
    other, _ = make(configured("a3c"))
    agent.apply_contributions(*contributions)
    other.apply_contributions(*reversed(contributions))
    assert not np.array_equal(weights(agent), weights(other))


@pytest.mark.parametrize("algo", ["dqn", "a3c"])
def test_what_is_too_old_is_refused_and_counted(algo: str) -> None:
    agent, workers = make(configured(algo, stream={"max_lag": 2}))
    contributions = gathered(agent, workers, 4)
    filling = [c for c in contributions if not len(c.gradients)]
    assert len(filling) == (2 if algo == "dqn" else 0)
    contributions = contributions[len(filling) :][:4]
    told = agent.apply_contributions(*contributions[:3])
    assert told.dropped == []
    assert told.metrics["agent/refused"] == 0
    before, number, steps = weights(agent), told.number, agent._steps
    told = agent.apply_contributions(contributions[3])
    assert told.number == number
    assert np.array_equal(weights(agent), before)
    assert told.metrics["agent/refused"] == 1
    assert told.metrics["lag/max"] == 3
    assert agent.apply_contributions(*filling).metrics["agent/refused"] == 1, "without gradients nothing can be too old"
    late = contributions[3].record
    if algo == "dqn":  # its steps are in the worker's buffer, and will be learned from
        assert ([r.key for r in told.trained], told.dropped) == ([late.key], [])
        assert agent._steps == steps + late.steps + sum(c.record.steps for c in filling)
    else:
        assert (told.trained, [r.key for r in told.dropped], told.steps) == ([], [late.key], 0)
        assert agent._steps == steps


def test_statistics_of_parts_are_those_of_the_whole() -> None:
    rng = np.random.default_rng(0)
    whole, merged, parts = RunningStats(3), RunningStats(3), rng.normal(5, 2, (4, 50, 3))
    for part in [*parts, np.zeros((0, 3))]:
        own = RunningStats(3)
        own.update(part)
        merged.merge(own.state())
        whole.update(part)
    np.testing.assert_allclose(merged.mean, whole.mean)
    np.testing.assert_allclose(merged.variance, parts.reshape(-1, 3).var(axis=0))
    assert merged.count == 200


# -- what is counted ----------------------------------------------------------------------------------------


def record(steps: int, *returns: float) -> Record:
    return Record(0, 0, steps, np.array(returns, np.float32), np.ones(len(returns), np.int64))


def test_counts() -> None:
    counts = Counts()
    assert (counts.steps, counts.episodes, counts.best_return, counts.return_mean) == (0, 0, None, None)
    counts.add(record(10, -5.0, -7.0))
    counts.add(record(7))
    counts.add(record(3, *[-6.0] * RECENT))
    restored, older = Counts(), Counts()
    restored.load(counts.state())
    older.load({k: v for k, v in counts.state().items() if k != "lengths"})
    for found in (counts, restored, older):
        assert (found.steps, found.episodes) == (20, RECENT + 2)
        assert (found.best_return, found.return_mean) == (-5.0, -6.0)
    assert (restored.length_mean, older.length_mean) == (1.0, None)


# -- what is remembered -------------------------------------------------------------------------------------


def same(a: Contribution, b: Contribution) -> bool:
    records = a.record[:3] == b.record[:3] and np.array_equal(a.record.returns, b.record.returns)
    return np.array_equal(a.gradients, b.gradients) and records and a.metrics == b.metrics


@pytest.mark.parametrize("algo", ["dqn", "a3c"])
def test_a_worker_rebuilt_from_its_state_makes_the_same_contributions(algo: str) -> None:
    config = configured(algo, algorithm={"prioritized": True} if algo == "dqn" else {})
    agent, workers = make(config)
    for _ in range(5):
        agent.apply_contributions(*gathered(agent, workers, 1))
    state = workers[0].state()
    version = agent.publish()
    expected = [workers[0].work(version)[0] for _ in range(3)]
    _, (other, _) = make(config)
    assert other.load(state) == []
    for one in expected:
        assert same(other.work(version)[0], one)


def test_an_agent_rebuilt_from_its_state_goes_on_alike() -> None:
    config = configured("a3c", stream={"max_lag": 3}, network={"normalize_obs": True})
    agent, workers = make(config)
    agent.apply_contributions(*gathered(agent, workers, 3))
    other, _ = make(config)
    other.load(agent.state())
    contributions = gathered(agent, workers, 2)
    ours, theirs = agent.apply_contributions(*contributions), other.apply_contributions(*contributions)
    assert ours.metrics == theirs.metrics
    assert ours.metrics["agent/refused"] == 2
    assert np.array_equal(weights(agent), weights(other))


def test_a_contribution_as_a_tree() -> None:
    agent, workers = make(configured("a3c", network={"normalize_obs": True}))
    (one, _) = gathered(agent, workers, 1)
    other = Contribution.from_state(one.state())
    assert same(one, other)
    assert one.moments is not None
    assert other.moments is not None
    assert one.moments["count"] == other.moments["count"] == one.record.steps
    assert (other.record.key, other.version) == ((0, 0), 0)


def test_a_worker_that_begins_anew_has_other_episodes_and_names_for_what_it_keeps() -> None:
    agent, workers = make(configured("dqn"))
    for _ in range(8):
        agent.apply_contributions(*gathered(agent, workers, 1))
    version = agent.publish()
    _, (anew, _) = make(configured("dqn"))
    anew.start_fresh(20, 1)
    first = anew.work(version)[0]
    assert (first.record.sequence, len(first.gradients)) == (20, 0)
    assert np.array_equal(anew._algo.target.numpy(), version.params)  # type: ignore[attr-defined]
    for _ in range(7):
        last = anew.work(version)[0]
    assert len(last.gradients) > 0
    before = segments(workers[0].state())
    assert before
    assert not before.keys() & segments(anew.state()).keys(), "checkpoints would take them for the same"
    _, (other, _) = make(configured("dqn"))
    other.load(anew.state())
    assert same(other.work(version)[0], anew.work(version)[0])


def test_segments_that_are_known_are_left_out() -> None:
    agent, (worker, _) = make(configured("dqn"))
    worker.work(agent.publish())
    names = list(segments(worker.state()))
    assert names
    assert all(found == {} for found in segments(worker.state(names)).values())


def test_workers_begin_with_the_weights_they_are_given() -> None:
    """Also their target networks, where a run begins with those of another."""
    agent, (worker, _) = make(configured("dqn"))
    version = agent.publish()
    other = replace(version, params=version.params + 1)
    worker.work(other)
    assert np.array_equal(worker._algo.target.numpy(), other.params)  # type: ignore[attr-defined]
