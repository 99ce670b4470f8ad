"""What is learned: one file per algorithm, readable top to bottom, and the presets that are known to work."""

from __future__ import annotations

from typing import Any

from raynforce.algos.base import Algorithm
from raynforce.algos.contract import require_consistent, require_methods
from raynforce.errors import UsageError, nearest, said_elsewhere
from raynforce.imports import load_object

BUILT_IN = {
    "ppo": "raynforce.algos.ppo:PPO",
    "dqn": "raynforce.algos.dqn:DQN",
    "sac": "raynforce.algos.sac:SAC",
    "td3": "raynforce.algos.td3:TD3",
    "impala": "raynforce.algos.impala:IMPALA",
    "a3c": "raynforce.algos.a3c:A3C",
    "bc": "raynforce.algos.bc:BC",
}


def algorithm_class(name: str) -> type[Algorithm[Any]]:
    """The algorithm called `name`: a built-in one, or the user's `module:Class`."""
    path = BUILT_IN.get(name, name)
    if ":" not in path:
        from raynforce.synonyms import ALGORITHMS  # only once there is a mistake

        elsewhere = said_elsewhere(name, ALGORITHMS)
        hint = f" ({elsewhere})" if elsewhere else nearest(name, BUILT_IN)
        known = ", ".join(BUILT_IN)
        raise UsageError(f"no algorithm {name!r}{hint}; raynforce has {known}, or your own module:Class")
    found = load_object(path, "algo")
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        raise UsageError(f"algorithm {name!r} is {found!r}, not a subclass of raynforce.Algorithm")
    require_methods(found, name)
    require_consistent(found, name)
    return found
