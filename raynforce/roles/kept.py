"""What an algorithm names in `keeps`: put on the learner's device, written as a state tree, and restored in place."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raynforce.algos.base import Algorithm
from raynforce.algos.contract import names
from raynforce.errors import CheckpointError, UsageError, summary
from raynforce.experience.replay import Replay
from raynforce.trees import SEGMENTS, Tree, load_rng, rng_state

PIECES = "pieces"  # `segments` of a kept buffer in its tree: their names may be those of another buffer
CPU = torch.device("cpu")
PLAIN = (bool, int, float, str, type(None))


class Kept:
    def __init__(self, algo: Algorithm[Any]) -> None:
        self._algo = algo
        self.names = names(type(algo), "keeps")
        self._began: dict[int, list[Tree]] = {}  # by optimiser: its settings before the first update
        self._device = CPU

    def begin(self, device: torch.device) -> None:
        """Take what `begin` has made: place it, and see that it can be saved."""
        self._began.clear()
        self._device = device
        for name in self.names:
            if not hasattr(self._algo, name):
                who = type(self._algo).__name__
                raise UsageError(f"{who} keeps {name!r}, and neither __init__ nor begin has made self.{name}")
            self._place(getattr(self._algo, name), device)
        self.state()

    def _place(self, thing: Any, device: torch.device) -> None:
        if isinstance(thing, torch.nn.Module):
            thing.to(device)  # parameters stay the same objects, which an optimiser may have
        elif isinstance(thing, Tensor):
            if thing.device != device:
                thing.data = thing.data.to(device)  # in place, as a module does it
        elif isinstance(thing, torch.optim.Optimizer):
            self._began[id(thing)] = _settings(thing)
        elif isinstance(thing, Mapping | list | tuple | deque):
            for each in thing.values() if isinstance(thing, Mapping) else thing:
                self._place(each, device)

    def state(self) -> Tree:
        """Arrays are views: copy or write them before the next update."""
        return {name: self._written(getattr(self._algo, name), name) for name in self.names}

    def _written(self, thing: Any, name: str) -> Any:
        """One thing as a tree that says what it is."""
        if isinstance(thing, np.generic):
            return {"kind": "array", "value": np.asarray(thing)}
        if isinstance(thing, np.ndarray):
            if thing.dtype.kind not in "biufc":
                raise UsageError(f"{self._who(name)} is an array of {thing.dtype}; kept arrays hold numbers")
            return {"kind": "array", "value": thing}
        if isinstance(thing, PLAIN):
            return {"kind": "plain", "value": thing}
        if isinstance(thing, Tensor):
            value = thing.detach().cpu()
            exact = value.float() if value.dtype == torch.bfloat16 else value  # which numpy does not know
            return {"kind": "tensor", "value": exact.numpy(), "dtype": str(thing.dtype).removeprefix("torch.")}
        if isinstance(thing, np.random.Generator):
            return {"kind": "generator", "value": rng_state(thing)}
        if isinstance(thing, Mapping):
            keys, values = list(thing), list(thing.values())
            if not all(isinstance(key, PLAIN) for key in keys):
                raise UsageError(f"{self._who(name)} is a dict whose keys are not numbers or texts")
            return {"kind": "dict", "keys": keys, "value": self._several(values, name, _labels(keys))}
        if isinstance(thing, list | tuple | deque):
            return {"kind": "list", "value": self._several(thing, name)}
        if isinstance(thing, torch.optim.Optimizer):
            state = self._written(thing.state_dict(), name)
            return {"kind": "optimizer", "value": state, "began": self._written(self._began.get(id(thing), []), name)}
        if isinstance(thing, Replay):
            tree = {PIECES if key == SEGMENTS else key: value for key, value in thing.state().items()}
            return {"kind": "state", "value": tree}
        if _has(thing, "state_dict", "load_state_dict"):
            return {"kind": "state_dict", "value": self._written(thing.state_dict(), name)}
        if _has(thing, "state", "load"):
            return {"kind": "state", "value": thing.state()}
        problem = f"{self._who(name)} has a {type(thing).__name__}, which cannot be saved"
        fix = "give it state() and load(tree), keep its parts by names of their own, or name it in forgets"
        raise UsageError(f"{problem}: {fix}")

    def _several(self, values: Sequence[Any], name: str, labels: Sequence[str] | None = None) -> Tree:
        if all(isinstance(value, PLAIN) for value in values):
            return {"plain": list(values)}
        labels = labels or _numbers(len(values))
        return {label: self._written(value, name) for label, value in zip(labels, values, strict=True)}

    @torch.no_grad()
    def load(self, tree: Tree) -> list[str]:
        """Undo `state`; returns a sentence for what is not in the tree, or not kept any more."""
        for name in (name for name in self.names if name in tree):
            try:
                setattr(self._algo, name, self._read(getattr(self._algo, name), tree[name], self._device))
            except CheckpointError:
                raise
            except Exception as error:
                raise CheckpointError(f"{self._who(name)} is not what was saved: {summary(error)}") from error
        gone = [name for name in tree if name not in self.names]
        if not gone:
            return []
        return [f"{', '.join(gone)} of the checkpoint is not kept by {type(self._algo).__name__} any more: left out"]

    def _read(self, now: Any, node: Tree, device: torch.device = CPU) -> Any:
        """What a tree stands for: the thing that is there, with its content restored, or a new one on the device."""
        kind, value = node["kind"], node["value"]
        if kind == "tensor":
            saved = torch.from_numpy(np.array(value)).to(getattr(torch, node["dtype"]))
            if not isinstance(now, Tensor):
                return saved.to(device)
            if now.shape != saved.shape:
                raise CheckpointError(f"a kept tensor is of shape {tuple(now.shape)}, saved {tuple(saved.shape)}")
            return now.copy_(saved)
        if kind == "array":
            same = isinstance(now, np.ndarray) and (now.shape, now.dtype) == (value.shape, value.dtype)
            if same and now.flags.writeable:
                now[...] = value
                return now
            return np.array(value) if isinstance(now, np.ndarray) or value.ndim else value[()]
        if kind == "generator":
            load_rng(now, value)
            return now
        if kind == "dict":
            there = now if isinstance(now, Mapping) else {}
            pairs = dict(zip(node["keys"], self._all_read(there.get, node["keys"], value, device), strict=True))
            if type(now) is not dict:
                return pairs
            now.clear()
            now.update(pairs)
            return now
        if kind == "list":
            there = dict(enumerate(now)) if isinstance(now, list | tuple | deque) else {}
            found = self._all_read(there.get, None, value, device)
            if not isinstance(now, list | deque | dict):
                return tuple(found) if isinstance(now, tuple) else found
            container: Any = now
            container.clear()
            container.extend(found)
            return now
        if kind == "optimizer":
            self._load_optimizer(now, self._read(None, value), self._read(None, node["began"]))
            return now
        if kind == "state_dict":
            now.load_state_dict(self._read(None, value))
            return now
        if kind == "state":
            buffer = isinstance(now, Replay)
            now.load({SEGMENTS if buffer and key == PIECES else key: each for key, each in value.items()})
            return now
        return value

    def _all_read(
        self, now: Callable[[Any], Any], keys: Sequence[Any] | None, value: Tree, device: torch.device
    ) -> list[Any]:
        if "plain" in value:
            return list(value["plain"])
        labels = _numbers(len(value)) if keys is None else _labels(keys)
        keys = range(len(value)) if keys is None else keys
        return [self._read(now(key), value[label], device) for key, label in zip(keys, labels, strict=True)]

    def _load_optimizer(self, now: torch.optim.Optimizer, saved: Tree, began: list[Tree]) -> None:
        """Its settings as they were saved, but those that were changed for this resume."""
        fresh = _settings(now)
        groups = saved["param_groups"]
        for group, new, old in zip(groups, fresh, began, strict=False):
            group |= {k: v for k, v in new.items() if k not in old or _plain(v) != _plain(old[k])}
            group |= {k: tuple(group[k]) for k, v in new.items() if isinstance(v, tuple)}
        now.load_state_dict({**saved, "param_groups": groups})

    def _who(self, name: str) -> str:
        return f"{type(self._algo).__name__}.{name}"


def _labels(keys: Sequence[Any]) -> list[str]:
    """What the values of a dict are called in a tree: as in the dict, if that can be."""
    can_be = all(isinstance(key, str) and "/" not in key for key in keys) and "plain" not in keys
    return list(keys) if can_be else _numbers(len(keys))


def _numbers(count: int) -> list[str]:
    return [str(index) for index in range(count)]


def _settings(optimizer: torch.optim.Optimizer) -> list[Tree]:
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else float(value) if isinstance(value, Tensor) else value


def _has(thing: Any, *methods: str) -> bool:
    return not isinstance(thing, type) and all(callable(getattr(thing, method, None)) for method in methods)
