"""The roles by themselves: what a sampler, a learner and an evaluator promise."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

import raynforce
from raynforce.algos.dqn import DQN
from raynforce.algos.ppo import PPO
from raynforce.config import Config
from raynforce.envs.vector import EnvArgs, probe
from raynforce.errors import RaynforceError
from raynforce.experience.fragment import Fragment
from raynforce.experiment import resolve
from raynforce.policies.acting import Actor, PolicyVersion
from raynforce.policies.distributions import EpsilonGreedy
from raynforce.roles import sampler as sampler_module
from raynforce.roles.evaluator import Evaluator
from raynforce.roles.learner import Learner
from raynforce.roles.sampler import Sampler


def configured(env: str, **more: Any) -> Config:
    layers = {"env": env, "preset": "none", "sampling": {"envs": 3, "fragment": 7}}
    return resolve(layers, more)[0]


def roles(env: str, **more: Any) -> tuple[Learner, list[Sampler]]:
    config = configured(env, **more)
    spec = probe(config.env, config.env_args)
    learner = Learner(config, spec)
    args = EnvArgs(config.env, config.sampling.envs, config.seed)
    acting = learner._algo.acting()
    samplers = [Sampler(acting, args, config.sampling.fragment, i) for i in range(config.sampling.samplers)]
    return learner, samplers


def equal(a: Fragment, b: Fragment) -> bool:
    same = all(np.array_equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a.columns)
    return set(a.columns) == set(b.columns) and same and a.sequence == b.sequence


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1", "raynforce.envs.tiny:DictIdentity"])
def test_a_sampler_rebuilt_from_its_state_makes_the_same_fragments(env: str) -> None:
    learner, (sampler,) = roles(env)
    version = learner.publish()
    sampler.sample(version)
    state = sampler.state()
    after = [sampler.sample(version) for _ in range(3)]
    _, (other,) = roles(env)
    assert other.load(state) == []
    assert all(equal(a, other.sample(version)) for a in after)


def test_fragments_are_contiguous_read_only_and_continue_each_other() -> None:
    learner, (sampler,) = roles("CartPole-v1")
    first, second = (sampler.sample(learner.publish()) for _ in range(2))
    for column in first.columns.values():
        assert column.flags.c_contiguous
        assert not column.flags.writeable
    assert np.array_equal(first["obs"][-1], second["obs"][0])
    assert (first.sequence, second.sequence) == (0, 1)
    assert first["obs"].shape == (8, 3, 4)
    assert first["logp"].dtype == np.float32


def test_probability_ratios_that_overflow_are_told_once() -> None:
    learner, (sampler,) = roles("CartPole-v1")
    fragment = sampler.sample(learner.publish())
    far = replace(fragment, columns={**fragment.columns, "logp": np.full_like(fragment["logp"], -1000)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RaynforceError, match="training diverged"):
            learner.learn(far)


def test_samplers_see_different_episodes() -> None:
    learner, samplers = roles("CartPole-v1", sampling={"samplers": 2})
    one, two = (s.sample(learner.publish()) for s in samplers)
    assert not np.array_equal(one["obs"][0], two["obs"][0])


def test_episode_returns_are_counted_across_fragments() -> None:
    learner, (sampler,) = roles("raynforce.envs.tiny:Endless", sampling={"fragment": 7})
    fragments = [sampler.sample(learner.publish()) for _ in range(3)]  # episodes of ten steps, 21 steps
    assert np.concatenate([f["episode/return"] for f in fragments]).tolist() == [10.0] * 6
    assert np.concatenate([f["episode/length"] for f in fragments]).tolist() == [10] * 6


def exponents(sampler: Sampler) -> np.ndarray:
    distribution = sampler._actor.distribution
    assert isinstance(distribution, EpsilonGreedy)
    return np.asarray(distribution.exponent)


def test_the_number_of_samplers_does_not_change_how_much_is_explored() -> None:
    config = configured("CartPole-v1", algo="dqn", algorithm={"epsilon_ladder": 3.0})
    acting = DQN(config, probe("CartPole-v1")).acting()
    alone = exponents(Sampler(acting, EnvArgs("CartPole-v1", 6, 0), 7))
    np.testing.assert_allclose(alone, [3.0 ** (2 * (g + 0.5) / 6 - 1) for g in range(6)])
    two = [exponents(Sampler(acting, EnvArgs("CartPole-v1", 3, 0), 7, i, 2)) for i in range(2)]
    np.testing.assert_allclose(two, [alone[::2], alone[1::2]])  # each has lanes of all kinds


@pytest.mark.parametrize(
    ("setting", "topology", "ladder"),
    [(None, "sync", 1.0), (None, "async", 1.0), (None, "replay", 3.0), (1.0, "replay", 1.0), (8.0, "sync", 8.0)],
)
def test_the_ladder_of_dqn(setting: float | None, topology: Any, ladder: float) -> None:
    config = replace(configured("CartPole-v1", algo="dqn", algorithm={"epsilon_ladder": setting}), topology=topology)
    assert DQN(config, probe("CartPole-v1")).acting().ladder == ladder


def test_a_level_ladder_changes_nothing_and_a_steep_one_does() -> None:
    found = []
    for ladder in (None, 1.0, 3.0):
        learner, (sampler,) = roles("CartPole-v1", algo="dqn", algorithm={"epsilon_ladder": ladder})
        version = replace(learner.publish(), schedules={"epsilon": 0.5})
        found.append([sampler.sample(version) for _ in range(3)])
    assert all(equal(a, b) for a, b in zip(found[0], found[1], strict=True))
    assert not all(equal(a, b) for a, b in zip(found[0], found[2], strict=True))


def test_a_run_tells_its_samplers_how_many_they_are_and_goes_on_with_another_ladder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(sampler_module, "Actor", lambda *args, **more: made.append(more) or Actor(*args, **more))
    config = {
        "preset": "none",
        "algorithm": {"learning_starts": 30, "prioritized": True},
        "sampling": {"samplers": 2, "envs": 3},
        "eval": {"episodes": 1, "final_episodes": 1},
    }
    run = raynforce.train(
        "CartPole-v1", "dqn", steps=96, runtime="inline", out=tmp_path / "run", config=config, progress="quiet"
    )
    assert sorted(x for more in made for x in more["places"]) == pytest.approx((np.arange(6) + 0.5) / 6)
    changed = {"algorithm.epsilon_ladder": 3.0}
    assert raynforce.resume(run.path, steps=192, settings=changed, progress="quiet").result.steps >= 192
    assert raynforce.load(run.path, "last").spec.ladder == 3.0


def test_the_normaliser_is_updated_after_learning_with_what_was_sampled() -> None:
    learner, (sampler,) = roles("Pendulum-v1", network={"normalize_obs": True})
    before = learner.publish()
    assert before.shift is not None
    assert not before.shift.any()
    fragment = sampler.sample(before)
    learner.learn(fragment)
    after = learner.publish()
    seen = fragment["obs"][:-1].reshape(-1, 3).astype(np.float64)
    assert after.shift == pytest.approx(seen.mean(0), rel=1e-5, abs=1e-6)
    assert after.scale == pytest.approx(1 / seen.std(0), rel=1e-4)


def test_sampler_and_learner_normalise_alike_from_the_first_version_on() -> None:
    learner, (sampler,) = roles("Pendulum-v1", network={"normalize_obs": True})
    far = {"obs": np.full((2, 3), 100.0, np.float32)}  # beyond the clip, which is part of the layer
    for _ in range(2):
        version = learner.publish()
        sampler._actor.load(version)
        acted, learned = sampler._actor.outputs(far)["policy"], learner._net.predict(far)["policy"]
        assert acted == pytest.approx(learned, abs=1e-5)
        learner.learn(sampler.sample(version))


def test_the_reward_scale_by_hand() -> None:
    settings = {"learner": {"scale_rewards": True}, "algorithm": {"gamma": 0.5}, "sampling": {"samplers": 2, "envs": 1}}
    learner, samplers = roles("raynforce.envs.tiny:Endless", **settings)
    version = learner.publish()
    learner.learn(*(s.sample(version) for s in samplers))
    # Reward 1 for ever, cut after ten steps: running returns 1, 1.5, 1.75, … in both samplers, seven steps each.
    running, total = [], 0.0
    for _ in range(7):
        total = 1 + 0.5 * total
        running.append(total)
    assert learner._algo.reward_scale == pytest.approx(1 / np.std(running * 2))


def test_rewards_that_never_vary_are_not_scaled() -> None:
    settings = {"learner": {"scale_rewards": True}, "env_args": {"n": 1}}  # one choice, always right
    learner, (sampler,) = roles("raynforce.envs.tiny:Identity", **settings)
    sampler = Sampler(learner._algo.acting(), EnvArgs("raynforce.envs.tiny:Identity", 3, 0, {"n": 1}), 7)
    learner.learn(sampler.sample(learner.publish()))
    assert learner._algo.reward_scale == 1.0


def test_the_order_of_arrival_does_not_matter() -> None:
    hashes = []
    for order in (1, -1):
        settings = {"learner": {"scale_rewards": True}, "network": {"normalize_obs": True}, "sampling": {"samplers": 2}}
        learner, samplers = roles("Pendulum-v1", **settings)
        version = learner.publish()
        for _ in range(2):
            learner.learn(*[s.sample(version) for s in samplers][::order])
            version = learner.publish()
        hashes.append(version.params.tobytes())
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize("tolerated", [0, 1])
def test_fragments_older_than_the_algorithm_can_learn_from_are_refused(
    tolerated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PPO, "max_lag", tolerated)
    learner, (sampler,) = roles("CartPole-v1")
    fragment = sampler.sample(learner.publish())
    for lag in range(tolerated + 1):
        assert learner.learn(fragment).metrics["lag/max"] == lag
    with pytest.raises(RaynforceError, match=f"at most {tolerated} versions old, not {tolerated + 1}"):
        learner.learn(fragment)


def test_a_round_that_only_resets_is_no_error() -> None:
    settings = {"sampling": {"envs": 1, "fragment": 1}}
    learner, (sampler,) = roles("CartPole-v1", **settings)
    version, updates = learner.publish(), []
    for _ in range(60):
        learned = learner.learn(sampler.sample(version))
        version = learner.publish()
        updates.append((learned.steps, learned.updates))
    assert (0, 0) in updates
    assert (1, 10) in updates


def test_nobody_elses_random_numbers_change_the_learning() -> None:
    def weights(disturb: bool) -> bytes:
        learner, (sampler,) = roles("CartPole-v1")
        if disturb:
            torch.rand(3)
        before = torch.get_rng_state()
        learner.learn(sampler.sample(learner.publish()))
        assert torch.equal(torch.get_rng_state(), before)
        return learner.publish().params.tobytes()

    assert weights(False) == weights(True)


class Lottery(gymnasium.Env[np.ndarray, int]):
    """Half of the episodes last one step and pay 0, half last 19 and pay 1: counting early ends sees too many 0."""

    observation_space = gymnasium.spaces.Box(0.0, 1.0, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.left = 1 if self.np_random.random() < 0.5 else 19
        self.prize = float(self.left == 19)
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        over = self.left == 0
        return np.zeros(1, np.float32), self.prize if over else 0.0, over, False, {}


@pytest.fixture
def evaluator() -> Iterator[tuple[Evaluator, PolicyVersion]]:
    name = f"{__name__}:Lottery"
    learner, _ = roles(name)
    made = Evaluator(learner._algo.acting(), EnvArgs(name, 10, seed=0))
    yield made, learner.publish()
    made.close()


def play(made: Evaluator, version: PolicyVersion, episodes: int, **how: int) -> np.ndarray:
    made.begin(version, episodes, **how)
    return made.advance().returns


def test_evaluation_does_not_favour_short_episodes(evaluator: tuple[Evaluator, PolicyVersion]) -> None:
    made, version = evaluator
    returns = play(made, version, 400)
    assert len(returns) == 400
    assert returns.mean() == pytest.approx(0.5, abs=0.1)  # four deviations


def test_the_same_version_plays_the_same_episodes_and_another_others(
    evaluator: tuple[Evaluator, PolicyVersion],
) -> None:
    made, version = evaluator
    first, again = play(made, version, 50), play(made, version, 50)
    other = play(made, PolicyVersion(1, version.params, schedules=version.schedules), 50)
    final = play(made, version, 50, purpose=1)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert not np.array_equal(first, final)


def test_episodes_without_end_are_cut(evaluator: tuple[Evaluator, PolicyVersion]) -> None:
    made, version = evaluator
    returns = play(made, version, 10, max_length=5)
    assert (returns == 0).all()


def test_an_evaluation_is_played_in_pieces_and_can_be_given_up() -> None:
    name = f"{__name__}:Slow"
    learner, _ = roles(name, sampling={"envs": 1, "fragment": 1})
    made = Evaluator(learner._algo.acting(), EnvArgs(name, 1, 0))
    made.begin(learner.publish(), 100)
    pieces = [made.advance(0.05) for _ in range(2)]
    assert [piece.over for piece in pieces] == [False, False]
    made.begin(learner.publish(), 1)
    assert made.advance().over


class Slow(Lottery):
    """Each step takes 50 ms."""

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        import time

        time.sleep(0.05)
        return super().step(action)


def test_a_lane_that_is_twice_in_a_fragment_goes_on_in_it() -> None:
    """As where environments go their own pace."""

    def part(lanes: list[int], sequence: int) -> Fragment:
        zeros = np.zeros((1, len(lanes)), bool)
        rewards = np.array([[2.0**lane for lane in lanes]], np.float32)
        columns = {"reward": rewards, "terminated": zeros, "truncated": zeros, "first": zeros, "valid": ~zeros}
        return Fragment({**columns, "lane": np.array(lanes)}, 0, 0, sequence)

    settings: dict[str, Any] = {"learner": {"scale_rewards": True}, "algorithm": {"gamma": 0.5}}
    (one, _), (two, _) = (roles("CartPole-v1", **settings) for _ in range(2))
    together = one._updated_reward_scale([part([2, 0, 2, 2], 0)])
    apart = two._updated_reward_scale([part([2, 0], 0), part([2], 1), part([2], 2)])
    assert together == apart
    assert one._running_returns[0].tolist() == two._running_returns[0].tolist() == [1.0, 0.0, 7.0]


def test_a_lane_that_is_cut_short_goes_on_in_the_next_fragment() -> None:
    """A lane with fewer rows than others is truncated there; its return goes on, in what rewards are scaled by."""

    def part(rows: int, sequence: int, *, begins: bool) -> Fragment:
        valid = np.stack([np.ones(6, bool), np.arange(6) < rows], axis=1)  # [T, B]
        first, truncated = np.zeros((6, 2), bool), np.zeros((6, 2), bool)
        first[0], truncated[rows - 1, 1] = begins, rows < 6
        reward = (1.0 + sequence + np.zeros((6, 2), np.float32)) * valid
        columns = {"reward": reward, "terminated": np.zeros((6, 2), bool), "truncated": truncated}
        return Fragment({**columns, "first": first, "valid": valid}, 0, 0, sequence)

    settings: dict[str, Any] = {"learner": {"scale_rewards": True}, "algorithm": {"gamma": 0.5}}
    learner, _ = roles("CartPole-v1", **settings)
    for sequence, rows in enumerate((2, 1, 6)):
        scale = learner._updated_reward_scale([part(rows, sequence, begins=not sequence)])
    seen = [[1.0 + i // 6 for i in range(18)], [1.0, 1.0, 2.0, *[3.0] * 6]]  # rewards of each lane, without an end
    returns = []
    for rewards in seen:
        so_far = 0.0
        for reward in rewards:
            so_far = 0.5 * so_far + reward
            returns.append(so_far)
    assert scale == pytest.approx(1 / np.std(returns))
