"""What saves and loads the running episode of an environment: its own pair of methods, or an adapter for its class."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol

import numpy as np
from gymnasium import wrappers
from gymnasium.wrappers import TimeLimit

from raynforce import trees
from raynforce.envs.describe import bits, short
from raynforce.envs.frames import FrameStack, layers
from raynforce.envs.make import Env
from raynforce.envs.slow import Slow
from raynforce.envs.wrappers import SkipObservation
from raynforce.errors import UsageError
from raynforce.trees import Tree

# Wrappers that may be outside of what has the pair, because nothing of theirs is lost.
KNOWN = (
    TimeLimit,  # its count is saved beside the pair
    FrameStack,  # and so are its frames
    *(wrappers.OrderEnforcing, wrappers.PassiveEnvChecker),  # know only that there was a reset
    *(wrappers.ClipAction, wrappers.RescaleAction, wrappers.ClipReward),  # and these have no state at all
    *(Slow, SkipObservation),
    *(wrappers.DtypeObservation, wrappers.FilterObservation, wrappers.FlattenObservation),
    *(wrappers.GrayscaleObservation, wrappers.RescaleObservation, wrappers.ReshapeObservation),
    wrappers.ResizeObservation,
)
_NORMALIZE = "drop the wrapper and use --set network.normalize_obs=true, which is saved with the policy"
_SCALE = "scale the reward by a constant instead, or give the wrapper save_state and load_state"
# Wrappers that keep running statistics across episodes, and what to do about it.
KEPT: dict[type, str] = {wrappers.NormalizeObservation: _NORMALIZE, wrappers.NormalizeReward: _SCALE}
ALLOWED = "allowed are nested dicts and lists of numpy arrays of numbers, and of None, bool, int, float and str"
_JSON = (type(None), bool, int, float, str)
_DTYPES = {np.dtype(x) for x in ("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")}


class Snapshot(Protocol):
    """Saves and restores the whole state of one environment class as a tree of dicts, numpy arrays and JSON values.

    For a vector environment that includes the random stream; for a single one `np_random` is saved beside it.
    """

    def save(self, env: Any) -> Tree: ...

    def load(self, env: Any, tree: Tree) -> None: ...


class CartPoleSnapshot:
    arrays = ("state", "steps", "prev_done")  # [4, B], [B], [B]

    def save(self, env: Any) -> Tree:
        arrays = {name: getattr(env, name).copy() for name in self.arrays}
        return arrays | {"low": float(env.low), "high": float(env.high), "rng": trees.rng_state(env.np_random)}

    def load(self, env: Any, tree: Tree) -> None:
        for name in self.arrays:
            setattr(env, name, np.array(tree[name]))
        env.low, env.high = tree["low"], tree["high"]
        trees.load_rng(env.np_random, tree["rng"])


class _Own:
    def save(self, env: Any) -> Tree:
        return env.save_state()

    def load(self, env: Any, tree: Tree) -> None:
        env.load_state(tree)


SNAPSHOTS: dict[str, Snapshot] = {"gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv": CartPoleSnapshot()}


def register_snapshot(cls_path: str, snapshot: Snapshot) -> None:
    """Let running episodes of the environment class `module:Class`, single or vector, be saved and loaded.

    It is needed in every process that makes the environment: call it in the module that `env` names.
    """
    module, _, name = cls_path.partition(":")
    if not (module and name):
        raise UsageError(f"{cls_path!r} is not a class path of the form module:Class")
    SNAPSHOTS[cls_path] = snapshot


def snapshot_of(env: object) -> Snapshot | None:
    """The adapter of this very class: a subclass or a wrapper may hold state that its base's adapter misses."""
    return SNAPSHOTS.get(path_of(env))


def path_of(env: object) -> str:
    cls = type(env)
    return f"{cls.__module__}:{cls.__qualname__}"


@dataclass
class Pair:
    """What saves and loads the running episode of one environment."""

    env: Env
    layer: Any  # the environment itself or the wrapper around it that has the pair
    snapshot: Snapshot

    def __post_init__(self) -> None:
        own, path = isinstance(self.snapshot, _Own), path_of(self.layer)
        self.saver, self.loader = (f"{name}_state" if own else f"{name} of its snapshot" for name in ("save", "load"))
        self.name = f"save_state and load_state of {path}" if own else f"the snapshot registered for {path}"

    def save(self) -> Tree:
        """The state, with the random stream of the environment, the counts of time limits, and stacked frames."""
        try:
            state = pack(self.snapshot.save(self.layer))
        except NoTree as error:
            raise NoTree(f"{self.saver} returned {error}; {ALLOWED}") from None
        rng = self._rng()
        saved: Tree = {"state": state, "elapsed": [limit._elapsed_steps for limit in self._limits()]}
        if stacks := self._stacks():
            saved["frames"] = pack({str(i): dict(layer.stacks) for i, layer in enumerate(stacks)})
        return saved if rng is None else saved | {"rng": pack(trees.rng_state(rng))}

    def load(self, saved: Tree) -> None:
        """Undo `save`, in an environment that has been reset."""
        self.snapshot.load(self.layer, unpack(saved["state"]))
        rng = self._rng()
        if rng is not None and "rng" in saved:
            trees.load_rng(rng, unpack(saved["rng"]))  # last, because loading may have drawn from it
        for limit, elapsed in zip(self._limits(), saved["elapsed"], strict=True):
            limit._elapsed_steps = elapsed
        if stacks := self._stacks():
            frames = unpack(saved["frames"])
            for i, layer in enumerate(stacks):
                layer.stacks = frames[str(i)]

    def _rng(self) -> np.random.Generator | None:
        """The environment's `np_random`, if it has made one: asking for it would."""
        rng = getattr(self.env.unwrapped, "_np_random", None)
        return rng if isinstance(rng, np.random.Generator) else None

    def _limits(self) -> list[TimeLimit]:
        return [layer for layer in layers(self.env) if isinstance(layer, TimeLimit)]

    def _stacks(self) -> list[FrameStack]:
        """Those around what has the pair: one inside of a wrapper that has it is that wrapper's to save."""
        around = takewhile(lambda layer: layer is not self.layer, layers(self.env))
        return [layer for layer in around if isinstance(layer, FrameStack)]


def pair_of(env: Env) -> tuple[Pair | None, str]:
    """The outermost pair; or None, and why it is not used: a wrapper around it that is not `KNOWN` may have state."""
    stranger = half = ""
    for layer in layers(env):
        snapshot = snapshot_of(layer)
        own = [n for n in ("save_state", "load_state") if callable(inspect.getattr_static(layer, n, None))]
        if snapshot is None and len(own) == 2:
            snapshot = _Own()
        if snapshot is None:
            if own and not half:
                half = f"{path_of(layer)} has {own[0]} alone; save_state and load_state belong together"
            stranger = stranger or ("" if type(layer) in KNOWN else path_of(layer))
            continue
        pair = Pair(env, layer, snapshot)
        if not stranger:
            return pair, ""
        fix = "give it save_state and load_state, or register a snapshot for it"
        return None, f"not through {pair.name}, as the wrapper {stranger} around it may have a state of its own: {fix}"
    return None, half


def keepers(env: Env) -> tuple[tuple[str, str], ...]:
    """The wrappers of an environment that are known to keep something across episodes: what, and what to do."""
    found = [(kind, fix) for layer in layers(env) for kind, fix in KEPT.items() if isinstance(layer, kind)]
    return tuple((f"{kind.__name__} keeps running statistics", fix) for kind, fix in found)


class NoTree(Exception):
    """Something is neither an array nor JSON; the message says what, and where."""


def pack(tree: Any) -> Tree:
    """A user's tree as one of ours, with arrays by number: whatever its keys are, they mean nothing to a checkpoint."""
    if type(tree) is not dict:
        raise NoTree(f"a {type(tree).__name__} instead of a dict{_advice(tree)}")
    arrays: list[np.ndarray] = []
    places: list[tuple[list[Any], bool]] = []
    try:
        text = json.dumps([_rest(tree, [], arrays, places), places])
    except RecursionError:
        raise NoTree("a tree that is nested too deeply, or holds itself") from None
    return {"json": text, **{str(i): array for i, array in enumerate(arrays)}}


def unpack(packed: Tree) -> Tree:
    """Undo `pack`; the arrays are copies, which may be kept and written to."""
    tree, places = json.loads(packed["json"])
    for i, (path, scalar) in enumerate(places):
        node = tree
        for key in path[:-1]:
            node = node[key]
        array = np.array(packed[str(i)], order="C")
        node[path[-1]] = array[()] if scalar else array
    return tree


def _rest(value: Any, path: list[Any], arrays: list[np.ndarray], places: list[tuple[list[Any], bool]]) -> Any:
    """The JSON of a tree, with None in place of its arrays, which go to `arrays`; `places` says where."""
    if type(value) is dict:
        for key in value:
            if type(key) is not str:
                raise NoTree(f"the key {short(key)}{_at(path)}, which is no text")
        return {key: _rest(below, [*path, key], arrays, places) for key, below in value.items()}
    if type(value) is list:
        return [_rest(below, [*path, i], arrays, places) for i, below in enumerate(value)]
    if type(value) in _JSON:
        return value
    if type(value) is np.ndarray or isinstance(value, np.generic):
        native = value.dtype.newbyteorder("=")
        if native in _DTYPES:
            arrays.append(np.array(value, native, order="C"))  # a copy: the environment will write into its own
            places.append((path, isinstance(value, np.generic)))
            return None
        raise NoTree(f"an array of {value.dtype}{_at(path)}")
    raise NoTree(f"a {type(value).__name__}{_at(path)}{_advice(value)}")


def _at(path: list[Any]) -> str:
    return f" at {'/'.join(map(str, path))!r}" if path else ""


def _advice(value: object) -> str:
    if isinstance(value, bytes | bytearray | memoryview):
        return ", of which np.frombuffer(..., np.uint8) makes an array"
    return ", of which list(...) makes a list" if isinstance(value, tuple) else ""


def difference(a: Tree, b: Tree) -> str:
    """Where two saved states differ, bit for bit; empty if they do not."""
    for part in sorted({*a, *b}):
        x, y = (dict(_leaves(unpack(s[part]) if part in s and part != "elapsed" else s.get(part))) for s in (a, b))
        where = next((path for path in (*x, *y) if x.get(path) != y.get(path)), None)
        if where is not None:
            return "/".join(map(str, where)) if part == "state" and where else part
    return ""


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], bytes]]:
    """Paths and leaves of a tree, these in a form that is equal only for what is equal to the bit."""
    if isinstance(value, dict | list) and value:
        for key, below in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(below, (*path, key))
    else:
        yield path, bits(value)
