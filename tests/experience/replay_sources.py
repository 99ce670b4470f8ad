"""Samplers whose observations are all different, and a plain list of transitions to compare a replay buffer with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from raynforce.errors import UsageError
from raynforce.experience.fragment import Fragment
from raynforce.experience.replay import Replay
from raynforce.spaces import ActionSpec, ObsLeaf

OBS = (ObsLeaf("obs/id", "discrete", (), "int64", (10**9,), (0,)), ObsLeaf("obs/pair", "box", (2,), "float32"))
ACTION = ActionSpec("box", (2,), "float32", low=(-1.0, -1.0), high=(1.0, 1.0))
DISCRETE = ActionSpec("discrete", (), "int64", (2,), (0,))
GAMMA = 0.9


@dataclass
class Step:
    """One row of one lane, as a list of transitions would hold it."""

    obs: int
    action: float
    reward: float
    terminated: bool
    end: bool
    valid: bool
    next_obs: int


class Source:
    """A sampler whose observations are all different: each is its own name.

    Even lanes reset in the step after an episode's end (a row that is not valid), odd lanes within the last
    step (a final observation on the side).
    """

    def __init__(self, lanes: int, seed: int, sampler: int = 0, p_end: float = 0.2):
        self.rng = np.random.default_rng([seed, sampler])
        self.lanes, self.sampler, self.p_end = lanes, sampler, p_end
        self.names = 1_000_000 * sampler
        self.now = [self.new() for _ in range(lanes)]
        self.must_reset = [False] * lanes
        self.sequence = 0

    def new(self) -> int:
        self.names += 1
        return self.names

    def sample(self, length: int) -> tuple[Fragment, list[list[Step]]]:
        """A fragment, and the same steps per lane."""
        ids = np.zeros((length + 1, self.lanes), np.int64)
        ids[0] = self.now
        action = self.rng.normal(size=(length, self.lanes, 2)).astype(np.float32)
        reward = self.rng.normal(size=(length, self.lanes)).astype(np.float32)
        terminated, truncated = np.zeros((2, length, self.lanes), bool)
        valid = np.ones((length, self.lanes), bool)
        final: dict[int, int] = {}
        steps: list[list[Step]] = [[] for _ in range(self.lanes)]
        for b in range(self.lanes):
            for t in range(length):
                after = shown = self.new()
                if self.must_reset[b]:
                    self.must_reset[b], valid[t, b], reward[t, b] = False, False, 0.0
                elif self.rng.random() < self.p_end:
                    terminated[t, b] = self.rng.random() < 0.5
                    truncated[t, b] = not terminated[t, b] or self.rng.random() < 0.2
                    if b % 2:
                        final[t * self.lanes + b] = after
                        shown = self.new()
                    else:
                        self.must_reset[b] = True
                ids[t + 1, b] = shown
                done, end = bool(terminated[t, b]), bool(terminated[t, b] or truncated[t, b])
                steps[b].append(
                    Step(ids[t, b], action[t, b, 0], reward[t, b], done, end, bool(valid[t, b]), next_obs=after)
                )
        self.now = list(ids[-1])
        final_ids = np.array(list(final.values()), np.int64)
        columns = {
            "obs/id": ids,
            "obs/pair": pair(ids),
            "action": action,
            "reward": reward,
            "terminated": terminated,
            "truncated": truncated,
            "valid": valid,
            "final/index": np.array(list(final), np.int64),
            "final/obs/id": final_ids,
            "final/obs/pair": pair(final_ids),
        }
        for array in columns.values():
            array.flags.writeable = False  # as a received fragment's
        fragment = Fragment(columns, version=0, sampler=self.sampler, sequence=self.sequence)
        self.sequence += 1
        return fragment, steps


def pair(ids: np.ndarray) -> np.ndarray:
    return np.stack([ids, -ids], axis=-1).astype(np.float32)


class Reference:
    """The last `rows` entries per lane in a list; `None` stands where a fragment is missing."""

    def __init__(self, rows: int, n_step: int):
        self.rows, self.n_step = rows, n_step
        self.lanes: dict[tuple[int, int], list[Step | None]] = {}
        self.sequence: dict[int, int] = {}

    def insert(self, fragment: Fragment, steps: list[list[Step]]) -> None:
        gap = fragment.sequence != self.sequence.get(fragment.sampler, fragment.sequence - 1) + 1
        self.sequence[fragment.sampler] = fragment.sequence
        for b, new in enumerate(steps):
            lane = self.lanes.setdefault((fragment.sampler, b), [])
            lane += [None] * gap + new
            del lane[: max(0, len(lane) - self.rows)]

    def transitions(self) -> dict[int, tuple[float, float, float, int]]:
        """What can be sampled: observation -> action, n-step reward, discount, next observation."""
        found = {}
        for lane in self.lanes.values():
            for i, start in enumerate(lane):
                if start is None or not start.valid:
                    continue
                total = 0.0
                for k, step in enumerate(lane[i : i + self.n_step]):
                    assert step is not None
                    total += GAMMA**k * step.reward
                    before_gap = i + k + 1 < len(lane) and lane[i + k + 1] is None
                    if step.end or before_gap or k == self.n_step - 1:
                        discount = 0.0 if step.terminated else GAMMA ** (k + 1)
                        found[int(start.obs)] = (start.action, total, discount, int(step.next_obs))
                        break
        return found


def check(replay: Replay, reference: Reference, rng: np.random.Generator) -> None:
    expected = reference.transitions()
    assert len(replay) == len(expected)
    assert replay.resident == sum(step is not None and step.valid for lane in reference.lanes.values() for step in lane)
    if not expected:
        with pytest.raises(UsageError, match="can be sampled yet"):
            replay.sample(1, rng)
        return
    batch = replay.sample(25 * len(expected), rng)  # a transition is missed with probability e^-25
    assert {int(i) for i in batch["obs/id"]} == set(expected)
    want = np.array([expected[int(i)] for i in batch["obs/id"]])
    np.testing.assert_array_equal(batch["action"][:, 0], want[:, 0].astype(np.float32))
    np.testing.assert_allclose(batch["reward"], want[:, 1], atol=1e-6)
    np.testing.assert_allclose(batch["discount"], want[:, 2], atol=1e-6)
    np.testing.assert_array_equal(batch["next_obs/id"], want[:, 3])
    np.testing.assert_array_equal(batch["obs/pair"], pair(batch["obs/id"]))
    np.testing.assert_array_equal(batch["next_obs/pair"], pair(batch["next_obs/id"]))


def fill(replay: Replay, fragments: int, length: int = 6, seed: int = 0, **kwargs: Any) -> list[Source]:
    sources = [Source(replay.lanes, seed, sampler, **kwargs) for sampler in range(replay.samplers)]
    for _ in range(fragments):
        for source in sources:
            replay.insert(source.sample(length)[0])
    return sources
