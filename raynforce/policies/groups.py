"""Groups of parameters, each with a learning rate and a gradient clipping of its own, in one flat vector."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from raynforce.errors import UsageError
from raynforce.policies.spec import several

REST = ""  # the group of all parameters that no other has: the algorithm's own rate and clipping


@dataclass(frozen=True)
class Group:
    """Parameters that are learned at a rate of their own, and whose gradient is clipped by itself."""

    members: str | tuple[str, ...]
    """Towers, free vectors or parameters by name; of a module of your own, names of parameters or prefixes to a dot."""
    learning_rate: float
    """Adam's step size; it is annealed like the algorithm's own."""
    max_grad_norm: float | None = None
    """Gradients of this group longer than this are scaled down to it; None switches that off."""

    def __post_init__(self) -> None:
        if not self.learning_rate >= 0:
            raise UsageError(f"a Group has learning_rate = {self.learning_rate!r}: it is 0 or more")
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise UsageError(f"a Group has max_grad_norm = {self.max_grad_norm!r}: it is above 0, or None")


def rate_of(name: str) -> str:
    return f"learning_rate/{name}"


def is_rate(name: str) -> bool:
    return name.partition("/")[0] == "learning_rate"


def stretches(groups: Mapping[str, Group], parts: Mapping[str, slice]) -> dict[str, list[slice]]:
    """Where each group is in the flat vector, and the rest if there is any; `parts` are all parameters in order."""
    owner: dict[str, str] = {}
    for name, group in groups.items():
        for member in several(group.members):
            mine = [part for part in parts if part == member or part.startswith(f"{member}.")]
            if not mine:
                there = ", ".join(dict.fromkeys(part.partition(".")[0] for part in parts))
                raise UsageError(f"group {name!r} has {member!r}, which is no parameter: the network has {there}")
            for part in mine:
                if owner.setdefault(part, name) != name:
                    both = f"two groups, {owner[part]!r} and {name!r}"
                    raise UsageError(f"parameter {part!r} is in {both}: leave it to one")
        if not several(group.members):
            raise UsageError(f"group {name!r} has no parameters: name some, or leave it out")
    found: dict[str, list[slice]] = {}
    for part, place in parts.items():
        places = found.setdefault(owner.get(part, REST), [])
        if places and places[-1].stop == place.start:
            places[-1] = slice(places[-1].start, place.stop)
        else:
            places.append(place)
    return found
