"""Columns that nobody of ours fills yet are carried: the mask of allowed actions, and the recurrent state."""

from __future__ import annotations

from typing import Any

import numpy as np

from raynforce.algos import algorithm_class
from raynforce.envs.vector import EnvArgs, probe
from raynforce.experience.builder import EndedEpisode, finish
from raynforce.experience.fragment import Fragment
from raynforce.experience.trajectories import Trajectories
from raynforce.experiment import resolve
from raynforce.policies.acting import PolicyVersion
from raynforce.roles.sampler import Sampler
from raynforce.spaces import EnvSpec

ENV, T, B = "CartPole-v1", 5, 3
SPEC: EnvSpec = probe(ENV, {})


def test_a_sampler_carries_masks_and_the_state_at_the_start() -> None:
    config, _ = resolve({"env": ENV, "algo": "ppo", "topology": "sync"})
    acting = algorithm_class("ppo")(config, SPEC).acting()
    sampler = Sampler(acting, EnvArgs(ENV, B, 1), T)
    masks = np.random.default_rng(0).random((T + 1, B, 2)) < 0.5
    times = iter(range(1, T + 1))
    step = sampler._envs.step

    def masked(actions: np.ndarray) -> Any:
        told, t = step(actions), next(times)
        told.obs["action_mask"] = masks[t]
        sampler._actor.recurrent["h"][:] = t  # type: ignore[attr-defined]
        return told

    sampler._envs.step = masked  # type: ignore[method-assign]
    sampler._obs = sampler._obs | {"action_mask": masks[0]}
    sampler._actor.recurrent = {"h": np.zeros((B, 4))}  # type: ignore[attr-defined]
    fragment = sampler.sample(PolicyVersion(0, acting.network.initial(np.random.default_rng(0))))
    assert np.array_equal(fragment["action_mask"], masks)
    assert fragment["action_mask"].dtype == np.bool_
    assert np.array_equal(fragment["state0/h"], np.zeros((B, 4)))
    assert "final/action_mask" not in fragment.columns
    assert list(fragment.obs()) == ["obs"]
    sampler.close()


def test_lanes_that_go_their_own_pace_carry_masks() -> None:
    made = Trajectories(SPEC.obs, SPEC.action, T, 2, masked=True)
    masks = np.random.default_rng(0).random((T + 1, 2, 2)) < 0.5
    no, none = np.zeros(1, bool), np.zeros(0, np.int64)

    def seen(lane: int, t: int) -> dict[str, np.ndarray]:
        return {"obs": np.full((1, 4), t, np.float32), "action_mask": masks[t, [lane]]}

    for lane, steps in enumerate((T, 2)):
        lanes = np.array([lane])
        made.begin(lanes, seen(lane, 0))
        for t in range(steps):
            assert np.array_equal(made.newest(lanes)["action_mask"], masks[t, [lane]])
            made.act(lanes, np.zeros(1, np.int64), np.zeros(1, np.float32), 0)
            made.step(lanes, seen(lane, t + 1), np.ones(1, np.float32), no, no, none, {"obs": np.zeros((0, 4))})
    fragment = made.fragment(1)
    assert fragment is not None
    assert np.array_equal(fragment["action_mask"][:, 0], masks[:, 0])
    assert np.array_equal(fragment["action_mask"][:3, 1], masks[:3, 1])
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
