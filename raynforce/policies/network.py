"""What a loss sees of a network, and what the torch interpreters of a spec and of a user's own module share."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from raynforce.errors import AlgorithmError, UsageError
from raynforce.policies.spec import NetworkSpec

Outputs = dict[str, Tensor]


class SomeOutputs(Outputs):
    def __init__(self, found: Mapping[str, Tensor], why: Callable[[str], str]) -> None:
        super().__init__(found)
        self._why = why

    def __missing__(self, name: str) -> Tensor:
        if why := self._why(name):
            raise UsageError(f"output {name!r} {why}")
        raise KeyError(name)


def tensor(array: np.ndarray, device: torch.device) -> Tensor:
    """An array on the device. What is received read-only, and may be released, is copied."""
    return torch.from_numpy(array if array.flags.writeable else array.copy()).to(device, non_blocking=True)


class Network:
    """What an algorithm's loss sees of a network: a spec's (`SpecNet`), or a user's own module (`ModuleNet`)."""

    def __init__(self, spec: NetworkSpec, flat: np.ndarray, device: torch.device) -> None:
        self.spec = spec
        self.device = device
        self.flat = torch.from_numpy(flat.copy()).to(device)
        """All parameters, float32 `[P]`. Target networks are copies of this vector."""
        self.parts: dict[str, slice] = {}  # where each parameter is in the flat vector
        self._shift: Tensor | None = None
        self._scale: Tensor | None = None
        self._recorded: Outputs = {}

    def __call__(self, obs: Mapping[str, Tensor], params: Tensor | None = None, **named: Tensor) -> Outputs:
        """Evaluate the outputs on `[N, ...]` observations, with other parameters than its own if given.

        `named` are inputs beside the observation, such as `action`; an output that reads one that is not given is left
        out. Gradients flow to the network's own parameters and to all inputs. Other parameters are constants, unless
        they require gradients themselves.
        """
        raise NotImplementedError

    def gradient(self, loss: Tensor) -> Tensor:
        """The gradient `[P]` of a loss made from outputs since the last call; the next call may reuse the vector."""
        raise NotImplementedError

    def record(self, obs: Mapping[str, Tensor], **named: Tensor) -> Outputs:
        """Evaluate without autograd, and keep what `backward` needs: for losses derived by hand."""
        with torch.enable_grad():
            self._recorded = self(obs, **named)
        return {k: v.detach() for k, v in self._recorded.items()}

    def backward(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """The gradient `[P]` of a loss, given its gradients with respect to the outputs `record` returned."""
        self._require_recorded(gradients, self._recorded)
        with torch.enable_grad():
            return self.gradient(torch.stack([(self._recorded[k] * g).sum() for k, g in gradients.items()]).sum())

    def normalize_with(self, shift: np.ndarray, scale: np.ndarray) -> None:
        """Set the first layer: `clip((x - shift) * scale)`."""
        if self.spec.normalizes:
            self._shift = torch.from_numpy(shift).to(self.device)
            self._scale = torch.from_numpy(scale).to(self.device)

    def predict(self, obs: Mapping[str, np.ndarray], **named: np.ndarray) -> dict[str, np.ndarray]:
        """Evaluate on numpy arrays, without gradients, into numpy arrays."""
        with torch.no_grad():
            given = {k: tensor(v, self.device) for k, v in named.items()}
            outputs = self({k: tensor(v, self.device) for k, v in obs.items()}, **given)
        return {k: v.detach().cpu().numpy().copy() for k, v in outputs.items()}  # no views of the parameters

    def _require_vector(self, params: Tensor) -> None:
        if params.shape != self.flat.shape:
            wanted = f"a vector like net.flat, {list(self.flat.shape)}"
            raise UsageError(f"params has the shape {list(params.shape)}; wanted is {wanted}")

    @staticmethod
    def _require_recorded(gradients: Mapping[str, Tensor], recorded: Mapping[str, object]) -> None:
        if gradients and gradients.keys() <= recorded.keys():
            return
        for name in gradients:
            if name not in recorded:
                raise AlgorithmError(f"Loss.gradients has {name!r}, which net.record(obs) did not return")
        raise AlgorithmError("Loss.gradients has no derivatives: give one by each output that the loss is made of")


def derivatives(loss: Tensor, leaves: list[Tensor]) -> list[Tensor | None]:
    """The gradient of a loss by each leaf; None where it does not depend on one, refused if that holds for all."""
    found: list[Tensor | None] = [*torch.autograd.grad(loss, leaves, allow_unused=True)] if leaves else []
    if all(g is None for g in found):
        raise AlgorithmError(
            "the loss does not depend on the network's parameters: make Loss.total of what net(observations(minibatch))"
            " returns in the same call of loss, without params=, torch.no_grad() or detach()"
        )
    return found
