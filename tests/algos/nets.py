"""Networks whose outputs are given, and outputs and actions at random for every kind of action."""

from __future__ import annotations

from typing import Any

import torch

from raynforce.spaces import ActionSpec, ObsLeaf

BOX = ObsLeaf("obs", "box", (1,), "float32")
ACTIONS = {
    "discrete": ActionSpec("discrete", (), "int64", sizes=(3,), start=(0,)),
    "multidiscrete": ActionSpec("multidiscrete", (2,), "int64", sizes=(2, 3), start=(0, 0)),
    "box": ActionSpec("box", (2,), "float32", low=(-1.0, -1.0), high=(1.0, 1.0)),
}


class FixedNet:
    """A network whose outputs are given, so that only the loss is tested."""

    def __init__(self, **outputs: torch.Tensor) -> None:
        self.outputs = outputs
        self.flat = torch.zeros(1)

    def __call__(self, obs: Any, params: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return self.outputs

    def record(self, obs: Any) -> dict[str, torch.Tensor]:
        return self.outputs


def at_random(heads: dict[str, int], action: ActionSpec, count: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Outputs of a network, of which derivatives can be taken, and as many actions."""
    out = {k: torch.randn(count, n, dtype=torch.float64) for k, n in heads.items()}
    if action.kind == "box":
        out["log_std"] = torch.randn(2, dtype=torch.float64)
        actions = torch.randn(count, 2, dtype=torch.float64)
    else:
        actions = torch.stack([torch.randint(n, (count,)) for n in action.sizes], 1).reshape(count, *action.shape)
    return {k: v.requires_grad_() for k, v in out.items()}, actions
