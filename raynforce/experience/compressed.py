"""Compressed image frames by slot, for replay buffers whose images would not fit into memory otherwise."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from raynforce.errors import CheckpointError

# Measured (docs/performance.md): higher levels take twice as long to write for little, differences between rows gain
# nothing, and threads neither, as reading a frame takes some ten microseconds.
LEVEL = 1
PLAIN = -15  # zlib's name for deflate without header and checksum; checkpoints have checksums of their own
OBJECT = 48  # bytes that Python and the allocator take for each compressed frame, beside its own
NOTHING = b""
DAMAGED = "the checkpoint is damaged: resume from an older one"


class CompressedFrames:
    """`slots` byte frames of one shape, each compressed alone; one that was never written reads as zeros."""

    def __init__(self, slots: int, shape: Sequence[int]) -> None:
        self.shape = (slots, *shape)
        self._size = math.prod(shape)  # bytes of one frame
        self._packed = np.full(slots, NOTHING, object)
        self._used = 0  # bytes of all frames written

    @property
    def nbytes(self) -> int:
        return self._used + self._packed.nbytes

    def put(self, slots: np.ndarray | slice, frames: np.ndarray) -> None:
        """Write `frames` `[..., *shape]` to `slots` `[...]`, no two of which are the same."""
        count = math.prod(frames.shape[: frames.ndim - len(self.shape) + 1])
        flat = np.ascontiguousarray(frames).reshape(count, self._size)
        shown = zip(flat, flat.max(axis=1, initial=0).tolist(), strict=True)
        # Zeros are as if never written, so that equal frames are equal bytes.
        self._place(slots, [zlib.compress(frame.data, LEVEL, PLAIN) if most else NOTHING for frame, most in shown])

    def take(self, index: np.ndarray, axis: int = 0) -> np.ndarray:
        """The frames at these slots, `[*index.shape, *shape]`; each distinct one is decompressed once."""
        flat = index.reshape(-1)
        distinct, first, which = np.unique(flat, return_index=True, return_inverse=True)
        found = np.empty((len(flat), self._size), np.uint8)
        for row, packed in zip(first.tolist(), self._packed[distinct].tolist(), strict=True):
            found[row] = self._unpacked(packed)
        source = first[which.reshape(-1)]
        (again,) = (source != np.arange(len(flat))).nonzero()
        found[again] = found[source[again]]
        return found.reshape(*index.shape, *self.shape[1:])

    def clear(self, slots: np.ndarray | slice) -> None:
        self._used -= _bytes(self._packed[slots])
        self._packed[slots] = NOTHING

    def move(self, slots: np.ndarray | slice, source: CompressedFrames, places: np.ndarray | slice) -> None:
        """Take over the frames at `places` of another one, as they are."""
        self._place(slots, source._packed[places].reshape(-1).tolist())

    def saved(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """The slots from `start` to before `stop`, as flat arrays, still compressed."""
        packed = self._packed[start:stop].tolist()
        length = np.fromiter(map(len, packed), np.int32, len(packed))
        return {"blob": np.frombuffer(b"".join(packed), np.uint8), "length": length}

    @staticmethod
    def from_saved(saved: Mapping[str, np.ndarray], shape: Sequence[int]) -> CompressedFrames:
        """As many slots as were saved; `CheckpointError` for what cannot be that."""
        blob, length = _row(saved, "blob", "uint8"), _row(saved, "length", "int32")
        frames = CompressedFrames(len(length), shape)
        longest = 64 + 2 * frames._size  # more than noise takes; a longer one could become huge
        if (length < 0).any() or (length > longest).any() or length.sum(dtype=np.int64) != len(blob):
            raise CheckpointError(f"replay: lengths of compressed frames do not fit their {len(blob)} bytes; {DAMAGED}")
        whole, ends = blob.tobytes(), length.cumsum(dtype=np.int64).tolist()
        frames._place(slice(None), [whole[a:b] for a, b in zip([0, *ends], ends, strict=False)])
        return frames

    def _place(self, slots: np.ndarray | slice, packed: Sequence[bytes]) -> None:
        new = np.empty(len(packed), object)
        new[:] = packed
        before = self._packed[slots]
        self._used += _bytes(new) - _bytes(before)
        self._packed[slots] = new.reshape(before.shape)

    def _unpacked(self, packed: bytes) -> np.ndarray | int:
        if not packed:
            return 0
        try:
            found = np.frombuffer(zlib.decompress(packed, PLAIN, self._size), np.uint8)
        except zlib.error as error:
            raise CheckpointError(f"replay: a compressed frame cannot be read ({error}); {DAMAGED}") from error
        if len(found) != self._size:
            raise CheckpointError(f"replay: a compressed frame has {len(found)} bytes, not {self._size}; {DAMAGED}")
        return found


Stored: TypeAlias = np.ndarray | CompressedFrames  # frames by slot, `[slots, ...]`; `take` gives either's


def copy(source: Stored, places: np.ndarray | slice, target: Stored, slots: np.ndarray | slice) -> None:
    """Let `target` have at `slots` what `source` has at `places`; either may be compressed."""
    if isinstance(source, CompressedFrames) and isinstance(target, CompressedFrames):
        target.move(slots, source, places)
        return
    found = source.take(np.arange(source.shape[0])[places]) if isinstance(source, CompressedFrames) else source[places]
    if isinstance(target, CompressedFrames):
        target.put(slots, found)
    else:
        target[slots] = found


def _row(saved: Mapping[str, np.ndarray], name: str, dtype: str) -> np.ndarray:
    found = saved.get(name)
    if not isinstance(found, np.ndarray) or found.ndim != 1 or found.dtype != dtype:
        raise CheckpointError(f"replay: {name!r} of compressed frames is not one row of {dtype}; {DAMAGED}")
    return found


def _bytes(packed: np.ndarray) -> int:
    lengths = list(map(len, packed.reshape(-1).tolist()))
    return sum(lengths) + OBJECT * (len(lengths) - lengths.count(0))
