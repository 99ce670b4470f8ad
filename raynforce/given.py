"""Environments, algorithms and networks that are no `module:name`: given as objects, by a script or a notebook.

Such a thing gets a name that says where it is from, `__main__:Maze@/home/me/train.py`. Configs and checkpoints hold
the name; this process knows what it stands for, and so do those that a run starts: it is sent to them.
"""

from __future__ import annotations

import functools
import itertools
import os
import pickle
import sys
import threading
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from raynforce.errors import UsageError, summary
from raynforce.imports import bare, is_given, load_object

MAIN = "__main__"


@dataclass
class _Entry:
    thing: Any
    runs: int = 0  # that use it now. Without one, another thing may get the name
    packed: bytes | None = None  # as it was when a run that uses it first sent it: all of its processes get the same


_entries: dict[str, _Entry] = {}
_changing = threading.Lock()


class Lender:
    """Gives names to things for as long as one run lasts."""

    def __init__(self) -> None:
        self._lent: list[_Entry] = []

    def name_of(self, thing: Any) -> Any:
        """The `module:name` of a function or class, or one of ours; a text stays as it is."""
        if isinstance(thing, str) and thing.startswith(f"{MAIN}:") and not is_given(thing):
            thing = load_object(thing)
        if isinstance(thing, str) or not callable(thing):
            return thing  # what is neither is refused where settings are read
        path = f"{getattr(thing, '__module__', '')}:{getattr(thing, '__qualname__', '')}"
        if not path.startswith(f"{MAIN}:") and _leads_to(path, thing):
            return path
        with _changing:
            name = base = _describe(thing)
            numbers = itertools.count(2)
            while _is_taken(name, thing):  # by another run, in another thread
                name = f"{base}#{next(numbers)}"
            self._lend(name, thing)
        return name

    def know(self, name: str, thing: Any) -> None:
        """Let a name of ours, from the config of an older run, stand for this."""
        with _changing:
            if _is_taken(name, thing):
                raise UsageError(f"{bare(name)!r} stands for another object in a run that goes on in this process")
            self._lend(name, thing)

    def _lend(self, name: str, thing: Any) -> None:
        entry = _entries.get(name)
        if entry is None or not entry.runs:
            entry = _entries[name] = _Entry(thing)
        entry.runs += 1
        self._lent.append(entry)

    def close(self) -> None:
        with _changing:
            for entry in self._lent:
                entry.runs -= 1  # what it stood for stays known, for `evaluate` after `train`
                entry.packed = entry.packed if entry.runs else None
            self._lent.clear()


def lending() -> closing[Lender]:
    return closing(Lender())


def pack(names: Iterable[str | None]) -> bytes:
    """What those of these names stand for that are ours, to be sent to a process of the run; may be empty."""
    if reason := obstacle(names := list(names)):
        raise UsageError(f"{reason}: move it into a module, such as mine.py, and give 'mine:NAME', or train inline")
    packed = {name: _entries[name].packed for name in names if name is not None and is_given(name)}
    return pickle.dumps(packed) if packed else b""


def unpack(packed: bytes) -> None:
    """Know in this process what another has packed."""
    for name, data in pickle.loads(packed).items() if packed else ():
        _entries[name] = _Entry(pickle.loads(data), 1, data)


def obstacle(names: Iterable[str | None]) -> str:
    """Why what these names stand for cannot be used in another process; most often nothing."""
    for name in names:
        if name is None or not is_given(name):
            continue
        entry = _entries.setdefault(name, _Entry(load_object(name)))
        try:
            entry.packed = entry.packed or dumps(entry.thing)
        except Exception as error:
            return f"{bare(name)!r} cannot be sent to another process ({summary(error)})"
    return ""


def dumps(value: Any) -> bytes:
    """Pickle what may hold objects of classes that another process cannot import."""
    import cloudpickle  # type: ignore[import-untyped]

    data: bytes = cloudpickle.dumps(value, protocol=5)
    return data


def _is_taken(name: str, thing: Any) -> bool:
    entry = _entries.get(name)
    return entry is not None and entry.runs > 0 and entry.thing is not thing


def _leads_to(path: str, thing: Any) -> bool:
    try:
        return "<" not in path and not path.endswith(":") and load_object(path) is thing
    except UsageError:
        return False


def _describe(thing: Any) -> str:
    """`module:name@file`, and for a lambda the line too, as all have the same name."""
    module, name = _module_and_name(thing)
    code = getattr(thing, "__code__", None)
    line = f":{code.co_firstlineno}" if code is not None and name.endswith("<lambda>") else ""
    return f"{module}:{name}@{_file(module)}{line}"


def _module_and_name(thing: Any) -> tuple[str, str]:
    if isinstance(thing, functools.partial):
        module, name = _module_and_name(thing.func)
        return module, f"partial({name})"
    name = getattr(thing, "__qualname__", "")
    if not name:  # an object that can be called
        return type(thing).__module__, f"{type(thing).__qualname__}()"
    return thing.__module__ or MAIN, name


def _file(module: str) -> str:
    """Where a module's code is, as a reader would look for it."""
    found = sys.modules.get(module)
    file = getattr(found, "__file__", None) or getattr(found, "__vsc_ipynb_file__", None)
    if module == MAIN and not file:
        file = os.environ.get("JPY_SESSION_NAME")  # Jupyter's name for the notebook
    if file:
        return os.path.abspath(file)
    return "notebook" if "ipykernel" in sys.modules else "prompt"


def find(path: str) -> Any:
    """What a name of ours stands for: in a current run, else in this script, else in the last run with it; or None."""
    entry = _entries.get(path)
    if entry is not None and entry.runs:
        return entry.thing
    name, _, file = path.partition("@")
    if name.startswith(f"{MAIN}:") and file == _file(MAIN):
        found: Any = sys.modules[MAIN]
        for part in name.partition(":")[2].split("."):
            found = getattr(found, part, None)
        if found is not None:
            return found
    return None if entry is None else entry.thing
