"""Acts with the policy in this folder; numpy is all it needs. `python predict.py '[0.1, 0]'` prints an action."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

FACTS = json.loads(Path(__file__).with_name("policy.json").read_text())
WEIGHTS = dict(np.load(Path(__file__).with_name("weights.npz"), allow_pickle=False))


def conv(x: Any, w: Any, b: Any, pads: Any, strides: Any) -> Any:
    x = np.pad(x, ((0, 0), (0, 0), (pads[0], pads[2]), (pads[1], pads[3])))
    windows = np.lib.stride_tricks.sliding_window_view(x, w.shape[2:], (2, 3))[:, :, :: strides[0], :: strides[1]]
    return np.tensordot(windows, w, ((1, 4, 5), (1, 2, 3))).transpose(0, 3, 1, 2) + b[:, None, None]


def norm(x: Any, w: Any, b: Any, epsilon: float, axis: int) -> Any:
    x = x - x.mean(axes := tuple(range(axis, x.ndim)), keepdims=True)
    return x / np.sqrt(np.square(x).mean(axes, keepdims=True) + np.float32(epsilon)) * w + b


OPS: dict[str, Any] = {"Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Max": np.maximum, "Min": np.minimum}
OPS |= {"Equal": np.equal, "Tanh": np.tanh, "Relu": lambda x: np.maximum(x, 0), "Reshape": np.reshape}
OPS |= {"Elu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))), "Gather": np.take, "Conv": conv}
OPS |= {"Concat": lambda *x, axis: np.concatenate(x, axis), "Cast": np.ndarray.astype, "ArgMax": np.argmax}
OPS |= {"Transpose": lambda x, perm: x.transpose(perm), "Gemm": lambda x, w, b: x @ w + b, "LayerNormalization": norm}


def act(obs: Any, output: str = "action", mask: Any = None) -> Any:
    """The action for one observation, or for a batch; or another output by name. `mask` flags allowed choices."""
    values, several = dict(WEIGHTS), False
    mask = obs.get("action_mask") if mask is None and isinstance(obs, dict) else mask
    for leaf in FACTS["obs"]:
        x, keys = (mask, []) if leaf["path"] == "obs/action_mask" else (obs, leaf["path"].split("/")[1:])
        if x is mask and (np.shape(x)[-1:] != (*leaf["shape"],) or not np.add.reduceat(x, leaf["starts"], -1).all()):
            raise ValueError(f"this policy needs a mask of {leaf['shape'][0]} flags that allows a choice")
        for key in keys:
            x = x[int(key)] if isinstance(x, list | tuple) else x[key]
        values[leaf["path"]] = (array := np.asarray(x, leaf["dtype"])).reshape(-1, *leaf["shape"])
        several = several or array.ndim > len(leaf["shape"])
    for op, inputs, name, attributes in FACTS["graph"]:
        values[name] = OPS[op](*(values[i] for i in inputs), **attributes)
    return values[output] if several else values[output][0]


if __name__ == "__main__":
    print(act(json.loads(sys.argv[1]), mask=json.loads(sys.argv[2]) if sys.argv[2:] else None).tolist())
