"""RLlib's `MeanStdFilter` and our observation normaliser: the state of one as that of the other."""

from __future__ import annotations

import base64
import io
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from raynforce.engines.rllib.modules import CannotConvert

SMALL_NUMBER = 1e-6  # what RLlib's filter adds to deviations
CLIP = 10.0  # what our networks clip normalised observations to


def normalizer_from(state: Mapping[Any, Any]) -> tuple[np.ndarray, np.ndarray, int]:
    """Shift and scale of a policy version, and the samples seen, from the state of RLlib's `MeanStdFilter`.

    The connector comes after `FlattenObservations`, if there is one. `(x - mean) / (deviation + 1e-6)` is ours but for
    the rounding of `mean` to float32. Its deviation divides by n - 1.
    """
    if len(state) != 1:
        raise CannotConvert(f"the filter has states of {len(state)} agents; policies here have one")
    (one,) = state.values()
    if one["clip_by_value"] != CLIP:
        raise CannotConvert(f"clip_by_value = {one['clip_by_value']}: networks here clip to {CLIP}")
    if len(one["running_stats"]) != 1:
        raise CannotConvert("the filter is in front of FlattenObservations: put it behind")
    stats = one["running_stats"][0]
    mean, squares = (_array(stats[name]).reshape(-1) for name in ("mean_array", "sum_sq_diff_array"))
    seen = int(stats["num_pushes"])
    deviation = np.sqrt(np.maximum(squares / (seen - 1), 0)) if seen > 1 else np.zeros_like(squares)
    shift = mean if one["de_mean_to_zero"] else np.zeros_like(mean)
    scale = 1 / (deviation + SMALL_NUMBER) if one["de_std_to_one"] else np.ones_like(mean)
    return shift.astype(np.float32), scale.astype(np.float32), seen


def normalizer_to(shift: np.ndarray, scale: np.ndarray, seen: int, shape: Sequence[int]) -> dict[Any, Any]:
    """The state of a `MeanStdFilter` for observations of a shape that does what shift and scale do."""
    seen = max(seen, 2)
    deviation = np.maximum(1 / scale.astype(np.float64) - SMALL_NUMBER, 0)
    mean, squares = shift.astype(np.float64).reshape(shape), (np.square(deviation) * (seen - 1)).reshape(shape)
    nothing = _text(np.zeros(shape))
    stats = {"num_pushes": seen, "num_pushes_delta": 0, "mean_array": _text(mean), "mean_delta_array": nothing}
    stats |= {"sum_sq_diff_array": _text(squares), "sum_sq_diff_delta_array": nothing}
    kind = {"de_mean_to_zero": True, "de_std_to_one": True, "clip_by_value": CLIP}
    return {None: {"shape": np.array(shape), **kind, "running_stats": [stats]}}


def _array(text: str) -> np.ndarray:
    """As RLlib writes arrays."""
    found: np.ndarray = np.load(io.BytesIO(zlib.decompress(base64.b64decode(text))))
    return found


def _text(array: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(zlib.compress(file.getvalue())).decode("ascii")
