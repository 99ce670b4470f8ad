"""Compressed frames: how small they become, and what writing and reading one costs, by codec.

Frames of 84x84 as they are seen in some Atari games played at random (where `raynforce[atari]` is installed), of the
tiny environment Catch in large, and noise. The first codec is that of `raynforce.experience.compressed`; the others are
zlib with its header and checksum, at a higher level, and on the differences between neighbouring rows. They take turns.
Times are microseconds of CPU for each frame, one thread.

Then a replay buffer with and without `replay.compress`, whose observations are stacks of 4 of these frames:
milliseconds to sample 32 transitions with 3-step returns, and to insert a fragment of 64 steps.
"""

from __future__ import annotations

import importlib.util
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import NamedTuple

import numpy as np

from benchmarks.measure import Row, Table, command, pinned, row, take_turns
from raynforce.envs.make import Env, close_env, make
from raynforce.envs.tiny import Catch
from raynforce.experience.compressed import LEVEL, PLAIN
from raynforce.experience.fragment import Fragment
from raynforce.experience.replay import Replay
from raynforce.spaces import ActionSpec, ObsLeaf

GAMES = ("Pong", "Breakout", "Seaquest", "SpaceInvaders", "MsPacman")
SIDE, SKIPPED = 84, 400
STACK, LENGTH, BATCH = 4, 64, 32


class Codec(NamedTuple):
    name: str
    write: Callable[[np.ndarray], bytes]
    read: Callable[[bytes], object]


def measure(repeats: int = 7, frames: int = 400) -> list[Table]:
    seen = {"Catch": _catch(frames), "noise": np.random.default_rng(0).integers(256, size=(frames, SIDE, SIDE))}
    if all(importlib.util.find_spec(name) for name in ("ale_py", "cv2")):
        seen = {game: _played(game, frames) for game in GAMES} | seen
    with pinned():
        return [_table(name, shown.astype(np.uint8), repeats) for name, shown in seen.items()]


def _table(name: str, frames: np.ndarray, repeats: int) -> Table:
    return Table(f"{name}, {SIDE}x{SIDE}", _rows(frames, repeats) + _buffers(frames, repeats))


def _rows(frames: np.ndarray, repeats: int) -> list[Row]:
    rows = []
    sides = [lambda codec=codec: _turn(codec, frames) for codec in CODECS]
    for codec, turns in zip(CODECS, take_turns(repeats, *sides), strict=True):
        share, write, read = zip(*turns, strict=True)
        rows.append(row(f"{codec.name}: compressed / plain bytes", "ratio", share))
        rows += [row("to write a frame", "µs", write), row("to read it", "µs", read)]
    return rows


def _turn(codec: Codec, frames: np.ndarray) -> tuple[float, float, float]:
    began = time.process_time()
    packed = [codec.write(frame) for frame in frames]
    written = time.process_time()
    for bytes_ in packed:
        codec.read(bytes_)
    each = 1e6 / len(frames)
    share = sum(map(len, packed)) / frames.nbytes
    return share, (written - began) * each, (time.process_time() - written) * each


def _buffers(frames: np.ndarray, repeats: int) -> list[Row]:
    sides = [Buffer(frames, compress) for compress in (False, True)]
    for side in sides:
        side.turn()
    turns = take_turns(repeats, *(side.turn for side in sides))
    rows = []
    for name, times in zip(("plain", "compressed"), turns, strict=True):
        sample, insert = zip(*times, strict=True)
        rows += [row(f"replay, {name}: to sample {BATCH}", "ms", sample), row(f"to insert {LENGTH}", "ms", insert)]
    return rows


class Buffer:
    """A full buffer, into which the same frames go over and over."""

    def __init__(self, frames: np.ndarray, compress: bool) -> None:
        leaf = ObsLeaf("obs", "box", (STACK, SIDE, SIDE), "uint8", stack=STACK)
        action = ActionSpec("discrete", (), "int64", (2,), (0,))
        self.replay = Replay([leaf], action, capacity=len(frames), lanes=1, n_step=3, compress=compress)
        starts = range(0, len(frames) - LENGTH - STACK, LENGTH)
        self._fragments = [_fragment(frames[start : start + LENGTH + STACK]) for start in starts]
        self._sequences, self._rng = count(), np.random.default_rng(0)

    def turn(self) -> tuple[float, float]:
        """Milliseconds to sample a batch, and to insert a fragment."""
        began = time.process_time()
        for fragment in self._fragments:
            self.replay.insert(replace(fragment, sequence=next(self._sequences)))
        inserted = time.process_time()
        for _ in range(20):
            self.replay.sample(BATCH, self._rng)
        done = time.process_time()
        return (done - inserted) / 20 * 1e3, (inserted - began) / len(self._fragments) * 1e3


def _fragment(frames: np.ndarray) -> Fragment:
    """One lane that sees the newest four of `[LENGTH + STACK, SIDE, SIDE]`."""
    stacks = np.lib.stride_tricks.sliding_window_view(frames, STACK, axis=0)  # [T+1, SIDE, SIDE, STACK]
    no = np.zeros((LENGTH, 1), bool)
    columns = {
        "obs": np.ascontiguousarray(np.moveaxis(stacks, -1, 1))[:, None],
        "action": np.zeros((LENGTH, 1), np.int64),
        "reward": np.zeros((LENGTH, 1), np.float32),
        **dict.fromkeys(("terminated", "truncated"), no),
        "valid": ~no,
        "final/index": np.zeros(0, np.int64),
        "final/obs": np.zeros((0, STACK, SIDE, SIDE), np.uint8),
    }
    return Fragment(columns, version=0, sampler=0, sequence=0)


def _differences(frame: np.ndarray) -> np.ndarray:
    lines = frame.copy()
    lines[1:] -= frame[:-1]
    return lines


def _sums(packed: bytes) -> np.ndarray:
    lines = np.frombuffer(zlib.decompress(packed, PLAIN, SIDE * SIDE), np.uint8).reshape(SIDE, SIDE)
    return np.add.accumulate(lines, axis=0, dtype=np.uint8)


def _plain(packed: bytes) -> bytes:
    return zlib.decompress(packed, PLAIN, SIDE * SIDE)


CODECS = (
    Codec("deflate 1", lambda frame: zlib.compress(frame.data, LEVEL, PLAIN), _plain),
    Codec("zlib 1", lambda frame: zlib.compress(frame.data, LEVEL), zlib.decompress),
    Codec("deflate 6", lambda frame: zlib.compress(frame.data, 6, PLAIN), _plain),
    Codec("differences, deflate 1", lambda frame: zlib.compress(_differences(frame).data, LEVEL, PLAIN), _sums),
)


def _played(game: str, count: int) -> np.ndarray:
    env = make("raynforce.envs.atari:make", {"game": game, "frame_stack": 1, "screen": SIDE})
    env.action_space.seed(0)
    seen = _seen(env, SKIPPED + count)[SKIPPED:]
    close_env(env)
    return seen


def _catch(count: int) -> np.ndarray:
    small = _seen(Catch(length=20, width=21), count)[..., 0]
    return np.kron(small, np.ones((1, 4, 4), np.uint8))


def _seen(env: Env, count: int) -> np.ndarray:
    """So many observations, `[count, ...]`, of actions at random."""
    seen = [env.reset(seed=0)[0]]
    while len(seen) < count:
        obs, _, terminated, truncated, _ = env.step(env.action_space.sample())
        seen.append(env.reset(seed=len(seen))[0] if terminated or truncated else obs)
    return np.stack(seen)


if __name__ == "__main__":
    command(measure, __doc__ or "")
