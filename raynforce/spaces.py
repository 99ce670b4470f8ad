"""What an environment takes and gives, as plain data: no gymnasium, no torch, and it fits in JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

MASK = "obs/action_mask"
"""The leaf that says which actions are allowed, `[sum(sizes)]`, 0 or 1 for each choice: no input of a network."""
ACTING, TERMINATED, TRUNCATED = range(3)
"""Rows of the flags that environments of several agents show."""


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

    def misshapen(self, shape: tuple[int, ...]) -> str | None:
        """What is wrong with the shape of one observation, or of a batch of them."""
        if self.shape in (shape, shape[1:]):
            return None
        allowed = f"{list(self.shape)} and [{', '.join(['N', *map(str, self.shape)])}]"
        return f"{self.path} has shape {list(shape)}; allowed are {allowed}"

    def outside(self, array: np.ndarray) -> bool:
        """Whether some element is none of the values that it can take."""
        if not self.sizes:
            return False
        index = array - np.asarray(self.start)
        return bool(((index < 0) | (index >= np.asarray(self.sizes))).any())


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
class AgentKind:
    """Agents of one environment that have equal spaces."""

    agents: tuple[int, ...]
    """Their places among all names."""
    obs: tuple[ObsLeaf, ...]
    action: ActionSpec

    @staticmethod
    def from_json(data: dict[str, Any]) -> AgentKind:
        obs = tuple(ObsLeaf(**tuples(leaf)) for leaf in data["obs"])
        return AgentKind(tuple(data["agents"]), obs, ActionSpec(**tuples(data["action"])))


@dataclass(frozen=True)
class Agents:
    """Who may take part in an environment of several agents."""

    names: tuple[str, ...]
    kinds: tuple[AgentKind, ...]
    turns: bool = False
    """Whether one moves at a time (PettingZoo's AEC), else all at once."""
    state: int = 0
    """Numbers in the environment's own global state; 0 if it has none."""

    @property
    def state_width(self) -> int:
        """Numbers in the global state: the environment's own, or all that all agents see."""
        leaves = [[leaf for leaf in kind.obs if leaf.path != MASK] for kind in self.kinds]
        widths = [sum(math.prod(leaf.shape) for leaf in each) for each in leaves]
        each = [len(kind.agents) * width for kind, width in zip(self.kinds, widths, strict=True)]
        return self.state or sum(each)

    def kind_of(self, agent: int) -> int:
        return next(i for i, kind in enumerate(self.kinds) if agent in kind.agents)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Agents:
        kinds = tuple(AgentKind.from_json(kind) for kind in data["kinds"])
        return Agents(tuple(data["names"]), kinds, data["turns"], data["state"])


def leaf_name(kind: int, leaf: int) -> str:
    """What a leaf of a kind of agents is called in the observation of all."""
    return f"seen_{kind}_{leaf}"


def action_slices(agents: Agents) -> list[slice]:
    """Where each agent's action is in that of all."""
    found, begin = [], 0
    for agent in range(len(agents.names)):
        end = begin + math.prod(agents.kinds[agents.kind_of(agent)].action.shape)
        found.append(slice(begin, end))
        begin = end
    return found


def joined(agents: Agents) -> tuple[tuple[ObsLeaf, ...], ActionSpec]:
    """The observation and the action of all agents as one, as simulators have them.

    `reward` and `flags` of all, then the leaves of each kind with a row for each of its agents, then the global state.
    """
    count = len(agents.names)
    leaves = [ObsLeaf("obs/reward", "box", (count,), "float32")]
    leaves.append(ObsLeaf("obs/flags", "multibinary", (3, count), "uint8"))
    for k, kind in enumerate(agents.kinds):
        rows = len(kind.agents)
        for i, leaf in enumerate(kind.obs):
            what: Any = "multidiscrete" if leaf.kind == "discrete" else leaf.kind
            choices = leaf.sizes * rows, leaf.start * rows
            leaves.append(ObsLeaf(f"obs/{leaf_name(k, i)}", what, (rows, *leaf.shape), leaf.dtype, *choices))
    if agents.state:
        leaves.append(ObsLeaf("obs/state", "box", (agents.state,), "float32"))
    bounds = [action_bounds(agents.kinds[agents.kind_of(agent)].action) for agent in range(count)]
    low, high = (tuple(float(x) for bound in bounds for x in bound[side]) for side in (0, 1))
    return tuple(leaves), ActionSpec("box", (len(low),), "float32", low=low, high=high)


def float32_bounds(action: ActionSpec) -> tuple[np.ndarray, np.ndarray]:
    """The least and the largest float32 within the bounds of a box, as float64: actions are float32, and 0.1 of a
    float64 space would become 0.10000000149."""
    low, high = (np.asarray(bound, np.float64).reshape(action.shape) for bound in (action.low, action.high))
    with np.errstate(over="ignore"):  # beyond float32's range it is infinite
        least, most = low.astype(np.float32), high.astype(np.float32)
    least = np.where(least < low, np.nextafter(least, np.float32(np.inf)), least)
    most = np.where(most > high, np.nextafter(most, np.float32(-np.inf)), most)
    return least.astype(np.float64), most.astype(np.float64)


def action_bounds(action: ActionSpec) -> tuple[Sequence[float], Sequence[float]]:
    """The smallest and the largest value of each element."""
    if action.kind == "box":
        return action.low, action.high
    start = action.start or (0,) * len(action.sizes)
    return start, [a + n - 1 for a, n in zip(start, action.sizes, strict=True)]


@dataclass(frozen=True)
class EnvSpec:
    """All that the rest of Raynforce knows of an environment."""

    env: str
    obs: tuple[ObsLeaf, ...]
    action: ActionSpec
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments it is made with."""
    agents: Agents | None = None
    """Who takes part, if there are several; `obs` and `action` are then those of one of them."""

    @property
    def lanes(self) -> int:
        """Lanes of one environment: one for each agent."""
        return 1 if self.agents is None else len(self.agents.names)

    @property
    def masked(self) -> bool:
        """Whether it says which actions are allowed."""
        return any(leaf.path == MASK for leaf in self.obs)

    def to_json(self) -> dict[str, Any]:
        data = dataclasses.asdict(self)
        if self.agents is None:
            del data["agents"]
        return data

    @staticmethod
    def from_json(data: dict[str, Any]) -> EnvSpec:
        obs = tuple(ObsLeaf(**tuples(leaf)) for leaf in data["obs"])
        agents = Agents.from_json(data["agents"]) if "agents" in data else None
        return EnvSpec(data["env"], obs, ActionSpec(**tuples(data["action"])), data["args"], agents)


FORBIDS = "forbids every choice: at least one must be allowed until the episode has terminated"


def forbids_all(masks: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """`[N]` which of masks `[N, sum(sizes)]` leave nothing to choose, for any element of an action."""
    starts = np.cumsum((0, *sizes[:-1]))
    some: np.ndarray = np.logical_or.reduceat(masks, starts, axis=1)  # [N, len(sizes)]
    return np.logical_not(some.all(axis=1))


def forbidden_of(masks: np.ndarray, sizes: Sequence[int]) -> str:
    """Of an action with several elements, which one the first such mask leaves nothing to choose."""
    if len(sizes) == 1:
        return ""
    starts = np.cumsum((0, *sizes))
    empty = ~np.logical_or.reduceat(masks, starts[:-1], axis=1)  # [N, len(sizes)]
    at = int(np.argwhere(empty)[0, 1])
    return f" of element {at} of the action (flags {starts[at]} to {starts[at + 1] - 1})"


def forbids(masks: np.ndarray, sizes: Sequence[int]) -> str:
    """`FORBIDS`, of masks for which that holds, with what is left nothing to choose."""
    return FORBIDS.replace("every choice", f"every choice{forbidden_of(masks, sizes)}")


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
