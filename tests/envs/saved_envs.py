"""Environments whose running episodes come back exactly, and the way that saved ones take through a file."""

from __future__ import annotations

import json

from raynforce import trees

EXACT = ["walks:Walk", "Walk-v0", "walks:Stranger", "walks:saved", "walks:wrapped"]


def through_a_file(tree: trees.Tree) -> trees.Tree:
    """As a checkpoint does it: arrays apart and read-only, the rest as JSON."""
    arrays, rest = trees.split(tree)
    arrays = {k: v.copy() for k, v in arrays.items()}
    for array in arrays.values():
        array.flags.writeable = False
    return trees.join(arrays, json.loads(json.dumps(rest)))
