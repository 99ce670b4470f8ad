"""What is learned: one file per algorithm, readable top to bottom, and the presets that are known to work."""

from __future__ import annotations

from typing import Any

from raynforce.algos.base import Algorithm
from raynforce.algos.contract import require_methods
from raynforce.errors import UsageError, nearest
from raynforce.imports import load_object

BUILT_IN = {
    "ppo": "raynforce.algos.ppo:PPO",
    "dqn": "raynforce.algos.dqn:DQN",
    "impala": "raynforce.algos.impala:IMPALA",
    "a3c": "raynforce.algos.a3c:A3C",
}


def algorithm_class(name: str) -> type[Algorithm[Any]]:
    """The algorithm called `name`: a built-in one, or the user's `module:Class`."""
    path = BUILT_IN.get(name, name)
    if ":" not in path:
        known = ", ".join(sorted(BUILT_IN))
        guess = nearest(name, BUILT_IN)
        raise UsageError(f"unknown algorithm {name!r}{guess}: known are {known}, or your own module:Class")
    found = load_object(path)
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        raise UsageError(f"algorithm {name!r} is {found!r}, not a subclass of raynforce.Algorithm")
    require_methods(found, name)
    return found
