"""The torch twin of `distributions`: log-probabilities and entropies that can be differentiated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from raynforce.lazy import LazyModule
from raynforce.policies.distributions import LOG_2PI
from raynforce.spaces import ActionSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch")


def logp_entropy(spec: ActionSpec, out: Mapping[str, Tensor], action: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability `[N]` of the actions taken and entropy `[N]` (a scalar for a Gaussian) of the policy."""
    if spec.kind == "box":
        return _gaussian(out["policy"], out["log_std"], action.reshape(len(action), -1))
    if spec.kind == "discrete":
        return _categorical(out["policy"], action)
    choices = action.reshape(len(action), -1).unbind(1)
    logits = torch.split(out["policy"], list(spec.sizes), dim=1)
    logps, entropies = zip(*(_categorical(x, a) for x, a in zip(logits, choices, strict=True)), strict=True)
    return torch.stack(logps).sum(0), torch.stack(entropies).sum(0)


def _categorical(logits: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    logs = torch.log_softmax(logits, dim=1)
    return logs.gather(1, action.unsqueeze(1)).squeeze(1), -(logs.exp() * logs).sum(1)


def _gaussian(mean: Tensor, log_std: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
    z = (action - mean) * torch.exp(-log_std)
    constant = log_std.sum() + 0.5 * LOG_2PI * mean.shape[1]
    return -0.5 * z.square().sum(1) - constant, constant + 0.5 * mean.shape[1]
