"""The one loop over minibatches: tensors, loss, gradient, what becomes of it, `after_update`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from raynforce.algos.base import Algorithm, Batch, Loss
from raynforce.algos.contract import explained, is_own, wrong_arrays
from raynforce.errors import RaynforceError
from raynforce.policies.torch_net import Network, tensor
from raynforce.roles.keeper import Keeper, TorchStream

Use = Callable[[Batch, Loss], Mapping[str, Tensor]]  # applies or collects a gradient; returns what else to measure


class Trained(NamedTuple):
    updates: int
    metrics: dict[str, float]


def train(
    keeper: Keeper, net: Network, minibatches: Iterable[Mapping[str, Any]], stream: TorchStream, use: Use
) -> Trained:
    """Compute the loss of each minibatch and let `use` apply or collect its gradient; torch draws from `stream`."""
    algo = keeper.algo
    measured: list[Mapping[str, Tensor]] = []
    loss: Loss | None = None
    try:
        # What overflows is infinite, as in torch: `averages` looks whether losses are finite.
        with stream.in_use(), np.errstate(over="ignore"):
            for minibatch in minibatches:
                batch = tensors(algo, minibatch, "minibatches", keeper.device)
                loss = algo.loss(net, batch)
                measured.append({**loss.metrics, **use(batch, loss)})
                with torch.no_grad():
                    algo.after_update(net, batch, loss)
        trained = Trained(len(measured), averages(measured))
    except Exception as error:
        better = explained(algo, loss, error)
        if better is error:
            raise
        raise better from error
    if measured:
        keeper.look()
    return trained


def tensors(algo: Algorithm[Any], arrays: Mapping[str, Any], method: str, device: torch.device) -> dict[str, Tensor]:
    try:
        return {k: v if isinstance(v, Tensor) else tensor(v, device) for k, v in arrays.items()}
    except Exception as error:
        if not is_own(algo):
            raise
        raise wrong_arrays(algo, method, arrays, error) from error


def averages(metrics: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    """Means over the round's minibatches, read from the device in one transfer."""
    names = list(metrics[0]) if metrics else []
    if not names:
        return {}
    columns = [[each[name].detach() for each in metrics] for name in names]
    joined = [torch.cat(values) if values[0].ndim else torch.stack(values) for values in columns]
    means = torch.stack([values.mean() for values in joined]).tolist()
    if not np.isfinite(means).all():
        problem = f"training diverged: losses are {dict(zip(names, means, strict=True))}; lower algorithm.learning_rate"
        raise RaynforceError(f"{problem}, or set network.normalize_obs=true if observations are large")
    return {f"losses/{n}": v for n, v in zip(names, means, strict=True)}
