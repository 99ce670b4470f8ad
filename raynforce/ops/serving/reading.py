"""From a request's body to observations: parsed within limits, checked against the spaces, never unpickled."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Mapping
from json import JSONDecodeError, JSONDecoder
from typing import Any, NamedTuple, NoReturn

import numpy as np

from raynforce.errors import UsageError
from raynforce.spaces import MASK, EnvSpec, ObsLeaf, forbidden_of, forbids_all

DEPTH = 32  # levels of JSON; an image in a dictionary of dictionaries has five
SMALLEST_LIMIT = 1_000_000  # bytes of a body that are always allowed
OBSERVATIONS = 64  # that may come in one body, however large each is
DIGITS = 26  # bytes of a number as JSON, generous
NPY = "application/x-npy"
HEADER = 10_000  # bytes of an npy header

Leaves = dict[str, np.ndarray]


class Asked(NamedTuple):
    """What a request asks for."""

    leaves: Leaves  # each `[lanes, ...]`
    lanes: int
    single: bool  # one observation without a batch dimension
    greedy: bool | None = None  # None leaves it to the server
    mask: np.ndarray | None = None
    npy: bool = False  # answered in kind
    state: Any = None  # what a policy with memory remembers; empty where an episode begins


class Reader:
    """Reads observations of one environment's spaces; mistakes are `UsageError`s of one line."""

    def __init__(self, env: EnvSpec) -> None:
        self._leaves = [leaf for leaf in env.obs if leaf.path != MASK]
        self._choices = env.action.sizes if env.masked else None  # of a policy that needs a mask of them
        self._one = self._leaves[0] if self._leaves[0].path == "obs" else None
        self._dtypes = {leaf.path: np.dtype(leaf.dtype) for leaf in env.obs}
        self._floats = [path for path, dtype in self._dtypes.items() if dtype.kind == "f"]
        numbers = sum(math.prod(leaf.shape) for leaf in env.obs)
        self.limit = max(SMALLEST_LIMIT, OBSERVATIONS * numbers * DIGITS)

    def json(self, body: bytes) -> Asked:
        asked = parse(body)
        if len(asked) == 1 and "obs" in asked and self._choices is None:  # most often
            return Asked(*self._batched(asked["obs"]))
        if "obs" not in asked:
            raise UsageError('the body has no "obs": send {"obs": ...}')
        for name in asked:
            if name not in ("obs", "greedy", "mask", "state"):
                raise UsageError(f"unknown field {shown(name)}: known are obs, greedy, mask, state")
        greedy, mask = asked.get("greedy"), asked.get("mask")
        if greedy is not None and not isinstance(greedy, bool):
            raise UsageError(f"greedy = {shown(greedy)} is not one of: true, false")
        if self._choices is not None:
            leaves, lanes, single = self._batched(asked["obs"])
            leaves[MASK] = self._mask(asked["obs"], mask, lanes)
            return Asked(leaves, lanes, single, greedy, state=asked.get("state"))
        if mask is not None:
            mask = self._numbers("mask", mask).astype(bool)
        return Asked(*self._batched(asked["obs"]), greedy, mask, state=asked.get("state"))

    def _mask(self, obs: Any, mask: Any, lanes: int) -> np.ndarray:
        """Which choices are allowed, `[lanes, n]`: those of `mask`, or of the observation's `action_mask`."""
        if mask is None:
            mask = obs.get("action_mask") if isinstance(obs, dict) else None
        if mask is None:
            raise UsageError('this policy was trained with action masks: send "mask", true for each allowed choice')
        flags, choices = self._numbers("mask", mask), sum(self._choices or ())
        if flags.shape not in ((choices,), (lanes, choices)):
            raise UsageError(f"mask has shape {list(flags.shape)}; allowed are [{choices}] and [{lanes}, {choices}]")
        if ((flags != 0) & (flags != 1)).any():
            raise UsageError(f"mask is {shown(flags)}; expected true or false for each choice")
        rows = np.broadcast_to(flags.astype(np.int8), (lanes, choices))
        if forbids_all(rows, sizes := self._choices or ()).any():
            raise UsageError(f"mask allows no choice{forbidden_of(rows, sizes) or ' at all'}: allow one at least")
        return rows

    def npy(self, body: bytes) -> Asked:
        if self._choices is not None:
            raise UsageError("this policy was trained with action masks: send JSON with a mask, or act(obs, mask=...)")
        if self._one is None:
            raise UsageError(f"the observation has {len(self._leaves)} parts: send them as JSON, an array is for one")
        return Asked(*self._batched(read_npy(body)), npy=True)

    def settled(self, leaves: Leaves) -> Leaves:
        """The leaves of a whole batch in their own types; one cast for all of it."""
        return {path: _cast(array, self._dtypes[path]) for path, array in leaves.items()}

    def finite(self, leaves: Mapping[str, np.ndarray]) -> bool:
        return all(np.isfinite(leaves[path]).all() for path in self._floats)

    def nested(self, leaves: Leaves) -> Any:
        """Leaves by path, in the form that `act` takes."""
        if self._one is not None:
            return leaves["obs"]
        tree: dict[str, Any] = {}
        for path, array in leaves.items():
            if path == MASK:
                continue
            *inner, last = path.split("/")[1:]
            node = tree
            for key in inner:
                node = node.setdefault(key, {})
            node[last] = array
        return tree

    def _batched(self, obs: Any) -> tuple[Leaves, int, bool]:
        if self._one is not None:
            array = self._array(self._one, obs)
            if array.ndim == len(self._one.shape):
                return {"obs": array[None]}, 1, True
            return {"obs": array}, self._some(len(array)), False
        leaves = {leaf.path: self._array(leaf, _part(leaf, obs)) for leaf in self._leaves}
        forms = {leaves[leaf.path].shape[: leaves[leaf.path].ndim - len(leaf.shape)] for leaf in self._leaves}
        if len(forms) > 1:
            raise UsageError(f"the parts of the observation disagree about the batch: {sorted(forms)}")
        (form,) = forms
        if form:
            return leaves, self._some(form[0]), False
        return {path: array[None] for path, array in leaves.items()}, 1, True

    @staticmethod
    def _some(lanes: int) -> int:
        if not lanes:
            raise UsageError("the batch is empty: send at least one observation")
        return lanes

    def _array(self, leaf: ObsLeaf, obs: Any) -> np.ndarray:
        dtype = self._dtypes[leaf.path]
        found = obs if isinstance(obs, np.ndarray) else self._numbers(leaf.path, obs)
        if wrong := leaf.misshapen(found.shape):
            raise UsageError(wrong)
        if dtype.kind == "f":
            return found  # cast when it is `settled`
        array = _cast(found, dtype)
        if not np.array_equal(array, found):
            raise UsageError(f"{leaf.path} has values that {leaf.dtype} cannot hold: {shown(found)}")
        if leaf.outside(array):
            raise UsageError(f"{leaf.path} = {shown(array)} is outside its space of {list(leaf.sizes)} values")
        return array

    @staticmethod
    def _numbers(name: str, obs: Any) -> np.ndarray:
        try:
            array = np.array(obs)  # of the type that it has: with another, texts would be read as numbers
        except (TypeError, ValueError, OverflowError):
            array = None
        if array is None or array.dtype.kind not in "fiub":
            raise UsageError(f"{name} is not an array of numbers: {shown(obs)}")
        return array


@np.errstate(all="ignore")
def _cast(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """What does not fit becomes infinite, or another number: both are looked for."""
    return array.astype(dtype, copy=False)


def parse(body: bytes) -> dict[str, Any]:
    """A JSON object of at most `DEPTH` levels, without NaN and infinity."""
    if body.count(b"[") + body.count(b"{") > DEPTH and _depth(body) > DEPTH:
        raise UsageError(f"the JSON is nested too deeply: at most {DEPTH} levels")
    try:
        text = body.decode()
        found, end = _scan(text, 0)
        if end != len(text):
            found = _decoder.decode(text)  # there is space around it, or more
    except StopIteration:
        raise UsageError("the body is not JSON: there is nothing, or no value at its beginning") from None
    except JSONDecodeError as error:
        raise UsageError(f"the body is not JSON: {error.msg} at character {error.pos}") from None
    except UsageError:
        raise
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the body is not JSON: {str(error).splitlines()[0][:100]}") from None
    if not isinstance(found, dict):
        raise UsageError('the body is not an object: send {"obs": ...}')
    return found


def _not_finite(word: str) -> NoReturn:
    raise UsageError(f"{word} is not a number that can be acted on: observations are finite")


_decoder = JSONDecoder(parse_constant=_not_finite)
_scan = _decoder.scan_once  # type: ignore[attr-defined]  # what `decode` calls, without its search for spaces


def _depth(body: bytes) -> int:
    """Levels of brackets; those inside of strings count too."""
    characters = np.frombuffer(body, np.uint8)
    opened = (characters == ord("[")) | (characters == ord("{"))
    closed = (characters == ord("]")) | (characters == ord("}"))
    return int((opened.astype(np.int32) - closed).cumsum().max(initial=0))


def read_npy(body: bytes) -> np.ndarray:
    """An array in numpy's format, without a copy: its header is read as a literal, and objects are refused."""
    if body[:6] != b"\x93NUMPY" or len(body) < 12 or body[6] not in (1, 2, 3):
        raise UsageError("the body is not an npy file: write it with numpy.save(..., allow_pickle=False)")
    width = 2 if body[6] == 1 else 4
    length = int.from_bytes(body[8 : 8 + width], "little")
    start = 8 + width + length
    if length > HEADER or start > len(body) or b"\\" in body[8 + width : start]:  # an escape would be a warning
        raise UsageError(f"the npy header is cut off, longer than {HEADER} bytes, or not one")
    try:
        header = ast.literal_eval(body[8 + width : start].decode("utf-8" if body[6] == 3 else "latin1"))
        shape, descr, fortran = header["shape"], header["descr"], header["fortran_order"]
        if type(descr) is not str or type(fortran) is not bool or type(shape) is not tuple:
            raise ValueError(descr)
        dtype = np.dtype(descr)
        if any(type(size) is not int or size < 0 for size in shape) or len(shape) > DEPTH:
            raise ValueError(shape)
    except (ValueError, TypeError, KeyError, SyntaxError, MemoryError, RecursionError):
        raise UsageError("the npy header is not one") from None
    if dtype.kind not in "fiub":
        raise UsageError(f"the npy file holds {shown(descr)}: numbers are allowed, objects are not")
    if math.prod(shape) * dtype.itemsize != len(body) - start:
        raise UsageError(f"the npy header promises shape {shown(list(shape))}, the body has {len(body) - start} bytes")
    return np.frombuffer(body, dtype, offset=start).reshape(shape, order="F" if fortran else "C")


def _part(leaf: ObsLeaf, obs: Any) -> Any:
    for key in leaf.path.split("/")[1:]:
        try:
            obs = obs[int(key)] if isinstance(obs, list) else obs[key]
        except (KeyError, IndexError, TypeError, ValueError):
            raise UsageError(f"the observation has no {leaf.path.removeprefix('obs/')!r}") from None
    return obs


def shown(value: Any) -> str:
    """A value in one short line of plain characters."""
    if isinstance(value, np.ndarray):
        value = value.ravel()[:8].tolist()
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= 60 else f"{text[:57]}..."
