"""State trees: nested dicts whose leaves are numpy arrays or JSON values. Every role saves itself as one."""

from __future__ import annotations

from typing import Any

import numpy as np

Tree = dict[str, Any]


def split(tree: Tree, prefix: str = "") -> tuple[dict[str, np.ndarray], Tree]:
    """Separate a tree into its arrays (by `a/b/c` path) and the rest, which is plain JSON."""
    arrays: dict[str, np.ndarray] = {}
    rest: Tree = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        below: dict[str, np.ndarray] = {}
        if isinstance(value, np.ndarray):
            below = {path: value}
        elif isinstance(value, dict):
            below, rest[key] = split(value, path + "/")
        else:
            rest[key] = value
        if below and "/" in key:
            raise ValueError(f"the key {key!r} on the way to an array has a '/', which separates levels")
        arrays.update(below)
    return arrays, rest


def join(arrays: dict[str, np.ndarray], rest: Tree) -> Tree:
    """Undo `split`."""
    tree: Tree = {k: join({}, v) if isinstance(v, dict) else v for k, v in rest.items()}
    for path, array in arrays.items():
        *parents, leaf = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = array
    return tree


def rng_state(rng: np.random.Generator) -> Tree:
    """The exact state of a random stream (JSON: Python integers have no size limit)."""
    return dict(rng.bit_generator.state)


def load_rng(rng: np.random.Generator, state: Tree) -> None:
    rng.bit_generator.state = state
