"""Whether an export acts as `load` does: on random observations, in a process that knows nothing of us."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from raynforce.errors import RaynforceError
from raynforce.policies.acting import ActingSpec, Actor, PolicyVersion
from raynforce.policies.distributions import masked
from raynforce.spaces import MASK, ObsLeaf

TOLERANCE = 1e-5  # of actions and scores, relative where they are larger than 1
MOST, LEAST, NUMBERS = 1000, 16, 2_000_000  # observations, and how many numbers they may have together
SECONDS = 300

# What a format may import, so that a folder that needs more is found out here.
WITHOUT = {
    "numpy": ("raynforce", "torch", "onnxruntime", "onnx"),
    "onnx": ("raynforce", "torch", "onnx"),
    "torchscript": ("raynforce", "onnxruntime", "onnx"),
}
PROGRAM = """\
import json, sys
without, folder, scores, observations, answers = json.loads(sys.argv[1])
sys.modules.update(dict.fromkeys(without))
sys.path.insert(0, folder)
import numpy as np
import predict
given = dict(np.load(observations, allow_pickle=False))
more = {"mask": given.pop("obs/action_mask")} if "obs/action_mask" in given else {}
obs = {}
for path, array in given.items():
    *parents, last = path.split("/")
    level = obs
    for key in parents:
        level = level.setdefault(key, {})
    level[last] = array
obs = obs["obs"]
np.savez(answers, action=np.asarray(predict.act(obs, **more)), scores=np.asarray(predict.act(obs, scores, **more)))
"""


class Verified(NamedTuple):
    observations: int
    error: float
    """The largest difference to `load(…).act`: of actions, or of the scores that choices are made by."""


def random_observations(spec: ActingSpec, version: PolicyVersion, count: int | None = None) -> dict[str, np.ndarray]:
    """Observations by leaf, spread as those that the normaliser has seen, and wider."""
    rng = np.random.default_rng(7)
    numbers = sum(math.prod(leaf.shape) for leaf in spec.env.obs)
    count = count or min(MOST, max(LEAST, NUMBERS // max(1, numbers)))
    found = {leaf.path: _random(leaf, count, rng) for leaf in spec.env.obs}
    if MASK in found:  # which allows at least one
        begins = np.cumsum((0, *spec.env.action.sizes[:-1]))
        found[MASK][
            np.arange(count)[:, None], begins + rng.integers(0, spec.env.action.sizes, (count, len(begins)))
        ] = 1
    at = 0
    for leaf in spec.network.flat:
        if leaf.encoding == "vector" and version.shift is not None and version.scale is not None:
            shift, scale = (x[at : at + leaf.width].reshape(leaf.shape) for x in (version.shift, version.scale))
            if found[leaf.path].dtype.kind == "f":
                wide = found[leaf.path] / scale + shift
                found[leaf.path] = wide.astype(found[leaf.path].dtype)
        at += leaf.width
    return found


def _random(leaf: ObsLeaf, count: int, rng: np.random.Generator) -> np.ndarray:
    shape, dtype = (count, *leaf.shape), np.dtype(leaf.dtype)
    if leaf.sizes:
        sizes, start = (np.asarray(x, np.int64).reshape(leaf.shape) for x in (leaf.sizes, leaf.start or leaf.sizes))
        start = start if leaf.start else np.zeros_like(start)
        return (rng.integers(0, sizes, shape) + start).astype(dtype)
    if leaf.kind == "multibinary" or dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(dtype)
    if dtype.kind in "iu":
        return rng.integers(0, 256 if dtype == np.uint8 else 100, shape).astype(dtype)
    spread = np.where(np.arange(count) % 4, 1.0, 5.0).reshape(-1, *(1,) * len(leaf.shape))
    return (rng.standard_normal(shape) * spread).astype(dtype)


class Wanted(NamedTuple):
    """Actions and scores as `load(…).act` has them."""

    action: np.ndarray
    scores: np.ndarray
    allowed: np.ndarray | None = None  # a mask of choices


def expected(spec: ActingSpec, version: PolicyVersion, obs: Mapping[str, np.ndarray]) -> Wanted:
    actor = Actor(spec, light=True)
    actor.load(version)
    out = actor.outputs(obs)
    scores = out[actor.distribution.outputs[0]]
    action = actor.to_env(actor.distribution.mode(actor.masked(out, obs)))
    return Wanted(action, scores.reshape(len(scores), -1), obs.get(MASK))


def answers(folder: Path, to: str, scores: str, obs: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """What `predict.py` gives, in a process without this package."""
    with tempfile.TemporaryDirectory(prefix="raynforce-export-") as temporary:
        given, found = Path(temporary) / "observations.npz", Path(temporary) / "answers.npz"
        np.savez(given, **obs)  # type: ignore[arg-type]
        told = json.dumps([WITHOUT[to], str(folder.resolve()), scores, str(given), str(found)])
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environ["PYTHONDONTWRITEBYTECODE"] = "1"
        words = [sys.executable, "-P", "-c", PROGRAM, told]
        done = subprocess.run(words, capture_output=True, text=True, env=environ, timeout=SECONDS, cwd=temporary)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise RaynforceError(f"the exported predict.py does not run: {last}; nothing was written")
        with np.load(found, allow_pickle=False) as arrays:
            return arrays["action"], arrays["scores"]


def compare(spec: ActingSpec, wanted: Wanted, action: np.ndarray, scores: np.ndarray | None = None) -> Verified:
    """Refuse actions that differ by more than the tolerance; choices may differ where their scores do not."""
    error = 0.0 if scores is None else _difference(scores, wanted.scores)
    if action.shape != wanted.action.shape:
        raise RaynforceError(f"the export gives actions of shape {action.shape[1:]}: nothing was written")
    if spec.env.action.kind == "box":
        error = max(error, _difference(action, wanted.action, _span(spec)))
    else:
        error = max(error, _regret(spec, wanted, action))
    if not error <= TOLERANCE:
        what = f"the export differs from load(…).act by {error:.2g} on random observations"
        raise RaynforceError(f"{what}, and at most {TOLERANCE:g} is allowed: nothing was written")
    return Verified(len(action), error)


def _difference(found: np.ndarray, wanted: np.ndarray, span: float = 1.0) -> float:
    rows = np.abs(wanted.reshape(len(wanted), -1)).max(axis=1, initial=span)  # rounding is as large as the largest
    scale = rows.reshape(-1, *(1,) * (wanted.ndim - 1))
    worst = np.abs(found.astype(np.float64) - wanted) / scale
    return math.inf if np.isnan(worst).any() else float(worst.max(initial=0.0))


def _span(spec: ActingSpec) -> float:
    """Half of the widest range of a bounded box: what rounding of the network is multiplied by."""
    bounds = np.asarray([spec.env.action.low, spec.env.action.high], np.float64)
    return max(1.0, float((bounds[1] - bounds[0]).max()) / 2) if np.isfinite(bounds).all() and bounds.size else 1.0


def _regret(spec: ActingSpec, wanted: Wanted, action: np.ndarray) -> float:
    """How much less than the best score the chosen ones have: equal scores leave the choice open."""
    scores = wanted.scores
    compared = scores if wanted.allowed is None else masked(scores, wanted.allowed)
    start = np.asarray(spec.env.action.start or [0] * len(spec.env.action.sizes), np.int64)
    choices = action.reshape(len(action), -1) - start
    worst, at = 0.0, 0
    for index, size in enumerate(spec.env.action.sizes):
        part, chosen = scores[:, at : at + size], choices[:, index]
        if (chosen < 0).any() or (chosen >= size).any():
            return math.inf
        each = compared[:, at : at + size]
        less = (each.max(axis=1) - each[np.arange(len(part)), chosen]) / np.abs(part).max(axis=1, initial=1.0)
        worst, at = max(worst, float(less.max(initial=0.0))), at + size
    return worst


def as_bytes(leaves: tuple[ObsLeaf, ...], obs: Mapping[str, np.ndarray]) -> bytes:
    """Observations one after the other, of each the leaves in their order."""
    rows = [np.ascontiguousarray(obs[x.path]).view(np.uint8).reshape(len(obs[x.path]), -1) for x in leaves]
    return np.concatenate(rows, axis=1).tobytes()


def facts(verified: Verified) -> dict[str, Any]:
    return {"observations": verified.observations, "largest_difference": verified.error, "tolerance": TOLERANCE}
