"""The numpy interpreter of a network spec: how samplers and deployed policies act without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from raynforce.errors import UsageError
from raynforce.policies.spec import NORM_EPS, Conv, Input, LayerNorm, Linear, NetworkSpec

COLUMNS_BYTES = 1 << 19  # of a convolution's windows laid out at a time: they stay in the cache until multiplied
Obs = Mapping[str, np.ndarray]
NONE: Obs = {}
Op = Callable[[np.ndarray], np.ndarray]


class NumpyNet:
    """Forward passes of a spec on `[N, ...]` batches. Bind parameters with `load` before the first call."""

    def __init__(self, spec: NetworkSpec, outputs: tuple[str, ...] | None = None) -> None:
        self.spec = spec
        self.outputs = spec.outputs if outputs is None else outputs
        self._params = spec.params()
        self._shift: np.ndarray | None = None
        self._scale: np.ndarray | None = None

    def load(self, flat: np.ndarray, shift: np.ndarray | None = None, scale: np.ndarray | None = None) -> None:
        """Take parameters (views into `flat`, not copies) and the normaliser's `(x - shift) * scale`."""
        by_name = {p.name: p.view(flat) for p in self._params}
        self._shift, self._scale = (shift, scale) if self.spec.normalizes else (None, None)
        self._free = {f.name: by_name[f.name] for f in self.spec.free}
        self._ops: dict[str, list[Op]] = {t.name: [] for t in self.spec.towers}
        for tower, index, layer, _ in self.spec.walk():
            name = f"{tower.name}.{index}"
            if isinstance(layer, Linear):
                op = _linear(by_name[f"{name}.weight"], by_name[f"{name}.bias"])
            elif isinstance(layer, Conv):
                op = _conv(by_name[f"{name}.weight"], by_name[f"{name}.bias"], layer.stride)
            elif isinstance(layer, LayerNorm):
                op = _layer_norm(by_name[f"{name}.scale"], by_name[f"{name}.shift"])
            else:
                op = ACTIVATIONS[layer.name]
                if index == 0:  # its input is not its own
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
        return {name: self._free[name] if name in self._free else self._tower(name, values) for name in self.outputs}

    def _tower(self, name: str, values: dict[str, np.ndarray]) -> np.ndarray:
        if name not in values:
            parts = [self._tower(source, values) for source in self.spec.reads[name]]
            h = parts[0] if len(parts) == 1 else np.concatenate([p.reshape(len(p), -1) for p in parts], axis=1)
            for op in self._ops[name]:
                h = op(h)
            values[name] = h
        return values[name]


def _linear(weight: np.ndarray, bias: np.ndarray) -> Op:
    width = weight.shape[0]

    def op(x: np.ndarray) -> np.ndarray:
        y = np.matmul(x if x.ndim == 2 else x.reshape(-1, width), weight)
        y += bias
        return y

    return op


def _conv(weight: np.ndarray, bias: np.ndarray, stride: int) -> Op:
    """Windows laid out as rows, channels last in memory, then one matrix product: the next layer's input."""
    out, channels, kernel, _ = weight.shape
    matrix = weight.transpose(2, 3, 1, 0).reshape(-1, out)  # [k*k*C, out]
    shape_of = Conv(out, kernel, stride).output

    def op(x: np.ndarray) -> np.ndarray:
        x = np.ascontiguousarray(x.transpose(0, 2, 3, 1))  # [N, H, W, C]
        _, height, width = shape_of((channels, *x.shape[1:3]))
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


def _layer_norm(scale: np.ndarray, shift: np.ndarray) -> Op:
    def op(x: np.ndarray) -> np.ndarray:
        axes = tuple(range(1, x.ndim))
        centred = x - x.mean(axes, keepdims=True)
        variance = np.square(centred).mean(axes, keepdims=True)
        y: np.ndarray = centred / np.sqrt(variance + np.float32(NORM_EPS)) * scale + shift
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
ACTIVATIONS: dict[str, Op] = {"tanh": lambda x: np.tanh(x, out=x), "relu": _relu, "elu": _elu, "silu": _silu}


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
    index = x.reshape(len(x), -1) + onehot_offsets(leaf)
    out = np.zeros((len(x), leaf.width), np.float32)
    np.put_along_axis(out, index, 1.0, axis=1)
    return out


def onehot_offsets(leaf: Input) -> np.ndarray:
    """What to add to each element so that it becomes its column in the one-hot code."""
    return np.concatenate([[0], np.cumsum(leaf.sizes)[:-1]]).astype(np.int64) - np.asarray(leaf.start, np.int64)
