"""Columns that are carried: the mask of allowed actions."""

from __future__ import annotations

import numpy as np

from raynforce.envs.masks import mask_leaf
from raynforce.envs.vector import probe
from raynforce.experience.builder import EndedEpisode, finish
from raynforce.experience.fragment import Fragment
from raynforce.experience.trajectories import Trajectories
from raynforce.spaces import MASK, EnvSpec

ENV, T, B = "CartPole-v1", 5, 3
SPEC: EnvSpec = probe(ENV, {})


def test_lanes_that_go_their_own_pace_carry_masks() -> None:
    made = Trajectories((*SPEC.obs, mask_leaf(SPEC.action)), SPEC.action, T, 2)
    masks = np.random.default_rng(0).random((T + 1, 2, 2)) < 0.5
    no, none = np.zeros(1, bool), np.zeros(0, np.int64)

    def seen(lane: int, t: int) -> dict[str, np.ndarray]:
        return {"obs": np.full((1, 4), t, np.float32), MASK: masks[t, [lane]]}

    for lane, steps in enumerate((T, 2)):
        lanes = np.array([lane])
        made.begin(lanes, seen(lane, 0))
        for t in range(steps):
            assert np.array_equal(made.newest(lanes)[MASK], masks[t, [lane]])
            made.act(lanes, np.zeros(1, np.int64), np.zeros(1, np.float32), 0)
            made.step(lanes, seen(lane, t + 1), np.ones(1, np.float32), no, no, none, {"obs": np.zeros((0, 4))})
    fragment = made.fragment(1)
    assert fragment is not None
    assert np.array_equal(fragment[MASK][:, 0], masks[:, 0])
    assert np.array_equal(fragment[MASK][:3, 1], masks[:3, 1])
    assert fragment["first"].sum() == 2


def test_what_is_finished_is_read_only_and_its_record_counts_it() -> None:
    columns = {"valid": np.ones((2, 2), bool)}
    fragment = finish(
        columns, [EndedEpisode(3.0, 7, {"won": 1.0}), EndedEpisode(4.0, 8)], version=1, sampler=2, sequence=3
    )
    assert isinstance(fragment, Fragment)
    assert not any(column.flags.writeable for column in fragment.columns.values())
    record = fragment.record
    assert (record.key, record.steps, record.returns.tolist(), record.lengths.tolist()) == ((2, 3), 4, [3, 4], [7, 8])
    assert np.array_equal(record.info["won"], [1.0, np.nan], equal_nan=True)
