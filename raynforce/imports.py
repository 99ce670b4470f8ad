"""Finding the user's own code: `module:name` to the object it stands for."""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType
from typing import Any

from raynforce.errors import UsageError, nearest, summary

importing: list[str] = []  # the modules that are being imported for the user right now


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
            elsewhere = f"install it, or run from its directory (now {here})"
            fix = f"write {name[:-3]!r}" if name.endswith(".py") else elsewhere
            raise UsageError(f"no module named {name!r}: {fix}") from error
        raise UsageError(f"importing {name!r} failed: {summary(error)}; fix that import first") from error
    finally:
        importing.pop()


def is_given(path: str) -> bool:
    """Whether it is the name of an object that was given instead of its `module:name`; see `raynforce.given`."""
    return "@" in path and ":" in path


def bare(path: str) -> str:
    """Such a name without where it is from; any other name as it is."""
    return path.partition("@")[0] if is_given(path) else path


def load_object(path: str, setting: str = "env") -> Any:
    """The object that `module:name` stands for; `name` may have dots. `setting` is the one it is for, for the error."""
    module_name, colon, names = path.partition(":")
    if not (module_name and colon and names):
        raise UsageError(f"{path!r} is not of the form module:name, for example my_envs:make_env")
    if is_given(path):
        from raynforce.given import find

        found: Any = find(path)
        if found is None:
            raise UsageError(_not_known(path, setting))
        return found
    found = load_module(module_name)
    for name in names.split("."):
        try:
            found = getattr(found, name)
        except AttributeError as error:
            raise UsageError(f"module {module_name!r} has no {names!r}{nearest(name, dir(found))}") from error
    return found


def _not_known(path: str, setting: str) -> str:
    name, _, where = path.partition("@")
    last = name.partition(":")[2].rpartition(".")[2]
    last = last if last.isidentifier() else "..."
    again = f"settings={{{setting!r}: {last}}}" if "." in setting else f"{setting}={last}"
    calls = [f"raynforce.{call}(run, {again})" for call in ("resume", "evaluate")[: 2 if setting == "env" else 1]]
    now = f"in Python, {' or '.join(calls)} goes on with it"
    later = f"once it is in a module, so does raynforce resume RUN --set {setting}=MODULE:NAME"
    return f"{name!r} was defined in {where}, not in a module: {now}; {later}"
