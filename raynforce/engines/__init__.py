"""What trains, behind one seam (`base.py`): `native` is a folder here, yours may be a class in any module."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raynforce.errors import UsageError
from raynforce.imports import load_object, require_named

if TYPE_CHECKING:
    from raynforce.engines.base import Engine

BUILT_IN = {"native": "raynforce.engines.native.engine:NativeEngine"}


def engine_class(name: str) -> type[Engine]:
    """The engine called `name`: a built-in one, or the user's `module:Class`."""
    from raynforce.engines.base import Engine

    require_named("engine", name, BUILT_IN, "Class")
    found = load_object(BUILT_IN.get(name, name), "engine")
    if not (isinstance(found, type) and issubclass(found, Engine)):
        raise UsageError(f"engine {name!r} is {found!r}, not a subclass of raynforce.engines.base.Engine")
    return found
