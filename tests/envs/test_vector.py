"""Single environments stepped in a loop."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from raynforce import trees
from raynforce.envs.local import LocalVector
from raynforce.envs.native import NativeVector
from raynforce.envs.vector import VectorEnv, derive_seed, make_vector
from raynforce.errors import CheckpointError, ContractError, EnvError, UsageError


def local(env: str, lanes: int = 2, seed: int = 0, record: bool = True, **env_args: Any) -> LocalVector:
    return LocalVector(env, env_args, lanes, seed=seed, record=record)


def act(vector: VectorEnv, rng: np.random.Generator) -> np.ndarray:
    action, shape = vector.spec.action, (vector.num_envs, *vector.spec.action.shape)
    if action.kind == "box":
        return rng.uniform(-1, 1, shape).astype(np.float32)
    return rng.integers(np.reshape(action.sizes, action.shape), size=shape)


def through_a_file(tree: trees.Tree) -> trees.Tree:
    """As a checkpoint does it: arrays apart, the rest as JSON."""
    arrays, rest = trees.split(tree)
    return trees.join({k: v.copy() for k, v in arrays.items()}, json.loads(json.dumps(rest)))


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_ends_and_final_observations(end: str) -> None:
    vector = local("bad_envs:Counter", 2, length=3, end=end)
    start = vector.reset()["obs"]
    zeros = np.zeros(2, np.int64)
    steps = [vector.step(zeros) for _ in range(4)]
    last = steps[2]
    assert [s.final_lanes.tolist() for s in steps] == [[], [], [0, 1], []]
    np.testing.assert_array_equal(last.final_obs["obs"], np.stack([start[:, 0], [3, 3]], 1))
    np.testing.assert_array_equal(last.obs["obs"][:, 1], [0, 0])  # already the next episode
    assert (last.obs["obs"][:, 0] != start[:, 0]).all()
    assert last.terminated.tolist() == [end == "terminated"] * 2
    assert last.truncated.tolist() == [end == "truncated"] * 2
    assert [s.reward.tolist() for s in steps] == [[1, 1], [2, 2], [3, 3], [1, 1]]
    assert all(s.valid.all() for s in steps)
    assert not steps[3].terminated.any()
    assert steps[0].final_obs["obs"].shape == (0, 2)
    np.testing.assert_array_equal(steps[0].obs["obs"][:, 1], [1, 1])  # later steps wrote elsewhere
    assert last.reward.dtype == np.float32
    assert last.obs["obs"].dtype == np.float32


def test_seeds_derive_from_run_sampler_lane_and_episode() -> None:
    vector = LocalVector("bad_envs:Counter", {"length": 1}, 2, seed=5, sampler=3)
    seen = {5}
    vector.reset()
    for episode in range(3):
        for lane, env in enumerate(lane.env for lane in vector._lanes):
            assert env.seed_seen == derive_seed(5, 3, lane, episode)  # type: ignore[attr-defined]
            seen.add(env.seed_seen)  # type: ignore[attr-defined]
        vector.step(np.zeros(2, np.int64))
    assert len(seen) == 7
    assert 0 <= derive_seed(5, 3, 0, 0) < 2**32
    assert derive_seed(0, 1) != derive_seed(0, 1, 0)


def test_actions_reach_the_env_as_its_space_says() -> None:
    vector = local("raynforce.envs.tiny:Identity", 3)
    obs = vector.reset()["obs"]
    assert vector.step(obs.copy()).reward.tolist() == [1, 1, 1]
    assert vector.step((vector.current()["obs"] + 1) % 4).reward.tolist() == [0, 0, 0]
    box = local("raynforce.envs.tiny:IdentityBox", 3)
    assert box.step(box.reset()["obs"]).reward.tolist() == [0, 0, 0]
    multi = local("raynforce.envs.tiny:MultiIdentity", 3)
    right = multi.reset()["obs"].copy()
    right[0, 1] = (right[0, 1] + 1) % 3
    assert multi.step(right).reward.tolist() == [0.5, 1, 1]
    nested = local("raynforce.envs.tiny:DictIdentity", 3)
    obs_by_path = nested.reset()
    assert {k: (v.shape, str(v.dtype)) for k, v in obs_by_path.items()} == {
        "obs/noise": ((3, 3), "float32"),
        "obs/target": ((3,), "int64"),
    }
    step = nested.step(obs_by_path["obs/target"])
    assert step.reward.tolist() == [1, 1, 1]
    assert step.final_obs["obs/noise"].shape == (3, 3)
    with pytest.raises(UsageError, match=r"actions have shape \(2,\); expected \(3,\)"):
        nested.step(np.zeros(2, np.int64))


def test_best_returns_of_corridor_and_endless() -> None:
    corridor = local("raynforce.envs.tiny:Corridor", 1, n=4)
    corridor.reset()
    steps = [corridor.step(np.ones(1, np.int64)) for _ in range(4)]
    assert sum(s.reward[0] for s in steps) == pytest.approx(0.97)
    assert [bool(s.terminated[0]) for s in steps] == [False, False, False, True]
    assert steps[3].final_obs["obs"].tolist() == [4]
    left = [corridor.step(np.zeros(1, np.int64)) for _ in range(40)]
    assert [bool(s.truncated[0]) for s in left] == [False] * 39 + [True]
    endless = local("raynforce.envs.tiny:Endless", 1)
    endless.reset()
    ends = [endless.step(np.zeros(1, np.int64)) for _ in range(10)]
    assert [bool(s.truncated[0]) for s in ends] == [False] * 9 + [True]
    assert not any(s.terminated[0] for s in ends)


@pytest.mark.parametrize(
    ("env", "args"),
    [
        ("Pendulum-v1", {}),
        ("Acrobot-v1", {}),
        ("Pendulum-v1", {"max_episode_steps": 70}),  # lanes in later episodes, and past the first 64 kept actions
        ("raynforce.envs.tiny:DictIdentity", {"length": 7}),
        ("raynforce.envs.tiny:MultiIdentity", {"length": 7}),
    ],
)
def test_resume_is_exact(env: str, args: dict[str, Any]) -> None:
    rng = np.random.default_rng(1)
    vector = LocalVector(env, args, 3, seed=9)
    vector.reset()
    for _ in range(140):
        vector.step(act(vector, rng))
    tree = through_a_file(vector.state())
    actions = [act(vector, rng) for _ in range(90)]
    expected = [vector.step(a) for a in actions]
    fresh = LocalVector(env, args, 3, seed=9)
    assert fresh.load(tree) == []
    assert fresh.restarted == []
    for path, array in fresh.current().items():
        assert array.tobytes() == tree["obs"][str(list(fresh.current()).index(path))].tobytes()
    for a, then in zip(actions, expected, strict=True):
        now = fresh.step(a)
        for x, y in zip(now[1:6], then[1:6], strict=True):
            assert x.tobytes() == y.tobytes()
        for path in then.obs:
            assert now.obs[path].tobytes() == then.obs[path].tobytes()
            assert now.final_obs[path].tobytes() == then.final_obs[path].tobytes()
    again, state = fresh.state(), vector.state()  # and it can be saved again
    assert again["actions"].tobytes() == state["actions"].tobytes()
    assert again["episodes"].tolist() == state["episodes"].tolist()


def test_lanes_that_cannot_be_replayed_start_fresh() -> None:
    vector = local("bad_envs:Bad", 3, fault="late")  # random after two steps, back to order after three
    vector.reset()
    vector._lanes[1]._begin(5)  # one lane stays a step behind
    vector.step(np.zeros(3, np.int64))
    vector._lanes[1]._begin(5)
    vector.step(np.zeros(3, np.int64))
    fresh = local("bad_envs:Bad", 3, fault="late")
    (sentence,) = fresh.load(vector.state())
    assert fresh.restarted == [0, 2]
    assert sentence.startswith("2 of 3 running episodes of env 'bad_envs:Bad' start over")
    assert fresh.current()["obs"][:, 1].tolist() == [0, 1, 0]
    assert fresh.state()["episodes"].tolist() == [1, 5, 1]
    assert fresh.load(fresh.state()) == []
    assert fresh.restarted == []


def test_a_replay_that_ends_early_begins_anew() -> None:
    vector = local("bad_envs:Counter", 2, length=10)
    vector.reset()
    for _ in range(5):
        vector.step(np.zeros(2, np.int64))
    fresh = local("bad_envs:Counter", 2, length=3)  # the observations would agree, but the episode was over
    assert len(fresh.load(vector.state())) == 1
    assert fresh.restarted == [0, 1]
    assert fresh.current()["obs"][:, 1].tolist() == [0, 0]


def test_without_exact_resume_nothing_is_recorded() -> None:
    vector = local("bad_envs:Counter", 2, record=False, length=10)
    vector.reset()
    vector.step(np.zeros(2, np.int64))
    tree = vector.state()
    assert "actions" not in tree
    assert "saved with exact_resume=false" in local("bad_envs:Counter", 2, length=10).load(tree)[0]
    assert isinstance(make_vector("Pendulum-v1", {}, 1, seed=0, exact_resume=False), LocalVector)


def test_load_refuses_what_does_not_fit() -> None:
    vector = local("bad_envs:Counter", 2)
    vector.reset()
    with pytest.raises(CheckpointError, match="saved with observations"):
        local("bad_envs:Counter", 3).load(vector.state())
    with pytest.raises(CheckpointError, match="another vector implementation"):
        vector.load({"kind": "native"})


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("reset raises", r"step 0\): reset raised KeyError: 'map'$"),
        ("reset obs", r"reset returned a ndarray; expected \(obs, info\)"),
        ("old", r"step 1\): step returned 4 values \(the old gym interface\); expected \(obs, reward, terminated"),
        ("shape", r"observation 'obs' has shape \(1,\); expected \(2,\)"),
        ("none", "observation 'obs' is a NoneType; expected float32"),
        ("dict", "observation 'obs' is a dict; expected float32"),
        ("discrete", r"observation 'obs' is 7; expected integers from \[0\] to \[2\]"),
        ("reward", r"the reward is array\(\[1., 1.\]\) \(ndarray\); expected one number"),
        ("reward text", r"the reward is '1' \(str\)"),
        ("flag", "terminated and truncated are False and None"),
    ],
)
def test_broken_envs(fault: str, message: str) -> None:
    vector = local("bad_envs:Bad", 2, seed=4, fault=fault)

    def run() -> None:
        vector.reset()
        for _ in range(4):
            vector.step(np.zeros(2, np.int64))

    with pytest.raises(EnvError, match=message) as caught:
        run()
    text = str(caught.value)
    episode = 0 if "step 0)" in text else 1  # a first step is tried twice
    assert text.startswith(f"env 'bad_envs:Bad' broke in lane 0 (episode seed {derive_seed(4, 0, 0, episode)}, step ")
    assert "\n" not in text
    assert isinstance(caught.value, ContractError) == (fault != "reset raises")  # trying again may help
    assert (caught.value.__cause__ is not None) == (fault == "reset raises")
    assert caught.value.facts["kind"] == ("raised" if fault == "reset raises" else "garbage")


def test_wider_floats_pass() -> None:
    assert local("bad_envs:Bad", 1, fault="float64").reset()["obs"].dtype == np.float32


@pytest.mark.filterwarnings("error")
def test_make_vector_chooses() -> None:
    assert isinstance(make_vector("CartPole-v1", {}, 2, seed=0), NativeVector)
    pendulum = make_vector("Pendulum-v1", None, 2, seed=0)
    assert isinstance(pendulum, LocalVector)
    assert pendulum.note == ""
    unlimited = make_vector("CartPole-v1", {"max_episode_steps": -1}, 1, seed=0)
    assert isinstance(unlimited, LocalVector)
    assert "time limit" in unlimited.note
    with pytest.raises(UsageError, match="num_envs is 0"):
        make_vector("CartPole-v1", {}, 0, seed=0)
    with pytest.raises(UsageError, match="seed is -1"):
        make_vector("CartPole-v1", {}, 1, seed=-1)
    with pytest.raises(UsageError, match="does not take env_args"):
        make_vector("CartPole-v1", {"gravity": 1}, 1, seed=0)


def test_reset_comes_first() -> None:
    vector = local("bad_envs:Counter")
    for use in (vector.current, vector.state, lambda: vector.step(np.zeros(2, np.int64))):
        with pytest.raises(UsageError, match=r"call reset\(\)"):
            use()
    first = vector.reset()["obs"].copy()
    assert (vector.reset()["obs"] != first).any()  # the next episodes, not the same again
