"""Vector implementations that an environment brings along."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from bad_envs import Counter
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from raynforce import trees
from raynforce.envs import snapshots
from raynforce.envs.local import LocalVector
from raynforce.envs.native import NativeVector
from raynforce.envs.snapshots import register_snapshot
from raynforce.envs.tiny import DictIdentity
from raynforce.envs.vector import derive_seed, make_vector
from raynforce.errors import CheckpointError, EnvError, UsageError

ZEROS = np.zeros(2, np.int64)


def sync(mode: AutoresetMode, end: str = "terminated") -> NativeVector:
    """Two counters, which end after 2 and 3 steps."""
    vector = SyncVectorEnv([lambda: Counter(2, end), lambda: Counter(3, end)], autoreset_mode=mode)
    return NativeVector("counters", vector, seed=0)


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_next_step_mode(end: str) -> None:
    vector = sync(AutoresetMode.NEXT_STEP, end)
    vector.reset()
    steps = [vector.step(ZEROS) for _ in range(4)]
    flags = [getattr(s, end).tolist() for s in steps]
    assert flags == [[False, False], [True, False], [False, True], [False, False]]
    other = "truncated" if end == "terminated" else "terminated"
    assert not any(getattr(s, other).any() for s in steps)
    assert [s.obs["obs"][:, 1].tolist() for s in steps] == [[1, 1], [2, 2], [0, 3], [1, 0]]  # the true last ones
    assert [s.valid.tolist() for s in steps] == [[True, True], [True, True], [False, True], [True, False]]
    assert [s.reward.tolist() for s in steps] == [[1, 1], [2, 2], [0, 3], [1, 0]]
    assert all(s.final_lanes.size == 0 for s in steps)


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_same_step_and_disabled_modes(mode: AutoresetMode, end: str) -> None:
    vector = sync(mode, end)
    start = vector.reset()["obs"][:, 0]
    steps = [vector.step(ZEROS) for _ in range(4)]
    flags = [getattr(s, end).tolist() for s in steps]
    assert flags == [[False, False], [True, False], [False, True], [True, False]]
    assert [s.obs["obs"][:, 1].tolist() for s in steps] == [[1, 1], [0, 2], [1, 0], [0, 1]]
    assert [s.reward.tolist() for s in steps] == [[1, 1], [2, 2], [1, 3], [2, 1]]
    assert [s.final_lanes.tolist() for s in steps] == [[], [0], [1], [0]]
    assert steps[1].final_obs["obs"].tolist() == [[start[0], 2]]
    assert steps[2].final_obs["obs"].tolist() == [[start[1], 3]]
    assert steps[0].final_obs["obs"].shape == (0, 2)
    assert all(s.valid.all() for s in steps)


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_dict_observations(mode: AutoresetMode) -> None:
    made = SyncVectorEnv([DictIdentity, DictIdentity], autoreset_mode=mode)
    vector = NativeVector("dicts", made, seed=0)
    step = vector.step(vector.reset()["obs/target"])
    assert step.reward.tolist() == [1, 1]
    assert step.obs["obs/noise"].shape == (2, 3)
    ended = 0 if mode is AutoresetMode.NEXT_STEP else 2
    assert step.final_obs["obs/noise"].shape == (ended, 3)
    assert step.final_obs["obs/target"].dtype == np.int64


class Batch(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """Writes into one array, always says that lane 1 ended, and pays 5 even for a step that only resets."""

    def __init__(self, mode: AutoresetMode) -> None:
        self.metadata = {"autoreset_mode": mode}
        self.num_envs = 2
        self.single_observation_space = gymnasium.spaces.Box(0, 9, (1,))
        self.single_action_space = gymnasium.spaces.Discrete(2)
        self.action_space = gymnasium.spaces.MultiDiscrete([2, 2])
        self.memory = np.zeros((2, 1), np.float32)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self.memory, {}

    def step(self, actions: np.ndarray) -> Any:
        self.memory += 1
        infos = {"final_obs": np.array([[7.0], [8.0]]), "_final_obs": np.array([False, True])}
        return self.memory, np.full(2, 5.0), np.array([False, True]), np.zeros(2, np.bool_), infos


def test_a_step_that_only_resets_shows_nothing() -> None:
    vector = NativeVector("batch", Batch(AutoresetMode.NEXT_STEP), seed=0)
    vector.reset()
    steps = [vector.step(ZEROS) for _ in range(3)]
    assert [s.reward.tolist() for s in steps] == [[5, 5], [5, 0], [5, 5]]
    assert [s.terminated.tolist() for s in steps] == [[False, True], [False, False], [False, True]]
    assert [s.valid.tolist() for s in steps] == [[True, True], [True, False], [True, True]]


def test_final_obs_as_one_batch() -> None:
    vector = NativeVector("batch", Batch(AutoresetMode.SAME_STEP), seed=0)
    first = vector.reset()["obs"]
    step = vector.step(ZEROS)
    assert step.final_obs["obs"].tolist() == [[8.0]]
    vector.step(ZEROS)
    assert first.tolist() == [[0], [0]]  # copied: the env writes all observations into one array
    assert step.obs["obs"].tolist() == [[1], [1]]


@pytest.mark.parametrize(
    ("last", "said"),
    [
        (None, "has no 'final_obs'"),
        (np.zeros((2, 3)), r"has 'obs' of shape \(3,\); expected \(1,\)"),
        (np.zeros((1, 1)), "does not fit: IndexError"),
        (np.array([None, "x"], object), "does not fit: ValueError"),
        (np.array([None, None], object), "has 'obs' of shape"),
    ],
    ids=["none", "shape", "lanes", "text", "empty"],
)
def test_final_obs_that_are_none(last: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(AutoresetMode.SAME_STEP)
    step = batch.step
    monkeypatch.setattr(batch, "step", lambda actions: (*step(actions)[:4], {"final_obs": last}))
    vector = NativeVector("batch", batch, seed=0)
    vector.reset()
    with pytest.raises(EnvError, match=said) as caught:
        vector.step(ZEROS)
    assert caught.value.facts["kind"] == "garbage"


def test_cartpole_agrees_with_gymnasium() -> None:
    vector = make_vector("CartPole-v1", {}, 4, seed=3, sampler=1)
    other = gymnasium.make_vec("CartPole-v1", 4, vectorization_mode="vector_entry_point")
    obs, _ = other.reset(seed=derive_seed(3, 1, 0))
    np.testing.assert_array_equal(vector.reset()["obs"], obs)
    rng, resets = np.random.default_rng(0), 0
    for _ in range(100):
        action = rng.integers(2, size=4)
        step, (obs, reward, terminated, _, _) = vector.step(action), other.step(action)
        np.testing.assert_array_equal(step.obs["obs"], obs)
        np.testing.assert_array_equal(step.reward, reward)
        np.testing.assert_array_equal(step.terminated, terminated)
        np.testing.assert_array_equal(step.valid, reward == 1)  # CartPole pays 1 for each real step
        resets += int((~step.valid).sum())
    assert resets > 5


def test_cartpole_truncates_at_its_time_limit() -> None:
    vector = make_vector("CartPole-v1", {"max_episode_steps": 3}, 2, seed=0)
    assert isinstance(vector, NativeVector)
    vector.reset()
    steps = [vector.step(np.array([0, 1])) for _ in range(4)]
    assert [s.truncated.all() for s in steps] == [False, False, True, False]
    assert not any(s.terminated.any() for s in steps)
    assert [s.valid.all() for s in steps] == [True, True, True, False]


@pytest.mark.parametrize("steps", [0, 7, 60])
def test_cartpole_resume_is_exact(steps: int) -> None:
    rng = np.random.default_rng(2)
    vector = make_vector("CartPole-v1", {}, 5, seed=1)
    vector.reset()
    for _ in range(steps):
        vector.step(rng.integers(2, size=5))
    while steps and not vector.state()["ended"].any():  # the hardest moment: some lanes are about to reset
        vector.step(rng.integers(2, size=5))
    arrays, rest = trees.split(vector.state())
    tree = trees.join({k: v.copy() for k, v in arrays.items()}, json.loads(json.dumps(rest)))
    actions = rng.integers(2, size=(80, 5))
    expected = [vector.step(a) for a in actions]
    fresh = make_vector("CartPole-v1", {}, 5, seed=1)
    assert fresh.load(tree) == []
    assert fresh.restarted == []
    assert fresh.current()["obs"].tobytes() == tree["obs"]["0"].tobytes()
    for a, then in zip(actions, expected, strict=True):
        now = fresh.step(a)
        assert now.obs["obs"].tobytes() == then.obs["obs"].tobytes()
        for x, y in zip(now[1:6], then[1:6], strict=True):
            assert x.tobytes() == y.tobytes()
    assert fresh.reset()["obs"].tobytes() == vector.reset()["obs"].tobytes()


class CounterVector(SyncVectorEnv):
    def __init__(self, num_envs: int = 1, **kwargs: Any) -> None:
        super().__init__([Counter] * num_envs)


class Slots:
    """A snapshot of `CounterVector`."""

    def save(self, env: Any) -> trees.Tree:
        return {"start": np.array([e.start for e in env.envs]), "t": np.array([e.t for e in env.envs])}

    def load(self, env: Any, tree: trees.Tree) -> None:
        for one, start, t in zip(env.envs, tree["start"].tolist(), tree["t"].tolist(), strict=True):
            one.start, one.t = start, t


@pytest.fixture
def counters() -> Iterator[str]:
    gymnasium.register("Counters-v0", entry_point="bad_envs:Counter", vector_entry_point=CounterVector)
    yield "Counters-v0"
    del gymnasium.registry["Counters-v0"]


def test_own_snapshots(counters: str, monkeypatch: pytest.MonkeyPatch) -> None:
    passed_over = make_vector(counters, {}, 2, seed=0)
    assert isinstance(passed_over, LocalVector)
    assert "no snapshot for exact resume" in passed_over.note
    monkeypatch.setattr(snapshots, "SNAPSHOTS", dict(snapshots.SNAPSHOTS))
    register_snapshot(f"{__name__}:CounterVector", Slots())
    vector = make_vector(counters, {}, 2, seed=0)
    assert isinstance(vector, NativeVector)
    vector.reset()
    seen = vector.step(ZEROS).obs["obs"]
    fresh = make_vector(counters, {}, 2, seed=0)
    assert fresh.load(vector.state()) == []
    np.testing.assert_array_equal(fresh.step(ZEROS).obs["obs"], np.stack([seen[:, 0], [2, 2]], 1))
    with pytest.raises(UsageError, match="module:Class"):
        register_snapshot("CounterVector", Slots())


def test_without_a_snapshot_all_lanes_start_fresh(counters: str) -> None:
    vector = make_vector(counters, {}, 2, seed=0, exact_resume=False)
    assert isinstance(vector, NativeVector)
    first = vector.reset()["obs"].copy()
    vector.step(ZEROS)
    fresh = make_vector(counters, {}, 2, seed=0, exact_resume=False)
    (sentence,) = fresh.load(vector.state())
    assert "all 2 running episodes of env 'Counters-v0' start over" in sentence
    assert fresh.restarted == [0, 1]
    assert (fresh.current()["obs"][:, 0] != first[:, 0]).all()  # not the beginning again


def test_an_implementation_that_cannot_be_built_is_passed_over() -> None:
    def broken(**kwargs: Any) -> Any:
        raise ModuleNotFoundError("No module named 'jax'")

    gymnasium.register("Broken-v0", entry_point="bad_envs:Counter", vector_entry_point=broken)
    try:
        vector = make_vector("Broken-v0", {}, 1, seed=0, exact_resume=False)
    finally:
        del gymnasium.registry["Broken-v0"]
    assert isinstance(vector, LocalVector)
    assert "failed (ModuleNotFoundError: No module named 'jax')" in vector.note


def test_errors() -> None:
    vector = make_vector("CartPole-v1", {}, 2, seed=0)
    for use in (vector.current, vector.state, lambda: vector.step(ZEROS)):
        with pytest.raises(UsageError, match=r"call reset\(\)"):
            use()
    vector.reset()
    with pytest.raises(UsageError, match=r"actions have shape \(3,\); expected \(2,\)"):
        vector.step(np.zeros(3, np.int64))
    with pytest.raises(EnvError, match=r"env 'CartPole-v1' .*step 1\) broke: step raised AssertionError"):
        vector.step(np.array([0, 7]))
    with pytest.raises(CheckpointError, match="another vector implementation"):
        vector.load({"kind": "local"})
    with pytest.raises(CheckpointError, match="saved with observations"):
        make_vector("CartPole-v1", {}, 3, seed=0).load(vector.state())


def test_observations_are_in_c_order() -> None:
    """CartPole hands out a transposed array, on which a matrix product rounds otherwise."""
    envs = make_vector("CartPole-v1", None, 3, seed=0)
    assert envs.reset()["obs"].flags.c_contiguous
    assert envs.step(np.zeros(3, np.int64)).obs["obs"].flags.c_contiguous
    envs.close()
