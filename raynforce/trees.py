"""State trees: nested dicts whose leaves are numpy arrays or JSON values. Every role saves itself as one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

Tree = dict[str, Any]

SEGMENTS = "segments"
"""The key under which a state has segments by name: `{"segments": {"17-123456": {"obs": array, …}}}`.

A segment holds arrays alone and never changes: what changes gets another name. So checkpoints store it once, and a
segment that is on disk already may be given as `{}`.
"""


def split(tree: Tree, prefix: str = "") -> tuple[dict[str, np.ndarray], Tree]:
    """Separate a tree into its arrays (by `a/b/c` path) and the rest, which is plain JSON."""
    arrays: dict[str, np.ndarray] = {}
    rest: Tree = {}
    for key, value in tree.items():
        below: dict[str, np.ndarray] = {}
        if isinstance(value, np.ndarray):
            below = {f"{prefix}{key}": value}
        elif isinstance(value, dict):
            below, rest[key] = split(value, f"{prefix}{key}/")
        else:
            rest[key] = value
        if below and "/" in key:
            raise ValueError(f"the key {key!r} on the way to an array has a '/', which separates levels")
        arrays.update(below)
    return arrays, rest


def join(arrays: Mapping[str, np.ndarray], rest: Tree) -> Tree:
    """Undo `split`."""
    tree: Tree = {k: join({}, v) if isinstance(v, dict) else v for k, v in rest.items()}
    for path, array in arrays.items():
        *parents, leaf = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = array
    return tree


def segments(tree: Tree) -> dict[str, Tree]:
    """Every segment of a tree, by name, wherever it is."""
    found: dict[str, Tree] = {}
    for key, value in tree.items():
        if not isinstance(value, dict):
            continue
        here = value if _has_segments(key, value) else segments(value)
        if double := found.keys() & here.keys():
            raise ValueError(f"two segments have the name {min(double)!r}")
        found |= here
    return found


def without(tree: Tree, known: Collection[str]) -> Tree:
    """The tree with those segments emptied whose names are known: they are on disk already."""
    return _changed(tree, lambda name, segment: (name, {} if name in known else segment))


def with_segments(tree: Tree, found: Mapping[str, Tree]) -> Tree:
    """The tree with its segments put in; those that were not found are left out, by name."""
    return _changed(tree, lambda name, _: (name, found[name]) if name in found else None)


def renamed(tree: Tree, rename: Callable[[str], str]) -> Tree:
    """The tree with its segments under other names, so that one part of a checkpoint can have those of several."""
    return _changed(tree, lambda name, segment: (rename(name), segment))


def _changed(tree: Tree, change: Callable[[str, Tree], tuple[str, Tree] | None]) -> Tree:
    """A copy of the tree with every segment changed, and its name; None leaves it out."""
    result: Tree = {}
    for key, value in tree.items():
        if not isinstance(value, dict):
            result[key] = value
        elif _has_segments(key, value):
            result[key] = dict(filter(None, (change(name, segment) for name, segment in value.items())))
        else:
            result[key] = _changed(value, change)
    return result


def _has_segments(key: str, value: Tree) -> bool:
    """Whether this is where segments are, and not the user's own data of that name."""
    return key == SEGMENTS and all(isinstance(segment, dict) and _arrays_alone(segment) for segment in value.values())


def _arrays_alone(tree: Tree) -> bool:
    return all(isinstance(v, np.ndarray) or (isinstance(v, dict) and _arrays_alone(v)) for v in tree.values())


def rng_state(rng: np.random.Generator) -> Tree:
    """The exact state of a random stream (JSON: Python integers have no size limit)."""
    return dict(rng.bit_generator.state)


def load_rng(rng: np.random.Generator, state: Tree) -> None:
    rng.bit_generator.state = state
