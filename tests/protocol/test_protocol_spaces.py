"""Spaces as JSON from strangers: read back as they were, compared by field, refused where they make no sense."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from typing import Any

import numpy as np
import pytest
from protocol_worlds import CART, ROBOT

from raynforce.protocol.frame import ProtocolError
from raynforce.protocol.spaces import Spaces, differences, misfits
from raynforce.spaces import ActionSpec, ObsLeaf


@pytest.mark.parametrize("spaces", [CART, ROBOT])
def test_spaces_come_back_from_strict_json(spaces: Spaces) -> None:
    text = json.dumps(spaces.to_json(), allow_nan=False)
    assert Spaces.from_json(json.loads(text)) == spaces


def test_infinite_bounds_are_null() -> None:
    data = ROBOT.to_json()["action"]
    assert (data["low"], data["high"]) == ([-1.0, None], [1.0, None])
    assert Spaces.from_json(
        {"obs": CART.to_json()["obs"], "action": {"kind": "box", "shape": [2], "dtype": "float32"}}
    ).action.low == (-math.inf, -math.inf)


def test_the_hash_is_of_a_text_that_any_language_can_write() -> None:
    assert CART.canonical() == (
        "obs box float32 shape=4 sizes= start= stack=1\naction discrete int64 shape= sizes=2 start=0 low= high=\n"
    )
    assert CART.digest() == hashlib.sha256(CART.canonical().encode()).hexdigest()
    assert "low=bff0000000000000,fff0000000000000" in ROBOT.canonical()


def test_differences_name_the_field() -> None:
    leaf = dataclasses.replace(ROBOT.obs[0], shape=(2, 4))
    other = Spaces((leaf, *ROBOT.obs[1:]), CART.action)
    found = {entry["field"]: (entry["host"], entry["policy"]) for entry in differences(other, ROBOT)}
    assert found["obs/camera.shape"] == ([2, 4], [2, 3])
    assert found["action.kind"] == ("discrete", "box")
    assert found["action.low"] == (None, [-1.0, None])
    assert differences(ROBOT, ROBOT) == []
    swapped = Spaces((ROBOT.obs[1], ROBOT.obs[0], ROBOT.obs[2]), ROBOT.action)
    assert differences(swapped, ROBOT)[0]["field"] == "obs order"


def changed(place: str, value: Any) -> Any:
    data: Any = ROBOT.to_json()
    *way, last = place.split(".")
    node = data
    for step in way:
        node = node[int(step)] if step.isdigit() else node[step]
    if value is KeyError:
        del node[last]
    else:
        node[int(last) if last.isdigit() else last] = value
    return data


@pytest.mark.parametrize(
    ("place", "value", "text"),
    [
        ("obs", [], "spaces.obs is 0 items"),
        ("obs.0", 3, r"spaces.obs\[0\] is 3; expected an object"),
        ("obs.0.path", "camera", r"spaces.obs\[0\].path is 'camera'"),
        ("obs.0.path", "obs/\x1b[2J", "printable"),
        ("obs.1.path", "obs/camera", "two leaves of the same path"),
        ("obs.0.kind", "image", "expected one of box, discrete"),
        ("obs.0.shape", [2, 0], r"spaces.obs\[0\].shape\[1\] is 0"),
        ("obs.0.shape", [True], "is True; expected a whole number"),
        ("obs.0.shape", [1] * 9, "9 items"),
        ("obs.0.shape", [1 << 20, 1 << 20], "at most 1073741824 elements"),
        ("obs.0.dtype", "object", "expected one of uint8"),
        ("obs.0.dtype", KeyError, r"spaces.obs\[0\] lacks 'dtype'"),
        ("obs.0.stack", 0, "stack is 0"),
        ("obs.1.sizes", [], "expected a list of 1 to 1"),
        ("obs.1.sizes", [0], r"sizes\[0\] is 0"),
        ("obs.1.dtype", "float32", "whole numbers for a discrete space"),
        ("action.kind", "multibinary", "expected one of discrete"),
        ("action.low", [0], "expected a list of 2 to 2"),
        ("action.low", ["a", 0], "null where there is no bound"),
        ("action.high", [10**400, 0], "a double can hold"),
        ("action.shape", [1 << 17], "at most 65536 elements"),
        ("action", KeyError, "spaces lacks 'action'"),
    ],
)
def test_nonsense_is_named(place: str, value: Any, text: str) -> None:
    with pytest.raises(ProtocolError, match=text) as raised:
        Spaces.from_json(changed(place, value))
    assert "\n" not in str(raised.value)


def test_unknown_keys_are_of_a_later_version() -> None:
    assert Spaces.from_json(changed("obs.0.unit", "m")) == ROBOT


def test_values_that_a_space_does_not_have() -> None:
    box, gear, flags = ObsLeaf("obs", "box", (2,), "float32"), ROBOT.obs[1], ROBOT.obs[2]
    rows = np.array([[0, 1], [np.nan, 0], [0, np.inf]], np.float32)
    assert misfits(box, rows[:1], True) is None
    assert misfits(box, rows, False) is None
    assert misfits(box, rows, True).tolist() == [False, True, True]  # type: ignore[union-attr]
    assert misfits(gear, np.array([-1, 3, 4, -2]), True).tolist() == [False, False, True, True]  # type: ignore[union-attr]
    assert misfits(flags, np.array([[0, 1, 2]], np.int8), True).tolist() == [True]  # type: ignore[union-attr]
    pair = ActionSpec("multidiscrete", (2,), "int64", (2, 3), (0, 5))
    assert misfits(pair, np.array([[1, 7], [1, 8]]), True).tolist() == [False, True]  # type: ignore[union-attr]
