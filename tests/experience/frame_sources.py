"""Frames with names, in stacks, and the fragments that have them, some of which went wrong."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from replay_sources import Source

from raynforce.experience.fragment import Fragment
from raynforce.experience.replay import Replay
from raynforce.spaces import ObsLeaf

STACKED = (
    ObsLeaf("obs/id", "discrete", (), "int64", (10**9,), (0,)),
    ObsLeaf("obs/camera", "box", (4 * 2, 2, 2), "uint8", stack=4),  # a frame is eight bytes: its name
    ObsLeaf("obs/speed", "box", (2, 3), "float32", stack=2),  # another number of frames, of bytes that make no words
)
PLAIN = tuple(replace(leaf, stack=1) for leaf in STACKED)


class FrameSource:
    """A `Source` that shows its names as stacks of frames; `truth` has all that it has shown."""

    def __init__(self, lanes: int, seed: int, sampler: int = 0, **kwargs: Any) -> None:
        self.source = Source(lanes, seed, sampler, **kwargs)
        self.history = [[name] * 4 for name in self.source.now]
        self.truth: dict[int, list[int]] = {}

    def sample(self, length: int) -> Fragment:
        fragment, _ = self.source.sample(length)
        ids, valid = fragment["obs/id"], fragment["valid"]
        finals = dict(zip(fragment["final/index"].tolist(), fragment["final/obs/id"].tolist(), strict=True))
        shown = np.zeros((length + 1, fragment.lanes, 4), np.int64)
        last = []
        for b in range(fragment.lanes):
            names = self.history[b]
            shown[0, b] = names
            for t in range(length):
                name = int(ids[t + 1, b])
                final = finals.get(t * fragment.lanes + b)
                if final is not None:
                    last.append((t * fragment.lanes + b, [*names[1:], final]))
                names = [*names[1:], name] if valid[t, b] and final is None else [name] * 4
                shown[t + 1, b] = names
            self.history[b] = names
        stacks = dict(last)
        final_names = np.array([stacks[i] for i in finals], np.int64).reshape(-1, 4)
        for names in (*shown.reshape(-1, 4).tolist(), *final_names.tolist()):
            self.truth[names[3]] = names
        columns = {k: v for k, v in fragment.columns.items() if "pair" not in k}
        columns |= {"action": np.zeros((length, fragment.lanes), np.int64)}
        columns |= seen(shown) | {f"final/{path}": array for path, array in seen(final_names).items()}
        return replace(fragment, columns=columns)


def seen(names: np.ndarray) -> dict[str, np.ndarray]:
    """`[..., 4]` names as stacks of frames."""
    names = np.ascontiguousarray(names, np.int64)
    speed = np.repeat(names[..., 2:, None], 3, axis=-1).astype(np.float32)
    return {"obs/camera": names.view(np.uint8).reshape(*names.shape[:-1], 8, 2, 2), "obs/speed": speed}


def fragments(sources: list[FrameSource], rng: np.random.Generator, times: int, longest: int = 8) -> Iterator[Fragment]:
    """From any of the sources, some lost on their way, some whose env broke or that begin elsewhere, some no stacks."""
    for _ in range(times):
        fragment = sources[rng.integers(len(sources))].sample(int(rng.integers(1, longest + 1)))
        columns, trouble = dict(fragment.columns), rng.random()
        if trouble < 0.1:
            continue
        if trouble < 0.2:
            columns["valid"] = fragment["valid"].copy()
            columns["valid"][0] = False
        elif trouble < 0.3:
            columns["obs/camera"] = fragment["obs/camera"].copy()
            columns["obs/camera"][0, 0] += 7
        elif trouble < 0.4:
            columns["obs/camera"] = rng.integers(0, 255, fragment["obs/camera"].shape, np.uint8)
        yield replace(fragment, columns=columns)


def assert_same(shared: Replay, plain: Replay, rng: np.random.Generator) -> None:
    assert (len(shared), shared.resident) == (len(plain), plain.resident)
    if not len(plain):
        return
    seed = int(rng.integers(1 << 30))
    one, two = (replay.sample(4 * len(plain), np.random.default_rng(seed)) for replay in (shared, plain))
    assert one.keys() == two.keys()
    for path, array in one.items():
        assert array.dtype == two[path].dtype
        np.testing.assert_array_equal(array, two[path], err_msg=path)
    priority = rng.random(len(one["index"]))
    for replay in (shared, plain):
        replay.update_priorities(one["index"], priority)
