"""Stacked frames in replay: a buffer that stores each frame once gives what one that stores whole stacks gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from frame_sources import PLAIN, STACKED, FrameSource, assert_same, fragments, seen
from replay_sources import DISCRETE, GAMMA
from saved_replays import written

from raynforce import memory as memory_module
from raynforce.errors import CheckpointError, UsageError
from raynforce.experience import ring as ring_module
from raynforce.experience.replay import Replay
from raynforce.experience.storage import Layout, estimate_bytes
from raynforce.spaces import ObsLeaf
from raynforce.trees import Tree


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_module, "LEAST_SEGMENT", 12)


def pair(rows: int, samplers: int, lanes: int, **kwargs: Any) -> tuple[Replay, Replay]:
    sizes: dict[str, Any] = {"capacity": rows * samplers * lanes, "lanes": lanes, "samplers": samplers}
    return (
        Replay(STACKED, DISCRETE, gamma=GAMMA, **sizes, **kwargs),
        Replay(PLAIN, DISCRETE, gamma=GAMMA, **sizes, **kwargs),
    )


@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("seed", range(8))
def test_samples_equal_those_of_whole_stacks(seed: int, n_step: int, prioritized: bool) -> None:
    rng = np.random.default_rng(seed)
    samplers, lanes, rows = (int(rng.integers(*limits)) for limits in ((1, 4), (1, 4), (6, 30)))
    sizes = {"rows": rows, "samplers": samplers, "lanes": lanes, "n_step": n_step, "prioritized": prioritized}
    shared, plain = pair(**sizes)
    sources = [
        FrameSource(lanes, seed, sampler, p_end=float(rng.choice([0.0, 0.1, 0.5]))) for sampler in range(samplers)
    ]
    names: dict[str, Tree] = {}
    for i, fragment in enumerate(fragments(sources, rng, 60, longest=min(8, rows - 1))):
        assert shared.insert(fragment) == plain.insert(fragment)
        assert_same(shared, plain, rng)
        segments = written(shared)["segments"]
        for name in segments.keys() & names.keys():  # what changes has another name
            np.testing.assert_equal(segments[name], names[name])
        names |= segments
        if i % 10 == 9:
            saved = written(shared), written(plain)
            shared, plain = pair(**sizes)
            for replay, tree in zip((shared, plain), saved, strict=True):
                replay.load(tree)
            assert_same(shared, plain, rng)
            np.testing.assert_equal(written(shared), {**saved[0], **_priorities(shared)})


def _priorities(replay: Replay) -> Tree:
    """What the samples just taken have changed."""
    tree = written(replay)
    return {key: tree[key] for key in ("priority", "max_priority", "drawn") if key in tree}


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("seed", range(10))
def test_another_layout_gives_what_it_gives_of_whole_stacks(
    seed: int, n_step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(seed)
    monkeypatch.setattr("raynforce.experience.restoring.PIECE", int(rng.choice([2, 5, 128])))
    buffers = pair(int(rng.integers(9, 30)), 2, 2, n_step=n_step)
    for fragment in fragments([FrameSource(2, seed, sampler) for sampler in range(2)], rng, int(rng.choice([3, 60]))):
        for replay in buffers:
            replay.insert(fragment)
    samplers, lanes, rows = (int(rng.integers(*limits)) for limits in ((1, 4), (1, 4), (9, 40)))
    others = pair(rows, samplers, lanes, n_step=n_step)
    for replay, other in zip(buffers, others, strict=True):
        other.load(written(replay))
    assert_same(*others, rng)
    for fragment in fragments([FrameSource(lanes, seed + 1, sampler) for sampler in range(samplers)], rng, 30):
        for other in others:
            other.insert(fragment)
        assert_same(*others, rng)


@pytest.mark.parametrize("seed", range(10))
def test_frames_that_are_missing_are_never_seen(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shared, plain = pair(40, 1, 2, n_step=2)
    source = FrameSource(2, seed, p_end=0.1)
    for _ in range(int(rng.choice([4, 40]))):
        fragment = source.sample(6)
        if rng.random() < 0.1:
            continue
        for replay in (shared, plain):
            replay.insert(fragment)
    trees = written(shared), written(plain)
    count = len(trees[0]["segments"])
    for number in sorted(rng.choice(count, max(1, count // 4), replace=False), reverse=True):
        for tree in trees:
            del tree["segments"][list(tree["segments"])[number]]
    for rows in (40, 33):  # as it was, and laid out anew
        one, two = pair(rows, 1, 2, n_step=2)
        one.load(trees[0])
        two.load(trees[1])
        assert 0.4 * two.resident <= one.resident <= two.resident
        for _ in range(6):
            check_truth(one, source, rng)
            one.insert(source.sample(5))
        again, _ = pair(rows, 1, 2, n_step=2)
        again.load(written(one))
        check_truth(again, source, rng)
        assert again.resident == one.resident


def check_truth(replay: Replay, source: FrameSource, rng: np.random.Generator) -> None:
    if not len(replay):
        return
    batch = replay.sample(20 * len(replay), rng)
    for prefix in ("", "next_"):
        names = np.array([source.truth[name] for name in batch[f"{prefix}obs/id"].tolist()])
        for path, array in seen(names).items():
            np.testing.assert_array_equal(batch[prefix + path], array)


def test_nearly_every_frame_is_stored_once() -> None:
    shared, plain = pair(500, 1, 2)
    source = FrameSource(2, 0, p_end=0.01)
    for _ in range(200):
        shared.insert(source.sample(10))
    assert shared._ring.stacks is not None
    assert shared._ring.stacks.pool.used == 2 * 3  # the oldest three of each lane
    assert shared._ring["obs/camera"].nbytes * 4 == plain._ring["obs/camera"].nbytes
    for piece in shared.state()["segments"].values():
        assert np.shares_memory(piece["obs"]["camera"], shared._ring["obs/camera"])


def test_memory_is_estimated_by_the_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    atari = (ObsLeaf("obs", "box", (4, 84, 84), "uint8", stack=4),)
    sizes: dict[str, Any] = {"capacity": 1_000_000, "lanes": 8}
    assert estimate_bytes(atari, DISCRETE, Layout.of(**sizes)) == pytest.approx(1_000_000 * (84 * 84 + 25), rel=0.001)
    monkeypatch.setattr(memory_module, "available_bytes", lambda: 5_000_000_000)
    with pytest.raises(UsageError, match=r"7\.\d\d GB.*lower algorithm\.buffer_size"):
        Replay(atari, DISCRETE, **sizes)
    monkeypatch.setattr(memory_module, "available_bytes", lambda: None)
    small = sizes | {"capacity": 800}
    assert Replay(atari, DISCRETE, **small).nbytes == estimate_bytes(atari, DISCRETE, Layout.of(**small))


def test_what_does_not_fit_is_refused() -> None:
    shared, plain = pair(20, 1, 2)
    fragment = FrameSource(2, 0).sample(5)
    wrong = {**fragment.columns, "obs/camera": fragment["obs/camera"][:, :, 6:]}
    with pytest.raises(UsageError, match=r"'obs/camera' has shape \(6, 2, 2, 2, 2\), expected \(6, 2, 8, 2, 2\)"):
        shared.insert(replace(fragment, columns=wrong))
    for replay in (shared, plain):
        replay.insert(fragment)
    with pytest.raises(CheckpointError, match="obs/camera"):
        shared.load(written(plain))
    tree = written(shared)
    (piece,) = tree["segments"].values()
    piece["whole_index"] = np.array([5, 3])
    with pytest.raises(CheckpointError, match="whole_index' is not a rising"):
        pair(20, 1, 2)[0].load(tree)
