"""The numpy interpreter of a network spec: how samplers and deployed policies act without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from raynforce.errors import UsageError
from raynforce.policies.cells import CellParams, step
from raynforce.policies.spec import GRU, LSTM, Conv, Input, LayerNorm, Linear, NetworkSpec

COLUMNS_BYTES = 1 << 19  # of a convolution's windows laid out at a time: they stay in the cache until multiplied
Obs = Mapping[str, np.ndarray]
NONE: Obs = {}
Op = Callable[[np.ndarray], np.ndarray]
Cell = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]  # input and state to output and next state
STATE, NEXT = "state0/", "next/"  # what states are called among a step's values


class NumpyNet:
    """Forward passes of a spec on `[N, ...]` batches. Bind parameters with `load` before the first call."""

    def __init__(self, spec: NetworkSpec, outputs: tuple[str, ...] | None = None) -> None:
        self.spec = spec
        self.outputs = spec.outputs if outputs is None else outputs
        self._params = spec.params()
        self._towers: list[str] = []  # what a step goes over, of a network with memory
        self._shift: np.ndarray | None = None
        self._scale: np.ndarray | None = None

    def load(self, flat: np.ndarray, shift: np.ndarray | None = None, scale: np.ndarray | None = None) -> None:
        """Take parameters (views into `flat`, which must not change) and the normaliser's `(x - shift) * scale`."""
        by_name = {p.name: p.view(flat) for p in self._params}
        self._shift, self._scale = (shift, scale) if self.spec.normalizes else (None, None)
        self._free = {f.name: by_name[f.name] for f in self.spec.free}
        self._ops: dict[str, list[Op]] = {t.name: [] for t in self.spec.towers}
        self._cells: dict[str, Cell] = {}
        for tower, index, layer, _ in self.spec.walk():
            name = f"{tower.name}.{index}"
            if isinstance(layer, LSTM | GRU):
                self._cells[name] = partial(step, layer, cell_params(name, by_name))
                op: Op = _flat_rows  # in its place among the operators
            elif isinstance(layer, Linear):
                op = _linear(by_name[f"{name}.weight"], by_name[f"{name}.bias"])
            elif isinstance(layer, Conv):
                op = _conv(by_name[f"{name}.weight"], by_name[f"{name}.bias"], layer)
            elif isinstance(layer, LayerNorm):
                op = _layer_norm(by_name[f"{name}.scale"], by_name[f"{name}.shift"], layer.eps)
            else:
                op = ACTIVATIONS[layer.name]
                if index == 0 or isinstance(tower.layers[index - 1], LSTM | GRU):  # its input is not its own
                    op = _on_copy(op)
            self._ops[tower.name].append(op)

    def __call__(self, obs: Obs, **named: np.ndarray) -> dict[str, np.ndarray]:
        """Evaluate the outputs: towers give `[N, size]`, free vectors `[size]`; all named inputs they read are due."""
        values = encode(self.spec, obs, named)
        if self.spec.named:
            for name in self.outputs:
                if why := self.spec.lacks(name, named):
                    raise UsageError(f"output {name!r} {why}")
        if self._shift is not None and self._scale is not None:
            values["input"] = np.clip((values["input"] - self._shift) * self._scale, -10.0, 10.0)
        if self.spec.states:
            raise UsageError("this network has memory: give it the state before, as step(obs, state)")
        return {name: self._free[name] if name in self._free else self._tower(name, values) for name in self.outputs}

    def step(self, obs: Obs, state: Obs) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """The outputs of one step, and the next state, from the state before it, `[N, size]` each."""
        values = encode(self.spec, obs) | {STATE + name: state[name] for name in self.spec.states}
        if self._shift is not None and self._scale is not None:
            values["input"] = np.clip((values["input"] - self._shift) * self._scale, -10.0, 10.0)
        towers = self._towers or self._remembering()
        for name in towers:
            self._step_tower(name, values)
        out = {name: self._free[name] if name in self._free else values[name] for name in self.outputs}
        return out, {name: values[NEXT + name] for name in self.spec.states}

    def _remembering(self) -> list[str]:
        """The towers that outputs need, and those that remember, in order."""
        wanted = {tower.name for tower in self.spec.towers if any(isinstance(x, LSTM | GRU) for x in tower.layers)}
        wanted = self.spec.sources({*wanted, *self.outputs})
        self._towers = [tower.name for tower in self.spec.towers if tower.name in wanted]
        return self._towers

    def _step_tower(self, name: str, values: dict[str, np.ndarray]) -> None:
        first, *others = self.spec.reads[name]
        h = values[first]
        if others:
            h = np.concatenate([values[source].reshape(len(h), -1) for source in (first, *others)], axis=1)
        for index, op in enumerate(self._ops[name]):
            h = op(h)
            if op is _flat_rows:
                layer = f"{name}.{index}"
                h, values[NEXT + layer] = self._cells[layer](h, values[STATE + layer])
        values[name] = h

    def _tower(self, name: str, values: dict[str, np.ndarray]) -> np.ndarray:
        if name not in values:
            first, *others = self.spec.reads[name]
            h = self._tower(first, values)
            if others:
                parts = [h, *(self._tower(source, values) for source in others)]
                h = np.concatenate([p.reshape(len(p), -1) for p in parts], axis=1)
            for op in self._ops[name]:
                h = op(h)
            values[name] = h
        return values[name]


def cell_params(name: str, views: Mapping[str, np.ndarray]) -> CellParams:
    bias = views.get(f"{name}.h.bias")
    return CellParams(views[f"{name}.x.weight"], views[f"{name}.h.weight"], views[f"{name}.bias"], bias)


def _flat_rows(x: np.ndarray) -> np.ndarray:
    return x if x.ndim == 2 else x.reshape(len(x), -1)


def _linear(weight: np.ndarray, bias: np.ndarray) -> Op:
    known = bias[None]  # in as many rows as the last batch had: few rows are added in a third of the time

    def op(x: np.ndarray) -> np.ndarray:
        nonlocal known
        y: np.ndarray = (x if x.ndim == 2 else x.reshape(-1, weight.shape[0])).dot(weight)
        rows = known  # another thread may change it
        if len(rows) != len(y):
            rows = known = np.repeat(bias[None], len(y), axis=0)
        y += rows
        return y

    return op


def _conv(weight: np.ndarray, bias: np.ndarray, layer: Conv) -> Op:
    """Windows laid out as rows, channels last in memory, then one matrix product: the next layer's input."""
    out, channels, kernel, _ = weight.shape
    stride = layer.stride
    matrix = weight.transpose(2, 3, 1, 0).reshape(-1, out)  # [k*k*C, out]

    def op(x: np.ndarray) -> np.ndarray:
        _, height, width = layer.output(x.shape[1:])
        if layer.padding != "valid":
            x = np.pad(x, ((0, 0), (0, 0), *layer.pads(x.shape[1:])))
        x = np.ascontiguousarray(x.transpose(0, 2, 3, 1))  # [N, H, W, C]
        n, across = len(x), x.shape[2]
        pixel = x.itemsize * channels  # not x.strides: what it says of an axis of length 1 means nothing
        row = pixel * across
        steps = (row * x.shape[1], row * stride, pixel * stride, row, x.itemsize)
        windows = np.lib.stride_tricks.as_strided(x, (n, height, width, kernel, kernel * channels), steps)
        at_once = max(1, min(n, COLUMNS_BYTES // (4 * height * width * len(matrix))))  # samples
        columns = np.empty((at_once, *windows.shape[1:]), np.float32)
        y = np.empty((n * height * width, out), np.float32)
        for start in range(0, n, at_once):
            some = windows[start : start + at_once]
            rows = len(some) * height * width
            np.copyto(columns[: len(some)], some)
            first = start * height * width
            np.matmul(columns.reshape(-1, len(matrix))[:rows], matrix, out=y[first : first + rows])
        y += bias
        return y.reshape(n, height, width, out).transpose(0, 3, 1, 2)

    return op


def _layer_norm(scale: np.ndarray, shift: np.ndarray, eps: float) -> Op:
    def op(x: np.ndarray) -> np.ndarray:
        axes = tuple(range(1, x.ndim))
        centred = x - x.mean(axes, keepdims=True)
        variance = np.square(centred).mean(axes, keepdims=True)
        y: np.ndarray = centred / np.sqrt(variance + np.float32(eps)) * scale + shift
        return y

    return op


def _on_copy(op: Op) -> Op:
    return lambda x: op(x.copy())


def _relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0, out=x)


def _elu(x: np.ndarray) -> np.ndarray:
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0)))


def _silu(x: np.ndarray) -> np.ndarray:
    half = x * np.float32(0.5)  # x * sigmoid(x), written so that exp cannot overflow
    return half * (np.tanh(half) + 1)


# In place where that saves an array: the layer before has just made it.
ACTIVATIONS: dict[str, Op] = {"tanh": lambda x: np.tanh(x, x), "relu": _relu, "elu": _elu, "silu": _silu}


def encode(spec: NetworkSpec, obs: Obs, named: Obs = NONE) -> dict[str, np.ndarray]:
    """What towers read of raw observations `[N, ...]` per leaf, in float32: `input` `[N, D]`, images `[N, C, H, W]`."""
    found = {leaf.path: _image(leaf, obs[leaf.path]) for leaf in spec.images} if spec.images else {}
    if spec.flat:
        found["input"] = flat_input(spec, obs)
    if named:
        found |= {leaf.path: _flat(leaf, named) for leaf in spec.given(named)}
    return found


def flat_input(spec: NetworkSpec, obs: Obs) -> np.ndarray:
    if len(spec.flat) == 1:
        return _flat(spec.flat[0], obs)
    return np.concatenate([_flat(leaf, obs) for leaf in spec.flat], axis=1)


def _image(leaf: Input, x: np.ndarray) -> np.ndarray:
    x = leaf.channels_first(x).transpose(0, 2, 3, 1)  # as it will lie in memory
    image = leaf.encoding == "image"
    x = np.multiply(x, np.float32(1 / 255), dtype=np.float32, order="C") if image else x.astype(np.float32, order="C")
    return x.transpose(0, 3, 1, 2)


def _flat(leaf: Input, obs: Obs) -> np.ndarray:
    x = obs[leaf.path]
    if leaf.encoding == "vector" and x.ndim == 2 and x.dtype == np.float32:  # most often: nothing to do
        return x
    if leaf.encoding == "image":
        return x.reshape(len(x), -1).astype(np.float32) * np.float32(1 / 255)
    if leaf.encoding != "onehot":
        return x.reshape(len(x), -1).astype(np.float32, copy=False)
    out = np.zeros((len(x), leaf.width), np.float32)
    np.put_along_axis(out, x.reshape(len(x), -1) + onehot_offsets(leaf), 1.0, axis=1)
    return out


def onehot_offsets(leaf: Input) -> np.ndarray:
    """What to add to each element so that it becomes its column in the one-hot code."""
    return np.concatenate([[0], np.cumsum(leaf.sizes)[:-1]]).astype(np.int64) - np.asarray(leaf.start, np.int64)
