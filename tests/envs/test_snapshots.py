"""Running episodes that come back through a pair of methods, an adapter, or their actions; and those that do not."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import numpy as np
import pytest
import walks
from saved_envs import EXACT, through_a_file

import raynforce
from raynforce.envs import snapshots
from raynforce.envs.local import LocalVector
from raynforce.envs.snapshots import NoTree, difference, pack, pair_of, unpack
from raynforce.envs.vector import Step, make_vector
from raynforce.errors import ContractError, EnvError

pytestmark = pytest.mark.usefixtures("walk_id")


def local(env: str, lanes: int = 3, record: bool = True, **env_args: Any) -> LocalVector:
    return LocalVector(env, env_args, lanes, seed=7, record=record)


def actions(count: int, lanes: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(2, size=(count, lanes))


def played(count: int, env: str, lanes: int = 3, **more: Any) -> LocalVector:
    vector = local(env, lanes, **more)
    vector.reset()
    for action in actions(count, lanes):
        vector.step(action)
    return vector


def flat(step: Step) -> list[bytes]:
    arrays = [*step[1:6], step.cut, *step.obs.values(), *step.final_obs.values()]
    return [array.tobytes() for array in arrays]


# -- what comes back --------------------------------------------------------------------------------------------------


def test_lanes_of_which_some_have_no_pair_are_all_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = itertools.cycle([walks.Walk, walks.Plain])
    monkeypatch.setattr(walks, "mixed", lambda: next(kinds)(), raising=False)
    vector, fresh = played(7, "walks:mixed", 2), local("walks:mixed", 2)
    tree = vector.state()
    assert "saved" not in tree
    assert (vector.way_back, fresh.load(tree)) == ("by replaying their actions", [])
    for action in actions(9, 2, seed=1):
        assert flat(vector.step(action)) == flat(fresh.step(action))


@pytest.mark.parametrize("env", EXACT)
def test_resume_is_exact_without_replaying(env: str) -> None:
    vector = played(77, env)
    tree = vector.state()
    assert "actions" not in tree  # so that never-ending episodes cost nothing
    assert vector._lanes[0]._actions is None
    assert vector.note == ""
    assert max(tree["steps"]) > 3
    tree = through_a_file(tree)
    later = actions(60, seed=1)
    expected = [vector.step(a) for a in later]
    assert any(len(step.final_lanes) for step in expected)
    fresh, taken = local(env), walks.Plain.taken
    assert fresh.load(tree) == []
    assert fresh.restarted == []
    assert walks.Plain.taken == taken
    assert fresh.current()["obs"].tobytes() == tree["obs"]["0"].tobytes()
    assert difference(fresh.state()["saved"]["1"], tree["saved"]["1"]) == ""
    assert fresh.state()["returns"].tobytes() == tree["returns"].tobytes()
    for action, then in zip(later, expected, strict=True):
        assert flat(fresh.step(action)) == flat(then)


@pytest.mark.parametrize("env", ["Walk-v0", "walks:saved"])
def test_time_limits_count_on(env: str) -> None:
    vector = played(12, env, far=math.inf)
    fresh = local(env, far=math.inf)
    assert fresh.load(through_a_file(vector.state())) == []
    limit = 17 if env == "Walk-v0" else 29
    ends = [bool(fresh.step(a).truncated.all()) for a in actions(limit - 12)]
    assert ends == [False] * (limit - 13) + [True]


def test_what_is_loaded_belongs_to_the_env() -> None:
    vector = played(5, "walks:Walk")
    tree = vector.state()
    before = tree["saved"]["0"]["state"]["0"].copy()
    vector.step(actions(1)[0])
    assert tree["saved"]["0"]["state"]["0"].tobytes() == before.tobytes()  # saved: a copy
    vector.load(tree)
    vector.step(actions(1)[0])
    assert tree["saved"]["0"]["state"]["0"].tobytes() == before.tobytes()  # given to `load_state`: another


def test_a_pair_brings_back_what_no_seed_determines() -> None:
    vector = played(5, "walks:Walk", 2, wanders=True, far=1e6)
    fresh = local("walks:Walk", 2, wanders=True, far=1e6)
    assert fresh.load(vector.state()) == []
    assert flat(fresh.step(actions(1, 2)[0])) == flat(vector.step(actions(1, 2)[0]))
    other = played(5, "walks:Plain", 2, wanders=True, far=1e6)
    (sentence,) = local("walks:Plain", 2, wanders=True, far=1e6).load(other.state())
    assert "2 of 2 running episodes of env 'walks:Plain' start over: replaying their actions led elsewhere" in sentence


def test_a_wrapper_of_unknown_state_makes_replaying_necessary() -> None:
    vector = played(40, "walks:delayed")
    assert vector.way_back == "by replaying their actions"
    for words in ("walks:Delayed", "save_state and load_state of walks:Walk", "by replaying", "'walks:delayed'"):
        assert words in vector.note
    tree = through_a_file(vector.state())
    assert "saved" not in tree
    fresh = local("walks:delayed")
    assert fresh.load(tree) == []
    for action in actions(30, seed=1):
        assert flat(fresh.step(action)) == flat(vector.step(action))


def test_which_pair_is_found() -> None:
    def words(env: str, **args: Any) -> str:
        return local(env, 1, **args).way_back

    assert words("walks:Walk") == "through save_state and load_state of walks:Walk"
    assert words("Walk-v0") == "through save_state and load_state of walks:Walk"
    assert words("walks:Stranger") == "through the snapshot registered for walks:Stranger"
    assert words("walks:saved") == "through save_state and load_state of walks:Saved"  # the outermost
    assert words("walks:Plain") == "by replaying their actions"
    assert words("walks:Walk", record=False) == "not at all: they start over"
    assert local("walks:Plain", 1).note == ""
    assert "walks:Half has save_state alone" in local("walks:Half", 1).note
    assert local("walks:delayed", 1, record=False).note == ""
    assert "snapshot" in make_vector("CartPole-v1", {}, 1, seed=0).way_back
    assert raynforce.register_snapshot is snapshots.register_snapshot


def test_states_of_before_and_after_a_pair_was_written() -> None:
    without, fresh = played(30, "walks:Plain"), local("walks:Walk")
    assert fresh.load(without.state()) == []  # by the actions that were kept
    for action in actions(20, seed=1):
        assert flat(fresh.step(action)) == flat(without.step(action))
    (sentence,) = local("walks:Plain").load(fresh.state())
    assert sentence.endswith("which it does not have any more")
    off = played(30, "walks:Walk", record=False)
    assert "saved" not in off.state()
    assert "saved with exact_resume=false" in local("walks:Walk").load(off.state())[0]


# -- what does not ----------------------------------------------------------------------------------------------------


def test_a_pair_that_lies() -> None:
    vector = played(4, "walks:Walk", fault="lies", far=math.inf)
    fresh = local("walks:Walk", fault="lies", far=math.inf)
    (sentence,) = fresh.load(vector.state())
    assert sentence == (
        "3 of 3 running episodes of env 'walks:Walk' start over: what its load_state was given is not what its "
        "save_state gives afterwards (lane 0: 'body' differs)"
    )
    assert fresh.restarted == [0, 1, 2]
    assert fresh.state()["episodes"].tolist() == [1, 1, 1]
    assert fresh.state()["steps"].tolist() == [0, 0, 0]
    anew = local("walks:Walk", far=math.inf)
    anew.reset()
    assert fresh.current()["obs"].tobytes() == anew.reset()["obs"].tobytes()  # the next episode, as it would have been


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("pickle", "save_state returned a bytes at 'body', of which np.frombuffer(..., np.uint8) makes an array"),
        ("tuple", "save_state returned a tuple at 'body', of which list(...) makes a list"),
        ("object", "save_state returned a Walk at 'body'"),
        ("objects", "save_state returned an array of object at 'body'"),
        ("key", "save_state returned the key 3 at 'body', which is no text"),
        ("array", "save_state returned a ndarray instead of a dict"),
    ],
)
def test_what_is_no_tree_is_refused(fault: str, said: str) -> None:
    vector = played(1, "walks:Walk", fault=fault)
    with pytest.raises(ContractError) as caught:
        vector.state()
    text = str(caught.value)
    assert text == f"env 'walks:Walk' cannot be saved: {said}; {snapshots.ALLOWED}"
    assert "\n" not in text


def test_a_pair_that_never_saves() -> None:
    vector = played(1, "walks:Walk", fault="save raises")
    with pytest.raises(EnvError, match=r"broke in lane 0 .*: save_state raised RuntimeError: no space$") as caught:
        vector.state()
    assert caught.value.facts["kind"] == "raised"


def test_an_env_that_breaks_when_it_is_saved() -> None:
    vector = played(4, "walks:Walk", 2, fault="save raises", after=1, far=math.inf)
    assert sorted(vector.state()["saved"]) == ["0", "1"]
    vector._lanes[0].env.after = 2  # type: ignore[attr-defined]
    tree = vector.state()
    assert sorted(tree["saved"]) == sorted(vector.state()["saved"]) == ["0"]
    assert vector.take_faults() == []
    step = vector.step(actions(1, 2)[0])
    assert step.cut.tolist() == [1]
    assert step.valid.tolist() == [True, False]
    (fault,) = vector.take_faults()
    assert (fault.lane, fault.cause, fault.kind) == (1, "save_state raised RuntimeError: no space", "raised")
    assert len(vector.step(actions(1, 2)[0]).cut) == 0
    vector._lanes[0].env.after = 1  # type: ignore[attr-defined]
    fresh, later = local("walks:Walk", 2, far=math.inf), vector.state()
    assert later["steps"].tolist() == [6, 1]
    assert fresh.load(later) == []  # of the new env
    assert flat(fresh.step(actions(1, 2)[0])) == flat(vector.step(actions(1, 2)[0]))
    assert fresh.load(tree) == ["1 of 2 running episodes of env 'walks:Walk' start over: they could not be saved"]
    assert fresh.restarted == [1]


def test_a_pair_that_does_not_load() -> None:
    vector = played(4, "walks:Walk", 2, far=math.inf)
    fresh = local("walks:Walk", 2, fault="load raises", far=math.inf)
    (sentence,) = fresh.load(vector.state())
    assert sentence.endswith("it broke on the way there (lane 0: load_state raised RuntimeError: another version)")
    assert fresh.restarted == [0, 1]
    assert [fault.cause for fault in fresh.take_faults()] == ["load_state raised RuntimeError: another version"] * 2
    fresh.step(actions(1, 2)[0])


def test_rewards_that_no_seed_determines_are_found_and_told_in_numbers() -> None:
    walks.Plain.taken = 0
    vector = played(4, "walks:Plain", 2, drifts=True, far=math.inf)  # observations do not show it
    fresh = local("walks:Plain", 2, drifts=True, far=math.inf)
    (sentence,) = fresh.load(vector.state())
    was = vector.state()["returns"][0]
    assert sentence.startswith("2 of 2 running episodes of env 'walks:Plain' start over: replaying their actions led")
    numbers = re.search(r"\(lane 0: after 4 steps the return is (\S+), not (\S+)\)$", sentence)
    assert numbers is not None
    now = was - (1 + 3 + 5 + 7) + (9 + 10 + 11 + 12)
    assert [float(number) for number in numbers.groups()] == pytest.approx([now, was], rel=1e-5)
    old = vector.state()
    del old["returns"]  # as earlier releases saved it
    assert local("walks:Plain", 2, drifts=True, far=math.inf).load(old) == []


def test_early_ends_and_other_observations_are_told_in_numbers() -> None:
    vector = played(5, "bad_envs:Counter", 2, length=10)
    (sentence,) = local("bad_envs:Counter", 2, length=3).load(vector.state())
    assert sentence.endswith("doctor bad_envs:Counter` tells why (lane 0: it ended after 3 of 5 steps)")
    vector = played(2, "walks:Plain", 1, far=math.inf)
    (sentence,) = local("walks:Plain", 1, far=math.inf).load(
        vector.state() | {"obs": {"0": np.array([[4.5]], np.float32)}}
    )
    assert "1 of 1 running episodes" in sentence
    assert "(lane 0: after 2 steps obs[0] is " in sentence
    assert sentence.endswith(", not 4.5)")


# -- trees ------------------------------------------------------------------------------------------------------------


def test_trees_come_back_as_they_were() -> None:
    generator = np.random.Generator(np.random.MT19937(0))
    tree: dict[str, Any] = {
        "a/b": {"segments": {"": np.arange(6).reshape(2, 3).T, "c": [1, {"d": np.zeros((0, 2), np.float16)}]}},
        "scalars": [np.float32(0.1), np.int64(3), np.bool_(True), 1, 1.0, True, None, "x", -0.0, 2**100],
        "zero": np.array(4, np.uint8),
        "swapped": np.array([1, 2], ">i4"),
        "empty": {},
        "rng": dict(generator.bit_generator.state),
    }
    packed = through_a_file(pack(tree))
    assert all(isinstance(v, np.ndarray | str) for v in packed.values())
    back = unpack(packed)
    assert difference({"state": pack(back)}, {"state": pack(tree)}) == ""
    assert list(back) == list(tree)
    assert back["a/b"]["segments"][""].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert back["a/b"]["segments"][""].flags.writeable
    assert [type(x) for x in back["scalars"]] == [type(x) for x in tree["scalars"]]
    assert back["scalars"] == tree["scalars"]
    assert back["swapped"].tolist() == [1, 2]
    loop: dict[str, Any] = {}
    loop["loop"] = loop
    with pytest.raises(NoTree, match="holds itself"):
        pack(loop)
    with pytest.raises(NoTree, match=r"a MaskedArray at 'x/0'"):
        pack({"x": [np.ma.array([1, 2], mask=[True, False])]})
    with pytest.raises(NoTree, match="array of complex128"):
        pack({"x": np.zeros(2, complex)})


@pytest.mark.parametrize(
    ("a", "b", "where"),
    [
        ({"x": 1}, {"x": 1.0}, "x"),
        ({"x": 0.0}, {"x": -0.0}, "x"),
        ({"x": float("nan")}, {"x": float("nan")}, ""),
        ({"x": 1, "y": 2}, {"y": 2, "x": 1}, ""),
        ({"x": {"y": [1, 2]}}, {"x": {"y": [1]}}, "x/y/1"),
        ({"x": np.zeros(2)}, {"x": np.zeros(2, np.float32)}, "x"),
        ({"x": np.zeros(2)}, {"x": np.zeros((2, 1))}, "x"),
        ({"x": np.array([0.0])}, {"x": np.array([-0.0])}, "x"),
        ({}, {"x": None}, "state"),
        ({"x": {}}, {"x": []}, "x"),
    ],
)
def test_differences(a: Any, b: Any, where: str) -> None:
    assert difference({"state": pack(a)}, {"state": pack(b)}) == where


def test_differences_beside_the_state() -> None:
    state = {"state": pack({}), "elapsed": [3]}
    assert difference(state, state | {"elapsed": [4]}) == "elapsed"
    assert difference(state, state | {"rng": pack({"x": 1})}) == "rng"
    assert pair_of(walks.Plain()) == (None, "")
