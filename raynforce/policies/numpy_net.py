"""The numpy interpreter of a network spec: how samplers and deployed policies act without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from raynforce.policies.spec import NORM_EPS, Conv, Input, LayerNorm, Linear, NetworkSpec

Obs = Mapping[str, np.ndarray]
Op = Callable[[np.ndarray], np.ndarray]


class NumpyNet:
    """Forward passes of a spec on `[N, ...]` batches. Bind parameters with `load` before the first call."""

    def __init__(self, spec: NetworkSpec, outputs: tuple[str, ...] | None = None) -> None:
        self.spec = spec
        self.outputs = spec.outputs if outputs is None else outputs
        self._params = spec.params()
        self._sources = {t.name: t.source for t in spec.towers}
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
                if index == 0:  # what it reads belongs to somebody else
                    op = _on_copy(op)
            self._ops[tower.name].append(op)

    def __call__(self, obs: Obs) -> dict[str, np.ndarray]:
        """Evaluate the outputs asked for: towers give `[N, size]`, free vectors `[size]`."""
        x = encode(self.spec, obs)
        if self._shift is not None and self._scale is not None:
            x = np.clip((x - self._shift) * self._scale, -10.0, 10.0)
        values = {"input": x}
        return {name: self._free[name] if name in self._free else self._tower(name, values) for name in self.outputs}

    def _tower(self, name: str, values: dict[str, np.ndarray]) -> np.ndarray:
        if name not in values:
            h = self._tower(self._sources[name], values)
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
    kernel = weight.shape[2]
    matrix = weight.reshape(weight.shape[0], -1).T  # [C*k*k, out]

    def op(x: np.ndarray) -> np.ndarray:
        windows = np.lib.stride_tricks.sliding_window_view(x, (kernel, kernel), (2, 3))[:, :, ::stride, ::stride]
        n, _, height, width = windows.shape[:4]
        columns = windows.transpose(0, 2, 3, 1, 4, 5).reshape(n * height * width, -1)
        y = columns @ matrix + bias
        return np.ascontiguousarray(y.reshape(n, height, width, -1).transpose(0, 3, 1, 2))

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


def encode(spec: NetworkSpec, obs: Obs) -> np.ndarray:
    """Turn raw observations `[N, ...]` per leaf into the network's float32 input `[N, D]` or `[N, C, H, W]`."""
    if spec.image is not None:
        image = spec.inputs[0]
        x = obs[image.path].astype(np.float32) * np.float32(1 / 255)
        x = x.transpose(0, 3, 1, 2) if image.channels_last else x
        return x.reshape(len(x), *spec.input_shape())
    if len(spec.inputs) == 1:
        return _flat(spec.inputs[0], obs)
    return np.concatenate([_flat(i, obs) for i in spec.inputs], axis=1)


def _flat(leaf: Input, obs: Obs) -> np.ndarray:
    x = obs[leaf.path]
    if leaf.encoding == "vector":
        return x.reshape(len(x), -1).astype(np.float32, copy=False)
    if leaf.encoding == "image":
        return x.reshape(len(x), -1).astype(np.float32) * np.float32(1 / 255)
    index = x.reshape(len(x), -1) + onehot_offsets(leaf)
    out = np.zeros((len(x), leaf.width), np.float32)
    np.put_along_axis(out, index, 1.0, axis=1)
    return out


def onehot_offsets(leaf: Input) -> np.ndarray:
    """What to add to each element so that it becomes its column in the one-hot code."""
    return np.concatenate([[0], np.cumsum(leaf.sizes)[:-1]]).astype(np.int64) - np.asarray(leaf.start, np.int64)
