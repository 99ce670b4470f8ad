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
        found, keys = (mask, []) if leaf["path"] == "obs/action_mask" else (obs, leaf["path"].split("/")[1:])
        if found is mask and (mask is None or not np.logical_or.reduceat(mask, leaf["starts"], -1).all()):
            raise ValueError("this policy needs a mask that allows a choice: act(obs, mask=[1, 0, ...])")
        for key in keys:
            found = found[int(key)] if isinstance(found, list | tuple) else found[key]
        given[leaf["path"]] = (array := np.asarray(found, leaf["dtype"])).reshape(-1, *leaf["shape"])
        several = several or array.ndim > len(leaf["shape"])
    rows = max(map(len, given.values()))
    (answer,) = SESSION.run([output], {k: np.broadcast_to(v, (rows, *v.shape[1:])) for k, v in given.items()})
    return answer if several else answer[0]


if __name__ == "__main__":
    print(act(json.loads(sys.argv[1]), mask=json.loads(sys.argv[2]) if sys.argv[2:] else None).tolist())
