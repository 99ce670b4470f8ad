"""Acts with the policy in this folder; torch is all it needs. `python predict.py '[0.1, 0]'` prints an action."""

import json
import sys
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
FACTS = json.loads((HERE / "policy.json").read_text())
MODULE: Any = torch.jit.load(str(HERE / "policy.pt"), map_location="cpu")  # type: ignore[no-untyped-call]


def act(obs: Any, output: str = "action", mask: Any = None) -> Any:
    """The action for one observation, or for a batch; or another output by name. `mask` flags allowed choices."""
    given, several = [], False
    mask = obs.get("action_mask") if mask is None and isinstance(obs, dict) else mask
    for leaf in FACTS["obs"]:
        found, keys = (mask, []) if leaf["path"] == "obs/action_mask" else (obs, leaf["path"].split("/")[1:])
        flags = torch.as_tensor(() if mask is None else mask)
        fits = found is not mask or list(flags.shape[-1:]) == leaf["shape"]
        each = flags.tensor_split(leaf["starts"][1:], -1) if found is mask and fits else ()
        if not (fits and all(part.any(-1).all() for part in each)):
            raise ValueError(f"this policy needs a mask of {leaf['shape'][0]} flags that allows a choice")
        for key in keys:
            found = found[int(key)] if isinstance(found, list | tuple) else found[key]
        array = torch.as_tensor(found, dtype=getattr(torch, leaf["dtype"]))
        given.append(array.reshape(-1, *leaf["shape"]))
        several = several or array.ndim > len(leaf["shape"])
    rows = max(map(len, given))
    with torch.no_grad():
        answer = MODULE(*(x.expand(rows, *x.shape[1:]) for x in given))[FACTS["outputs"].index(output)]
    return answer if several else answer[0]


if __name__ == "__main__":
    print(act(json.loads(sys.argv[1]), mask=json.loads(sys.argv[2]) if sys.argv[2:] else None).tolist())
