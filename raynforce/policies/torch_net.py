"""The torch interpreters: a spec, or a user's own module, over one flat parameter tensor."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from raynforce.errors import UsageError, summary
from raynforce.imports import load_object
from raynforce.policies.numpy_net import onehot_offsets
from raynforce.policies.products import convolution, convolution_backward, linear, linear_backward
from raynforce.policies.spec import NORM_EPS, Activation, Conv, Input, Layer, LayerNorm, Linear, NetworkSpec

NO_ARGS: Mapping[str, Any] = {}

Outputs = dict[str, Tensor]
Values = dict[str, list[Tensor]]  # of each tower: its input, then what each layer gives


IMAGES_AT_ONCE = 256
"""Observations with images that `predict` evaluates together: as floats a fragment of them may not fit in memory."""


class Network(Protocol):
    """What an algorithm's loss sees of a network."""

    flat: Tensor
    """All parameters, float32 `[P]`. Target networks are copies of this vector."""

    def __call__(self, obs: Mapping[str, Tensor], params: Tensor | None = None) -> Outputs:
        """Evaluate all outputs on `[N, ...]` observations, with other parameters than its own if given."""

    def gradient(self, loss: Tensor) -> Tensor:
        """The gradient `[P]` of a loss made from this network's outputs since the last call.

        The vector may be reused by the next call: copy it to keep it.
        """

    def record(self, obs: Mapping[str, Tensor]) -> Outputs:
        """Evaluate without autograd, and keep what `backward` needs: for losses derived by hand."""

    def backward(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """The gradient `[P]` of a loss, given its gradients with respect to the outputs `record` returned."""

    def normalize_with(self, shift: np.ndarray, scale: np.ndarray) -> None:
        """Set the first layer: `clip((x - shift) * scale)`."""

    def predict(self, obs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Evaluate on numpy arrays, without gradients, into numpy arrays."""


def tensor(array: np.ndarray, device: torch.device) -> Tensor:
    """An array on the device. What is received read-only, and may be released, is copied."""
    return torch.from_numpy(array if array.flags.writeable else array.copy()).to(device, non_blocking=True)


class _Base:
    """What both kinds of network share: the flat vector, the normaliser's shift and scale, `predict`."""

    def __init__(self, spec: NetworkSpec, flat: np.ndarray, device: torch.device) -> None:
        self.spec = spec
        self.device = device
        self.flat = torch.from_numpy(flat.copy()).to(device)
        self._shift: Tensor | None = None
        self._scale: Tensor | None = None
        self._recorded: Outputs = {}

    def record(self, obs: Mapping[str, Tensor]) -> Outputs:
        with torch.enable_grad():
            self._recorded = self(obs)
        return {k: v.detach() for k, v in self._recorded.items()}

    def backward(self, gradients: Mapping[str, Tensor]) -> Tensor:
        with torch.enable_grad():
            return self.gradient(torch.stack([(self._recorded[k] * g).sum() for k, g in gradients.items()]).sum())

    def gradient(self, loss: Tensor) -> Tensor:
        raise NotImplementedError

    def normalize_with(self, shift: np.ndarray, scale: np.ndarray) -> None:
        if self.spec.normalizes:
            self._shift = torch.from_numpy(shift).to(self.device)
            self._scale = torch.from_numpy(scale).to(self.device)

    def predict(self, obs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        with torch.no_grad():
            outputs = self({k: tensor(v, self.device) for k, v in obs.items()})
        return {k: v.detach().cpu().numpy().copy() for k, v in outputs.items()}  # no views of the parameters

    def __call__(self, obs: Mapping[str, Tensor], params: Tensor | None = None) -> Outputs:
        raise NotImplementedError

    def _refuse_gradients_of(self, params: Tensor | None) -> None:
        if params is not None and torch.is_grad_enabled():
            raise UsageError("gradients flow to the network's own parameters only: wrap this call in torch.no_grad()")


class SpecNet(_Base):
    """A network spec in torch.

    Towers of linear layers and convolutions with tanh or relu, the common case, have their backward pass written out
    below: the loss is differentiated down to the network's outputs, by hand or by autograd, then the chain rule runs
    over preallocated gradient views. On small networks that costs half of an autograd node per operation. Anything else
    goes through autograd.
    """

    def __init__(self, spec: NetworkSpec, flat: np.ndarray, device: torch.device, threads: int = 1) -> None:
        super().__init__(spec, flat, device)
        self._openblas = device.type == "cpu" and threads == 1
        self._params = spec.params()
        self._own = self._bind(self.flat)
        self._other: tuple[Tensor | None, _Bound] = (None, self._own)
        self._flat_grad = torch.zeros_like(self.flat)
        self._grads = {p.name: p.view(self._flat_grad) for p in self._params}
        self._by_hand = all(
            isinstance(x, Linear | Conv) or (isinstance(x, Activation) and x.name in _BACKWARD)
            for t in spec.towers
            for x in t.layers
        )
        self._given = {"input", *(i.path for i in spec.images)}
        self._values: Values = {}
        self._tape: list[tuple[Values, Outputs]] = []
        self._leaf: Tensor | None = None

    def _bind(self, flat: Tensor) -> _Bound:
        """Every layer as a function of its input, over views into a flat vector."""
        views = {p.name: p.view(flat) for p in self._params}
        layers: dict[str, list[Callable[[Tensor], Tensor]]] = {t.name: [] for t in self.spec.towers}
        for tower, index, layer, _ in self.spec.walk():
            layers[tower.name].append(_bound(layer, f"{tower.name}.{index}", views, self._openblas))
        return _Bound(layers, views)

    def __call__(self, obs: Mapping[str, Tensor], params: Tensor | None = None) -> Outputs:
        x = self._encoded(obs, learning=torch.is_grad_enabled())
        if not torch.is_grad_enabled():
            bound = self._own if params is None else self._bound_to(params)
            return self._outputs(self._forward(x, bound), bound)
        self._refuse_gradients_of(params)
        if not self._by_hand:
            if self._leaf is None:
                self._leaf = self.flat.detach().requires_grad_()
            bound = self._bind(self._leaf)
            return self._outputs(self._forward(x, bound), bound)
        with torch.no_grad():
            values = self._forward(x, self._own)
        outputs = {k: v.detach().requires_grad_() for k, v in self._outputs(values, self._own).items()}
        self._tape.append((values, outputs))
        return outputs

    def predict(self, obs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        count = len(next(iter(obs.values())))
        if not self.spec.images or count <= IMAGES_AT_ONCE:
            return super().predict(obs)
        cuts = range(0, count, IMAGES_AT_ONCE)
        parts = [super(SpecNet, self).predict({k: v[i : i + IMAGES_AT_ONCE] for k, v in obs.items()}) for i in cuts]
        free = {f.name for f in self.spec.free}
        return {k: v if k in free else np.concatenate([p[k] for p in parts]) for k, v in parts[0].items()}

    def record(self, obs: Mapping[str, Tensor]) -> Outputs:
        if not self._by_hand:
            return super().record(obs)
        with torch.no_grad():
            self._values = self._forward(self._encoded(obs, learning=True), self._own)
        return self._outputs(self._values, self._own)

    def backward(self, gradients: Mapping[str, Tensor]) -> Tensor:
        if not self._by_hand:
            return super().backward(gradients)
        with torch.no_grad():
            self._backward(self._values, {name: gradients.get(name) for name in self.spec.outputs})
        return self._flat_grad

    def _bound_to(self, params: Tensor) -> _Bound:
        if self._other[0] is not params:  # a target network is the same vector every time
            self._other = (params, self._bind(params))
        return self._other[1]

    def _encoded(self, obs: Mapping[str, Tensor], learning: bool = False) -> dict[str, Tensor]:
        found = encode(self.spec, obs)
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
        for tower in self.spec.towers:
            read = self.spec.reads[tower.name]
            if len(read) > 1 and read not in joined:
                joined[read] = torch.cat([values[source][-1].flatten(1) for source in read], 1)
            chain = [joined[read] if len(read) > 1 else values[read[0]][-1]]
            for layer in bound.layers[tower.name]:
                chain.append(layer(chain[-1]))
            values[tower.name] = chain
        return values

    def _outputs(self, values: Values, bound: _Bound) -> Outputs:
        return {n: values[n][-1] if n in values else bound.views[n] for n in self.spec.outputs}

    def gradient(self, loss: Tensor) -> Tensor:
        if self._leaf is not None:
            (grad,) = torch.autograd.grad(loss, self._leaf)
            self._leaf = None
            return grad
        tape, self._tape = self._tape, []
        leaves = [v for _, outputs in tape for v in outputs.values()]
        found = iter(torch.autograd.grad(loss, leaves, allow_unused=True))
        total = self._flat_grad
        with torch.no_grad():
            for index, (values, outputs) in enumerate(tape):
                if index == 1:  # a loss that evaluated the network more than once: sum the passes
                    total = total.clone()
                self._backward(values, {name: next(found) for name in outputs})
                if index:
                    total += self._flat_grad
        return total

    def _backward(self, values: Values, back: dict[str, Tensor | None]) -> None:
        """Overwrite the flat gradient, given the gradients `back` with respect to the outputs."""
        if any(g is None for g in back.values()):
            self._flat_grad.zero_()
        for free in self.spec.free:
            g = back[free.name]
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
        weight, d_weight, d_bias = self._own.views[f"{name}.weight"], *self._slots(name)
        if isinstance(layer, Conv):
            d_x, found, found_bias = convolution_backward(x, weight, g, layer.stride, wanted)
            d_weight.copy_(found)
            d_bias.copy_(found_bias)
            return d_x
        torch.sum(g, 0, out=d_bias)
        flat = x if x.ndim == 2 else x.flatten(1)
        d_x = linear_backward(flat, weight, g, d_weight, self._openblas, wanted)
        return d_x.view(x.shape) if wanted and flat is not x else d_x

    def _slots(self, name: str) -> tuple[Tensor, Tensor]:
        return self._grads[f"{name}.weight"], self._grads[f"{name}.bias"]

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


class _Bound(NamedTuple):
    """A spec's layers over one particular parameter vector."""

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


def encode(spec: NetworkSpec, obs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The torch twin of `numpy_net.encode`."""
    found = {leaf.path: _image(leaf, obs[leaf.path]) for leaf in spec.images}
    if len(spec.flat) == 1:
        found["input"] = _flat(spec.flat[0], obs)
    elif spec.flat:
        found["input"] = torch.cat([_flat(leaf, obs) for leaf in spec.flat], dim=1)
    return found


def _image(leaf: Input, x: Tensor) -> Tensor:
    x = leaf.channels_first(x).float()
    return x.mul_(1 / 255) if leaf.encoding == "image" else x  # in place: bytes were copied


def _flat(leaf: Input, obs: Mapping[str, Tensor]) -> Tensor:
    x = obs[leaf.path]
    if leaf.encoding == "image":
        return x.reshape(len(x), -1).float() * (1 / 255)
    if leaf.encoding != "onehot":
        return x.reshape(len(x), -1).float()
    index = x.reshape(len(x), -1) + torch.from_numpy(onehot_offsets(leaf)).to(x.device)
    return torch.zeros(len(x), leaf.width, device=x.device).scatter_(1, index, 1.0)


class ModuleNet(_Base):
    """A user's own `torch.nn.Module` whose parameters become views into the flat vector.

    `factory(leaves, heads)` gets the observation's leaves (`raynforce.spaces.ObsLeaf`) and the outputs wanted with
    their sizes, and returns a module. Its `forward(obs)` gets a dict of `[N, ...]` tensors under the leaves' paths
    (just the tensor if there is one leaf) and returns a dict with a `[N, size]` tensor for each head.
    """

    def __init__(self, spec: NetworkSpec, module: torch.nn.Module, heads: Mapping[str, int], device: torch.device):
        named = [(n, p) for n, p in module.named_parameters() if n not in {f.name for f in spec.free}]
        if not named:
            raise UsageError("network.factory returned a module without parameters: there is nothing to learn")
        if any(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in module.modules()):
            raise UsageError("network.factory returned a module with batch normalisation: use layer normalisation")
        if any(True for _ in module.buffers()):
            raise UsageError(
                "network.factory returned a module with buffers, which do not travel with the policy: "
                "make them parameters with requires_grad=False"
            )
        start = [p.detach().float().reshape(-1).numpy() for _, p in named]
        start += [np.full(f.size, f.init, np.float32) for f in spec.free]
        super().__init__(spec, np.concatenate(start), device)
        self.module = module.to(device)
        self.heads = dict(heads)
        self._grad = torch.zeros_like(self.flat)
        self.slices: dict[str, tuple[int, torch.Size]] = {}
        """Where each parameter is in the flat vector: first element, and shape."""
        offset = 0
        for name, parameter in named:
            part = slice(offset, offset + parameter.numel())
            parameter.data = self.flat[part].view(parameter.shape)
            parameter.grad = self._grad[part].view(parameter.shape)
            self.slices[name] = (offset, parameter.shape)
            offset = part.stop
        self._free: dict[str, Tensor] = {}
        for free in spec.free:
            vector = self.flat[offset : offset + free.size].requires_grad_()
            vector.grad = self._grad[offset : offset + free.size]
            self._free[free.name] = vector
            self.slices[free.name] = (offset, vector.shape)
            offset += free.size

    def __call__(self, obs: Mapping[str, Tensor], params: Tensor | None = None) -> Outputs:
        self._refuse_gradients_of(params)
        inputs: Any = self._prepared(obs)
        if len(self.spec.inputs) == 1:
            inputs = inputs[self.spec.inputs[0].path]
        free = self._free
        if params is None:
            outputs = self._call(inputs)
        else:
            views = {n: params[o : o + s.numel()].view(s) for n, (o, s) in self.slices.items()}
            free = {n: views.pop(n) for n in free}
            outputs = torch.func.functional_call(self.module, views, (inputs,))
        for head, size in self.heads.items():
            given = outputs.get(head) if isinstance(outputs, dict) else outputs
            if not (isinstance(outputs, dict) and isinstance(given, Tensor) and tuple(given.shape[1:]) == (size,)):
                found = f"shape {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
                found = found if isinstance(outputs, dict) else type(outputs).__name__
                raise UsageError(f"network.factory's module must return a dict with {head!r} [N, {size}]; got {found}")
        return {**outputs, **free}

    def _call(self, inputs: Any) -> Any:
        try:
            return self.module(inputs)
        except Exception as error:
            given = {k: tuple(v.shape) for k, v in inputs.items()} if isinstance(inputs, dict) else tuple(inputs.shape)
            raise UsageError(f"network.factory's forward raised {summary(error)}; it was given {given}") from error

    def _prepared(self, obs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The leaves as the module gets them: raw, but for vectors when observations are normalised."""
        prepared: dict[str, Tensor] = {}
        offset = 0
        for leaf in self.spec.inputs:
            x, part = obs[leaf.path], slice(offset, offset + leaf.width)
            offset = part.stop
            if leaf.encoding == "vector" and self._shift is not None and self._scale is not None:
                flat = (x.reshape(len(x), -1).float() - self._shift[part]) * self._scale[part]
                x = flat.clamp_(-10.0, 10.0).view(x.shape)
            prepared[leaf.path] = x
        return prepared

    def predict(self, obs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        self.module.eval()  # no dropout where nothing is learned
        try:
            return super().predict(obs)
        finally:
            self.module.train()

    def gradient(self, loss: Tensor) -> Tensor:
        self._grad.zero_()
        loss.backward()  # type: ignore[no-untyped-call]
        return self._grad


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
    """Refuse keyword arguments that the factory does not take, before it is called."""
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):
        return  # some callables have none: calling them tells
    try:
        signature.bind((), {}, **args)
    except TypeError as error:
        takes = ", ".join([*signature.parameters][2:]) or "none"
        raise UsageError(
            f"network.factory {factory!r} does not take network.factory_args = {dict(args)}: {error}; after leaves and "
            f"outputs it takes {takes}"
        ) from None


class TorchActor:
    """Acts with torch, behind the interface of `NumpyNet`: with a user's own module, or where it is faster."""

    def __init__(
        self,
        spec: NetworkSpec,
        factory: str | None,
        heads: Mapping[str, int],
        leaves: Any,
        args: Mapping[str, Any] = NO_ARGS,
    ) -> None:
        self._net = build(spec, factory, heads, leaves, 0, torch.device("cpu"), args)
        self._one_thread = factory is None

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
