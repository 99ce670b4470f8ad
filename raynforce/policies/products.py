"""Linear layers of torch tensors that round alike on every CPU.

Torch's matrix products are MKL's, whose kernels depend on the processor. numpy's OpenBLAS can be held to one set of
kernels (`raynforce/kernels.py`), and is as fast for matrices of a learner's size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F


def linear(weight: Tensor, bias: Tensor, openblas: bool) -> Callable[[Tensor], Tensor]:
    """`x @ weight + bias` as a function of `x` `[N, ...]`; `openblas` is for the CPU and one thread."""
    if not openblas:
        return lambda x: torch.addmm(bias, x if x.ndim == 2 else x.flatten(1), weight)
    apply: Callable[..., Tensor] = _Linear.apply
    if weight.requires_grad:
        return lambda x: apply(x if x.ndim == 2 else x.flatten(1), weight, bias)
    matrix = weight.numpy()

    def op(x: Tensor) -> Tensor:
        if x.requires_grad:  # through constant parameters to what `x` was made of
            return apply(x if x.ndim == 2 else x.flatten(1), weight, bias)
        return torch.from_numpy(np.dot((x if x.ndim == 2 else x.flatten(1)).numpy(), matrix)).add_(bias)

    return op


def linear_backward(x: Tensor, weight: Tensor, g: Tensor, out: Tensor | None, openblas: bool, wanted: bool) -> Tensor:
    """From the gradient `g` by `x @ weight`, write that by the weight to `out`; returns that by `x`, if wanted."""
    if not openblas:
        if out is not None:
            torch.mm(x.t(), g, out=out)
        return torch.mm(g, weight.t()) if wanted else g
    return openblas_backward(x, g, weight.numpy().T, None if out is None else out.numpy(), wanted)


def openblas_backward(x: Tensor, g: Tensor, transposed: np.ndarray, out: np.ndarray | None, wanted: bool) -> Tensor:
    """The same with arrays, which a network makes once: the transposed weight, and where its gradient goes."""
    back = g.numpy()
    if out is not None:
        np.dot(x.numpy().T, back, out=out)
    return torch.from_numpy(np.dot(back, transposed)) if wanted else g


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return linear(weight.detach(), bias.detach(), openblas=True)(x.detach())

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        by_x, by_weight, by_bias = ctx.needs_input_grad
        d_bias = g.sum(0) if by_bias else None
        if torch.is_grad_enabled():  # the gradient will be differentiated itself
            product: Callable[..., Tensor] = _Linear.apply
            zero = g.new_zeros(())
            d_x = product(g, weight.t(), zero) if by_x else None
            return d_x, product(x.t(), g, zero) if by_weight else None, d_bias
        d_weight = torch.empty(weight.shape) if by_weight else None
        d_x = linear_backward(x.detach(), weight.detach(), g.detach(), d_weight, openblas=True, wanted=by_x)
        return d_x if by_x else None, d_weight, d_bias


def convolution(weight: Tensor, bias: Tensor, stride: int) -> Callable[[Tensor], Tensor]:
    if skips_pixels(weight, stride):
        return lambda x: F.conv2d(x[:, :, ::stride, ::stride], weight, bias)
    return lambda x: F.conv2d(x, weight, bias, stride)


def convolution_backward(
    x: Tensor, weight: Tensor, g: Tensor, stride: int, wanted: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """From the gradient `g` by its output, those by `x` (only if wanted), the weight and the bias."""
    seen, step = (x[:, :, ::stride, ::stride], 1) if skips_pixels(weight, stride) else (x, stride)
    shape = [len(weight)], [step, step], [0, 0], [1, 1], False, [0, 0], 1, [wanted, True, True]
    d_x, d_weight, d_bias = torch.ops.aten.convolution_backward.default(g, seen, weight, *shape)
    if wanted and seen is not x:
        d_seen, d_x = d_x, torch.zeros_like(x)
        d_x[:, :, ::stride, ::stride] = d_seen
    return d_x if wanted else g, d_weight, d_bias


def skips_pixels(weight: Tensor, stride: int) -> bool:
    """Whether we leave out pixels ourselves: oneDNN's AVX2 kernel writes past its memory (issue 6035, open in 3.12)."""
    return stride > 1 and weight.shape[2:] == (1, 1)
