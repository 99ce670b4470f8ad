"""A policy as one graph of plain tensor operators, from raw observations to the environment's actions.

Normaliser, encodings and action transforms are inside. Operators are ONNX's by name and meaning, so that one lowering
serves every format; `docs/export.md` lists them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from raynforce.errors import UsageError
from raynforce.policies.acting import ActingSpec, PolicyVersion
from raynforce.policies.distributions import (
    FORBIDDEN,
    Categorical,
    EpsilonGreedy,
    Gaussian,
    MaskedEpsilonGreedy,
    MultiCategorical,
    SquashedGaussian,
    StateDependent,
    WideGaussian,
)
from raynforce.policies.spec import Activation, Conv, Input, LayerNorm, Linear
from raynforce.spaces import MASK, ActionSpec, float32_bounds

ACTION = "action"
OWN = "own"  # what a user's own module gives
CLIP = 10.0  # of normalised observations, as in numpy_net


@dataclass(frozen=True)
class Node:
    op: str
    inputs: tuple[str, ...]
    output: str
    attributes: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> list[Any]:
        return [self.op, list(self.inputs), self.output, self.attributes]


@dataclass
class Graph:
    """Nodes in an order in which they can be computed; its inputs are the leaves of the observation."""

    nodes: list[Node] = field(default_factory=list)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    scores: str = ""
    """The output of the network that it acts by, `[N, n]`: logits, action values, or means."""

    def add(self, op: str, *inputs: str | np.ndarray, to: str = "", **attributes: Any) -> str:
        """Append a node; arrays become constants. Returns the name of what it computes."""
        output = to or f"v{len(self.nodes)}"
        names = tuple(self.constant(x) if isinstance(x, np.ndarray) else x for x in inputs)
        self.nodes.append(Node(op, names, output, attributes))
        return output

    def constant(self, array: np.ndarray, name: str = "") -> str:
        name = name or f"c{len(self.constants)}"
        self.constants[name] = np.ascontiguousarray(array)
        return name

    def reshape(self, x: str, *shape: int) -> str:
        """`[N, …]` as `[N, *shape]`."""
        return self.add("Reshape", x, np.array([-1, *shape], np.int64))

    def cast(self, x: str, dtype: str, to: str = "") -> str:
        return self.add("Cast", x, to=to, dtype=dtype)

    def scale(self, x: str, factor: float) -> str:
        return self.add("Mul", x, np.array(factor, np.float32))


def lower(spec: ActingSpec, version: PolicyVersion) -> Graph:
    """The graph of a policy that acts greedily; of a user's own module what comes after `OWN`."""
    graph = Graph()
    distribution = spec.distribution()
    graph.scores = distribution.outputs[0]
    values = {graph.scores: OWN} if spec.factory else _encoded(graph, spec, version)
    if not spec.factory:
        _towers(graph, spec, version, values)
    raw = _greedy(graph, spec, distribution, values[graph.scores])
    _to_env(graph, spec.env.action, raw)
    return graph


def _encoded(graph: Graph, spec: ActingSpec, version: PolicyVersion) -> dict[str, str]:
    """What towers read: `input` `[N, D]`, normalised, and images `[N, C, H, W]`."""
    network = spec.network
    values = {leaf.path: _image(graph, leaf) for leaf in network.images}
    if network.flat:
        parts = [_flat(graph, leaf) for leaf in network.flat]
        joined = parts[0] if len(parts) == 1 else graph.add("Concat", *parts, axis=1)
        if network.normalizes and version.shift is not None and version.scale is not None:
            joined = graph.add("Mul", graph.add("Sub", joined, version.shift), version.scale)
            joined = graph.add("Max", joined, np.array(-CLIP, np.float32))
            joined = graph.add("Min", joined, np.array(CLIP, np.float32))
        values["input"] = joined
    return values


def _image(graph: Graph, leaf: Input) -> str:
    x, rank = leaf.path, len(leaf.shape) + 1
    if leaf.channels_last:
        x = graph.add("Transpose", x, perm=[*range(rank - 3), rank - 1, rank - 3, rank - 2])
    x = graph.cast(graph.reshape(x, *leaf.image_shape), "float32")
    return graph.scale(x, 1 / 255) if leaf.encoding == "image" else x


def _flat(graph: Graph, leaf: Input) -> str:
    if leaf.encoding != "onehot":
        x = graph.cast(graph.reshape(leaf.path, leaf.width), "float32")
        return graph.scale(x, 1 / 255) if leaf.encoding == "image" else x
    starts = leaf.start or (0,) * len(leaf.sizes)
    which = np.repeat(np.arange(len(leaf.sizes)), leaf.sizes)  # the element that each column is of
    value = np.concatenate([start + np.arange(size) for start, size in zip(starts, leaf.sizes, strict=True)])
    x = graph.cast(graph.reshape(leaf.path, len(leaf.sizes)), "int64")
    same = graph.add("Equal", graph.add("Gather", x, which.astype(np.int64), axis=1), value.astype(np.int64))
    return graph.cast(same, "float32")


def _towers(graph: Graph, spec: ActingSpec, version: PolicyVersion, values: dict[str, str]) -> None:
    """Every tower that the action depends on, into `values`."""
    network = spec.network
    params = {p.name: p.view(version.params) for p in network.params()}
    needed = network.sources([graph.scores])
    shapes: dict[str, tuple[int, ...]] = {"input": (network.input_width,)}
    shapes |= {i.path: i.image_shape for i in network.images}
    for tower in network.towers:
        if tower.name not in needed:
            continue
        read = network.reads[tower.name]
        x, shape = values[read[0]], shapes[read[0]]
        if len(read) > 1:
            parts = [graph.reshape(values[source], math.prod(shapes[source])) for source in read]
            x, shape = graph.add("Concat", *parts, axis=1), (sum(math.prod(shapes[source]) for source in read),)
        for index, layer in enumerate(tower.layers):
            x, shape = _layer(graph, layer, f"{tower.name}.{index}", x, shape, params)
        values[tower.name], shapes[tower.name] = x, shape


def _layer(
    graph: Graph, layer: Any, name: str, x: str, shape: tuple[int, ...], params: dict[str, np.ndarray]
) -> tuple[str, tuple[int, ...]]:
    def parameters(*kinds: str) -> list[str]:
        return [graph.constant(params[f"{name}.{kind}"], f"{name}.{kind}") for kind in kinds]

    if isinstance(layer, Linear):
        if len(shape) > 1:
            x = graph.reshape(x, math.prod(shape))
        return graph.add("Gemm", x, *parameters("weight", "bias")), (layer.size,)
    if isinstance(layer, Conv):
        (top, bottom), (left, right) = layer.pads(shape)
        how: dict[str, Any] = {"pads": [top, left, bottom, right], "strides": [layer.stride] * 2}
        return graph.add("Conv", x, *parameters("weight", "bias"), **how), layer.output(shape)
    if isinstance(layer, LayerNorm):
        return graph.add("LayerNormalization", x, *parameters("scale", "shift"), axis=1, epsilon=layer.eps), shape
    if isinstance(layer, Activation) and layer.name == "silu":  # x * sigmoid(x), without an exp that overflows
        half = graph.scale(x, 0.5)
        return graph.add("Mul", half, graph.add("Add", graph.add("Tanh", half), np.array(1, np.float32))), shape
    if isinstance(layer, Activation) and layer.name in ("tanh", "relu", "elu"):
        return graph.add(layer.name.capitalize(), x), shape
    raise UsageError(f"{name} is a {type(layer).__name__} layer, which no export knows yet")


def _greedy(graph: Graph, spec: ActingSpec, distribution: Any, scores: str) -> str:
    """The greedy action `[N, …]` as fragments record it; the scores become an output."""
    graph.reshape(scores, spec.heads[graph.scores])
    graph.nodes[-1] = Node("Reshape", graph.nodes[-1].inputs, graph.scores)
    shape, scores = spec.env.action.shape, graph.scores
    if spec.env.masked:  # 0 where a choice is allowed, and else so low that no other is below it
        allowed = graph.add("Sub", graph.cast(MASK, "float32"), np.array(1, np.float32))
        scores = graph.add("Add", scores, graph.scale(allowed, -FORBIDDEN))
    kind = type(distribution)
    if kind is MultiCategorical:
        starts = np.cumsum([0, *spec.env.action.sizes])
        parts = [
            graph.add("ArgMax", _columns(graph, scores, range(a, b)), axis=1, keepdims=1) for a, b in pairwise(starts)
        ]
        return graph.reshape(parts[0] if len(parts) == 1 else graph.add("Concat", *parts, axis=1), *shape)
    if kind in (Categorical, EpsilonGreedy, MaskedEpsilonGreedy):
        return graph.add("ArgMax", scores, axis=1, keepdims=0)
    if isinstance(distribution, StateDependent):
        mean = graph.reshape(graph.scores, *shape)
        return graph.add("Tanh", mean) if distribution.squashed else mean
    if kind not in (Gaussian, WideGaussian, SquashedGaussian):
        raise UsageError(f"this policy acts by {kind.__name__}, which no export knows yet")
    mean = graph.scores if kind is Gaussian else _columns(graph, graph.scores, range(math.prod(shape)))
    mean = graph.reshape(mean, *shape)
    return graph.add("Tanh", mean) if kind is SquashedGaussian else mean


def _columns(graph: Graph, x: str, columns: Sequence[int]) -> str:
    return graph.add("Gather", x, np.array(columns, np.int64), axis=1)


def _to_env(graph: Graph, action: ActionSpec, raw: str) -> None:
    """The environment's action, as `acting.action_map` makes it: of a box in float64, as there."""
    if action.kind != "box":
        start = np.asarray(action.start or [0] * len(action.sizes), np.int64).reshape(action.shape)
        graph.add("Add", raw, start, to=ACTION)
        return
    low, high = (np.asarray(bound, np.float64).reshape(action.shape) for bound in (action.low, action.high))
    x = graph.cast(raw, "float64")
    if np.isfinite(low).all() and np.isfinite(high).all():
        x = graph.add("Add", graph.add("Mul", x, (high - low) / 2), (high + low) / 2)
    least, most = float32_bounds(action)
    graph.cast(graph.add("Min", graph.add("Max", x, least), most), "float32", to=ACTION)
