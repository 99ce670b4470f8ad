"""The prioritised replay buffer: shares, weights, and priorities that find their transition or nobody."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from replay_sources import ACTION, GAMMA, OBS, Source, fill
from saved_replays import broken, make, written

from raynforce.errors import UsageError
from raynforce.experience.fragment import Fragment
from raynforce.experience.replay import EPSILON, Replay


def prioritized_replay(**kwargs: Any) -> Replay:
    return Replay(OBS, ACTION, capacity=2 * 30, lanes=2, prioritized=True, gamma=GAMMA, **kwargs)


def test_priorities_are_proportional_and_weighted() -> None:
    replay = prioritized_replay(alpha=0.5)
    fill(replay, 2, p_end=0.0)
    size = len(replay)
    rng = np.random.default_rng(0)
    index = np.unique(replay.sample(1000, rng)["index"])
    assert len(index) == size == 24
    errors = np.ones(size)
    errors[:2] = [100.0, -9.0]  # signs do not matter; alpha 0.5 makes it 10, 3 and 22 times 1
    replay.update_priorities(index, errors)
    batch = replay.sample(3500, rng, beta=1.0)
    share = np.array([np.mean(batch["index"] == i) for i in index])
    np.testing.assert_allclose(share[:3], [10 / 35, 3 / 35, 1 / 35], atol=0.001)  # stratified: nearly exact
    weight = [batch["weight"][batch["index"] == i][0] for i in index[:3]]
    np.testing.assert_allclose(weight, [0.1, 1 / 3, 1.0], rtol=1e-5)
    half = replay.sample(3500, rng, beta=0.5)
    np.testing.assert_allclose(half["weight"][half["index"] == index[0]], 0.1**0.5, rtol=1e-5)


def test_new_transitions_get_the_largest_priority_seen() -> None:
    replay = prioritized_replay(alpha=1.0)
    source = Source(2, seed=0, p_end=0.0)
    replay.insert(source.sample(5)[0])
    rng = np.random.default_rng(0)
    index = np.unique(replay.sample(1000, rng)["index"])
    replay.update_priorities(index, np.where(index == index[0], 9.0, 1.0))
    replay.update_priorities(index, np.ones(len(index)))
    fragment, _ = source.sample(5)
    replay.insert(fragment)
    new = np.isin(replay.sample(10_000, rng)["obs/id"], fragment["obs/id"][:5])
    assert np.mean(new) == pytest.approx(0.9, abs=0.001)


def test_inserting_keeps_the_priorities_of_what_stays() -> None:
    replay = prioritized_replay(alpha=1.0, n_step=3)
    source = Source(2, seed=0, p_end=0.3)
    rng = np.random.default_rng(0)
    replay.insert(source.sample(5)[0])
    batch = replay.sample(1000, rng)
    replay.update_priorities(batch["index"], np.full(1000, 1e-4))
    old = set(batch["obs/id"])
    replay.insert(source.sample(5)[0])
    share = np.mean(np.isin(replay.sample(1000, rng)["obs/id"], list(old)))
    assert share < 0.01  # every new one counts 1, those complete in the meantime included


# Names


def test_a_late_priority_is_not_given_to_what_has_come_since() -> None:
    replay = prioritized_replay(alpha=1.0)
    (source,) = fill(replay, 4, p_end=0.0)
    old = replay.sample(100, np.random.default_rng(0))
    name = old["index"][:1]
    for late in range(1, 4):
        fragment, _ = source.sample(24)
        replay.insert(fragment)
        replay.insert(source.sample(6)[0])  # 30 rows: each time a whole turn of the ring
        assert replay._ready[name % replay.capacity]
        replay.update_priorities(np.array([name[0], name[0]]), np.array([1e9, 1e9]))
        assert replay.late == 2 * late
    batch = replay.sample(58 * 100, np.random.default_rng(1))
    np.testing.assert_allclose(np.unique(batch["index"], return_counts=True)[1], 100, atol=2)  # all are alike
    assert not np.isin(old["index"], batch["index"]).any()


def test_a_gap_makes_names_late_too() -> None:
    replay = prioritized_replay(alpha=1.0)
    (source,) = fill(replay, 8, p_end=0.0)
    stale = np.unique(replay.sample(1000, np.random.default_rng(0))["index"])
    source.sample(1)
    replay.insert(source.sample(6)[0])  # a gap: its row and the row at the head hold no transition now
    replay.update_priorities(stale, np.full(len(stale), 3.0))
    assert replay.late == 2 * 7  # the fragment's six rows and the gap's one, in both lanes
    index, counts = np.unique(replay.sample(1000, np.random.default_rng(1))["index"], return_counts=True)
    assert len(index) == len(replay) == 56
    old = np.isin(index, stale)
    assert np.count_nonzero(old) == len(stale) - 14
    np.testing.assert_allclose(counts[old] / counts[~old].mean(), 3, rtol=0.2)


@pytest.mark.parametrize("seed", range(4))
def test_a_name_stands_for_one_transition_for_ever(seed: int) -> None:
    rng = np.random.default_rng(seed)
    samplers, lanes, rows = int(rng.integers(1, 4)), int(rng.integers(1, 4)), int(rng.integers(12, 20))
    replay = Replay(
        OBS, ACTION, capacity=rows * samplers * lanes, lanes=lanes, samplers=samplers, n_step=2, prioritized=True
    )
    sources = [Source(lanes, seed, sampler) for sampler in range(samplers)]
    seen: dict[int, int] = {}
    for _ in range(60):
        source = sources[rng.integers(samplers)]
        if rng.random() < 0.2:
            source.sample(2)  # lost on its way
        replay.insert(source.sample(int(rng.integers(1, 9)))[0])
        batch = replay.sample(30 * replay.resident, rng) if len(replay) else {"index": [], "obs/id": []}
        now = dict(zip(np.array(batch["index"]).tolist(), np.array(batch["obs/id"]).tolist(), strict=True))
        assert len(set(now.values())) == len(now)
        assert all(seen.setdefault(name, transition) == transition for name, transition in now.items())
        gone = np.array([name for name in seen if name not in now], np.int64)
        before = replay.late
        replay.update_priorities(gone, np.full(len(gone), 1e9))
        assert replay.late - before == len(gone)
        replay.update_priorities(np.array([*now], np.int64), np.ones(len(now)))
        assert replay.late - before == len(gone)
    assert len(seen) > 2 * replay.capacity
    assert replay._max_priority < 2.0


def test_a_priority_that_is_no_number_is_refused() -> None:
    replay = prioritized_replay()
    fill(replay, 1)
    index = replay.sample(2, np.random.default_rng(0))["index"]
    with pytest.raises(UsageError, match="nan"):
        replay.update_priorities(index, np.array([1.0, np.nan]))
    replay.sample(2, np.random.default_rng(0))


# Priorities that come with the fragments


def error_of(ids: np.ndarray) -> np.ndarray:
    """Below 1, so that the largest priority stays 1; every ninth one is not known."""
    error = (0.05 + ids % 11 / 20).astype(np.float32) * np.where(ids % 2, 1, -1)
    return np.where(ids % 9 == 0, np.where(ids % 2, np.inf, np.nan), error).astype(np.float32)


def judged(fragment: Fragment) -> Fragment:
    """With a TD error for each step."""
    return replace(fragment, columns={**fragment.columns, "priority": error_of(fragment["obs/id"][:-1])})


def assert_begun_with_its_own(replay: Replay, least: int = 1) -> None:
    """Every transition that can be sampled has the priority of its own error, or the largest."""
    assert replay._tree is not None
    assert len(replay) >= least
    error = np.abs(error_of(replay._ring.flat["obs/id"][replay._ready])).astype(np.float64)
    own = (error + EPSILON) ** 0.6
    want = np.where(np.isfinite(own), own, 1.0)
    np.testing.assert_allclose(replay._tree.leaves[replay._ready], want, rtol=1e-6)
    assert not replay._tree.leaves[~replay._ready].any()


@pytest.mark.parametrize("n_step", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_transitions_begin_with_their_own_errors(seed: int, n_step: int) -> None:
    rng = np.random.default_rng(seed)
    samplers, lanes, rows = int(rng.integers(1, 4)), int(rng.integers(1, 4)), int(rng.integers(9, 24))
    sizes: dict[str, Any] = {"rows": rows, "samplers": samplers, "lanes": lanes, "prioritized": True}
    replay = make(n_step=n_step, **sizes)
    sources = [Source(lanes, seed, sampler) for sampler in range(samplers)]
    for _ in range(60):
        source, trouble = sources[rng.integers(samplers)], rng.random()
        if trouble < 0.2:
            source.sample(3)  # lost on its way
        fragment = source.sample(int(rng.integers(1, 9)))[0]
        replay.insert(judged(broken(fragment) if trouble > 0.9 else fragment))
        assert_begun_with_its_own(replay, least=0)
        if trouble > 0.5:  # what waits is saved, and comes back, even if more or fewer have to wait
            saved = written(replay)
            n_step = int(rng.integers(1, 6))
            replay = make(n_step=n_step, **sizes)
            replay.load(saved)
            assert_begun_with_its_own(replay, least=0)
    assert len(replay) > 0


def test_what_waits_at_a_checkpoint_keeps_its_priority_in_another_layout() -> None:
    replay, other = make(prioritized=True, n_step=4), make(31, 1, 3, prioritized=True, n_step=4)
    for source in (Source(2, 0, 0, p_end=0.0), Source(2, 0, 1, p_end=0.0)):
        replay.insert(judged(source.sample(9)[0]))
    other.load(written(replay))
    assert len(replay) < replay.resident
    assert_begun_with_its_own(other, least=replay.resident)  # cut streams are complete


def test_a_checkpoint_from_before_there_were_errors_gives_the_largest() -> None:
    replay = make(samplers=1, prioritized=True, n_step=3)
    source = Source(2, 0, p_end=0.0)
    replay.insert(judged(source.sample(6)[0]))
    saved = written(replay)
    saved["priority"][~replay._ready[: len(saved["priority"])]] = 0.0
    other = make(samplers=1, prioritized=True, n_step=3)
    other.load(saved)
    waited = np.flatnonzero(other._ring.valid & ~other._ready)
    assert len(waited) == 4
    for buffer in (replay, other):
        buffer.insert(judged(source.sample(6)[0]) if buffer is replay else source.sample(6)[0])
    assert other._tree is not None
    np.testing.assert_array_equal(other._tree.leaves[waited], 1.0)
    assert_begun_with_its_own(replay)


def test_some_fragments_may_have_errors_and_a_uniform_buffer_needs_none() -> None:
    replay, uniform = make(samplers=1, prioritized=True, alpha=1.0, n_step=2), make(samplers=1, n_step=2)
    source = Source(2, 0, p_end=0.0)
    for errors in (None, 4.0, None, 0.5):
        fragment, _ = source.sample(3)
        columns = {} if errors is None else {"priority": np.full((3, 2), errors, np.float32)}
        for buffer in (replay, uniform):
            buffer.insert(replace(fragment, columns={**fragment.columns, **columns}))
    assert replay._tree is not None
    steps = replay._tree.leaves.reshape(20, 2)[:, 0]
    np.testing.assert_allclose(
        steps[:11], [1, 1, 4, 4, 4, 4, 4, 4, 4, 0.5, 0.5], rtol=1e-5
    )  # the third waited: 4 by then
    assert len(uniform) == len(replay) == 22


def test_errors_of_another_shape_are_refused() -> None:
    fragment, _ = Source(2, 0).sample(3)
    with pytest.raises(UsageError, match=r"'priority' has shape \(3,\), expected \(3, 2\)"):
        make(samplers=1).insert(replace(fragment, columns={**fragment.columns, "priority": np.zeros(3)}))
