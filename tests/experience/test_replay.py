"""The replay buffer against a plain list of transitions, and its promises: uniform, prioritised, saved, refused."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from raynforce.errors import CheckpointError, UsageError
from raynforce.experience import memory as memory_module
from raynforce.experience.fragment import Fragment
from raynforce.experience.replay import Replay, estimate_bytes
from raynforce.spaces import ActionSpec, ObsLeaf
from raynforce.trees import join, split

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


@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize("n_step", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_equals_a_list_of_transitions(seed: int, n_step: int, prioritized: bool) -> None:
    rng = np.random.default_rng(seed)
    samplers, lanes, rows = int(rng.integers(1, 4)), int(rng.integers(1, 4)), int(rng.integers(9, 24))
    capacity = rows * samplers * lanes + samplers * lanes - 1  # what does not fill a row is left
    replay = Replay(
        OBS,
        ACTION,
        capacity=capacity,
        lanes=lanes,
        samplers=samplers,
        n_step=n_step,
        gamma=GAMMA,
        prioritized=prioritized,
    )
    reference = Reference(rows - 1, n_step)
    sources = [Source(lanes, seed, sampler) for sampler in range(samplers)]
    check(replay, reference, rng)
    for _ in range(30):
        source = sources[rng.integers(samplers)]  # heads drift apart
        if rng.random() < 0.2:
            source.sample(3)  # lost on its way: a gap in the sequence
        fragment, steps = source.sample(int(rng.integers(1, 9)))
        assert replay.insert(fragment) == fragment.steps
        reference.insert(fragment, steps)
        check(replay, reference, rng)


def fill(replay: Replay, fragments: int, length: int = 6, seed: int = 0, **kwargs: Any) -> list[Source]:
    sources = [Source(replay.lanes, seed, sampler, **kwargs) for sampler in range(replay.samplers)]
    for _ in range(fragments):
        for source in sources:
            replay.insert(source.sample(length)[0])
    return sources


def test_a_fragment_may_fill_all_rows_but_one() -> None:
    replay, reference = Replay(OBS, ACTION, capacity=20, lanes=2, gamma=GAMMA, n_step=3), Reference(9, 3)
    source = Source(2, seed=0)
    for gap in (False, False, True, False):
        if gap:
            source.sample(1)
        fragment, steps = source.sample(9)
        replay.insert(fragment)
        reference.insert(fragment, steps)
        check(replay, reference, np.random.default_rng(0))


def test_a_gap_ends_the_window_and_bootstraps_from_what_was_seen() -> None:
    replay = Replay(OBS, ACTION, capacity=30, lanes=1, n_step=3, gamma=GAMMA)
    source = Source(1, seed=0, p_end=0.0)
    first, _ = source.sample(4)
    replay.insert(first)
    assert len(replay) == 2  # the windows of the two newest steps are open
    source.sample(4)  # never arrives
    replay.insert(source.sample(1)[0])
    assert (len(replay), replay.resident) == (4, 5)
    batch = replay.sample(200, np.random.default_rng(0))
    (last,) = np.unique(batch["next_obs/id"][batch["obs/id"] == first["obs/id"][3, 0]])
    assert last == first["obs/id"][4, 0]
    np.testing.assert_allclose(np.unique(batch["discount"]), [GAMMA**3, GAMMA**2, GAMMA], rtol=1e-6)


def test_what_lies_behind_an_episode_end_does_not_leak() -> None:
    replay = Replay(OBS, ACTION, capacity=30, lanes=1, n_step=3, gamma=GAMMA)
    fragment, _ = Source(1, seed=0, p_end=0.0).sample(6)
    reward, terminated = fragment["reward"].copy(), fragment["terminated"].copy()
    terminated[2], reward[3:] = True, np.inf
    replay.insert(replace(fragment, columns={**fragment.columns, "reward": reward, "terminated": terminated}))
    batch = replay.sample(200, np.random.default_rng(0))
    before_end = np.isin(batch["obs/id"], fragment["obs/id"][:3])
    assert np.isfinite(batch["reward"][before_end]).all()
    assert (batch["discount"][before_end] == 0).all()


@pytest.mark.parametrize("p_end", [0.1, 0.95])  # nearly every other row a reset: many redraws
def test_uniform(p_end: float) -> None:
    replay = Replay(OBS, ACTION, capacity=2 * 3 * 20, lanes=3, samplers=2, n_step=2)
    sources = fill(replay, 2, p_end=p_end)
    for _ in range(4):
        replay.insert(sources[0].sample(6)[0])  # one ring has come around, the other is half full
    draws = 400 * len(replay)
    counts = np.unique(replay.sample(draws, np.random.default_rng(0))["index"], return_counts=True)[1]
    assert len(counts) == len(replay)
    chi_square = ((counts - 400) ** 2 / 400).sum()
    assert chi_square < len(replay) + 5 * np.sqrt(2 * len(replay))


def test_uniform_when_almost_nothing_is_ready() -> None:
    replay = Replay(OBS, ACTION, capacity=40 * 20, lanes=1, samplers=40)
    replay.insert(Source(1, seed=0, sampler=39, p_end=0.0).sample(4)[0])
    index, counts = np.unique(replay.sample(4000, np.random.default_rng(0))["index"], return_counts=True)
    assert index.tolist() == [39, 79, 119, 159]
    np.testing.assert_allclose(counts, 1000, atol=150)


def test_uniform_columns() -> None:
    replay = Replay(OBS, DISCRETE, capacity=100, lanes=1)
    fragment, _ = Source(1, seed=0).sample(5)
    replay.insert(replace(fragment, columns={**fragment.columns, "action": np.arange(5).reshape(5, 1)}))
    batch = replay.sample(7, np.random.default_rng(0))
    assert {path: (array.shape, array.dtype.name) for path, array in batch.items()} == {
        "obs/id": ((7,), "int64"),
        "obs/pair": ((7, 2), "float32"),
        "next_obs/id": ((7,), "int64"),
        "next_obs/pair": ((7, 2), "float32"),
        "action": ((7,), "int64"),
        "reward": ((7,), "float32"),
        "discount": ((7,), "float32"),
        "weight": ((7,), "float32"),
        "index": ((7,), "int64"),
    }
    assert (batch["weight"] == 1).all()
    replay.update_priorities(batch["index"], np.ones(7))  # a uniform buffer has none: no effect, no error
    assert len(replay) == np.count_nonzero(fragment["valid"])


def prioritized_replay(**kwargs: Any) -> Replay:
    return Replay(OBS, ACTION, capacity=2 * 30, lanes=2, prioritized=True, gamma=GAMMA, **kwargs)


def test_priorities_are_proportional_and_weighted() -> None:
    replay = prioritized_replay(alpha=0.5)
    fill(replay, 2, p_end=0.0)
    size = len(replay)
    rng = np.random.default_rng(0)
    index = np.unique(replay.sample(1000, rng)["index"])
    assert len(index) == size == 24
    errors = np.ones(size)
    errors[:2] = [100.0, -9.0]  # signs do not matter; alpha 0.5 makes it 10, 3 and 22 times 1
    replay.update_priorities(index, errors)
    batch = replay.sample(3500, rng, beta=1.0)
    share = np.array([np.mean(batch["index"] == i) for i in index])
    np.testing.assert_allclose(share[:3], [10 / 35, 3 / 35, 1 / 35], atol=0.001)  # stratified: nearly exact
    weight = [batch["weight"][batch["index"] == i][0] for i in index[:3]]
    np.testing.assert_allclose(weight, [0.1, 1 / 3, 1.0], rtol=1e-5)
    half = replay.sample(3500, rng, beta=0.5)
    np.testing.assert_allclose(half["weight"][half["index"] == index[0]], 0.1**0.5, rtol=1e-5)


def test_new_transitions_get_the_largest_priority_seen() -> None:
    replay = prioritized_replay(alpha=1.0)
    source = Source(2, seed=0, p_end=0.0)
    replay.insert(source.sample(5)[0])
    rng = np.random.default_rng(0)
    index = np.unique(replay.sample(1000, rng)["index"])
    replay.update_priorities(index, np.where(index == index[0], 9.0, 1.0))
    replay.update_priorities(index, np.ones(len(index)))
    fragment, _ = source.sample(5)
    replay.insert(fragment)
    new = np.isin(replay.sample(10_000, rng)["obs/id"], fragment["obs/id"][:5])
    assert np.mean(new) == pytest.approx(0.9, abs=0.001)


def test_inserting_keeps_the_priorities_of_what_stays() -> None:
    replay = prioritized_replay(alpha=1.0, n_step=3)
    source = Source(2, seed=0, p_end=0.3)
    rng = np.random.default_rng(0)
    replay.insert(source.sample(5)[0])
    batch = replay.sample(1000, rng)
    replay.update_priorities(batch["index"], np.full(1000, 1e-4))
    old = set(batch["obs/id"])
    replay.insert(source.sample(5)[0])
    share = np.mean(np.isin(replay.sample(1000, rng)["obs/id"], list(old)))
    assert share < 0.01  # every new one counts 1, those complete in the meantime included


def test_stale_updates_are_ignored() -> None:
    replay = prioritized_replay(alpha=1.0)
    (source,) = fill(replay, 8, p_end=0.0)
    stale = np.unique(replay.sample(1000, np.random.default_rng(0))["index"])
    source.sample(1)
    replay.insert(source.sample(6)[0])  # a gap: its row and the row at the head hold no transition now
    before = len(replay)
    assert before < len(stale)
    replay.update_priorities(stale, np.full(len(stale), 5.0))
    index, counts = np.unique(replay.sample(56 * 100, np.random.default_rng(1))["index"], return_counts=True)
    assert len(index) == before == 56
    np.testing.assert_allclose(counts, 100, atol=2)
    all_gone = np.setdiff1d(stale, index)
    replay.update_priorities(all_gone, np.full(len(all_gone), 1e9))
    assert set(replay.sample(1000, np.random.default_rng(2))["index"]) <= set(index)


def test_a_priority_that_is_no_number_is_refused() -> None:
    replay = prioritized_replay()
    fill(replay, 1)
    index = replay.sample(2, np.random.default_rng(0))["index"]
    with pytest.raises(UsageError, match="nan"):
        replay.update_priorities(index, np.array([1.0, np.nan]))
    replay.sample(2, np.random.default_rng(0))


@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize("fragments", [0, 2, 9])
def test_state_and_load_give_identical_later_samples(prioritized: bool, fragments: int) -> None:
    def make() -> Replay:
        return Replay(
            OBS, ACTION, capacity=2 * 2 * 20, lanes=2, samplers=2, n_step=3, gamma=GAMMA, prioritized=prioritized
        )

    replay, other = make(), make()
    sources = fill(replay, fragments)
    rng = np.random.default_rng(0)
    if fragments:
        batch = replay.sample(100, rng)
        replay.update_priorities(batch["index"], rng.random(100) * 10)
    fill(other, 5, seed=1)  # what it held before does not matter
    arrays, rest = split(replay.state())
    assert all(len(array) <= 13 * 4 for array in arrays.values()) or fragments == 9  # only what is filled
    other.load(join(arrays, json.loads(json.dumps(rest))))
    assert (len(other), other.resident) == (len(replay), replay.resident)
    for _ in range(4):
        fragments_now = [source.sample(5)[0] for source in sources]
        for buffer in (replay, other):
            for fragment in fragments_now:
                buffer.insert(fragment)
        one, two = (buffer.sample(300, np.random.default_rng(7)) for buffer in (replay, other))
        for path in one:
            np.testing.assert_array_equal(one[path], two[path], err_msg=path)
        replay.update_priorities(one["index"], one["reward"])
        other.update_priorities(one["index"], one["reward"])


def test_state_is_a_snapshot_unless_asked_otherwise() -> None:
    replay = Replay(OBS, ACTION, capacity=20, lanes=2)
    fill(replay, 1)
    snapshot, view = replay.state(), replay.state(copy=False)
    before = snapshot["ring"]["reward"].copy()
    fill(replay, 3, seed=1)
    np.testing.assert_array_equal(snapshot["ring"]["reward"], before)
    assert (view["ring"]["reward"] != before).any()


def test_load_with_another_n_step() -> None:
    replay, reference = Replay(OBS, ACTION, capacity=60, lanes=2, gamma=GAMMA, n_step=1), Reference(29, 4)
    source = Source(2, seed=0)
    for _ in range(8):
        fragment, steps = source.sample(5)
        replay.insert(fragment)
        reference.insert(fragment, steps)
    other = prioritized_replay(n_step=4)
    other.load(replay.state())
    check(other, reference, np.random.default_rng(0))


def test_load_refuses_other_shapes() -> None:
    replay = Replay(OBS, ACTION, capacity=60, lanes=2)
    fill(replay, 2)
    state = replay.state()
    with pytest.raises(CheckpointError, match=r"'rows': 40.*'rows': 30"):
        Replay(OBS, ACTION, capacity=80, lanes=2).load(state)
    with pytest.raises(CheckpointError, match=r"'ring/action' of \(13, 2\) int64, found \(13, 2, 2\) float32"):
        Replay(OBS, DISCRETE, capacity=60, lanes=2).load(state)
    other = Replay((replace(OBS[0], path="obs/name"), OBS[1]), ACTION, capacity=60, lanes=2)
    with pytest.raises(CheckpointError, match=r"'ring/obs/name'.*found nothing"):
        other.load(state)
    assert other.state()["head"] == [0]  # nothing was changed
    with pytest.raises(CheckpointError, match="found None"):
        other.load({})


def test_final_slots_are_used_again() -> None:
    replay = Replay(OBS, ACTION, capacity=400, lanes=4)
    source = Source(4, seed=0, p_end=0.5)
    sizes = []
    for _ in range(200):
        replay.insert(source.sample(20)[0])
        sizes.append(replay.nbytes)
    assert sizes[-1] == sizes[20]  # 40 000 episodes later the pool is as large as the ring needs it


def test_memory_is_estimated_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = (ObsLeaf("obs", "box", (4, 84, 84), "uint8"),)
    sizes = {"capacity": 1_000_000, "lanes": 8, "samplers": 2, "prioritized": True}
    needed = estimate_bytes(frames, DISCRETE, **sizes)
    assert needed == pytest.approx(1_000_000 * (4 * 84 * 84 + 28), rel=0.001)
    monkeypatch.setattr(memory_module, "available_bytes", lambda: 20_000_000_000)
    with pytest.raises(UsageError, match=r"28\.\d\d GB.*16\.00 GB.*lower algorithm\.buffer_size"):
        Replay(frames, DISCRETE, **sizes)
    monkeypatch.setattr(memory_module, "available_bytes", lambda: None)  # not known: not refused
    small = sizes | {"capacity": 1000}
    assert Replay(frames, DISCRETE, **small).nbytes == estimate_bytes(frames, DISCRETE, **small)


def test_available_bytes_is_read() -> None:
    available = memory_module.available_bytes()
    assert available is None or 1e6 < available < 1e15


def test_refusals_say_what_to_change() -> None:
    with pytest.raises(UsageError, match=r"at least 40 or lower --envs"):
        Replay(OBS, ACTION, capacity=39, lanes=8, n_step=3)
    with pytest.raises(UsageError, match="n_step 0"):
        Replay(OBS, ACTION, capacity=39, lanes=8, n_step=0)
    replay = Replay(OBS, ACTION, capacity=20, lanes=2)
    with pytest.raises(UsageError, match=r"10 steps does not fit into 10 rows.*at least 22"):
        replay.insert(Source(2, seed=0).sample(10)[0])
    with pytest.raises(UsageError, match="sampler 1 with 2 lanes"):
        replay.insert(Source(2, seed=0, sampler=1).sample(3)[0])
    with pytest.raises(UsageError, match="sampler 0 with 3 lanes"):
        replay.insert(Source(3, seed=0).sample(3)[0])
    fragment, _ = Source(2, seed=0).sample(3)
    with pytest.raises(UsageError, match=r"'action' has shape \(3, 2\), expected \(3, 2, 2\)"):
        replay.insert(replace(fragment, columns={**fragment.columns, "action": np.zeros((3, 2))}))
    with pytest.raises(UsageError, match="none of the 0 transitions"):
        replay.sample(1, np.random.default_rng(0))
