"""Spaces on the wire: what a host declares in its HELLO, read with suspicion, compared field by field, and hashed."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raynforce.protocol.fields import items, mapping, one_of, take, text, whole, wrong
from raynforce.protocol.frame import FEW, MOST_BODY, MOST_LEAVES, ProtocolError
from raynforce.spaces import ActionSpec, EnvSpec, ObsLeaf

DTYPES = {  # little-endian; flags are uint8: bool has no size that all languages agree on
    str(dtype): dtype.newbyteorder("<")
    for dtype in map(np.dtype, ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f2", "f4", "f8"))
}
MOST_DIMENSIONS = 8
MOST_ACTION = 1 << 16  # elements of one action
_KINDS = ("box", "discrete", "multidiscrete", "multibinary")
_ACTION_KINDS = ("discrete", "multidiscrete", "box")
_WHOLE = (-(1 << 53), 1 << 53)  # what every JSON reader keeps exact


@dataclass(frozen=True)
class Spaces:
    """What one environment takes and gives: from this follows the size of every buffer."""

    obs: tuple[ObsLeaf, ...]
    action: ActionSpec

    @staticmethod
    def of(spec: EnvSpec) -> Spaces:
        return Spaces(spec.obs, spec.action)

    @property
    def obs_bytes(self) -> int:
        return sum(row_bytes(leaf) for leaf in self.obs)

    def to_json(self) -> dict[str, Any]:
        """Without what is empty. A bound that is infinite is null: JSON knows no infinity."""
        action = _lean(self.action, "kind", "shape", "dtype", "sizes", "start")
        for name in ("low", "high"):
            if bounds := getattr(self.action, name):
                action[name] = [bound if math.isfinite(bound) else None for bound in bounds]
        names = "path", "kind", "shape", "dtype", "sizes", "start"
        stacks = [{"stack": leaf.stack} if leaf.stack > 1 else {} for leaf in self.obs]
        obs = [_lean(leaf, *names) | stack for leaf, stack in zip(self.obs, stacks, strict=True)]
        return {"obs": obs, "action": action}

    @staticmethod
    def from_json(data: object, where: str = "spaces") -> Spaces:
        """From a peer: everything is checked, and what is wrong is named as in `spaces.obs[1].shape`."""
        found = mapping(data, where)
        obs = items(take(found, "obs", where), f"{where}.obs", 1, MOST_LEAVES)
        leaves = tuple(_leaf(leaf, f"{where}.obs[{i}]") for i, leaf in enumerate(obs))
        paths = [leaf.path for leaf in leaves]
        if len(set(paths)) < len(paths):
            raise ProtocolError("field", f"{where}.obs has two leaves of the same path")
        spaces = Spaces(leaves, _action(take(found, "action", where), f"{where}.action"))
        if spaces.obs_bytes > MOST_BODY:
            raise ProtocolError(
                "limit", f"one observation has {spaces.obs_bytes} bytes; at most {MOST_BODY} are allowed"
            )
        return spaces

    def digest(self) -> str:
        """SHA-256 of a text that is the same in every language: see `canonical`."""
        return hashlib.sha256(self.canonical().encode()).hexdigest()

    def canonical(self) -> str:
        """One line per leaf; numbers in decimal, bounds as the 16 hex digits of a big-endian double."""
        lines = [_line(leaf.path, leaf, [f"stack={leaf.stack}"]) for leaf in self.obs]
        both = {"low": self.action.low, "high": self.action.high}
        bounds = [f"{n}={','.join(struct.pack('>d', b).hex() for b in values)}" for n, values in both.items()]
        return "".join([*lines, _line("action", self.action, bounds)])


def row_bytes(leaf: ObsLeaf | ActionSpec) -> int:
    return math.prod(leaf.shape) * DTYPES[leaf.dtype].itemsize


def differences(host: Spaces, policy: Spaces, most: int = 32) -> list[dict[str, Any]]:
    """Where two declarations differ: `{"field": "obs/camera.shape", "host": …, "policy": …}`, with null for nothing."""
    ours, theirs = _flat(policy), _flat(host)
    names = [*theirs, *(name for name in ours if name not in theirs)]
    found = [(name, theirs.get(name), ours.get(name)) for name in names if theirs.get(name) != ours.get(name)]
    order = [leaf.path for leaf in host.obs], [leaf.path for leaf in policy.obs]
    if not found and order[0] != order[1]:
        found = [("obs order", *order)]
    return [{"field": name, "host": _short(theirs), "policy": _short(ours)} for name, theirs, ours in found[:most]]


def misfits(leaf: ObsLeaf | ActionSpec, rows: np.ndarray, finite: bool) -> np.ndarray | None:
    """`[N]` which rows hold values that the leaf cannot have; None, most often, if none does."""
    if leaf.kind == "discrete" and len(rows) <= FEW:
        values, first = rows.tolist(), leaf.start[0] if leaf.start else 0
        if first <= min(values, default=first) and max(values, default=first) < first + leaf.sizes[0]:
            return None
    if rows.dtype.kind == "f":
        good = np.isfinite(rows) if finite else None
    elif leaf.kind == "multibinary":
        good = (rows == 0) | (rows == 1)
    elif leaf.sizes:
        start = np.array(leaf.start or (0,) * len(leaf.sizes)).reshape(leaf.shape)
        good = (rows >= start) & (rows < start + np.array(leaf.sizes).reshape(leaf.shape))
    else:
        good = None
    if good is None or np.count_nonzero(good) == good.size:
        return None
    return ~good.reshape(len(rows), -1).all(axis=1)


def forbidden(masks: np.ndarray, actions: np.ndarray, action: ActionSpec) -> bool:
    """Whether some of the actions `[N, ...]`, counted from 0, are not among those that masks `[N, n]` allow."""
    places = actions.reshape(len(actions), -1) + np.cumsum((0, *action.sizes[:-1]))
    return not np.take_along_axis(masks, places, 1).all()


def _leaf(data: object, where: str) -> ObsLeaf:
    found = mapping(data, where)
    path = text(take(found, "path", where), f"{where}.path")
    if path != "obs" and not path.startswith("obs/"):
        raise wrong(f"{where}.path", path, "'obs' or 'obs/…'")
    stack = take(found, "stack", where, 1)
    return ObsLeaf(path, *_elements(found, where, _KINDS), whole(stack, f"{where}.stack", 1, 1 << 16))


def _action(data: object, where: str) -> ActionSpec:
    found = mapping(data, where)
    elements = _elements(found, where, _ACTION_KINDS)
    kind, shape = elements[:2]
    if math.prod(shape) > MOST_ACTION:
        raise wrong(f"{where}.shape", list(shape), f"at most {MOST_ACTION} elements")
    if kind != "box":
        return ActionSpec(*elements)
    ends = [_bounds(found, name, end, shape, where) for name, end in (("low", -math.inf), ("high", math.inf))]
    return ActionSpec(*elements, *ends)


def _elements(found: dict[str, Any], where: str, kinds: Sequence[str]) -> tuple[Any, tuple[int, ...], str, Any, Any]:
    """What leaves and actions have in common: kind, shape, dtype, sizes and start."""
    kind = one_of(take(found, "kind", where), f"{where}.kind", kinds)
    shape = _shape(found, where)
    dtype = one_of(take(found, "dtype", where), f"{where}.dtype", tuple(DTYPES))
    return kind, shape, dtype, *_choices(found, where, kind, shape, dtype)


def _shape(data: dict[str, Any], where: str) -> tuple[int, ...]:
    where = f"{where}.shape"
    shape = items(take(data, "shape", where), where, 0, MOST_DIMENSIONS)
    sizes = tuple(whole(size, f"{where}[{i}]", 1, MOST_BODY) for i, size in enumerate(shape))
    if math.prod(sizes) > MOST_BODY:
        raise wrong(where, list(sizes), f"at most {MOST_BODY} elements")
    return sizes


def _choices(
    data: dict[str, Any], where: str, kind: str, shape: tuple[int, ...], dtype: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """`sizes` and `start`: as many as there are elements, and within what the element type can hold."""
    if kind == "discrete" and shape:
        raise wrong(f"{where}.shape", list(shape), "[] for a discrete space")
    if kind != "box" and DTYPES[dtype].kind == "f":
        raise wrong(f"{where}.dtype", dtype, f"whole numbers for a {kind} space")
    if kind not in ("discrete", "multidiscrete"):
        return (), ()
    count = math.prod(shape)
    sizes = items(take(data, "sizes", where), f"{where}.sizes", count, count)
    start = items(take(data, "start", where, [0] * count), f"{where}.start", count, count)
    checked = tuple(whole(size, f"{where}.sizes[{i}]", 1, _WHOLE[1]) for i, size in enumerate(sizes))
    return checked, tuple(whole(first, f"{where}.start[{i}]", *_WHOLE) for i, first in enumerate(start))


def _bounds(data: dict[str, Any], name: str, default: float, shape: tuple[int, ...], where: str) -> tuple[float, ...]:
    where, count = f"{where}.{name}", math.prod(shape)
    bounds = data.get(name)
    if bounds is None:
        return (default,) * count
    bounds = items(bounds, where, count, count)
    if wrongly := [b for b in bounds if b is not None and type(b) not in (int, float)]:
        raise wrong(where, wrongly[0], "numbers, or null where there is no bound")
    try:
        return tuple(default if b is None else float(b) for b in bounds)
    except OverflowError as error:
        raise wrong(where, "an integer beyond double precision", "numbers that a double can hold") from error


def _lean(spec: ObsLeaf | ActionSpec, *names: str) -> dict[str, Any]:
    values = {name: getattr(spec, name) for name in names}
    listed = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
    return {name: value for name, value in listed.items() if value or name == "shape"}


def _short(value: Any) -> Any:
    return value if len(str(value)) <= 200 else f"{str(value)[:200]}…"


def _flat(spaces: Spaces) -> dict[str, Any]:
    data = spaces.to_json()
    flat = {f"{leaf['path']}.{name}": value for leaf in data["obs"] for name, value in leaf.items() if name != "path"}
    return flat | {f"action.{name}": value for name, value in data["action"].items()}


def _line(path: str, spec: ObsLeaf | ActionSpec, rest: Sequence[str]) -> str:
    numbers = [f"{name}={','.join(map(str, getattr(spec, name)))}" for name in ("shape", "sizes", "start")]
    return " ".join([path, spec.kind, spec.dtype, *numbers, *rest]) + "\n"
