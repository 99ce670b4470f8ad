"""Policies as TorchScript: our graph, or a user's own module with what is around it, traced once."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from raynforce.lazy import LazyModule
from raynforce.ops.exporting.graph import ACTION, OWN, Graph, Node
from raynforce.policies.acting import ActingSpec, PolicyVersion

torch: Any = LazyModule("torch")
torch_net: Any = LazyModule("raynforce.policies.torch_net")
functional: Any = LazyModule("torch.nn.functional")


def write(path: Path, spec: ActingSpec, version: PolicyVersion, graph: Graph, obs: Mapping[str, np.ndarray]) -> None:
    """Save a module that takes the observation's leaves in their order and returns action and scores."""
    compute = own_module(spec, version) if spec.factory else None
    constants = {name: torch.from_numpy(array) for name, array in graph.constants.items()}

    class Traced(torch.nn.Module):  # type: ignore[misc]
        def forward(self, *leaves: Any) -> tuple[Any, Any]:
            values = {leaf.path: x for leaf, x in zip(spec.env.obs, leaves, strict=True)}
            given = {} if compute is None else {OWN: compute(values)}
            found = run(graph.nodes, {**constants, **values, **given})
            return found[ACTION], found[graph.scores]

    example = tuple(torch.from_numpy(obs[leaf.path].copy()) for leaf in spec.env.obs)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # tracing is deprecated in favour of what only Python can load
        torch.jit.save(torch.jit.trace(Traced(), example, check_trace=False), str(path))


def run(nodes: list[Node], values: dict[str, Any]) -> dict[str, Any]:
    """Compute a graph in torch."""
    for node in nodes:
        values[node.output] = OPS[node.op](*(values[name] for name in node.inputs), **node.attributes)
    return values


def own_module(spec: ActingSpec, version: PolicyVersion) -> Any:
    """A user's own module as a function of the leaves: normalised as in training, to the scores."""
    actor = torch_net.TorchActor(spec)
    actor.load(version.params, version.shift, version.scale)
    actor._net.module.requires_grad_(False)  # else a trace takes them for inputs
    name = spec.distribution().outputs[0]
    return lambda values: actor._net(values)[name]


def _conv(x: Any, w: Any, b: Any, pads: list[int], strides: list[int]) -> Any:
    top, left, bottom, right = pads
    return functional.conv2d(functional.pad(x, (left, right, top, bottom)), w, b, strides)


OPS: dict[str, Any] = {
    "Add": lambda x, y: x + y,
    "Sub": lambda x, y: x - y,
    "Mul": lambda x, y: x * y,
    "Max": lambda x, y: torch.maximum(x, y),
    "Min": lambda x, y: torch.minimum(x, y),
    "Equal": lambda x, y: x == y,
    "Tanh": lambda x: torch.tanh(x),
    "Relu": lambda x: torch.relu(x),
    "Elu": lambda x: functional.elu(x),
    "Cast": lambda x, dtype: x.to(getattr(torch, dtype)),
    "Reshape": lambda x, shape: x.reshape(shape.tolist()),
    "Transpose": lambda x, perm: x.permute(perm),
    "Concat": lambda *x, axis: torch.cat(x, axis),
    "Gather": lambda x, index, axis: x.index_select(axis, index),
    "Gemm": lambda x, w, b: torch.addmm(b, x, w),
    "Conv": _conv,
    "LayerNormalization": lambda x, w, b, epsilon, axis: functional.layer_norm(x, x.shape[axis:], w, b, epsilon),
    "ArgMax": lambda x, axis, keepdims: x.argmax(axis, keepdim=bool(keepdims)),
}
