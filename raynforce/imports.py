"""Finding the user's own code: `module:name` to the object it stands for."""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType
from typing import Any

from raynforce.errors import UsageError, nearest, summary

importing: list[str] = []
"""The modules that are being imported for the user right now."""


def load_module(name: str) -> ModuleType:
    """Import a module by its dotted name; modules in the current directory are found too."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does; it stays, because the module may import its neighbours later
    importlib.invalidate_caches()  # the file may be younger than this process
    importing.append(name)
    try:
        return importlib.import_module(name)
    except UsageError:
        raise
    except (Exception, SystemExit) as error:  # a script that was not made to be imported may exit
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and (name == missing or name.startswith(missing + ".")):
            fix = (
                f"write {name[:-3]!r}"
                if name.endswith(".py")
                else f"install it, or run from its directory (now {here})"
            )
            raise UsageError(f"no module named {name!r}: {fix}") from error
        raise UsageError(f"importing {name!r} failed: {summary(error)}; fix that import first") from error
    finally:
        importing.pop()


def load_object(path: str) -> Any:
    """Return the object that `module:name` stands for; `name` may have dots, as in `my_envs:Maze.large`."""
    module_name, colon, names = path.partition(":")
    if not (module_name and colon and names):
        raise UsageError(f"{path!r} is not of the form module:name, for example my_envs:make_env")
    found: Any = load_module(module_name)
    for name in names.split("."):
        try:
            found = getattr(found, name)
        except AttributeError as error:
            raise UsageError(f"module {module_name!r} has no {names!r}{nearest(name, dir(found))}") from error
    return found


def name_of(thing: Any) -> str:
    """The `module:name` of a function or class, as configs and other processes need it; a text stays as it is."""
    if isinstance(thing, str) or not callable(thing):
        return thing  # what is neither is refused where settings are read
    module, name = getattr(thing, "__module__", ""), getattr(thing, "__qualname__", "")
    path = f"{module}:{name}"
    if module == "__main__" or "<" in name or load_object(path) is not thing:
        raise UsageError(
            f"{thing!r} cannot be found by name from another process: put it into a module and give 'module:name'"
        )
    return path
