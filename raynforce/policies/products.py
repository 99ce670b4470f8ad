"""Linear layers of torch tensors that round alike on every CPU.

Torch leaves matrix products to MKL, which takes other kernels on Intel's processors than on others, whatever it is
told. numpy's OpenBLAS can be held to one set of kernels (`raynforce/kernels.py`), and is as fast for matrices of a
learner's size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def linear(weight: Tensor, bias: Tensor, openblas: bool) -> Callable[[Tensor], Tensor]:
    """`x @ weight + bias` as a function of `x` `[N, ...]`; `openblas` is for the CPU and one thread."""
    if not openblas:
        return lambda x: torch.addmm(bias, x if x.ndim == 2 else x.flatten(1), weight)
    if weight.requires_grad:
        apply: Callable[..., Tensor] = _Linear.apply
        return lambda x: apply(x if x.ndim == 2 else x.flatten(1), weight, bias)
    matrix = weight.numpy()

    def op(x: Tensor) -> Tensor:
        return torch.from_numpy(np.dot((x if x.ndim == 2 else x.flatten(1)).numpy(), matrix)).add_(bias)

    return op


def linear_backward(x: Tensor, weight: Tensor, g: Tensor, out: Tensor, openblas: bool, wanted: bool) -> Tensor:
    """From the gradient `g` by `x @ weight`, write that by the weight to `out`; returns that by `x`, if wanted."""
    if not openblas:
        torch.mm(x.t(), g, out=out)
        return torch.mm(g, weight.t()) if wanted else g
    back = g.numpy()
    np.dot(x.numpy().T, back, out=out.numpy())
    return torch.from_numpy(np.dot(back, weight.numpy().T)) if wanted else g


class _Linear(torch.autograd.Function):
    """The same for autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return linear(weight.detach(), bias.detach(), openblas=True)(x.detach())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = (saved.detach() for saved in ctx.saved_tensors)
        d_weight = torch.empty_like(weight)
        return linear_backward(x, weight, g.detach(), d_weight, openblas=True, wanted=True), d_weight, g.sum(0)
