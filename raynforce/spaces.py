"""What an environment takes and gives, as plain data: no gymnasium, no torch, and it fits in JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class ObsLeaf:
    """One array of an observation. A `Dict` space has several, a plain `Box` has one called `obs`."""

    path: str
    """Its column in a fragment: `obs`, or `obs/camera` for the key `camera` of a `Dict` space."""
    kind: Literal["box", "discrete", "multidiscrete", "multibinary"]
    shape: tuple[int, ...]
    """Shape of one observation, without batch dimensions; `()` for `discrete`."""
    dtype: str
    sizes: tuple[int, ...] = ()
    """How many values each element can take, for `discrete` (one entry) and `multidiscrete`."""
    start: tuple[int, ...] = ()
    """The smallest value of each element, for `discrete` and `multidiscrete`."""
    stack: int = 1
    """How many frames it is made of, joined along the first axis with the newest last."""


@dataclass(frozen=True)
class ActionSpec:
    """The action space. Recorded actions are zero-based indices (discrete kinds) or float32 (box)."""

    kind: Literal["discrete", "multidiscrete", "box"]
    shape: tuple[int, ...]
    dtype: str
    sizes: tuple[int, ...] = ()
    """Number of choices: one entry for `discrete`, one per element for `multidiscrete`."""
    start: tuple[int, ...] = ()
    """The environment's smallest choice of each element, added before the action reaches it."""
    low: tuple[float, ...] = ()
    """Lower bounds of a box action, flattened; may be -inf."""
    high: tuple[float, ...] = ()


@dataclass(frozen=True)
class EnvSpec:
    """All that the rest of Raynforce knows of an environment."""

    env: str
    obs: tuple[ObsLeaf, ...]
    action: ActionSpec
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments it is made with."""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> EnvSpec:
        obs = tuple(ObsLeaf(**tuples(leaf)) for leaf in data["obs"])
        return EnvSpec(data["env"], obs, ActionSpec(**tuples(data["action"])), data["args"])


CHANNELS = (1, 3, 4)
"""How many channels an image has that is not a stack: gray, colour, colour with depth."""


def channels_last(image: tuple[int, ...]) -> bool:
    """Whether an image of three dimensions is `[height, width, channels]`, as renderers give it, by its shape alone.

    Two equal sides are the picture's. Where there are none, or three, the channels are at the end that has as many as
    `CHANNELS` says; where that is both or neither, at the smaller one, and at the front if they are equal.
    """
    first, middle, last = image
    if (first == middle) != (middle == last):
        return first == middle
    if (first in CHANNELS) != (last in CHANNELS):
        return last in CHANNELS
    return last < first


def tuples(data: dict[str, Any]) -> dict[str, Any]:
    """Lists as tuples, as they were before JSON."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
