"""A network of your own: any torch module, made by a function.

    raynforce train ppo CartPole-v1 --set network.factory=examples.own_network:make --set network.factory_args.width=32

The function gets the observation's leaves (`raynforce.spaces.ObsLeaf`: path, kind, shape, dtype, …) and the outputs
that the algorithm wants, by name and size. `forward` gets a tensor `[N, ...]`, or where there are several leaves a
dict of tensors by path (`obs/position`); masks of allowed actions are none of them. Discrete values and images come
as they are, vectors normalised if `network.normalize_obs` is on. It returns a dict with a tensor `[N, size]` for each
output.

Every process that acts with it imports torch. Parameters travel with the policy; buffers do not and are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from raynforce.spaces import ObsLeaf


class Residual(nn.Module):
    """Two residual layers and a linear head for each output."""

    def __init__(self, inputs: int, heads: Mapping[str, int], width: int = 64) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList([nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(2)])
        self.heads = nn.ModuleDict({name: nn.Linear(width, size) for name, size in heads.items()})

    def forward(self, obs: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.first(obs.flatten(1)))
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        return {name: head(h) for name, head in self.heads.items()}


def make(leaves: Sequence[ObsLeaf], heads: Mapping[str, int], width: int = 64) -> nn.Module:
    """What `network.factory` names; arguments after the first two are `network.factory_args`."""
    (leaf,) = leaves
    return Residual(torch.Size(leaf.shape).numel(), heads, width)
