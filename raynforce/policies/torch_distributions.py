"""The torch twin of `distributions`: log-probabilities and entropies, with their derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from raynforce.lazy import LazyModule
from raynforce.policies.distributions import LOG_2PI
from raynforce.spaces import ActionSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch")

LOG2_E = math.log2(math.e)


class Taken(NamedTuple):
    logp: Tensor  # log-probability of each, `[N]`
    entropy: Tensor  # entropy of the policy at each, `[N]`
    backward: Callable[[Tensor, float], dict[str, Tensor]]
    """From a loss's derivative by `logp` `[N]`, and by every element of `entropy`, to that by the network's outputs."""


def taken(spec: ActionSpec, out: Mapping[str, Tensor], action: Tensor) -> Taken:
    """Look at actions `[N, ...]` through a network's outputs; autograd works too, `backward` is faster."""
    if spec.kind == "box":
        return _gaussian(out["policy"], out["log_std"], action.reshape(len(action), -1))
    if spec.kind == "discrete":
        return _categorical(out["policy"], action)
    parts = torch.split(out["policy"], list(spec.sizes), dim=1)
    each = [_categorical(x, a) for x, a in zip(parts, action.reshape(len(action), -1).unbind(1), strict=True)]

    def backward(d_logp: Tensor, d_entropy: float) -> dict[str, Tensor]:
        return {"policy": torch.cat([one.backward(d_logp, d_entropy)["policy"] for one in each], dim=1)}

    logp, entropy = (torch.stack([getattr(one, k) for one in each]).sum(0) for k in ("logp", "entropy"))
    return Taken(logp, entropy, backward)


def logp_entropy(spec: ActionSpec, out: Mapping[str, Tensor], action: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy, each `[N]`, for autograd."""
    return taken(spec, out, action)[:2]


def exp(x: Tensor) -> Tensor:
    """e to the power of each element of `[N, ...]`, rounded alike on every CPU: `torch.exp` is MKL's, which is not."""
    if x.device.type == "cpu" and not x.requires_grad:
        with np.errstate(over="ignore"):  # as torch does: the learner looks whether losses are finite
            return torch.from_numpy(np.exp(x.numpy()))
    return torch.exp2(x * LOG2_E)


def _categorical(logits: Tensor, action: Tensor) -> Taken:
    logs = torch.log_softmax(logits, dim=1)
    chances = exp(logs)
    column = action.unsqueeze(1)
    entropy = -(chances * logs).sum(1)

    def backward(d_logp: Tensor, d_entropy: float) -> dict[str, Tensor]:
        down = d_logp.unsqueeze(1)
        grad = (chances * -down).scatter_add_(1, column, down)  # d logp = onehot - chances
        if d_entropy:
            grad -= d_entropy * chances * (logs + entropy.unsqueeze(1))
        return {"policy": grad}

    return Taken(logs.gather(1, column).squeeze(1), entropy, backward)


def _gaussian(mean: Tensor, log_std: Tensor, action: Tensor) -> Taken:
    inverse = exp(-log_std)
    z = (action - mean) * inverse
    squares = z.square()
    constant = log_std.sum() + 0.5 * LOG_2PI * mean.shape[1]

    def backward(d_logp: Tensor, d_entropy: float) -> dict[str, Tensor]:
        down = d_logp.unsqueeze(1)
        return {"policy": down * z * inverse, "log_std": (down * (squares - 1)).sum(0) + d_entropy * len(z)}

    entropy = (constant + 0.5 * mean.shape[1]).expand(len(z))
    return Taken(-0.5 * squares.sum(1) - constant, entropy, backward)
