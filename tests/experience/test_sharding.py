"""Four shards sample what one buffer with all of it samples; the wrong ways to share a minibatch out do not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from replay_sources import Source
from saved_replays import make

from raynforce.errors import UsageError
from raynforce.experience.replay import Replay
from raynforce.experience.sharding import minibatches, portions, split_errors

BATCH, UPDATES = 64, 600
FILLS = (3, 9, 1, 30)  # fragments; the last one has come around
SCALES = (1.0, 4.0, 8.0, 0.3)  # of errors


def one_and_four(prioritized: bool) -> tuple[Replay, list[Replay]]:
    """The same streams in one buffer and in a buffer each."""
    one = make(60, 4, 2, n_step=2, prioritized=prioritized)
    four = [make(60, 1, 2, n_step=2, prioritized=prioritized) for _ in FILLS]
    for sampler, (fragments, scale) in enumerate(zip(FILLS, SCALES, strict=True)):
        source = Source(2, 5, sampler, p_end=0.1)
        for _ in range(fragments):
            fragment, _ = source.sample(6)
            error = scale * (1 + fragment["obs/id"][:-1] * 7919 % 13).astype(np.float32)
            fragment = replace(fragment, columns={**fragment.columns, "priority": error})
            one.insert(fragment)
            four[sampler].insert(replace(fragment, sampler=0))
    return one, four


def shares(one: Replay) -> dict[int, float]:
    """How likely each transition is, by its observation."""
    mass = one._tree.leaves[one._ready] if one._tree else np.ones(len(one))
    return dict(zip(one._ring.flat["obs/id"][one._ready].tolist(), (mass / mass.sum()).tolist(), strict=True))


def distance(expected: dict[int, float], ids: np.ndarray) -> float:
    """Chi-square in standard deviations from what the expected distribution itself would give, or a lower one."""
    assert set(ids.tolist()) <= set(expected)
    found = dict.fromkeys(expected, 0) | dict(zip(*np.unique(ids, return_counts=True), strict=True))
    want = np.array(list(expected.values())) * len(ids)
    chi_square = ((np.array([found[name] for name in expected]) - want) ** 2 / want).sum()
    freedom = len(expected) - 1
    return float((chi_square - freedom) / np.sqrt(2 * freedom))


def joined(four: list[Replay], counts: np.ndarray, seed: int = 1, beta: float = 1.0) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return list(minibatches([shard.draw(counts[:, k], rng) for k, shard in enumerate(four)], counts, beta))


def seen(batches: list[dict[str, np.ndarray]], path: str) -> np.ndarray:
    return np.concatenate([batch[path] for batch in batches])


@pytest.mark.parametrize("prioritized", [False, True])
def test_four_shards_sample_what_one_buffer_samples(prioritized: bool) -> None:
    one, four = one_and_four(prioritized)
    masses = [shard.mass for shard in four]
    assert sum(masses) == pytest.approx(one.mass, rel=1e-9)
    assert max(masses) > 5 * min(masses)
    rng, expected = np.random.default_rng(0), shares(one)

    ours = joined(four, portions(masses, BATCH, UPDATES, rng))
    whole = [one.sample(BATCH, rng, beta=1.0) for _ in range(UPDATES)]
    assert all(len(batch["index"]) == BATCH for batch in ours)
    assert distance(expected, seen(whole, "obs/id")) < 5
    assert distance(expected, seen(ours, "obs/id")) < 5
    # The same test finds out what is wrong: portions that are equal, or by the number of transitions.
    equal = joined(four, np.full((UPDATES, 4), BATCH // 4))
    assert distance(expected, seen(equal, "obs/id")) > 50
    if prioritized:
        by_size = portions([len(shard) for shard in four], BATCH, UPDATES, rng)
        assert distance(expected, seen(joined(four, by_size), "obs/id")) > 50

    # Weights too, and they do what they are for.
    assert seen(ours, "weight").mean() == pytest.approx(seen(whole, "weight").mean(), rel=0.05)
    if prioritized:
        assert abs(seen(equal, "weight").mean() / seen(whole, "weight").mean() - 1) > 0.1
    everything = np.array(list(expected)) // 1_000_000 == 3
    weighted = np.average(seen(ours, "obs/id") // 1_000_000 == 3, weights=seen(ours, "weight"))
    assert weighted == pytest.approx(everything.mean(), abs=0.03)


def test_weights_are_those_of_the_whole_minibatch() -> None:
    _, four = one_and_four(True)
    counts = np.array([[2, 3, 0, 4], [0, 0, 5, 1]])
    rng = np.random.default_rng(0)
    draws = [shard.draw(counts[:, k], rng) for k, shard in enumerate(four)]
    first, second = minibatches(draws, counts, beta=0.5)
    assert first["shard"].tolist() == [0] * 2 + [1] * 3 + [3] * 4
    assert second["shard"].tolist() == [2] * 5 + [3]
    assert first.keys() == four[0].sample(1, rng).keys() | {"shard"}
    priority = np.concatenate([draws[0]["priority"][:2], draws[1]["priority"], draws[3]["priority"][:4]])
    np.testing.assert_allclose(first["weight"], (priority / priority.min()) ** -0.5, rtol=1e-6)
    np.testing.assert_array_equal(second["index"], [*draws[2]["index"], draws[3]["index"][4]])
    assert {first["weight"].dtype, second["weight"].dtype} == {np.dtype(np.float32)}


def test_one_minibatch_of_a_draw_is_a_sample() -> None:
    one, _ = one_and_four(True)
    sample, draw = one.sample(50, np.random.default_rng(3), 0.7), one.draw(np.array([50]), np.random.default_rng(3))
    np.testing.assert_array_equal(sample["index"], draw["index"])
    np.testing.assert_array_equal(one._tree.leaves[draw["index"] % one.capacity], draw["priority"])  # type: ignore[union-attr]


def test_every_minibatch_of_a_draw_is_spread_over_all_priorities() -> None:
    replay = make(20, 1, 2, prioritized=True, alpha=1.0)
    source = Source(2, 0, p_end=0.0)
    for _ in range(3):
        replay.insert(source.sample(6)[0])
    counts = np.array([36, 0, 72, 36])  # 36 of equal priority: every one has its slice
    drawn = np.split(replay.draw(counts, np.random.default_rng(0))["obs/id"], counts.cumsum()[:-1])
    assert [sorted(part.tolist()) for part in drawn] == [
        sorted(replay._ring.flat["obs/id"][replay._ready].tolist() * k) for k in (1, 0, 2, 1)
    ]


def test_an_empty_shard_is_asked_for_nothing_and_gives_it() -> None:
    counts = portions([0.0, 3.0, 1.0, 0.0], 10, 2000, np.random.default_rng(0))
    assert counts.shape == (2000, 4)
    assert (counts.sum(axis=1) == 10).all()
    assert not counts[:, [0, 3]].any()
    assert counts[:, 1].mean() == pytest.approx(7.5, abs=0.1)
    for prioritized in (False, True):
        empty = make(n_step=3, prioritized=prioritized)
        assert empty.mass == 0.0
        draw = empty.draw(np.zeros(2, np.int64), np.random.default_rng(0))
        assert {len(column) for column in draw.values()} == {0}
        with pytest.raises(UsageError, match="none of the 0 transitions"):
            empty.draw(np.array([0, 1]), np.random.default_rng(0))
    with pytest.raises(UsageError, match="none of the 2 shards"):
        portions([0.0, 0.0], 10, 1, np.random.default_rng(0))


def test_a_shard_that_is_lost_is_left_out() -> None:
    _, four = one_and_four(False)
    counts = np.array([[2, 3, 0, 4], [0, 0, 5, 0], [1, 0, 0, 0]])
    draws = [shard.draw(counts[:, k], np.random.default_rng(k)) for k, shard in enumerate(four)]
    first, last = minibatches([draws[0], draws[1], None, draws[3]], counts, 0.4)  # nothing is left of the second
    assert (first["shard"].tolist(), last["shard"].tolist()) == ([0, 0, 1, 1, 1, 3, 3, 3, 3], [0])
    assert list(minibatches([None] * 4, counts, 0.4)) == []


def test_errors_go_back_to_where_the_transitions_are() -> None:
    _, four = one_and_four(True)
    batch = joined(four, portions([shard.mass for shard in four], 400, 1, np.random.default_rng(0)))[0]
    error = 100.0 + np.arange(400)
    back = split_errors(batch["shard"], batch["index"], error, 4)
    assert [len(index) for index, _ in back] == np.bincount(batch["shard"], minlength=4).tolist()
    for shard, (index, errors) in zip(four, back, strict=True):
        shard.update_priorities(index, errors)
    last = dict(zip(batch["obs/id"].tolist(), error, strict=True))
    for shard in four:
        assert shard._tree is not None
        assert shard.late == 0
        for slot in np.flatnonzero(shard._ready):
            want = last.get(int(shard._ring.flat["obs/id"][slot]))
            assert (shard._tree.leaves[slot] > 15) == (want is not None)
            if want is not None:
                assert shard._tree.leaves[slot] == pytest.approx(want**0.6, rel=1e-5)
    assert [len(index) for index, _ in split_errors(np.array([2]), np.array([7]), np.array([1.0]), 4)] == [0, 0, 1, 0]
    assert [len(index) for index, _ in split_errors(*np.zeros((3, 0), np.int64), 2)] == [0, 0]
