"""The torch interpreters: a spec, or a user's own module, over one flat parameter tensor."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from raynforce.errors import AlgorithmError, UsageError, summary
from raynforce.imports import load_object
from raynforce.policies.acting import ActingSpec
from raynforce.policies.network import ModuleNet, Network, Outputs, SomeOutputs, derivatives, tensor
from raynforce.policies.numpy_net import onehot_offsets
from raynforce.policies.products import convolution, convolution_backward, linear, linear_backward, openblas_backward
from raynforce.policies.spec import NORM_EPS, Activation, Conv, Input, Layer, LayerNorm, Linear, NetworkSpec

__all__ = ["ModuleNet", "Network", "Outputs", "SpecNet", "TorchActor", "build", "tensor"]

NO_ARGS: Mapping[str, Any] = {}
NONE: Mapping[str, Tensor] = {}
IMAGES_AT_ONCE = 256  # observations that `predict` evaluates together: a fragment as floats may not fit in memory
Values = dict[str, list[Tensor]]  # of each tower: its input, then what each layer gives


class SpecNet(Network):
    """A network spec in torch.

    Towers of linear layers and convolutions with tanh or relu have their backward pass written out: from the outputs,
    whose derivatives come by hand or autograd, the chain rule runs over preallocated gradient views. On small networks
    that halves the cost. Anything else goes through autograd, to the same numbers: other layers, and calls whose inputs
    have gradients.
    """

    def __init__(self, spec: NetworkSpec, flat: np.ndarray, device: torch.device, threads: int = 1) -> None:
        super().__init__(spec, flat, device)
        self._openblas = device.type == "cpu" and threads == 1
        self._params = spec.params()
        self._own = self._bind(self.flat)
        self._other: tuple[Tensor | None, _Bound] = (None, self._own)
        self._flat_grad = torch.zeros_like(self.flat)
        self._grads = {p.name: p.view(self._flat_grad) for p in self._params}
        linear = [(n, view) for n, view in self._own.views.items() if view.ndim == 2] if self._openblas else []
        # For OpenBLAS: each linear layer's weight, transposed, and where its gradient goes.
        self._matrices = {name: (view.numpy().T, self._grads[name].numpy()) for name, view in linear}
        self.parts = spec.parts
        layers = [x for t in spec.towers for x in t.layers if not isinstance(x, Linear | Conv)]
        self._by_hand = all(isinstance(x, Activation) and x.name in _BACKWARD for x in layers)
        self._given = {"input", *(i.path for i in spec.images), *(i.path for i in spec.named)}
        self._last: _Pass | None = None  # what `backward` goes over
        self._tape: list[_Pass] = []  # the calls that `gradient` goes over
        self._learned: _Bound | None = None  # what autograd differentiates by
        self._by_autograd = False  # whether a call since the last gradient was

    def _bind(self, flat: Tensor, *, learned: bool = False) -> _Bound:
        """Every layer as a function of its input, over views into a flat vector."""
        views = {p.name: p.view(flat) for p in self._params}
        if learned:  # each a leaf: the gradient of a slice would be as long as the whole vector
            views = {name: view.detach().requires_grad_() for name, view in views.items()}
        layers: dict[str, list[Callable[[Tensor], Tensor]]] = {t.name: [] for t in self.spec.towers}
        for tower, index, layer, _ in self.spec.walk():
            layers[tower.name].append(_bound(layer, f"{tower.name}.{index}", views, self._openblas))
        return _Bound(layers, views)

    def __call__(self, obs: Mapping[str, Tensor], params: Tensor | None = None, **named: Tensor) -> Outputs:
        learning = torch.is_grad_enabled()
        x = self._encoded(obs, named, learning=learning)
        if params is not None or not learning:
            bound = self._own if params is None else self._bound_to(params)
        elif self._by_hand and not any(value.requires_grad for value in x.values()):
            with torch.no_grad():
                values = self._forward(x, self._own)
                outputs = self._outputs(values, self._own)
            for name, value in outputs.items():
                outputs[name] = value.detach().requires_grad_()
            self._tape.append(_Pass(values, dict(outputs), self._stamp(values)))
            return outputs
        else:
            if self._learned is None:
                self._learned = self._bind(self.flat, learned=True)
            bound, self._by_autograd = self._learned, True
        return self._outputs(self._forward(x, bound), bound)

    def predict(self, obs: Mapping[str, np.ndarray], **named: np.ndarray) -> dict[str, np.ndarray]:
        count = len(next(iter(obs.values())))
        if not self.spec.images or count <= IMAGES_AT_ONCE:
            return super().predict(obs, **named)
        cuts = [slice(i, i + IMAGES_AT_ONCE) for i in range(0, count, IMAGES_AT_ONCE)]
        some = [({k: v[cut] for k, v in obs.items()}, {k: v[cut] for k, v in named.items()}) for cut in cuts]
        parts = [super(SpecNet, self).predict(seen, **given) for seen, given in some]
        free = {f.name for f in self.spec.free}
        return {k: v if k in free else np.concatenate([p[k] for p in parts]) for k, v in parts[0].items()}

    def record(self, obs: Mapping[str, Tensor], **named: Tensor) -> Outputs:
        if not self._by_hand:
            return super().record(obs, **named)
        with torch.no_grad():
            values = self._forward(self._encoded(obs, named, learning=True), self._own)
        outputs = self._outputs(values, self._own)
        self._last = _Pass(values, outputs, self._stamp(values))
        return outputs

    def backward(self, gradients: Mapping[str, Tensor]) -> Tensor:
        if not self._by_hand:
            return super().backward(gradients)
        self._tape.clear()
        assert self._last is not None, "record first"
        self._require_recorded(gradients, self._last.outputs)
        with torch.no_grad():
            self._backward(self._last, {name: gradients.get(name) for name in self.spec.outputs})
        return self._flat_grad

    def _bound_to(self, params: Tensor) -> _Bound:
        if self._other[0] is params and not params.requires_grad:  # a target network is the same vector every time
            return self._other[1]
        if params is self.flat:
            return self._own
        self._require_vector(params)
        bound = self._bind(params)
        if not params.requires_grad:
            self._other = (params, bound)
        return bound

    def _encoded(self, obs: Mapping[str, Tensor], named: Mapping[str, Tensor], *, learning: bool) -> dict[str, Tensor]:
        found = encode(self.spec, obs, named)
        if learning:  # with channels last in memory an update takes a quarter less, a forward pass alone not
            for image in self.spec.images:
                found[image.path] = found[image.path].contiguous(memory_format=torch.channels_last)
        if self._shift is not None and self._scale is not None:
            found["input"] = ((found["input"] - self._shift) * self._scale).clamp_(-10.0, 10.0)
        return found

    def _forward(self, encoded: dict[str, Tensor], bound: _Bound) -> Values:
        """For each tower, its input and the output of each of its layers."""
        values = {name: [x] for name, x in encoded.items()}
        joined: dict[tuple[str, ...], Tensor] = {}  # policy and value read the same
        towers = self.spec.towers
        if self.spec.named:
            towers = tuple(t for t in towers if values.keys() >= self.spec.needs[t.name])
        for tower in towers:
            read = self.spec.reads[tower.name]
            if len(read) > 1 and read not in joined:
                joined[read] = torch.cat([values[source][-1].flatten(1) for source in read], 1)
            chain = [joined[read] if len(read) > 1 else values[read[0]][-1]]
            for layer in bound.layers[tower.name]:
                chain.append(layer(chain[-1]))
            values[tower.name] = chain
        return values

    def _outputs(self, values: Values, bound: _Bound) -> Outputs:
        if not self.spec.named:
            return {n: values[n][-1] if n in values else bound.views[n] for n in self.spec.outputs}
        made = {n: values[n][-1] for n in self.spec.outputs if n in values}
        made |= {free.name: bound.views[free.name] for free in self.spec.free}
        return SomeOutputs(made, lambda name: self.spec.lacks(name, values))

    def gradient(self, loss: Tensor) -> Tensor:
        tape, self._tape = self._tape, []
        by_autograd, self._by_autograd = self._by_autograd, False
        leaves = [v for one in tape for v in one.outputs.values()]
        learned = self._learned.views if by_autograd and self._learned is not None else NONE
        found = iter(derivatives(loss, [*leaves, *learned.values()]))
        total = self._flat_grad
        used = [(one, {name: next(found) for name in one.outputs}) for one in tape]
        used = [(one, back) for one, back in used if any(g is not None for g in back.values())]
        with torch.no_grad():
            for index, (one, back) in enumerate(used):
                if index == 1:  # a loss that evaluated the network more than once: sum the passes
                    total = total.clone()
                self._backward(one, back)
                if index:
                    total += self._flat_grad
            if not used:
                total.zero_()
            for name, g in zip(learned, found, strict=True):
                if g is not None:
                    total[self.parts[name]].view(g.shape).add_(g)
        return total

    def _stamp(self, values: Values) -> int:
        """A count that grows when parameters or inputs are changed, which the backward pass reads again."""
        stamp = self.flat._version
        for name in self._given:
            if name in values:
                stamp += values[name][0]._version
        return stamp

    def _backward(self, one: _Pass, back: dict[str, Tensor | None]) -> None:
        """Overwrite the flat gradient, given the gradients `back` with respect to the outputs."""
        values = one.values
        if one.stamp != self._stamp(values):
            changed = "the network's inputs or parameters were changed in place after it was called"
            raise AlgorithmError(f"{changed}: copy them")
        if len(back) < len(self.spec.outputs) or any(g is None for g in back.values()):
            self._flat_grad.zero_()
        for free in self.spec.free:
            g = back.get(free.name)
            if g is not None:
                self._grads[free.name].copy_(g)
        for tower in reversed(self.spec.towers):
            g = back.get(tower.name)
            if g is None:
                continue
            chain = values[tower.name]
            for index in range(len(tower.layers) - 1, -1, -1):
                layer, name = tower.layers[index], f"{tower.name}.{index}"
                if isinstance(layer, Activation):
                    g = _BACKWARD[layer.name](g, chain[index + 1])
                else:
                    wanted = index > 0 or not self._given.issuperset(self.spec.reads[tower.name])
                    g = self._layer_backward(layer, name, chain[index], g, wanted)
            if not self._given.issuperset(self.spec.reads[tower.name]):
                self._hand_back(tower.name, g, values, back)

    def _layer_backward(self, layer: Layer, name: str, x: Tensor, g: Tensor, wanted: bool) -> Tensor:
        """Write the gradients of a layer's parameters; returns that of its input `x`, if wanted."""
        weight = self._own.views[f"{name}.weight"]
        d_weight, d_bias = self._grads[f"{name}.weight"], self._grads[f"{name}.bias"]
        if isinstance(layer, Conv):
            d_x, found, found_bias = convolution_backward(x, weight, g, layer.stride, wanted)
            d_weight.copy_(found)
            d_bias.copy_(found_bias)
            return d_x
        torch.sum(g, 0, out=d_bias)
        flat = x if x.ndim == 2 else x.flatten(1)
        if self._openblas:
            d_x = openblas_backward(flat, g, *self._matrices[f"{name}.weight"], wanted)
        else:
            d_x = linear_backward(flat, weight, g, d_weight, False, wanted)
        return d_x.view(x.shape) if wanted and flat is not x else d_x

    def _hand_back(self, name: str, g: Tensor, values: Values, back: dict[str, Tensor | None]) -> None:
        """Add a tower's gradient by its input to those by the outputs of the towers it reads."""
        read, offset = self.spec.reads[name], 0
        for source in read:
            shape, part = values[source][-1].shape, g
            if len(read) > 1:
                width = shape[1:].numel()
                part, offset = g[:, offset : offset + width].reshape(shape), offset + width
            if source not in self._given:
                other = back.get(source)
                back[source] = part if other is None else other + part


class _Pass(NamedTuple):
    values: Values
    outputs: Outputs
    stamp: int


class _Bound(NamedTuple):
    layers: dict[str, list[Callable[[Tensor], Tensor]]]
    views: dict[str, Tensor]


def _bound(layer: Layer, name: str, views: Mapping[str, Tensor], openblas: bool) -> Callable[[Tensor], Tensor]:
    if isinstance(layer, Activation):
        return _FORWARD[layer.name]
    if isinstance(layer, LayerNorm):
        scale, shift = views[f"{name}.scale"], views[f"{name}.shift"]
        return lambda x: F.layer_norm(x, x.shape[1:], scale, shift, NORM_EPS)
    weight, bias = views[f"{name}.weight"], views[f"{name}.bias"]
    if isinstance(layer, Conv):
        return convolution(weight, bias, layer.stride)
    return linear(weight, bias, openblas)


_FORWARD: dict[str, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh, "relu": torch.relu, "elu": F.elu, "silu": F.silu}
_BACKWARD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # of the gradient and the activation's output
    "tanh": torch.ops.aten.tanh_backward.default,
    "relu": lambda g, y: torch.ops.aten.threshold_backward.default(g, y, 0),
}


def encode(spec: NetworkSpec, obs: Mapping[str, Tensor], named: Mapping[str, Tensor] = NONE) -> dict[str, Tensor]:
    """The torch twin of `numpy_net.encode`."""
    found = {leaf.path: _image(leaf, obs[leaf.path]) for leaf in spec.images}
    if len(spec.flat) == 1:
        found["input"] = _flat(spec.flat[0], obs)
    elif spec.flat:
        found["input"] = torch.cat([_flat(leaf, obs) for leaf in spec.flat], dim=1)
    if named:
        found |= {leaf.path: _flat(leaf, named) for leaf in spec.given(named)}
    return found


def _image(leaf: Input, given: Tensor) -> Tensor:
    x = leaf.channels_first(given).float()
    if leaf.encoding != "image":
        return x
    return x * (1 / 255) if given.is_floating_point() else x.mul_(1 / 255)  # in place: bytes were copied


def _flat(leaf: Input, obs: Mapping[str, Tensor]) -> Tensor:
    x = obs[leaf.path]
    if leaf.encoding == "vector" and x.ndim == 2 and x.dtype is torch.float32:  # most often: nothing to do
        return x
    if leaf.encoding == "image":
        return x.reshape(len(x), -1).float() * (1 / 255)
    if leaf.encoding != "onehot":
        return x.reshape(len(x), -1).float()
    index = x.reshape(len(x), -1) + torch.from_numpy(onehot_offsets(leaf)).to(x.device)
    return torch.zeros(len(x), leaf.width, device=x.device).scatter_(1, index, 1.0)


def build(
    spec: NetworkSpec,
    factory: str | None,
    heads: Mapping[str, int],
    leaves: Any,
    seed: int,
    device: torch.device,
    args: Mapping[str, Any] = NO_ARGS,
    threads: int = 1,
) -> SpecNet | ModuleNet:
    """Make the network of a run with fresh parameters: from its spec, or by the user's `module:factory` with `args`."""
    if factory is None:
        return SpecNet(spec, spec.initial(np.random.default_rng([seed, 7])), device, threads)
    make = load_object(factory, "network.factory")
    _require_arguments(factory, make, args)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            module = make(leaves, dict(heads), **args)
        except Exception as error:
            raise UsageError(f"network.factory {factory!r} raised {summary(error)}") from error
    if not isinstance(module, torch.nn.Module):
        raise UsageError(f"network.factory {factory!r} returned {type(module).__name__}, not a torch.nn.Module")
    return ModuleNet(spec, module, heads, device)


def _require_arguments(factory: str, make: Any, args: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):
        return  # some callables have none: calling them tells
    try:
        signature.bind((), {}, **args)
    except TypeError as error:
        takes = ", ".join([*signature.parameters][2:]) or "none"
        given = f"network.factory {factory!r} does not take network.factory_args = {dict(args)}"
        raise UsageError(f"{given}: {error}; after leaves and outputs it takes {takes}") from None


class TorchActor:
    """Acts with torch, behind the interface of `NumpyNet`: with a user's own module, or where it is faster."""

    def __init__(self, spec: ActingSpec) -> None:
        made = spec.network, spec.factory, spec.heads, spec.env.obs
        self._net = build(*made, 0, torch.device("cpu"), spec.factory_args)
        self._one_thread = spec.factory is None

    def load(self, flat: np.ndarray, shift: np.ndarray | None = None, scale: np.ndarray | None = None) -> None:
        with torch.no_grad():
            self._net.flat.copy_(tensor(flat, self._net.device))
        if shift is not None and scale is not None:
            self._net.normalize_with(shift, scale)

    def __call__(self, obs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        threads = torch.get_num_threads()
        if not self._one_thread or threads == 1:
            return self._net.predict(obs)
        torch.set_num_threads(1)  # beside a learner of several threads, as in a process of its own
        try:
            return self._net.predict(obs)
        finally:
            torch.set_num_threads(threads)
