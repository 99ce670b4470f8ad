"""Older formats of checkpoints, and how what they hold becomes what this release loads."""

from __future__ import annotations

from collections.abc import Callable

from raynforce.trees import SEGMENTS, Tree

Parts = dict[str, Tree]


def _replay_in_segments(parts: Parts) -> Parts:
    """1 to 2: a replay buffer is saved in segments; the older ring is one of them."""
    if "learner" not in parts:
        return parts
    learner = parts["learner"]
    algo = {name: _segmented(state) if _is_ring(state) else state for name, state in learner.get("algo", {}).items()}
    return {**parts, "learner": {**learner, "algo": algo}}


def _is_ring(state: object) -> bool:
    return isinstance(state, dict) and {"layout", "head", "sequence", "ring", "final"} <= state.keys()


def _segmented(state: Tree) -> Tree:
    """`ring` arrays are `[filled, width, ...]` from row 0 on, so positions in the ring are those in the segment."""
    changed = {name: value for name, value in state.items() if name not in ("ring", "final")}
    final = dict(state["final"])
    segment = {**state["ring"], "final_index": final.pop("index"), "final": final}
    return {**changed, "stamp": 0, SEGMENTS: {"0-0": segment} if len(state["ring"]["valid"]) else {}}


MIGRATIONS: dict[int, Callable[[Parts], Parts]] = {1: _replay_in_segments}
"""By format: what makes the next format of it. Only some of the parts may be there."""
