"""A role's own stream of torch's random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from raynforce.trees import Tree


class TorchStream:
    """What dropout and the like draw from: the role's own, whoever else draws from torch's global ones."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(self._devices):
            torch.manual_seed(seed)
            self._states = self._read()

    def _read(self) -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in self._devices)]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        with torch.random.fork_rng(self._devices):
            torch.set_rng_state(self._states[0])
            for device, state in zip(self._devices, self._states[1:], strict=True):
                torch.cuda.set_rng_state(state, device)
            yield
            self._states = self._read()

    def state(self) -> Tree:
        return {str(i): s.cpu().numpy().copy() for i, s in enumerate(self._states)}

    def load(self, tree: Tree) -> None:
        self._states = [torch.from_numpy(tree[str(i)].copy()) for i in range(len(self._states))]
