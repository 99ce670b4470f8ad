"""What trains, behind one seam (`base.py`): `native` and `rllib` are folders here, yours a class in any module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raynforce.algos import algorithm_class
from raynforce.errors import UsageError
from raynforce.imports import load_object, require_named

if TYPE_CHECKING:
    from raynforce.algos.base import Algorithm
    from raynforce.engines.base import Engine
    from raynforce.engines.rllib.algorithms import Described

BUILT_IN = {
    "native": "raynforce.engines.native.engine:NativeEngine",
    "rllib": "raynforce.engines.rllib.engine:RLlibEngine",
}


def algorithm_of(engine: str, algo: str) -> type[Algorithm[Any]] | Described:
    """What an algorithm declares to a config, `Settings` and the three kinds of `defaults`, for the engine it is of."""
    if engine == "rllib":
        from raynforce.engines.rllib.algorithms import described

        return described(algo)
    return algorithm_class(algo)


def engine_class(name: str) -> type[Engine]:
    """The engine called `name`: a built-in one, or the user's `module:Class`."""
    from raynforce.engines.base import Engine

    require_named("engine", name, BUILT_IN, "Class")
    found = load_object(BUILT_IN.get(name, name), "engine")
    if not (isinstance(found, type) and issubclass(found, Engine)):
        raise UsageError(f"engine {name!r} is {found!r}, not a subclass of raynforce.engines.base.Engine")
    return found
