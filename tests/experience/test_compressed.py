"""Compressed frames: the same as an array of bytes in all but size, saved as they are, and checked when loaded."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

from raynforce.errors import CheckpointError
from raynforce.experience.compressed import OBJECT, CompressedFrames

SHAPE = (1, 24, 20)
SIZE = 480


def pictures(count: int, seed: int = 0) -> np.ndarray:
    """A square on gray, each elsewhere, `[count, *SHAPE]`."""
    frames = np.full((count, *SHAPE), 87, np.uint8)
    for frame, (y, x) in zip(frames, np.random.default_rng(seed).integers(16, size=(count, 2)), strict=True):
        frame[0, y : y + 4, x : x + 4] = 255
    return frames


def filled(count: int = 12) -> tuple[CompressedFrames, np.ndarray]:
    store, frames = CompressedFrames(count, SHAPE), pictures(count)
    store.put(np.arange(count), frames)
    return store, frames


def test_it_reads_like_an_array_of_bytes() -> None:
    rng = np.random.default_rng(0)
    store, plain = CompressedFrames(40, SHAPE), np.zeros((40, *SHAPE), np.uint8)
    for turn in range(30):
        slots = rng.permutation(40)[: 2 * rng.integers(1, 9)].reshape(2, -1)
        frames = rng.integers(256, size=(*slots.shape, *SHAPE), dtype=np.uint8)
        frames = frames if turn % 3 else pictures(slots.size, turn).reshape(*slots.shape, *SHAPE)
        store.put(slots, frames)
        plain[slots] = frames
        if turn % 7 == 6:
            store.clear(slots[0])
            plain[slots[0]] = 0
        for index in (rng.integers(40, size=9), rng.integers(40, size=(5, 4)), np.zeros(0, np.int64)):
            found = store.take(index, axis=0)
            assert found.dtype == np.uint8
            np.testing.assert_array_equal(found, plain.take(index, axis=0))


def test_frames_need_not_be_contiguous() -> None:
    stacks = np.random.default_rng(0).integers(256, size=(6, 4, 24, 20), dtype=np.uint8)
    store = CompressedFrames(6, SHAPE)
    store.put(np.arange(6), stacks[:, -1:])
    np.testing.assert_array_equal(store.take(np.arange(6)), stacks[:, -1:])


def test_a_frame_is_decompressed_once_for_all_its_places(monkeypatch: pytest.MonkeyPatch) -> None:
    store, frames = filled()
    calls = []

    def counted(*args: Any) -> bytes:
        calls.append(args)
        return zlib_decompress(*args)

    zlib_decompress = zlib.decompress
    monkeypatch.setattr(zlib, "decompress", counted)
    index = np.array([[3, 3, 4, 5], [4, 5, 6, 7], [3, 3, 3, 3]])
    np.testing.assert_array_equal(store.take(index), frames[index])
    assert len(calls) == 5
    store.take(index)[...] = 0  # what was given is nobody else's
    np.testing.assert_array_equal(store.take(index), frames[index])


def test_it_knows_its_size() -> None:
    empty = CompressedFrames(12, SHAPE).nbytes
    store, _ = filled()
    small = store.nbytes
    assert empty < small < 12 * SIZE / 3
    saved = store.saved(0, 12)
    assert small == empty + len(saved["blob"]) + 12 * OBJECT
    store.put(np.arange(6), np.random.default_rng(0).integers(256, size=(6, *SHAPE), dtype=np.uint8))
    assert small + 6 * 0.7 * SIZE < store.nbytes < small + 6 * 1.05 * SIZE, "noise takes what it took, and little more"
    store.put(np.arange(6), pictures(12)[:6])
    assert store.nbytes == small
    store.clear(slice(None))
    assert store.nbytes == empty


def test_it_is_saved_and_moved_without_being_decompressed(monkeypatch: pytest.MonkeyPatch) -> None:
    store, frames = filled()
    store.clear(np.array([5]))
    frames[5] = 0
    with monkeypatch.context() as patch:
        patch.delattr(zlib, "decompress")
        patch.delattr(zlib, "compress")
        saved = load(save(store.saved(3, 9)))
        again = CompressedFrames.from_saved(saved, SHAPE)
        other = CompressedFrames(20, SHAPE)
        other.move(np.array([[0, 19], [7, 8]]), again, np.array([[0, 1], [2, 5]]))
    assert {name: array.dtype for name, array in saved.items()} == {"blob": np.uint8, "length": np.int32}
    assert again.shape == (6, *SHAPE)
    np.testing.assert_array_equal(again.take(np.arange(6)), frames[3:9])
    np.testing.assert_array_equal(other.take(np.array([0, 19, 7, 8, 1])), [*frames[[3, 4, 5, 8]], 0 * frames[0]])
    slots = np.arange(12)
    fresh = CompressedFrames(12, SHAPE)
    fresh.move(slots, store, slots)
    assert fresh.nbytes == store.nbytes


def test_nothing_can_be_saved_too() -> None:
    none = CompressedFrames.from_saved(CompressedFrames(3, SHAPE).saved(0, 3), SHAPE)
    assert not none.take(np.arange(3)).any()
    assert CompressedFrames.from_saved(none.saved(0, 0), SHAPE).shape == (0, *SHAPE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blob": None}, "'blob' of compressed frames is not one row of uint8"),
        ({"length": np.ones(12)}, "'length' of compressed frames is not one row of int32"),
        ({"length": np.ones((3, 4), np.int32)}, "not one row of int32"),
        ({"blob": np.zeros(7, np.uint8)}, "lengths of compressed frames do not fit their 7 bytes"),
        ({"blob": np.zeros(0, np.uint8), "length": np.array([-1, 1], np.int32)}, "do not fit their 0 bytes"),
        ({"blob": np.zeros(9999, np.uint8), "length": np.array([9999], np.int32)}, "do not fit their 9999 bytes"),
    ],
)
def test_what_cannot_be_that_is_refused(change: dict[str, Any], message: str) -> None:
    store, _ = filled()
    with pytest.raises(CheckpointError, match=message):
        CompressedFrames.from_saved({**store.saved(0, 12), **change}, SHAPE)


@pytest.mark.parametrize(
    ("packed", "message"),
    [
        (b"\xff" * 20, "a compressed frame cannot be read"),
        (zlib.compress(b"\0" * SIZE, 1, -15)[:-2], "a compressed frame cannot be read"),
        (zlib.compress(b"\0" * (SIZE - 1), 1, -15), "a compressed frame has 479 bytes, not 480"),
        (zlib.compress(b"\0" * (SIZE + 1), 1, -15), "a compressed frame has 481 bytes, not 480"),
    ],
)
def test_a_damaged_frame_is_found_when_it_is_read(packed: bytes, message: str) -> None:
    saved = {"blob": np.frombuffer(packed, np.uint8), "length": np.array([len(packed)], np.int32)}
    store = CompressedFrames.from_saved(saved, SHAPE)
    with pytest.raises(CheckpointError, match=message):
        store.take(np.array([0]))
