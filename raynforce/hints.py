"""What was meant by a setting that there is none of: asked only once there is a mistake."""

from __future__ import annotations

from collections.abc import Iterable

from raynforce import settings
from raynforce.algos import BUILT_IN, algorithm_class
from raynforce.config import Config
from raynforce.errors import nearest, said_elsewhere
from raynforce.synonyms import NONE, SETTINGS, Here


def about_setting(path: str, known: Iterable[str], algo: str) -> str:
    """What to add to the complaint about an unknown setting: what it is called here, why there is none, or a guess."""
    names = list(known)
    right_word = any(_leaf(name) == _leaf(path) for name in names)  # in the wrong place
    found = "" if right_word else called_here(path, algo)
    if isinstance(found, Here):
        return f": here it is {found.path}" + (f" ({found.note})" if found.note else "")
    return f": {found}" if found else nearest(path, names)


def called_here(word: str, algo: str | None) -> Here | str:
    """The setting that is meant for `algo` (None: for any), a clause that says why there is none, or "" if unknown."""
    leaf = _leaf(word)
    own = [f"algorithm.{leaf}", *(name for name in _keys(algo) if _leaf(name) == leaf)]
    here = [*map(Here, own), *(said_elsewhere(leaf, SETTINGS) or ())]
    for found in here:
        if found.path in _keys(algo):
            return found
    for found in here:
        others = [name for name in BUILT_IN if found.path in _keys(name)]
        if others:
            named = "" if found.path == word else f" ({found.path})"
            *first, last = others
            who = f"{', '.join(first)} and {last} have" if first else f"{last} has"
            return f"{who} it{named}, {algo} does not"
    return said_elsewhere(leaf, NONE) or ""


def _leaf(path: str) -> str:
    return path.lstrip("-").rpartition(".")[2].lower().replace("-", "_")


def _keys(algo: str | None) -> list[str]:
    """Every setting of an algorithm; None is all that are built in."""
    kinds = [algorithm_class(name).Settings for name in (BUILT_IN if algo is None else (algo,))]
    return [key for kind in kinds for key in settings.known_keys(Config, {"algorithm": kind})]
