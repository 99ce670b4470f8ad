"""The torch twin of `distributions`: log-probabilities and entropies, with their derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from raynforce.lazy import LazyModule
from raynforce.policies.distributions import FORBIDDEN, INSIDE, LOG_2, LOG_2PI, SDE_EPSILON
from raynforce.spaces import MASK, ActionSpec

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


def taken(spec: ActionSpec, out: Mapping[str, Tensor], action: Tensor, mask: Tensor | None = None) -> Taken:
    """Look at actions `[N, ...]` through a network's outputs; autograd works too, `backward` is faster.

    Choices that `mask` `[N, n]` forbids have probability zero, and no derivative reaches their logits.
    """
    if spec.kind == "box":
        return _gaussian(out["policy"], out["log_std"], action.reshape(len(action), -1))
    logits = out["policy"] if mask is None else masked(out["policy"], mask)
    if spec.kind == "discrete":
        return _categorical(logits, action)
    parts = torch.split(logits, list(spec.sizes), dim=1)
    each = [_categorical(x, a) for x, a in zip(parts, action.reshape(len(action), -1).unbind(1), strict=True)]

    def backward(d_logp: Tensor, d_entropy: float) -> dict[str, Tensor]:
        return {"policy": torch.cat([one.backward(d_logp, d_entropy)["policy"] for one in each], dim=1)}

    logp, entropy = (torch.stack([getattr(one, k) for one in each]).sum(0) for k in ("logp", "entropy"))
    return Taken(logp, entropy, backward)


def logp_entropy(
    spec: ActionSpec, out: Mapping[str, Tensor], action: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy, each `[N]`, for autograd."""
    return taken(spec, out, action, mask)[:2]


def allowed(batch: Mapping[str, Tensor], prefix: str = "") -> Tensor | None:
    """The mask `[..., n]` of allowed actions in a batch, None if there is none; `next_` is that of the next ones.

    One that forbids everything comes after an episode's end, where nothing is chosen: there all are allowed.
    """
    mask = batch.get(prefix + MASK)
    return None if mask is None else (mask != 0) | (mask == 0).all(-1, keepdim=True)


def masked(logits: Tensor, mask: Tensor) -> Tensor:
    """Logits `[..., n]` of which those that `mask` forbids have probability zero."""
    return logits.masked_fill(~mask, FORBIDDEN)


def exp(x: Tensor) -> Tensor:
    """e to the power of each element of `[N, ...]`, rounded alike on every CPU: `torch.exp` is MKL's, which is not."""
    if x.is_cpu and not x.requires_grad:
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

    return Taken(-0.5 * squares.sum(1) - constant, (constant + 0.5 * mean.shape[1]).expand(len(z)), backward)


def sde_taken(mean: Tensor, latent: Tensor, log_std: Tensor, action: Tensor) -> Taken:
    """Look at actions `[N, ...]` of a `StateDependent` that is not squashed; its features are constants."""
    squares, deviations, variance = _sde(mean, latent, log_std)
    error = action.reshape(len(action), -1) - mean
    logs = torch.log(variance)
    logp = -0.5 * (error.square() / variance + logs + LOG_2PI).sum(1)

    def backward(d_logp: Tensor, d_entropy: float) -> dict[str, Tensor]:
        ratio = error / variance
        down = d_logp.unsqueeze(1)
        d_variance = 0.5 * (down * (ratio.square() - 1 / variance) + d_entropy / variance)
        d_log_std = 2 * deviations * (squares.t() @ d_variance)
        return {"policy": down * ratio, "log_std": d_log_std.reshape(-1)}

    return Taken(logp, 0.5 * (logs + 1 + LOG_2PI).sum(1), backward)


class DrawnSDE(NamedTuple):
    action: Tensor  # `[N, n]`, between -1 and 1
    logp: Tensor  # log-probability of each, `[N]`
    backward: Callable[[Tensor, Tensor], dict[str, Tensor]]
    """From a loss's derivative by `action` `[N, n]`, and by every element of `logp`, to those by the outputs."""


def sde_drawn(mean: Tensor, latent: Tensor, log_std: Tensor, noise: Tensor) -> DrawnSDE:
    """Squashed actions of standard normal `noise` `[N, n]`, one matrix for each sample; features are learned too."""
    squares, deviations, variance = _sde(mean, latent, log_std)
    spread = variance.sqrt()
    raw = mean + spread * noise
    action = torch.tanh(raw)
    slope = raw + torch.nn.functional.softplus(-2 * raw)  # log(2) less half the log of tanh's derivative
    logs = 0.5 * torch.log(variance)
    logp = (2 * slope - 0.5 * noise.square() - logs).sum(1) - (0.5 * LOG_2PI + 2 * LOG_2) * mean.shape[1]

    def backward(d_action: Tensor, d_logp: Tensor) -> dict[str, Tensor]:
        d_raw = d_action * (1 - action.square()) + 2 * d_logp * action
        d_variance = 0.5 * (d_raw * noise / spread - d_logp / variance)
        d_log_std = 2 * deviations * (squares.t() @ d_variance)
        return {
            "policy": d_raw,
            "latent": 2 * latent * (d_variance @ deviations.t()),
            "log_std": d_log_std.reshape(-1),
        }

    return DrawnSDE(action, logp, backward)


def _sde(mean: Tensor, latent: Tensor, log_std: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Squared features `[N, f]`, squared deviations `[f, n]`, and the variance `[N, n]` of actions."""
    deviations = exp(2 * log_std).reshape(latent.shape[1], mean.shape[1])
    squares = latent.square()
    return squares, deviations, squares @ deviations + SDE_EPSILON


def wide_logp_entropy(policy: Tensor, action: Tensor, log_std_range: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy `[N]` of a `WideGaussian`, for autograd."""
    mean, log_std = _halves(policy, log_std_range)
    z = (action.reshape(len(action), -1) - mean) * exp(-log_std)
    entropy = log_std.sum(1) + 0.5 * (1 + LOG_2PI) * mean.shape[1]
    return -(0.5 * z.square() + log_std).sum(1) - 0.5 * LOG_2PI * mean.shape[1], entropy


def squashed_logp(policy: Tensor, action: Tensor, log_std_range: tuple[float, float]) -> Tensor:
    """Log-probabilities `[N]` of a `SquashedGaussian`'s actions, for autograd."""
    return _squashed_logp(policy, torch.atanh(action.reshape(len(action), -1).clamp(-INSIDE, INSIDE)), log_std_range)


def squashed_taken(policy: Tensor, action: Tensor, log_std_range: tuple[float, float]) -> Taken:
    """What `squashed_logp` gives, with its derivative; the entropy is that of the normals before tanh."""
    mean, wide = policy.chunk(2, dim=1)
    log_std = wide.clamp(*log_std_range)
    inverse = exp(-log_std)
    raw = torch.atanh(action.reshape(len(action), -1).clamp(-INSIDE, INSIDE))
    z = (raw - mean) * inverse
    slope = raw + torch.nn.functional.softplus(-2 * raw)  # log(2) less half the log of tanh's derivative
    logp = (2 * slope - 0.5 * z.square() - log_std).sum(1) - (0.5 * LOG_2PI + 2 * LOG_2) * mean.shape[1]

    def backward(d_logp: Tensor, d_entropy: float) -> dict[str, Tensor]:
        down = d_logp.unsqueeze(1)
        d_log_std = torch.where(wide == log_std, down * (z.square() - 1) + d_entropy, 0.0)
        return {"policy": torch.cat([down * z * inverse, d_log_std], dim=1)}

    return Taken(logp, log_std.sum(1) + 0.5 * (1 + LOG_2PI) * mean.shape[1], backward)


def squashed_sample(policy: Tensor, noise: Tensor, log_std_range: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Actions `[N, n]` of standard normal `noise` `[N, n]`, and their log-probabilities; gradients reach `policy`."""
    mean, log_std = _halves(policy, log_std_range)
    raw = mean + exp(log_std) * noise
    return torch.tanh(raw), _squashed_logp(policy, raw, log_std_range)


class Drawn(NamedTuple):
    action: Tensor  # `[N, n]`, between -1 and 1
    logp: Tensor  # log-probability of each, `[N]`
    backward: Callable[[Tensor, Tensor], Tensor]
    """From a loss's derivative by `action` `[N, n]`, and by every element of `logp`, to that by `policy`."""


def squashed_drawn(policy: Tensor, noise: Tensor, log_std_range: tuple[float, float]) -> Drawn:
    """What `squashed_sample` gives, with its derivative instead of autograd's."""
    mean, wide = policy.chunk(2, dim=1)
    log_std = wide.clamp(*log_std_range)
    spread = exp(log_std) * noise
    raw = mean + spread
    action = torch.tanh(raw)
    slope = raw + torch.nn.functional.softplus(-2 * raw)  # log(2) less half the log of tanh's derivative
    logp = (2 * slope - 0.5 * noise.square() - log_std).sum(1) - (0.5 * LOG_2PI + 2 * LOG_2) * mean.shape[1]

    def backward(d_action: Tensor, d_logp: Tensor) -> Tensor:
        d_raw = d_action * (1 - action.square()) + 2 * d_logp * action  # -2 tanh is the derivative of its slope's log
        d_log_std = torch.where(wide == log_std, d_raw * spread - d_logp, 0.0)
        return torch.cat([d_raw, d_log_std], dim=1)

    return Drawn(action, logp, backward)


def _squashed_logp(policy: Tensor, raw: Tensor, log_std_range: tuple[float, float]) -> Tensor:
    slope = 2 * (LOG_2 - raw - torch.nn.functional.softplus(-2 * raw))
    return wide_logp_entropy(policy, raw, log_std_range)[0] - slope.sum(1)


def _halves(policy: Tensor, log_std_range: tuple[float, float]) -> tuple[Tensor, Tensor]:
    mean, log_std = policy.chunk(2, dim=1)
    return mean, log_std.clamp(*log_std_range)
