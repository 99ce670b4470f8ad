"""The replay buffer saved and loaded: exactly, with its priorities, in segments that keep their names."""

from __future__ import annotations

import numpy as np
import pytest
from replay_sources import Reference, Source, check, fill
from saved_replays import assert_same, feed, make, recut, written

from raynforce.trees import Tree, without

pytestmark = pytest.mark.usefixtures("small_segments")


@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("inserts", [0, 1, 5, 40])
def test_a_loaded_buffer_gives_the_same_samples(prioritized: bool, n_step: int, inserts: int) -> None:
    replay, other, rng = *(make(n_step=n_step, prioritized=prioritized) for _ in range(2)), np.random.default_rng(3)
    sources = [Source(2, 0, sampler) for sampler in range(2)]
    feed(replay, sources, rng, inserts)
    if len(replay):
        batch = replay.sample(100, rng)
        replay.update_priorities(batch["index"], rng.random(100) * 10)
    fill(other, 5, seed=1)  # what it held before does not matter
    other.load(written(replay))
    assert other.missing == 0
    for _ in range(6):
        if len(replay):
            batch = assert_same(replay, other)
            for buffer in (replay, other):
                buffer.update_priorities(batch["index"], batch["reward"])
        fragment, _ = sources[rng.integers(2)].sample(5)
        for buffer in (replay, other):
            buffer.insert(fragment)
        assert list(other.state()["segments"]) == list(replay.state()["segments"])
    np.testing.assert_equal(written(other), written(replay))


def test_a_buffer_may_be_loaded_from_its_own_views() -> None:
    replay, other = make(n_step=3), make(n_step=3)
    fill(replay, 9)
    other.load(written(replay))
    replay.load(replay.state())
    assert_same(replay, other)


def test_only_what_is_filled_is_saved_and_nothing_is_copied() -> None:
    replay = make(rows=1000)
    fill(replay, 2)
    segments = replay.state()["segments"]
    assert sum(len(piece["reward"]) for piece in segments.values()) == 13
    for piece in segments.values():
        assert all(np.shares_memory(piece[path], replay._ring[path]) for path in ("action", "reward", "end", "valid"))
        assert np.shares_memory(piece["obs"]["id"], replay._ring["obs/id"])
        assert piece["reward"].flags.c_contiguous  # it can be serialised without a copy


@pytest.mark.parametrize("seed", range(3))
def test_what_changes_gets_another_name(seed: int) -> None:
    rng = np.random.default_rng(seed)
    replay, sources = make(rows=30), [Source(2, seed, sampler) for sampler in range(2)]
    seen: dict[str, Tree] = {}
    kept = 0
    for _ in range(80):
        feed(replay, sources, rng, 1)
        segments = written(replay)["segments"]
        for name in segments.keys() & seen.keys():
            np.testing.assert_equal(segments[name], seen[name])
            kept += 1
        seen |= segments
    assert kept > 80 * 3  # of ten; also those behind a sampler that lags


def test_the_same_run_gives_the_same_names_and_resume_keeps_them() -> None:
    def run(resume: bool) -> list[list[str]]:
        replay, sources, rng, names = make(rows=50), [Source(2, 0, s) for s in range(2)], np.random.default_rng(0), []
        for _ in range(20):
            feed(replay, sources, rng, 3)
            if resume:
                saved, replay = written(replay), make(rows=50)
                replay.load(saved)
            names.append(list(replay.state()["segments"]))
        return names

    assert run(False) == run(False) == run(True)


def test_one_that_begins_anew_takes_no_name_of_another() -> None:
    names = []
    for attempt in (0, 1, 2):
        replay, sources = make(rows=30), [Source(2, 0, sampler) for sampler in range(2)]
        if attempt:
            replay.start_fresh(attempt)
        feed(replay, sources, np.random.default_rng(0), 6)
        names.append(set(replay.state()["segments"]))
    assert not names[0] & names[1]
    assert not names[1] & names[2]


def test_few_new_rows_are_few_new_segments() -> None:
    replay = make(rows=640, samplers=1)
    (source,) = fill(replay, 200)
    known = set(replay.state()["segments"])
    assert len(known) == 64
    for _ in range(5):
        replay.insert(source.sample(6)[0])
    tree = without(replay.state(), known)
    assert sum(bool(piece) for piece in tree["segments"].values()) <= 4
    assert len(tree["segments"]) == 64
    assert all(replay.state()["segments"].values())  # the buffer's own are whole


@pytest.mark.parametrize("cuts", [[0], [0, 1, 2, 11], [0, 19]])
def test_segments_may_have_any_row_ranges(cuts: list[int]) -> None:
    replay, other = make(n_step=3, prioritized=True), make(n_step=3, prioritized=True)
    fill(replay, 9)
    tree = written(replay)
    other.load(recut(tree, cuts))
    assert_same(replay, other)
    assert not set(other.state()["segments"]) & set(tree["segments"])  # who knows the old ones gets none of these
    assert all(int(name.split("-")[1]) <= other.state()["stamp"] for name in other.state()["segments"])


def test_load_with_another_n_step() -> None:
    replay, reference = make(30, 1, n_step=1), Reference(29, 4)
    source = Source(2, seed=0)
    for _ in range(8):
        fragment, steps = source.sample(5)
        replay.insert(fragment)
        reference.insert(fragment, steps)
    other = make(30, 1, n_step=4, prioritized=True)
    other.load(written(replay))
    check(other, reference, np.random.default_rng(0))


def test_what_metrics_count_goes_on_after_a_resume_and_older_checkpoints_have_none_of_it() -> None:
    replay, other, older = (make(prioritized=True) for _ in range(3))
    fill(replay, 9)
    index = replay.sample(64, np.random.default_rng(0))["index"]
    replay.update_priorities(index - replay.capacity, np.ones(64))
    saved = written(replay)
    other.load(saved)
    older.load({key: value for key, value in saved.items() if key not in ("late", "drawn")})
    assert older.metrics()["replay/late"] == 0.0
    found = other.metrics()
    assert (found["replay/late"], found["replay/age"]) == (64.0, replay.metrics()["replay/age"])


# Priorities


def test_priorities_are_saved_without_loss_and_may_come_with_more_digits() -> None:
    replay = make(prioritized=True)
    fill(replay, 3)
    rng = np.random.default_rng(0)
    index = replay.sample(100, rng)["index"]
    replay.update_priorities(index, rng.random(100))
    assert replay._tree is not None
    tree = written(replay)
    assert tree["priority"].dtype == np.float32
    np.testing.assert_array_equal(tree["priority"], replay._tree.leaves[: len(tree["priority"])])
    other = make(prioritized=True)
    other.load({**tree, "priority": tree["priority"].astype(np.float64)})
    assert_same(replay, other)
    other.load({**tree, "priority": tree["priority"].astype(np.float64) * (1 + 1e-12)})
    assert_same(replay, other)


def test_an_infinite_priority_is_still_refused() -> None:
    replay = make(prioritized=True, alpha=1.0)
    fill(replay, 1)
    index = replay.sample(1, np.random.default_rng(0))["index"]
    with pytest.raises(ValueError, match="inf"):
        replay.update_priorities(index, np.array([1e200]))
