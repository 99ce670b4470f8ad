"""Numbers that environments put into `info` where an episode ends, such as `is_success`: by name, and bounded."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from raynforce.trees import Tree

MOST = 32  # names that are kept, the first that come: an environment may use another one each time
LONGEST = 64  # characters of a name

Info = Mapping[str, float]  # what one episode told, by name
Values = Mapping[str, np.ndarray]  # what several told: `[E]` float64 by name, NaN where one did not tell it
NOTHING: Mapping[Any, Any] = {}  # as either of them


def numbers(info: Any) -> dict[str, float]:
    """The finite numbers and bools by name; all else is left out. It may be anything: nothing is raised."""
    found: dict[str, float] = {}
    with contextlib.suppress(Exception):
        for name, value in info.items():
            usable = isinstance(name, str) and 0 < len(name) <= LONGEST and name.isprintable()
            if usable and (number := _number(value)) is not None:
                found[name] = number
            if len(found) == MOST:
                break
    return found


def _number(value: Any) -> float | None:
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if not isinstance(value, bool | int | float | np.bool_ | np.integer | np.floating):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def values(episodes: Sequence[Info]) -> dict[str, np.ndarray]:
    names = list(dict.fromkeys(name for info in episodes for name in info))[:MOST]
    return {name: np.array([info.get(name, math.nan) for info in episodes], np.float64) for name in names}


def joined(parts: Iterable[Values]) -> dict[str, np.ndarray]:
    """One after another, without the episodes that did not tell: an array for each name, of any length."""
    found: dict[str, list[np.ndarray]] = {}
    for part in parts:
        for name, column in part.items():
            if name in found or len(found) < MOST:
                found.setdefault(name, []).append(column[~np.isnan(column)])
    return {name: np.concatenate(columns) for name, columns in found.items()}


def means(told: Values) -> dict[str, float]:
    """The mean of each, over the episodes that told it."""
    return {name: float(column.mean()) for name, column in joined([told]).items() if len(column)}


def to_tree(told: Values) -> Tree:
    """For checkpoints, where a name with a '/' cannot be a key on the way to an array."""
    return {"names": list(told), "values": {str(i): np.asarray(column) for i, column in enumerate(told.values())}}


def from_tree(tree: Tree | None) -> dict[str, np.ndarray]:
    """Undo `to_tree`; what was saved before there was anything is empty."""
    return {name: tree["values"][str(i)] for i, name in enumerate(tree.get("names", ()))} if tree else {}
