"""Adam (Kingma & Ba 2015) and gradient clipping over one flat parameter vector."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from raynforce.trees import Tree


class Adam:
    """One fused kernel per step: clipping enters as its gradient scale, so nothing waits for the norm.

    `torch.optim` would do the same arithmetic, but its first use imports the compiler stack (over a second).
    """

    def __init__(self, flat: Tensor, epsilon: float, groups: Sequence[Sequence[slice]] = ()) -> None:
        self._flat = flat
        self._epsilon = epsilon
        self._first = torch.zeros_like(flat)
        self._second = torch.zeros_like(flat)
        self._count = torch.zeros((), device=flat.device)
        self._groups = groups
        """Where each group is in the vector; none: all of it is one."""

    def step(self, gradient: Tensor, learning_rate: float, max_norm: float | None) -> Tensor:
        """Apply a gradient; returns its length before clipping (a tensor: reading it is up to the caller)."""
        return self.step_groups(gradient, [(learning_rate, max_norm)])

    def step_groups(self, gradient: Tensor, how: Sequence[tuple[float, float | None]]) -> Tensor:
        """The same with a learning rate and a clipping for each group."""
        parts = [[gradient[part] for part in group] for group in self._groups] or [[gradient]]
        norms = [_norm([torch.linalg.vector_norm(part) for part in group]) for group in parts]
        self._count += 1
        # A dead unit's first moment decays into denormal numbers and stays there, at 16 times the cost of a step.
        # Only for this kernel: numpy in the same process must round as it does in a sampler's own process.
        torch.set_flush_denormal(True)
        try:
            for index, (norm, (learning_rate, max_norm)) in enumerate(zip(norms, how, strict=True)):
                divisor = None if max_norm is None else (norm / max_norm).clamp_(min=1.0)
                self._fused(parts[index], index, learning_rate, divisor)
        finally:
            torch.set_flush_denormal(False)
        return _norm(norms)

    def _fused(self, gradients: list[Tensor], group: int, learning_rate: float, divisor: Tensor | None) -> None:
        def of(vector: Tensor) -> list[Tensor]:
            return [vector[part] for part in self._groups[group]] if self._groups else [vector]

        torch._fused_adam_(
            of(self._flat),
            gradients,
            of(self._first),
            of(self._second),
            [],
            [self._count] * len(gradients),
            lr=learning_rate,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.0,
            eps=self._epsilon,
            amsgrad=False,
            maximize=False,
            grad_scale=divisor,
        )

    def state(self) -> Tree:
        return {
            "first": self._first.cpu().numpy().copy(),
            "second": self._second.cpu().numpy().copy(),
            "count": float(self._count),
        }

    def load(self, tree: Tree) -> None:
        self._first.copy_(torch.tensor(tree["first"]))
        self._second.copy_(torch.tensor(tree["second"]))
        self._count.fill_(tree["count"])


def _norm(norms: list[Tensor]) -> Tensor:
    """The length of a vector whose parts have these."""
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
