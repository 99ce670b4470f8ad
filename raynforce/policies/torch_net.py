"""The torch interpreters: a spec, or a user's own module, over one flat parameter tensor."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from raynforce.errors import AlgorithmError, UsageError, summary
from raynforce.imports import load_object
from raynforce.policies.acting import ActingSpec
from raynforce.policies.network import STATE, ModuleNet, Network, Outputs, Sequences, SomeOutputs, derivatives, tensor
from raynforce.policies.numpy_net import onehot_offsets
from raynforce.policies.products import (
    convolution,
    convolution_backward,
    linear,
    linear_backward,
    linear_through,
    padded,
    unpadded,
)
from raynforce.policies.recurrent import Recurrence, bind, bind_backward
from raynforce.policies.spec import GRU, LSTM, Activation, Conv, Input, Layer, LayerNorm, Linear, NetworkSpec, Tower
from raynforce.spaces import MASK, ObsLeaf

__all__ = ["ModuleNet", "Network", "Outputs", "SpecNet", "TorchActor", "build", "tensor"]

NONE: Mapping[str, Any] = {}
IMAGES_AT_ONCE = 256  # observations that `predict` evaluates together: a fragment as floats may not fit in memory
Values = dict[str, list[Tensor]]  # of each tower: its input, then what each layer gives
Back = Callable[[Tensor, Tensor, Tensor], Tensor]  # of a layer's input, its output and the gradient by that


class SpecNet(Network):
    """A network spec in torch.

    Towers of linear layers and convolutions with tanh or relu have their backward pass written out: from the outputs,
    whose derivatives come by hand or autograd, the chain rule runs over preallocated gradient views. On small networks
    that halves the cost. Anything else goes through autograd, to the same numbers: other layers, and calls whose inputs
    have gradients.
    """

    def __init__(self, spec: NetworkSpec, flat: np.ndarray, device: torch.device, threads: int = 1) -> None:
        super().__init__(spec, flat, device)
        self._recurrence = Recurrence() if spec.states else None  # of the call that is under way
        self._openblas = device.type == "cpu" and threads == 1
        self._params = spec.params()
        self._own = self._bind(self.flat)
        self._other: tuple[Tensor | None, _Bound] = (None, self._own)
        self._flat_grad = torch.zeros_like(self.flat)
        self._grads = {p.name: p.view(self._flat_grad) for p in self._params}
        self.parts = spec.parts
        products = Linear | Conv | LSTM | GRU if device.type == "cpu" else Linear | Conv
        layers = [x for t in spec.towers for x in t.layers if not isinstance(x, products)]
        self._by_hand = all(isinstance(x, Activation) and x.name in _BACKWARD for x in layers)
        self._given = {"input", *(i.path for i in spec.images), *(i.path for i in spec.named)}
        sharing = [t for t in spec.towers if not t.learns_alone]
        self._hands_back = [t.name for t in sharing if not self._given.issuperset(spec.reads[t.name])]
        self._back = self._bind_backward() if self._by_hand else {}
        reading = [t for t in spec.towers if spec.needs[t.name]]
        self._reads_by_product = all(t.layers and isinstance(t.layers[0], Linear) for t in reading)
        self._last: _Pass | None = None  # what `backward` goes over
        self._tape: list[_Pass] = []  # the calls that `gradient` goes over
        self._learned: _Bound | None = None  # what autograd differentiates by
        self._chosen: dict[tuple[tuple[str, ...], tuple[str, ...]], tuple[Tower, ...]] = {}
        self._ways: dict[tuple[str, str], _Way] = {}  # from a tower's output to a named input, for `through`
        self._by_autograd = False  # whether a call since the last gradient was

    def _bind(self, flat: Tensor, *, learned: bool = False) -> _Bound:
        """Every layer as a function of its input, over views into a flat vector."""
        views = {p.name: p.view(flat) for p in self._params}
        if learned:  # each a leaf: the gradient of a slice would be as long as the whole vector
            views = {name: view.detach().requires_grad_() for name, view in views.items()}
        layers: dict[str, list[Callable[[Tensor], Tensor]]] = {t.name: [] for t in self.spec.towers}
        for tower, index, layer, _ in self.spec.walk():
            if isinstance(layer, LSTM | GRU):
                layers[tower.name].append(bind(layer, f"{tower.name}.{index}", views, self._recurring))
                continue
            op = _bound(layer, f"{tower.name}.{index}", views, self._openblas)
            if isinstance(layer, Activation) and index and isinstance(tower.layers[index - 1], Linear | Conv):
                op = _in_place(layer.name)  # nothing else reads what a product gave
            layers[tower.name].append(op)
        return _Bound(layers, views)

    def _recurring(self) -> Recurrence:
        assert self._recurrence is not None
        return self._recurrence

    def _bind_backward(self) -> dict[str, list[Back]]:
        """Every layer's backward pass, over views into the flat gradient."""
        layers: dict[str, list[Back]] = {t.name: [] for t in self.spec.towers}
        for tower, index, layer, _ in self.spec.walk():
            wanted = index > 0 or tower.name in self._hands_back
            if isinstance(layer, LSTM | GRU):
                name, views = f"{tower.name}.{index}", self._own.views
                layers[tower.name].append(bind_backward(layer, name, views, self._grads, self._recurring, wanted))
                continue
            back = _bound_backward(layer, f"{tower.name}.{index}", self._own.views, self._grads, self._openblas, wanted)
            layers[tower.name].append(back)
        return layers

    def __call__(
        self, obs: Mapping[str, Tensor], params: Tensor | None = None, only: Collection[str] = (), **named: Tensor
    ) -> Outputs:
        learning = torch.is_grad_enabled()
        if self._recurrence is not None:
            self._recurrence = Recurrence(Sequences.of(obs, self.spec.states))
        x = self._encoded(obs, named, learning=learning)
        if params is not None or not learning:
            bound = self._own if params is None else self._bound_to(params)
        elif self._by_hand and not any(value.requires_grad for value in x.values()):
            with torch.no_grad():
                values = self._forward(x, self._own, only)
                outputs = self._outputs(values, self._own, only)
            for name, value in outputs.items():
                outputs[name] = value.detach().requires_grad_()
            self._tape.append(_Pass(values, dict(outputs), self._stamp(values), self._recurrence))
            return outputs
        else:
            if self._learned is None:
                self._learned = self._bind(self.flat, learned=True)
            bound, self._by_autograd = self._learned, True
        return self._outputs(self._forward(x, bound, only), bound, only)

    def predict(
        self, obs: Mapping[str, np.ndarray], only: Collection[str] = (), /, **named: np.ndarray
    ) -> dict[str, np.ndarray]:
        count = len(next(iter(obs.values())))
        if not self.spec.images or self._recurrence is not None or count <= IMAGES_AT_ONCE:
            return super().predict(obs, only, **named)
        cuts = [slice(i, i + IMAGES_AT_ONCE) for i in range(0, count, IMAGES_AT_ONCE)]
        some = [({k: v[cut] for k, v in obs.items()}, {k: v[cut] for k, v in named.items()}) for cut in cuts]
        parts = [super(SpecNet, self).predict(seen, only, **given) for seen, given in some]
        free = {f.name for f in self.spec.free}
        return {k: v if k in free else np.concatenate([p[k] for p in parts]) for k, v in parts[0].items()}

    def _evaluate(self, obs: Mapping[str, Tensor], named: Mapping[str, Tensor], only: Collection[str]) -> Outputs:
        if self._recurrence is not None:
            return self(obs, only=only, **named)
        values = self._forward(self._encoded(obs, named, learning=False), self._own, only)
        return self._outputs(values, self._own, only)

    def record(self, obs: Mapping[str, Tensor], only: Collection[str] = (), **named: Tensor) -> Outputs:
        if not self._by_hand:
            return super().record(obs, only, **named)
        if self._recurrence is not None:
            self._recurrence = Recurrence(Sequences.of(obs, self.spec.states))
        with torch.no_grad():
            values = self._forward(self._encoded(obs, named, learning=True), self._own, only)
        outputs = self._outputs(values, self._own, only)
        self._last = _Pass(values, outputs, self._stamp(values), self._recurrence)
        return outputs

    def backward(self, gradients: Mapping[str, Tensor]) -> Tensor:
        if not self._by_hand:
            return super().backward(gradients)
        self._tape.clear()
        assert self._last is not None, "record first"
        self._require_recorded(gradients, self._last.outputs)
        with torch.no_grad():
            self._backward(self._last, {name: gradients.get(name) for name in (*self.spec.outputs, *gradients)})
        return self._flat_grad

    def through(
        self, name: str, obs: Mapping[str, Tensor], only: Collection[str] = (), /, **named: Tensor
    ) -> tuple[Outputs, Callable[[Mapping[str, Tensor]], Tensor]]:
        if not (self._by_hand and self._reads_by_product):
            return super().through(name, obs, only, **named)
        with torch.no_grad():
            values = self._forward(self._encoded(obs, named, learning=False), self._own, only)
        return self._outputs(values, self._own, only), lambda gradients: self._through(name, values, gradients)

    def _through(self, name: str, values: Values, gradients: Mapping[str, Tensor]) -> Tensor:
        """The gradient by a named input: the chain rule over the towers that depend on it, parameters left out."""
        back: dict[str, Tensor] = dict(gradients)
        with torch.no_grad():
            for tower in reversed(self.spec.towers):
                g = back.get(tower.name)
                if g is None or name not in self.spec.needs[tower.name]:
                    continue
                if (name, tower.name) not in self._ways:
                    self._ways[name, tower.name] = self._bind_through(name, tower, values)
                layers, sources = self._ways[name, tower.name]
                chain = values[tower.name]
                for index in range(len(layers), 0, -1):
                    g = layers[index - 1](chain[index], chain[index + 1], g)
                for source, product in sources:
                    part = product(g)
                    back[source] = part if source not in back else back[source] + part
        return back[name]

    def _bind_through(self, name: str, tower: Tower, values: Values) -> _Way:
        """A tower's layers after the first, and for each source that depends on the input, the first layer's part."""
        views, openblas = self._own.views, self._openblas
        layers: list[Back] = []
        for index, layer in enumerate(tower.layers[1:], 1):
            if isinstance(layer, Activation):
                layers.append(_BACKWARD[layer.name])
            else:
                layers.append(_of_gradient(linear_through(views[f"{tower.name}.{index}.weight"], openblas)))
        weight, sources, row = views[f"{tower.name}.0.weight"], [], 0
        for source in self.spec.reads[tower.name]:
            first, row = row, row + values[source][-1].shape[1:].numel()
            if source == name or (name in self.spec.needs.get(source, ()) and not tower.learns_alone):
                sources.append((source, linear_through(weight[first:row], openblas)))
        return _Way(layers, sources)

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

    def _forward(self, encoded: dict[str, Tensor], bound: _Bound, only: Collection[str] = ()) -> Values:
        """For each tower, or those that `only` some outputs need, its input and the output of each of its layers."""
        values = {name: [x] for name, x in encoded.items()}
        joined: dict[tuple[str, ...], Tensor] = {}  # policy and value read the same
        for tower in self._towers(tuple(values), tuple(only)) if only or self.spec.named else self.spec.towers:
            read = self.spec.reads[tower.name]
            if tower.learns_alone:
                parts = [values[s][-1] if s in encoded else values[s][-1].detach() for s in read]
                chain = [torch.cat([part.flatten(1) for part in parts], 1) if len(read) > 1 else parts[0]]
            else:
                if len(read) > 1 and read not in joined:
                    joined[read] = torch.cat([values[source][-1].flatten(1) for source in read], 1)
                chain = [joined[read] if len(read) > 1 else values[read[0]][-1]]
            for layer in bound.layers[tower.name]:
                chain.append(layer(chain[-1]))
            values[tower.name] = chain
        return values

    def _towers(self, given: tuple[str, ...], only: tuple[str, ...]) -> tuple[Tower, ...]:
        """Those that can be made of what is given, or of these `only` what some outputs need."""
        found = self._chosen.get((given, only))
        if found is None:
            wanted = self.spec.sources(only or [t.name for t in self.spec.towers])
            able = (t for t in self.spec.towers if self.spec.needs[t.name].issubset(given))
            found = self._chosen[given, only] = tuple(t for t in able if t.name in wanted)
        return found

    def _outputs(self, values: Values, bound: _Bound, only: Collection[str] = ()) -> Outputs:
        names = only or self.spec.outputs
        if self._recurrence is not None:
            self.after, some = self._recurrence.states, self._recurrence.sequences
            assert some is not None
            made = {n: some.selected(values[n][-1]) for n in names if n in values}
        elif not self.spec.named:
            return {n: values[n][-1] if n in values else bound.views[n] for n in names}
        else:
            made = {n: values[n][-1] for n in names if n in values}
        made |= {free.name: bound.views[free.name] for free in self.spec.free if free.name in names}
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
            raise AlgorithmError(
                "the network's inputs or parameters were changed in place after it was called: copy them"
            )
        if len(back) < len(self.spec.outputs) or any(g is None for g in back.values()):
            self._flat_grad.zero_()
        for free in self.spec.free:
            g = back.get(free.name)
            if g is not None:
                self._grads[free.name].copy_(g)
        if one.recurrence is not None:
            self._recurrence = one.recurrence
            back = one.recurrence.spread(back, values)
        for tower in reversed(self.spec.towers):
            g = back.get(tower.name)
            if g is None:
                continue
            chain, layers = values[tower.name], self._back[tower.name]
            for index in range(len(layers) - 1, -1, -1):
                g = layers[index](chain[index], chain[index + 1], g)
            if tower.name in self._hands_back:
                self._hand_back(tower.name, g, values, back)

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
    recurrence: Recurrence | None = None


class _Way(NamedTuple):
    layers: list[Back]
    sources: list[tuple[str, Callable[[Tensor], Tensor]]]


class _Bound(NamedTuple):
    layers: dict[str, list[Callable[[Tensor], Tensor]]]
    views: dict[str, Tensor]


def _bound(layer: Layer, name: str, views: Mapping[str, Tensor], openblas: bool) -> Callable[[Tensor], Tensor]:
    if isinstance(layer, Activation):
        return _FORWARD[layer.name]
    if isinstance(layer, LayerNorm):
        scale, shift = views[f"{name}.scale"], views[f"{name}.shift"]
        return lambda x: F.layer_norm(x, x.shape[1:], scale, shift, layer.eps)
    weight, bias = views[f"{name}.weight"], views[f"{name}.bias"]
    if isinstance(layer, Conv):
        apply = convolution(weight, bias, layer.stride)
        return apply if layer.padding == "valid" else lambda x: apply(padded(x, layer))
    return linear(weight, bias, openblas)


def _of_gradient(product: Callable[[Tensor], Tensor]) -> Back:
    return lambda x, y, g: product(g)


def _in_place(activation: str) -> Callable[[Tensor], Tensor]:
    apart, within = _FORWARD[activation], _IN_PLACE.get(activation)
    return apart if within is None else lambda x: apart(x) if x.requires_grad else within(x)


def _bound_backward(
    layer: Layer, name: str, views: Mapping[str, Tensor], grads: Mapping[str, Tensor], openblas: bool, wanted: bool
) -> Back:
    """Writes the gradients of a layer's parameters; returns that by its input, if wanted."""
    if isinstance(layer, Activation):
        return _BACKWARD[layer.name]
    weight, d_weight, d_bias = views[f"{name}.weight"], grads[f"{name}.weight"], grads[f"{name}.bias"]
    if isinstance(layer, Conv):

        def conv(x: Tensor, y: Tensor, g: Tensor) -> Tensor:
            d_x, found, found_bias = convolution_backward(padded(x, layer), weight, g, layer.stride, wanted)
            d_weight.copy_(found)
            d_bias.copy_(found_bias)
            return unpadded(d_x, layer, x.shape) if wanted else d_x

        return conv
    product = linear_backward(weight, d_weight, d_bias, openblas, wanted)
    return lambda x, y, g: product(x, g)


_FORWARD: dict[str, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh, "relu": torch.relu, "elu": F.elu, "silu": F.silu}
_IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh_, "relu": torch.relu_}
_tanh_backward, _relu_backward = torch.ops.aten.tanh_backward.default, torch.ops.aten.threshold_backward.default
_BACKWARD: dict[str, Back] = {
    "tanh": lambda x, y, g: _tanh_backward(g, y),
    "relu": lambda x, y, g: _relu_backward(g, y, 0),
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
    leaves: Sequence[ObsLeaf],
    seed: int,
    device: torch.device,
    args: Mapping[str, Any] = NONE,
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
            module = make([leaf for leaf in leaves if leaf.path != MASK], dict(heads), **args)
        except Exception as error:
            raise UsageError(f"network.factory {factory!r} raised {summary(error)}") from error
    if not isinstance(module, torch.nn.Module):
        raise UsageError(f"network.factory {factory!r} returned {type(module).__name__}, not a torch.nn.Module")
    made = ModuleNet(spec, module, heads, device)
    for name in spec.asked:
        made.require_input(name)
    with torch.random.fork_rng(devices=[]):
        made.predict(_blank(spec, leaves))  # what does not fit is told before anything is written
    return made


def _blank(spec: NetworkSpec, leaves: Sequence[ObsLeaf]) -> dict[str, np.ndarray]:
    """Two observations, with the states before them, of the least that choices may be and zeros."""
    dtypes, found = {leaf.path: leaf.dtype for leaf in leaves}, {}
    for given in spec.inputs:
        found[given.path] = np.zeros((2, *given.shape), dtypes.get(given.path, "float32"))
        if given.start:
            found[given.path] += np.array(given.start, found[given.path].dtype).reshape(given.shape)
    return found | {STATE + name: np.zeros((2, size), np.float32) for name, size in spec.states.items()}


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
        self._only = spec.distribution().outputs if spec.is_sde else ()

    def load(self, flat: np.ndarray, shift: np.ndarray | None = None, scale: np.ndarray | None = None) -> None:
        with torch.no_grad():
            self._net.flat.copy_(tensor(flat, self._net.device))
        if shift is not None and scale is not None:
            self._net.normalize_with(shift, scale)

    def __call__(self, obs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        threads = torch.get_num_threads()
        if not self._one_thread or threads == 1:
            return self._net.predict(obs, self._only)
        torch.set_num_threads(1)  # beside a learner of several threads, as in a process of its own
        try:
            return self._net.predict(obs, self._only)
        finally:
            torch.set_num_threads(threads)

    def step(
        self, obs: Mapping[str, np.ndarray], state: Mapping[str, np.ndarray]
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """The outputs of one step, and the next state."""
        out = self({**obs, **{STATE + name: array for name, array in state.items()}})
        return out, {name: after[0].numpy().copy() for name, after in self._net.after.items()}
