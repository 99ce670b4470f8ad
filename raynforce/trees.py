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
        if isinstance(value, np.ndarray):
            arrays[path] = value
        elif isinstance(value, dict):
            below, rest[key] = split(value, path + "/")
            arrays.update(below)
        else:
            rest[key] = value
    return arrays, rest


def join(arrays: dict[str, np.ndarray], rest: Tree, prefix: str = "") -> Tree:
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
