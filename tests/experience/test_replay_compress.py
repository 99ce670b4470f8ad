"""Compressed images in replay: a buffer gives what it gives without, whatever form it was saved in, and is smaller."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from frame_sources import PLAIN, STACKED, FrameSource, assert_same, fragments
from replay_sources import DISCRETE, GAMMA
from saved_replays import written

from raynforce import memory as memory_module
from raynforce.errors import CheckpointError, UsageError
from raynforce.experience.fragment import Fragment
from raynforce.experience.replay import Replay
from raynforce.experience.storage import estimate_bytes
from raynforce.spaces import ObsLeaf
from raynforce.trees import Tree, join, split

pytestmark = pytest.mark.usefixtures("small_segments")

CAMERA = "obs/camera"
KINDS = {
    "image": (replace(PLAIN[1], path="obs"),),
    "stack": (replace(STACKED[1], path="obs"),),
    "image and vector": PLAIN,
    "stack and vector": STACKED,
}
SCREEN = (ObsLeaf("obs", "box", (1, 24, 24), "uint8"),)


def pair(kind: str, rows: int, samplers: int, lanes: int, **kwargs: Any) -> tuple[Replay, Replay]:
    """One that compresses, and one that does not."""
    sizes: dict[str, Any] = {"capacity": rows * samplers * lanes, "lanes": lanes, "samplers": samplers}
    packed, plain = (
        Replay(KINDS[kind], DISCRETE, gamma=GAMMA, **sizes, **kwargs, compress=compress) for compress in (True, False)
    )
    return packed, plain


def shown(fragment: Fragment, kind: str) -> Fragment:
    """A fragment of all that there is, as it is without the vectors."""
    if len(KINDS[kind]) > 1:
        return fragment
    rest = {path: array for path, array in fragment.columns.items() if "obs/" not in path}
    images = {"obs": fragment[CAMERA], "final/obs": fragment[f"final/{CAMERA}"]}
    return replace(fragment, columns=rest | images)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n_step", "prioritized"), [(1, True), (3, False)])
@pytest.mark.parametrize("seed", range(4))
def test_samples_equal_those_of_plain_images(seed: int, n_step: int, prioritized: bool, kind: str) -> None:
    rng = np.random.default_rng(seed)
    samplers, lanes, rows = (int(rng.integers(*limits)) for limits in ((1, 4), (1, 4), (6, 30)))
    sizes = {"rows": rows, "samplers": samplers, "lanes": lanes, "n_step": n_step, "prioritized": prioritized}
    packed, plain = pair(kind, **sizes)
    sources = [FrameSource(lanes, seed, sampler, p_end=0.1) for sampler in range(samplers)]
    names: dict[str, Tree] = {}
    for i, fragment in enumerate(fragments(sources, rng, 40, longest=min(8, rows - 1))):
        assert packed.insert(shown(fragment, kind)) == plain.insert(shown(fragment, kind))
        assert_same(packed, plain, rng)
        segments = written(packed)["segments"]
        for name in segments.keys() & names.keys():  # what changes has another name
            np.testing.assert_equal(segments[name], names[name])
        names |= segments
        if i % 10 == 9:
            saved = written(packed), written(plain)
            for tree in saved:  # either is read by either
                packed, plain = pair(kind, **sizes)
                packed.load(tree)
                plain.load(tree)
                np.testing.assert_equal((written(packed), written(plain)), saved)
            assert_same(packed, plain, rng)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_another_layout_gives_what_it_gives_of_plain_images(
    seed: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(seed)
    monkeypatch.setattr("raynforce.experience.restoring.PIECE", int(rng.choice([2, 5, 128])))
    buffers = pair(kind, int(rng.integers(9, 30)), 2, 2)
    for fragment in fragments([FrameSource(2, seed, sampler) for sampler in range(2)], rng, int(rng.choice([3, 60]))):
        for replay in buffers:
            replay.insert(shown(fragment, kind))
    samplers, lanes, rows = (int(rng.integers(*limits)) for limits in ((1, 4), (1, 4), (9, 40)))
    for tree in map(written, buffers):
        others = pair(kind, rows, samplers, lanes)
        for other in others:
            other.load(tree)
        assert_same(*others, rng)
        for fragment in fragments([FrameSource(lanes, seed + 1, sampler) for sampler in range(samplers)], rng, 10):
            for other in others:
                other.insert(shown(fragment, kind))
            assert_same(*others, rng)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [40, 33])
def test_segments_of_both_forms_are_read_and_some_may_be_missing(kind: str, rows: int) -> None:
    rng = np.random.default_rng(rows)
    buffers = pair(kind, 40, 1, 2)
    source = FrameSource(2, rows, p_end=0.1)
    for _ in range(12):
        fragment = shown(source.sample(6), kind)
        for replay in buffers:
            replay.insert(fragment)
    tree, other = map(written, buffers)
    for number, name in enumerate(list(tree["segments"])):
        if number == 2:
            del tree["segments"][name]
        elif number % 2:
            tree["segments"][name] = other["segments"][name]
    again = pair(kind, rows, 1, 2)
    for replay in again:
        replay.insert(shown(FrameSource(2, 1).sample(7), kind))  # which goes away
        replay.load(tree)
    assert again[0].missing == again[1].missing > 0
    assert_same(*again, rng)
    assert 0 < again[0].resident < buffers[0].resident


def pictures(steps: int, seed: int = 0) -> Fragment:
    """A bright spot on gray, each elsewhere."""
    rng = np.random.default_rng(seed)
    seen = np.full((steps + 1, 1, 1, 24, 24), 87, np.uint8)
    for frame, (y, x) in zip(seen[:, 0, 0], rng.integers(20, size=(steps + 1, 2)), strict=True):
        frame[y : y + 4, x : x + 4] = 255
    columns = {
        "obs": seen,
        "action": np.zeros((steps, 1), np.int64),
        "reward": np.zeros((steps, 1), np.float32),
        "terminated": np.zeros((steps, 1), bool),
        "truncated": np.zeros((steps, 1), bool),
        "valid": np.ones((steps, 1), bool),
        "final/index": np.zeros(0, np.int64),
        "final/obs": np.zeros((0, 1, 24, 24), np.uint8),
    }
    return Fragment(columns, version=0, sampler=0, sequence=0)


def screens(compress: bool = True, **kwargs: Any) -> Replay:
    return Replay(SCREEN, DISCRETE, capacity=300, lanes=1, compress=compress, **kwargs)


def test_it_is_smaller() -> None:
    packed, plain = screens(), screens(compress=False)
    empty = packed.metrics()["replay/mb"]
    for replay in (packed, plain):
        replay.insert(pictures(299))
    assert empty < packed.metrics()["replay/mb"] < plain.metrics()["replay/mb"] / 3
    images = written(packed)["segments"]
    arrays, _ = split(images)
    assert sum(array.nbytes for path, array in arrays.items() if "obs" in path) < 300 * 24 * 24 / 4


def test_its_memory_is_a_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    atari = (ObsLeaf("obs", "box", (4, 84, 84), "uint8", stack=4),)
    sizes: dict[str, Any] = {"capacity": 1_000_000, "lanes": 8}
    guess = estimate_bytes(atari, DISCRETE, **sizes, compress=True)
    assert guess == pytest.approx(1_000_000 * (84 * 84 / 3 + 56 + 25), rel=0.001)
    monkeypatch.setattr(memory_module, "available_bytes", lambda: 3 * 10**9)
    with pytest.raises(UsageError, match=r"7\.\d\d GB.*buffer_size, or set replay.compress=true$"):
        Replay(atari, DISCRETE, **sizes)
    with pytest.raises(UsageError, match=r"2\.4\d GB.*lower algorithm.buffer_size$"):
        Replay(atari, DISCRETE, **sizes, compress=True)


def test_without_an_image_it_is_refused() -> None:
    leaves = (ObsLeaf("obs/bytes", "box", (8,), "uint8"), ObsLeaf("obs/depth", "box", (8, 8), "float32"))
    with pytest.raises(UsageError) as error:
        Replay(leaves, DISCRETE, capacity=100, lanes=1, compress=True)
    assert str(error.value) == (
        "replay.compress = true compresses images, which are uint8 of two dimensions or more, and 'obs/bytes' is (8,) "
        "uint8, 'obs/depth' is (8, 8) float32: leave it out"
    )


def test_what_is_damaged_is_refused() -> None:
    packed = screens()
    packed.insert(pictures(9))
    good = written(packed)
    (name,) = good["segments"]

    def load(change: dict[str, np.ndarray]) -> Replay:
        arrays, rest = split(good)
        replay = screens()
        replay.load(join({**arrays, **{f"segments/{name}/{path}": array for path, array in change.items()}}, rest))
        return replay

    saved = good["segments"][name]["obs"]
    load({})
    with pytest.raises(CheckpointError, match="lengths of compressed frames do not fit"):
        load({"obs/blob": saved["blob"][:-1]})
    with pytest.raises(CheckpointError, match=f"'{name}/obs' has 9 compressed frames, expected 10"):
        load({"obs/length": saved["length"][:-1], "obs/blob": saved["blob"][: saved["length"][:-1].sum()]})
    with pytest.raises(CheckpointError, match="a compressed frame cannot be read"):
        load({"obs/blob": np.full_like(saved["blob"], 255)})
    late = load({"obs/blob": np.where(np.arange(len(saved["blob"])) < saved["length"][0], saved["blob"], 255)})
    with pytest.raises(CheckpointError, match="a compressed frame cannot be read"):
        late.sample(100, np.random.default_rng(0))


def test_segments_that_are_saved_already_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = screens()
    packed.insert(pictures(9))
    (name,) = packed.state()["segments"]
    monkeypatch.setattr("raynforce.experience.compressed.CompressedFrames.saved", None)
    assert packed.state({name})["segments"] == {name: {}}


def test_images_of_another_size_are_refused_at_once() -> None:
    packed = screens()
    packed.insert(pictures(9))
    other = Replay((replace(SCREEN[0], shape=(1, 12, 24)),), DISCRETE, capacity=300, lanes=1)
    with pytest.raises(CheckpointError, match="576 bytes, not 288"):
        other.load(written(packed))
    numbers = Replay((replace(SCREEN[0], dtype="float32"),), DISCRETE, capacity=300, lanes=1)
    with pytest.raises(CheckpointError, match=r"obs' of \(10, 1, 1, 24, 24\) float32, found a dict"):
        numbers.load(written(packed))
