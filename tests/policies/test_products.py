"""Linear layers and convolutions are what plain torch makes of them, forwards and backwards, and harm nobody."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from raynforce.policies.products import convolution, convolution_backward, linear, linear_backward
from raynforce.policies.torch_distributions import exp


def normal(*shape: int, **more: Any) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), **more)


@pytest.mark.parametrize("openblas", [True, False])
@pytest.mark.parametrize("shape", [(5, 3), (1, 3), (4, 3, 2, 2)])
def test_a_linear_layer(openblas: bool, shape: tuple[int, ...]) -> None:
    x, width = normal(*shape), shape[1:] + (1,) * (len(shape) == 2)
    size = int(torch.tensor(width).prod())
    weight, bias, g = normal(size, 6), normal(6), normal(shape[0], 6)
    flat, d_weight, d_bias = x.flatten(1), torch.empty(size, 6), torch.empty(6)
    torch.testing.assert_close(linear(weight, bias, openblas)(x), flat @ weight + bias)
    d_x = linear_backward(weight, d_weight, d_bias, openblas, wanted=True)(x, g)
    torch.testing.assert_close(d_x, (g @ weight.t()).view(shape))
    torch.testing.assert_close(d_weight, flat.t() @ g)
    torch.testing.assert_close(d_bias, g.sum(0))

    leaves = [v.clone().requires_grad_() for v in (x, weight, bias)]
    (linear(*leaves[1:], openblas)(leaves[0]) * g).sum().backward()  # type: ignore[no-untyped-call]
    for leaf, expected in zip(leaves, ((g @ weight.t()).view(shape), flat.t() @ g, g.sum(0)), strict=True):
        torch.testing.assert_close(leaf.grad, expected)


@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize(
    ("count", "kernel", "stride"), [(5, 3, 1), (5, 3, 2), (1, 3, 1), (5, 1, 1), (5, 1, 2), (1, 1, 3)]
)
def test_a_convolution(last: bool, count: int, kernel: int, stride: int) -> None:
    x, weight, bias = normal(count, 2, 6, 8), normal(4, 2, kernel, kernel), normal(4)
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    leaves = [v.detach().double().requires_grad_() for v in (x, weight, bias)]
    expected = F.conv2d(*leaves, stride)
    g = normal(*expected.shape)
    (expected * g).sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(convolution(weight, bias, stride)(x).double(), expected, rtol=1e-4, atol=1e-4)
    for found, leaf in zip(convolution_backward(x, weight, g, stride, True), leaves, strict=True):
        torch.testing.assert_close(found.double(), leaf.grad, rtol=1e-4, atol=1e-4)


def test_convolutions_that_skip_pixels_write_nowhere_else() -> None:
    """What the kernels of AVX2 would write past their memory shows when it is given back: the process dies."""
    program = """
import torch
from raynforce.policies.products import convolution_backward
torch.set_num_threads(1)
for count in range(1, 301):
    x = torch.randn(5, 2, 6, 8).contiguous(memory_format=torch.channels_last)
    convolution_backward(x, torch.randn(1, 2, 1, 1), torch.randn(5, 1, 3, 4), 2, False)
print(count)
"""
    environ = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environ, timeout=200)
    assert (done.returncode, done.stdout.split()) == (0, ["300"])


def test_exp() -> None:
    x = torch.tensor([-200.0, -30.0, -1.0, -0.001, 0.0, 0.3, 5.0, 80.0, 200.0])
    expected = torch.exp(x.double()).float()
    with np.errstate(over="ignore"):  # as where losses are computed
        torch.testing.assert_close(exp(x), expected)
    leaf = x[1:-1].clone().requires_grad_()
    found = exp(leaf)
    torch.testing.assert_close(found, expected[1:-1], rtol=2e-5, atol=0.0)
    found.sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(leaf.grad, expected[1:-1], rtol=2e-5, atol=0.0)
