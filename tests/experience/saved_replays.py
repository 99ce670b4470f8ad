"""Replay buffers to save: how tests make, fill, cut and compare them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
from replay_sources import ACTION, GAMMA, OBS, Source

from raynforce.experience.fragment import Fragment
from raynforce.experience.replay import Replay
from raynforce.trees import Tree, join, split


def make(rows: int = 20, samplers: int = 2, lanes: int = 2, **kwargs: Any) -> Replay:
    capacity = rows * samplers * lanes
    return Replay(OBS, ACTION, capacity=capacity, lanes=lanes, samplers=samplers, **{"gamma": GAMMA, **kwargs})


def written(replay: Replay) -> Tree:
    """Its state as it comes back from a disk."""
    arrays, rest = split(replay.state())
    return join({path: array.copy() for path, array in arrays.items()}, json.loads(json.dumps(rest)))


def assert_same(one: Replay, two: Replay, seed: int = 7) -> dict[str, np.ndarray]:
    assert (len(one), one.resident) == (len(two), two.resident)
    first, second = (replay.sample(300, np.random.default_rng(seed)) for replay in (one, two))
    for path in first:
        np.testing.assert_array_equal(first[path], second[path], err_msg=path)
    return first


def feed(replay: Replay, sources: list[Source], rng: np.random.Generator, times: int) -> None:
    """Insert from any of the sources, so that heads drift apart, with gaps and with envs that break or jump."""
    for _ in range(times):
        fragment, _ = sources[rng.integers(len(sources))].sample(int(rng.integers(1, 8)))
        trouble = rng.random()
        if trouble < 0.1:
            continue  # lost on its way
        if trouble < 0.2:
            fragment = broken(fragment)
        elif trouble < 0.3:
            fragment = elsewhere(fragment)
        replay.insert(fragment)


def broken(fragment: Fragment) -> Fragment:
    valid = fragment["valid"].copy()
    valid[0] = False
    return replace(fragment, columns={**fragment.columns, "valid": valid})


def elsewhere(fragment: Fragment) -> Fragment:
    ids = fragment["obs/id"].copy()
    ids[0] += 500_000
    return replace(fragment, columns={**fragment.columns, "obs/id": ids})


def recut(tree: Tree, cuts: list[int]) -> Tree:
    """The same buffer in segments that begin at these rows."""
    segments = list(tree["segments"].items())
    width = tree["layout"]["samplers"] * tree["layout"]["lanes"]
    flat = [split(piece)[0] for _, piece in segments]
    firsts = [int(name.split("-")[0]) for name, _ in segments]
    index = np.concatenate([f["final_index"] + first * width for f, first in zip(flat, firsts, strict=True)])
    whole = {path: np.concatenate([f[path] for f in flat]) for path in flat[0]}
    pieces = {}
    for start, stop in zip(cuts, [*cuts[1:], len(whole["reward"])], strict=True):
        inside = (index >= start * width) & (index < stop * width)
        piece = {
            path: array[inside] if path.startswith("final") else array[start:stop] for path, array in whole.items()
        }
        piece["final_index"] = index[inside] - start * width
        pieces[f"{start}-0"] = join(piece, {})
    return {**tree, "segments": pieces}
