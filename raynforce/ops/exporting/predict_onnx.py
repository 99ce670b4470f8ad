"""Acts with the policy in this folder by numpy and onnxruntime. `python predict.py '[0.1, 0]'` prints an action."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime  # type: ignore[import-untyped, unused-ignore]

HERE = Path(__file__).parent
FACTS = json.loads((HERE / "policy.json").read_text())
SESSION = onnxruntime.InferenceSession(HERE / "policy.onnx", providers=["CPUExecutionProvider"])


def act(obs: Any, output: str = "action", mask: Any = None) -> Any:
    """The action for one observation, or for a batch; or another output by name. `mask` flags allowed choices."""
    given, several = {}, False
    mask = obs.get("action_mask") if mask is None and isinstance(obs, dict) else mask
    for leaf in FACTS["obs"]:
        x, keys = (mask, []) if leaf["path"] == "obs/action_mask" else (obs, leaf["path"].split("/")[1:])
        if x is mask and (np.shape(x)[-1:] != (*leaf["shape"],) or not np.add.reduceat(x, leaf["starts"], -1).all()):
            raise ValueError(f"this policy needs a mask of {leaf['shape'][0]} flags that allows a choice")
        for key in keys:
            x = x[int(key)] if isinstance(x, list | tuple) else x[key]
        given[leaf["path"]] = (array := np.asarray(x, leaf["dtype"])).reshape(-1, *leaf["shape"])
        several = several or array.ndim > len(leaf["shape"])
    rows = max(map(len, given.values()))
    (answer,) = SESSION.run([output], {k: np.broadcast_to(v, (rows, *v.shape[1:])) for k, v in given.items()})
    return answer if several else answer[0]


if __name__ == "__main__":
    print(act(json.loads(sys.argv[1]), mask=json.loads(sys.argv[2]) if sys.argv[2:] else None).tolist())
