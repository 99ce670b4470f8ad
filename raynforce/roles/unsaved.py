"""Finds what an algorithm changes in training and no checkpoint would have."""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raynforce.algos.base import Algorithm
from raynforce.algos.contract import names
from raynforce.experience.replay import Replay
from raynforce.policies.torch_net import Network
from raynforce.trees import SEGMENTS, Tree, rng_state

GIVEN = ("config", "hp", "env", "round")  # attributes that are the framework's
WHOLE = 1 << 22  # bytes of an array up to which all of it is compared
PART = 1 << 19  # bytes at both ends of a larger one: buffers are filled from one
ELEMENTS = 64  # of a list or dict, at both ends
DEPTH = 6
CODE = (FunctionType, MethodType, BuiltinFunctionType, ModuleType, type)
NUMBERS = (bool, int, float, complex, str, bytes, type(None), np.generic)


class Unsaved:
    """Compares the attributes of an algorithm with what they were before the first update, the large ones in part."""

    def __init__(self, algo: Algorithm[Any], net: Network) -> None:
        self._algo, self._net = algo, net
        self._declared = {*GIVEN, *names(type(algo), "keeps"), *names(type(algo), "forgets")}
        self._apart = {id(algo), id(net), *(id(getattr(algo, name, None)) for name in ("config", "hp", "env"))}
        self._before = {name: self._mark(value) for name, value in self._candidates()}
        self.found: dict[str, str] = {}  # their names, and what they are

    def is_candidate(self, name: str) -> bool:
        """Whether an attribute of this name, if there is one, is neither ours nor declared."""
        return name not in self._declared

    def _candidates(self) -> Iterator[tuple[str, Any]]:
        for name, value in vars(self._algo).items():
            if self.is_candidate(name) and not self._is_network(value):
                yield name, value

    def look(self, saved: Tree | None = None) -> list[str]:
        """Those that have come to light since the last look; `saved` is what `state` returns, if that is known."""
        changed = {
            name: value
            for name, value in self._candidates()
            if name not in self.found and self._mark(value) != self._before.get(name)
        }
        if changed and saved is None:
            saved = self._algo.state()
        new = {n: type(v).__name__ for n, v in changed.items() if v is not None and not self._is_in(saved or {}, n, v)}
        self.found |= new
        return list(new)

    def note(self, new: list[str]) -> str:
        which = ", ".join(f"{name} ({self.found[name]})" for name in new)
        it, value = ("it", "its initial value") if len(new) == 1 else ("them", "their initial values")
        changes = f"{type(self._algo).__name__} changes {which} in training and does not save {it}"
        begins = f"a resume, or a restart of the learner, begins {it} at {value}"
        return f"{changes}: {begins}; name {it} in keeps, or in forgets if nothing depends on {it}"

    def _is_in(self, saved: Tree, name: str, value: Any) -> bool:
        """Whether the state has it: under its name, or under another with equal content."""
        items = list(_items(saved))
        if name.strip("_") in {key for key, _ in items}:
            return True
        if isinstance(value, NUMBERS):
            return any(isinstance(leaf, NUMBERS) and leaf == value for _, leaf in items)
        if isinstance(value, np.random.Generator):
            return rng_state(value) in [leaf for _, leaf in items if isinstance(leaf, dict) and "bit_generator" in leaf]
        arrays = [leaf for _, leaf in items if isinstance(leaf, np.ndarray)]
        own = list(_arrays(value))
        return bool(own) and all(
            any(a.shape == b.shape and self._mark(a) == self._mark(b) for b in arrays) for a in own
        )

    def _is_network(self, value: Any) -> bool:
        """Whether it is the network, or a part of its parameters."""
        if value is self._net:
            return True
        tensors = list(value.parameters()) if isinstance(value, torch.nn.Module) else [value]
        flat = self._net.flat.untyped_storage().data_ptr()
        dense = [t for t in tensors if isinstance(t, Tensor) and not t.is_sparse]
        return 0 < len(dense) == len(tensors) and all(t.untyped_storage().data_ptr() == flat for t in dense)

    def _mark(self, value: Any) -> str:
        sha = hashlib.sha1(usedforsecurity=False)
        for chunk in self._chunks(value, DEPTH, set()):
            sha.update(chunk)
        return sha.hexdigest()

    def _chunks(self, value: Any, depth: int, seen: set[int]) -> Iterator[bytes]:
        if isinstance(value, NUMBERS):
            yield repr(value).encode()
        elif isinstance(value, Tensor):
            yield from _of_tensor(value)
        elif isinstance(value, np.ndarray):
            yield from _of_array(value)
        elif isinstance(value, CODE) or id(value) in self._apart or id(value) in seen or not depth:
            yield b"."
        else:
            for part in _parts(value):
                yield from self._chunks(part, depth - 1, seen | {id(value)})


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, Replay):
        yield from (len(value), value.resident)
    elif isinstance(value, np.random.Generator):
        yield str(rng_state(value))
    elif isinstance(value, random.Random):
        yield str(value.getstate())
    elif isinstance(value, torch.Generator):
        yield value.get_state()
    elif isinstance(value, Mapping):
        yield len(value)
        yield from _some([part for pair in islice(value.items(), 2 * ELEMENTS) for part in pair])
    elif isinstance(value, list | tuple | deque):
        yield len(value)
        yield from _some(value)
    elif isinstance(value, set | frozenset):
        yield len(value)
    elif isinstance(value, torch.nn.Module | torch.optim.Optimizer):
        yield dict(value.state_dict())
    else:
        yield dict(getattr(value, "__dict__", {}))


def _some(values: Any) -> Iterator[Any]:
    count = len(values)
    if count <= 2 * ELEMENTS:
        yield from values
    else:
        yield from (values[i] for i in (*range(ELEMENTS), *range(count - ELEMENTS, count)))


def _of_tensor(tensor: Tensor) -> Iterator[bytes]:
    tensor = tensor.detach()
    if tensor.is_sparse or tensor.is_quantized or tensor.is_meta:
        return
    flat = tensor.reshape(-1) if tensor.is_contiguous() else tensor
    if tensor.nbytes > WHOLE:
        yield str(tensor._version).encode()  # counts what was written into it, wherever
        most = max(1, PART * len(flat) // tensor.nbytes)
        flat = torch.cat((flat[:most], flat[-most:]))
    flat = flat.float() if flat.dtype == torch.bfloat16 else flat
    yield f"{tuple(tensor.shape)}".encode()
    yield np.ascontiguousarray(flat.cpu().numpy()).tobytes()


def _of_array(array: np.ndarray) -> Iterator[bytes]:
    yield f"{array.shape}{array.dtype}".encode()
    if array.dtype.hasobject or not array.size:
        return
    flat = array.reshape(-1) if array.flags.c_contiguous else array
    if array.nbytes > WHOLE:
        most = max(1, PART * len(flat) // array.nbytes)
        yield np.ascontiguousarray(flat[:most]).tobytes()
        flat = flat[-most:]
    yield np.ascontiguousarray(flat).tobytes()


def _items(tree: Tree) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        yield key, value
        if isinstance(value, dict) and key != SEGMENTS:  # of a replay buffer, which may be large
            yield from _items(value)


def _arrays(value: Any) -> Iterator[Any]:
    if isinstance(value, Tensor):
        yield value.detach().cpu().numpy()
    elif isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, torch.nn.Module | torch.optim.Optimizer):
        yield from _arrays(list(value.state_dict().values()))
    elif isinstance(value, Mapping):
        yield from _arrays(list(value.values()))
    elif isinstance(value, list | tuple | deque):
        for each in value:
            yield from _arrays(each)
