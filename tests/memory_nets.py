"""A user's own module with memory, for `network.factory` and `network.memory=own`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

WIDTH = 16


class Remembering(torch.nn.Module):
    """A GRU cell of torch, and a layer for each output."""

    def __init__(self, inputs: int, heads: Mapping[str, int]) -> None:
        super().__init__()
        self.cell = torch.nn.GRUCell(inputs, WIDTH)
        self.inputs = inputs
        self.heads = torch.nn.ModuleDict({name: torch.nn.Linear(WIDTH, size) for name, size in heads.items()})

    def forward(self, obs: Tensor, state: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        state = self.cell(torch.nn.functional.one_hot(obs.reshape(-1), self.inputs).float(), state)
        return {name: head(state) for name, head in self.heads.items()}, state


def make(leaves: Any, heads: Mapping[str, int]) -> torch.nn.Module:
    return Remembering(leaves[0].sizes[0], heads)


class Forgetful(Remembering):
    def forward(self, obs: Tensor, state: Tensor) -> Any:
        return super().forward(obs, state)[0]


def forgetful(leaves: Any, heads: Mapping[str, int]) -> torch.nn.Module:
    return Forgetful(leaves[0].sizes[0], heads)
