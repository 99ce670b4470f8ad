"""The reader: fragments of recorded episodes are those that a sampler would have sent, and it goes on where it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recordings import assert_equal, episodes_of
from test_data_files import written

from raynforce.data.episodes import Gathering, joined, to_recorded
from raynforce.envs.vector import EnvArgs
from raynforce.errors import UsageError
from raynforce.policies.acting import PolicyVersion
from raynforce.policies.chance import ChanceActor
from raynforce.roles.reader import Reader
from raynforce.roles.sampler import Sampler
from raynforce.spaces import EnvSpec

LENGTHS = (3, 1, 4, 2)


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[EnvSpec, str]:
    spec, episodes = episodes_of("numbers", LENGTHS)
    return spec, str(written(tmp_path / "x.parquet", spec, episodes))


def test_a_lane_reads_whole_episodes_in_a_shuffled_order_each_once_in_a_pass(recorded: tuple[EnvSpec, str]) -> None:
    spec, path = recorded
    _, episodes = episodes_of("numbers", LENGTHS)
    reader, gathering, found = Reader(path, spec, 1, 7, seed=3), Gathering(spec, 1), []
    for number in range(30):
        fragment, receipt = reader.produce(number)
        assert (fragment.version, fragment.sequence, receipt.record.steps) == (number, number, 7)
        assert fragment["valid"].all()
        found += gathering.add(fragment)[0]
    known = {one.reward.tobytes(): k for k, one in enumerate(episodes.each())}
    order = [known[one.reward.tobytes()] for one in found[1:]]  # the first began somewhere in the middle
    passes = [tuple(order[3 + 4 * k : 7 + 4 * k]) for k in range(len(order) // 4 - 1)]  # which ends the first pass
    assert all(sorted(each) == [0, 1, 2, 3] for each in passes)
    assert len(set(passes)) > 1
    whole = {known[one.reward.tobytes()]: one for one in found[1:]}
    np.testing.assert_array_equal(to_recorded(spec.action, whole[2].action), list(episodes.each())[2].action)
    assert_equal(joined([whole[k] for k in range(4)], spec), episodes)


def test_returns_lengths_and_first_steps_are_those_of_whole_episodes(recorded: tuple[EnvSpec, str]) -> None:
    spec, path = recorded
    _, episodes = episodes_of("numbers", LENGTHS)
    known = {(np.float32(r), n) for r, n in zip(episodes.returns(), LENGTHS, strict=True)}
    reader = Reader(path, spec, 5, 6, seed=0)
    ended = 0
    for number in range(10):
        fragment, _ = reader.produce(number)
        for total, length in zip(fragment["episode/return"], fragment["episode/length"], strict=True):
            assert any(length == n and total == pytest.approx(r) for r, n in known)
        ends = fragment["terminated"] | fragment["truncated"]
        assert fragment["first"][1:].tolist() == ends[:-1].tolist()
        assert len(fragment["final/index"]) == ends.sum() == len(fragment["episode/return"])
        ended += int(ends.sum())
    assert ended > 50


def test_it_goes_on_where_it_was_and_in_another_order_without_a_state(recorded: tuple[EnvSpec, str]) -> None:
    spec, path = recorded
    one, other = (Reader(path, spec, 3, 5, seed=1) for _ in range(2))
    for number in range(4):
        one.produce(number)
    other.load(one.state())
    for number in range(4, 12):
        here, there = one.produce(number)[0], other.produce(number)[0]
        assert here.columns.keys() == there.columns.keys()
        for name, column in here.columns.items():
            np.testing.assert_array_equal(column, there[name])
    other.start_fresh(20, attempt=1)
    fresh = other.produce(12)[0]
    assert fresh.sequence == 20
    assert not np.array_equal(fresh["obs"], Reader(path, spec, 3, 5, seed=1).produce(0)[0]["obs"])


def test_other_data_is_refused_at_a_resume(recorded: tuple[EnvSpec, str], tmp_path: Path) -> None:
    spec, path = recorded
    other = written(tmp_path / "other.parquet", *episodes_of("numbers", (5, 5)))
    with pytest.raises(UsageError, match="is not what this run has learned from so far"):
        Reader(str(other), spec, 3, 5, seed=1).load(Reader(path, spec, 3, 5, seed=1).state())


@pytest.mark.parametrize("env", ["raynforce.envs.tiny:Corridor", "CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize("exact", [True, False])
def test_gathering_finds_the_episodes_of_a_sampler(env: str, exact: bool) -> None:
    """Of every kind of vector: those that show the next episode at once, and those that reset with a step."""
    from raynforce.envs.vector import probe

    spec = probe(env)
    actor: Any = ChanceActor(spec)
    sampler = Sampler(actor.spec, EnvArgs(env, 3, 0, exact_resume=exact), 64, actor=actor)
    gathering, found, totals = Gathering(spec, 3), [], []
    for _ in range(12):
        fragment = sampler.sample(PolicyVersion(0, np.zeros(0, np.float32)))
        found += [one for lane in gathering.add(fragment) for one in lane]
        totals += list(zip(fragment["episode/return"].tolist(), fragment["episode/length"].tolist(), strict=True))
    sampler.close()
    assert len(found) == len(totals) > 5
    ours = sorted((len(one.reward), float(one.reward.sum())) for one in found)
    np.testing.assert_allclose(ours, sorted((n, total) for total, n in totals), rtol=1e-4)
    for one in found:
        assert len(one.obs["obs"]) == len(one.reward) + 1
        assert one.terminated or one.truncated
    if env.endswith("Corridor"):
        for one in found:  # a step moves by one, and ends at the goal
            place = one.obs["obs"]
            expected = np.maximum(0, place[:-1] + np.where(one.action == 1, 1, -1))
            np.testing.assert_array_equal(place[1:], expected)
            assert one.terminated == (place[-1] == 8)
