"""Trajectories of lanes that go their own pace: nothing is lost, repeated or out of order, whoever is slow."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raynforce.experience.advantages import final_values
from raynforce.experience.fragment import Fragment, lag_metrics, lags
from raynforce.experience.trajectories import Trajectories
from raynforce.spaces import ActionSpec, ObsLeaf

LEAVES = (ObsLeaf("obs", "box", (2,), "float32"),)
CHOICES = ActionSpec("discrete", (), "int64", sizes=(1 << 40,), start=(0,))


@dataclass
class World:
    """Environments whose observations are (episode, step); everything that happens is written down."""

    lanes: int
    length: int
    made: Trajectories = field(init=False)
    at: np.ndarray = field(init=False)
    """`[lanes, 2]` episode and step."""
    story: list[list[tuple[int, int, bool, int]]] = field(init=False)
    """Of each lane: episode, step, whether it ended there, version."""

    def __post_init__(self) -> None:
        self.made = Trajectories(LEAVES, CHOICES, self.length, self.lanes)
        self.at = np.zeros((self.lanes, 2), np.int64)
        self.story = [[] for _ in range(self.lanes)]
        self.begin(np.arange(self.lanes))

    def begin(self, lanes: np.ndarray) -> None:
        self.made.begin(lanes, {"obs": self.at[lanes].astype(np.float32)})

    def act(self, lanes: np.ndarray, version: int) -> None:
        assert (self.made.newest(lanes)["obs"] == self.at[lanes]).all()
        chosen = self.at[lanes, 0] * 1000 + self.at[lanes, 1]
        self.made.act(lanes, chosen, -chosen.astype(np.float32), version)
        for lane in lanes.tolist():
            self.story[lane].append((*self.at[lane].tolist(), False, version))

    def answer(self, lanes: np.ndarray, ends: np.ndarray) -> None:
        reward = (self.at[lanes, 1] + 1).astype(np.float32)
        self.at[lanes, 1] += 1
        final = self.at[lanes[ends]].astype(np.float32)
        for lane in lanes[ends].tolist():
            self.story[lane][-1] = (*self.story[lane][-1][:2], True, self.story[lane][-1][3])
            self.at[lane] = self.at[lane, 0] + 1, 0
        obs = {"obs": self.at[lanes].astype(np.float32)}
        self.made.step(lanes, obs, reward, ends, np.zeros(len(lanes), bool), np.flatnonzero(ends), {"obs": final})

    def breaks(self, lanes: np.ndarray) -> None:
        """In the step that they are at."""
        self.made.cut(lanes)
        for lane in lanes.tolist():
            self.story[lane].pop()
            self.at[lane] = self.at[lane, 0] + 1, 0
        self.begin(lanes)


def told(fragments: list[Fragment], lanes: int) -> list[list[tuple[int, int, bool, int]]]:
    """What fragments tell of each lane, one after the other."""
    stories: list[list[tuple[int, int, bool, int]]] = [[] for _ in range(lanes)]
    for fragment in fragments:
        for b, lane in enumerate(fragment["lane"].tolist()):
            valid = fragment["valid"][:, b]
            steps = int(valid.sum())
            assert valid[:steps].all()
            for t in range(steps):
                episode, step = fragment["obs"][t, b].astype(int).tolist()
                assert fragment["action"][t, b] == episode * 1000 + step == -fragment["logp"][t, b]
                assert fragment["reward"][t, b] == step + 1
                assert fragment["first"][t, b] == (step == 0)
                row = episode, step, bool(fragment["terminated"][t, b]), int(fragment["version"][t, b])
                stories[lane].append(row)
    return stories


def assert_bootstrapped(fragment: Fragment) -> None:
    """Every step's next observation, as learners find it, is the one that followed it."""
    value = fragment["obs"][..., 0] * 1000 + fragment["obs"][..., 1]  # [T+1, B]
    final = fragment["final/obs"][:, 0] * 1000 + fragment["final/obs"][:, 1]
    ends = fragment["terminated"] | fragment["truncated"]
    after = np.where(ends, final_values(fragment, value, final), value[1:])
    keep = fragment["valid"]
    assert (after[keep] == value[:-1][keep] + 1).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 7), st.integers(1, 30), st.integers(0, 2**32))
def test_nothing_is_lost_repeated_or_out_of_order(lanes: int, length: int, wanted: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    world = World(lanes, length)
    away = np.zeros(lanes, bool)
    fragments, version = [], 0
    pace = rng.random(lanes) ** 3 + 0.05  # very uneven
    for _ in range(300):
        idle = np.flatnonzero(~away)
        if len(idle):
            world.act(idle, version)
            away[idle] = True
        ready = rng.permutation(np.flatnonzero(rng.random(lanes) < pace))
        fate = rng.random(len(ready))
        broken, well = ready[fate < 0.05], ready[fate >= 0.05]
        if len(well):
            world.answer(well, rng.random(len(well)) < 0.15)
        if len(broken):
            world.breaks(broken)
        away[ready] = False
        version += int(rng.random() < 0.1)
        while (fragment := world.made.fragment(wanted)) is not None:
            assert fragment.steps >= wanted
            assert fragment["valid"].any(axis=1).all()  # no row for nothing
            assert fragment.version == fragment["version"][fragment["valid"]].min()
            assert_bootstrapped(fragment)
            fragments.append(fragment)
    assert [fragment.sequence for fragment in fragments] == list(range(len(fragments)))
    left = world.made.steps
    done = told(fragments, lanes)
    for lane in range(lanes):
        story = world.story[lane][:-1] if away[lane] else world.story[lane]
        assert done[lane] == story[: len(done[lane])]  # what is in flight is the end of it
        left -= len(story) - len(done[lane])
    assert left == 0
    lengths = np.concatenate([fragment["episode/length"] for fragment in fragments] or [np.zeros(0)])
    returns = np.concatenate([fragment["episode/return"] for fragment in fragments] or [np.zeros(0)])
    assert (returns == lengths * (lengths + 1) / 2).all()
    assert len(lengths) == sum(end for story in done for *_, end, _ in story)


def test_a_fragment_is_cut_as_soon_as_all_have_enough_together() -> None:
    world, all_, fast = World(3, 8), np.arange(3), np.array([0, 2])
    world.act(all_, 0)
    world.answer(fast, np.array([False, True]))
    assert world.made.fragment(3) is None
    world.act(fast, 1)
    world.answer(np.array([1]), np.zeros(1, bool))
    fragment = world.made.fragment(3)
    assert fragment is not None
    assert (fragment.length, fragment.lanes, fragment.steps) == (1, 3, 3)
    assert fragment["lane"].tolist() == [0, 1, 2]
    assert not fragment["truncated"].any()  # a fragment ends with its last row
    assert fragment["terminated"].tolist() == [[False, False, True]]
    assert_bootstrapped(fragment)
    world.answer(fast, np.zeros(2, bool))  # what was under way begins the next one
    fragment = world.made.fragment(2)
    assert fragment is not None
    assert fragment["lane"].tolist() == [0, 2]
    assert lags(3, [fragment]).tolist() == [2, 2]


def test_a_lane_that_is_much_faster_is_there_more_than_once() -> None:
    world, fast = World(2, 2), np.array([0])
    for version in range(5):
        world.act(fast, version)
        world.answer(fast, np.zeros(1, bool))
    fragment = world.made.fragment(5)
    assert fragment is not None
    assert fragment["lane"].tolist() == [0, 0, 0]
    assert fragment["version"].T.tolist() == [[0, 1], [2, 3], [4, 0]]
    assert fragment["valid"].T.tolist() == [[True, True], [True, True], [True, False]]
    assert fragment["truncated"].T.tolist() == [[False, False], [False, False], [True, False]]
    assert world.made.fragment(1) is None


def test_nobody_waits_for_a_slow_lane() -> None:
    world, fast = World(3, 2), np.array([1])
    world.act(np.arange(3), 0)
    for _ in range(6):
        world.answer(fast, np.zeros(1, bool))
        world.act(fast, 0)
    fragment = world.made.fragment(5)
    assert fragment is not None
    assert fragment["lane"].tolist() == [1, 1, 1]
    assert told([fragment], 3)[1] == world.story[1][:6]
    assert world.made.steps == 0


def test_a_lane_that_breaks_before_its_first_step_leaves_nothing() -> None:
    world = World(1, 3)
    world.act(np.array([0]), 0)
    world.breaks(np.array([0]))
    assert world.made.steps == 0
    assert world.made.fragment(1) is None


def test_the_histogram_of_lags() -> None:
    version = np.array([[9], [8], [8], [6], [0]])
    columns = {"valid": np.array([[True], [True], [True], [True], [False]]), "version": version}
    found = lag_metrics(9, [Fragment({**columns, "reward": np.zeros((5, 1))}, 6, 0, 0)])
    assert found["lag/mean"] == pytest.approx(1.25)
    assert found["lag/max"] == 3
    assert (found["lag/is_0"], found["lag/is_1"], found["lag/is_2"], found["lag/from_3_to_4"]) == (0.25, 0.5, 0, 0.25)
    assert sum(value for name, value in found.items() if name.startswith(("lag/is", "lag/from"))) == 1
