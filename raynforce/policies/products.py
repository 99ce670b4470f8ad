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

from raynforce.policies.spec import Conv


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
        return torch.from_numpy((x if x.ndim == 2 else x.flatten(1)).numpy().dot(matrix)).add_(bias)

    return op


def linear_backward(
    weight: Tensor, d_weight: Tensor, d_bias: Tensor, openblas: bool, wanted: bool
) -> Callable[[Tensor, Tensor], Tensor]:
    """A function of `x` `[N, ...]` and the gradient `g` by `x @ weight + bias`: it writes those by weight and bias, and
    returns that by `x`, if wanted."""

    def by_torch(x: Tensor, g: Tensor) -> Tensor:
        torch.sum(g, 0, out=d_bias)
        torch.mm((x if x.ndim == 2 else x.flatten(1)).t(), g, out=d_weight)
        return torch.mm(g, weight.t()).view(x.shape) if wanted else g

    if not openblas:
        return by_torch
    transposed, out = weight.numpy().T, d_weight.numpy()  # made once, as in `linear`

    def by_openblas(x: Tensor, g: Tensor) -> Tensor:
        torch.sum(g, 0, out=d_bias)
        back = g.numpy()
        (x if x.ndim == 2 else x.flatten(1)).numpy().T.dot(back, out)
        if not wanted:
            return g
        d_x = torch.from_numpy(back.dot(transposed))
        return d_x if x.ndim == 2 else d_x.view(x.shape)

    return by_openblas


def linear_through(weight: Tensor, openblas: bool) -> Callable[[Tensor], Tensor]:
    """From the gradient `g` by `x @ weight + bias` to that by `x`."""
    if not openblas:
        return lambda g: torch.mm(g, weight.t())
    transposed = weight.numpy().T
    return lambda g: torch.from_numpy(g.numpy().dot(transposed))


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
        back = g.detach().numpy()
        d_x = torch.from_numpy(np.dot(back, weight.detach().numpy().T)) if by_x else None
        return d_x, torch.from_numpy(np.dot(x.detach().numpy().T, back)) if by_weight else None, d_bias


def padded(x: Tensor, layer: Conv) -> Tensor:
    """With the zeros that a convolution wants around it."""
    if layer.padding == "valid":
        return x
    (top, bottom), (left, right) = layer.pads(x.shape[1:])
    return F.pad(x, (left, right, top, bottom))


def unpadded(x: Tensor, layer: Conv, shape: tuple[int, ...]) -> Tensor:
    """What is left of its gradient for the input of a shape `[N, C, H, W]`."""
    if layer.padding == "valid":
        return x
    (top, _), (left, _) = layer.pads(shape[1:])
    return x[:, :, top : top + shape[2], left : left + shape[3]]


def convolution(weight: Tensor, bias: Tensor, stride: int) -> Callable[[Tensor], Tensor]:
    if skips_pixels(weight, stride):
        return lambda x: F.conv2d(x[:, :, ::stride, ::stride], weight, bias)
    return lambda x: F.conv2d(x, weight, bias, stride)


def convolution_backward(x: Tensor, weight: Tensor, g: Tensor, stride: int, wanted: bool) -> tuple[Tensor, ...]:
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
