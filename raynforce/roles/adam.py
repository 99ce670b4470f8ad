"""Adam (Kingma & Ba 2015) and gradient clipping over one flat parameter vector."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from raynforce.trees import Tree

Place = tuple[Sequence[slice], float, float | None]  # of a group: where it is, its learning rate and its clipping


class Adam:
    """One fused kernel per step; clipping is its gradient scale. `torch.optim` takes over a second to import."""

    def __init__(self, flat: Tensor, epsilon: float) -> None:
        self._flat = flat
        self._first, self._second = torch.zeros_like(flat), torch.zeros_like(flat)
        self._count = torch.zeros((), device=flat.device)
        self._missed: dict[str, int] = {}  # steps that a group has been left out of
        how = {"beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0, "amsgrad": False, "maximize": False}
        self._fused = partial(torch._fused_adam_, **how, eps=epsilon)

    def step(self, gradient: Tensor, learning_rate: float, max_norm: float | None) -> Tensor:
        """Apply a gradient; returns its length before clipping (a tensor: reading it is up to the caller)."""
        norm = torch.linalg.vector_norm(gradient)
        self._count += 1
        # A dead unit's first moment decays into denormal numbers and stays there, at 16 times the cost of a step.
        # Only for this kernel: numpy in the same process must round as it does in a sampler's own process.
        torch.set_flush_denormal(True)
        try:
            vectors = [self._flat], [gradient], [self._first], [self._second]
            divisor = None if max_norm is None else (norm / max_norm).clamp_(min=1.0)
            self._fused(*vectors, [], [self._count], lr=learning_rate, grad_scale=divisor)
        finally:
            torch.set_flush_denormal(False)
        return norm

    def step_groups(self, gradient: Tensor, groups: Mapping[str, Place], frozen: Collection[str] = ()) -> Tensor:
        """The same for groups by name; those that are frozen keep their parameters and moments."""
        norm = torch.linalg.vector_norm(gradient)
        self._count += 1
        torch.set_flush_denormal(True)
        try:
            for name, (places, learning_rate, max_norm) in groups.items():
                if name in frozen:
                    self._missed[name] = self._missed.get(name, 0) + 1
                    continue
                vectors = self._flat, gradient, self._first, self._second
                parts = [[vector[place] for place in places] for vector in vectors]
                divisor = None
                if max_norm is not None:
                    lengths = torch.stack([torch.linalg.vector_norm(part) for part in parts[1]])
                    divisor = (torch.linalg.vector_norm(lengths) / max_norm).clamp_(min=1.0)
                count = self._count - self._missed[name] if name in self._missed else self._count
                self._fused(*parts, [], [count] * len(places), lr=learning_rate, grad_scale=divisor)
        finally:
            torch.set_flush_denormal(False)
        return norm

    def state(self) -> Tree:
        first, second = (moment.cpu().numpy().copy() for moment in (self._first, self._second))
        missed: Tree = {"missed": dict(self._missed)} if self._missed else {}
        return {"first": first, "second": second, "count": float(self._count), **missed}

    def load(self, tree: Tree) -> None:
        self._first.copy_(torch.tensor(tree["first"]))
        self._second.copy_(torch.tensor(tree["second"]))
        self._count.fill_(tree["count"])
        self._missed = dict(tree.get("missed", {}))
