"""A vector of environments side by side is one of environments in a loop, only faster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lane_envs
import numpy as np
import pytest

from raynforce import trees
from raynforce.envs.lanes import Lanes, ParallelVector
from raynforce.envs.local import LocalVector
from raynforce.envs.vector import Step, VectorEnv, derive_seed, make_vector
from raynforce.errors import CheckpointError, ContractError, UsageError

SEED = 4
opened: list[VectorEnv] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    lane_envs.awake.clear()
    yield
    lane_envs.awake.set()
    while opened:
        opened.pop().close()


def side_by_side(env: str, args: Any, count: int, parallel: Any = "threads", **more: Any) -> ParallelVector:
    opened.append(
        ParallelVector(Lanes(env, args, count, **{"seed": SEED, "parallel": parallel, "record": True, **more}))
    )
    return opened[-1]  # type: ignore[return-value]


def actions(vector: VectorEnv, count: int) -> np.ndarray:
    rng = np.random.default_rng(1)
    shape = (count, vector.num_envs, *vector.spec.action.shape)
    return rng.integers(2, size=shape) if vector.spec.action.kind == "discrete" else rng.random(shape).astype("float32")


def play(vector: VectorEnv, count: int, skip: int = 0) -> list[Step]:
    return [vector.step(action) for action in actions(vector, skip + count)[skip:]]


def assert_same(one: list[Step], other: list[Step]) -> None:
    for a, b in zip(one, other, strict=True):
        for x, y in zip(a, b, strict=True):
            both = zip(x.values(), y.values(), strict=True) if isinstance(x, dict) else [(x, y)]
            assert all(v.dtype == w.dtype and v.tobytes() == w.tobytes() for v, w in both)


def broken_args() -> dict[str, Any]:
    """One lane raises, one gives nonsense, one does not get through its second reset."""
    does = {(0, 0): {3: "raise"}, (1, 1): {2: "nan"}, (2, 1): {0: "raise"}}
    return {"script": {derive_seed(SEED, 2, *where): what for where, what in does.items()}}


ENVS = [("lane_envs:Turning", {}), ("lane_envs:Scripted", broken_args()), ("walks:saved", {})]


@pytest.mark.parametrize(("parallel", "env", "args"), [*(("threads", *env) for env in ENVS), ("processes", *ENVS[1])])
def test_equal_seeds_give_the_same_steps_as_a_loop(parallel: Any, env: str, args: Any) -> None:
    loop, vector = LocalVector(env, args, 3, seed=SEED, sampler=2), side_by_side(env, args, 3, parallel, sampler=2)
    for start in (loop.reset, vector.reset):
        start()
    assert_same(play(loop, 20), play(vector, 20))
    faults, others = loop.take_faults(), vector.take_faults()
    assert sorted(f.cause for f in faults) == sorted(f.cause for f in others)
    assert len(faults) == (3 if "script" in args else 0)
    loop.start_fresh(2)
    vector.start_fresh(2)
    assert_same(play(loop, 4), play(vector, 4))
    loop.reset(9)
    vector.reset(9)
    assert_same(play(loop, 9), play(vector, 9))
    assert (vector.note, vector.way_back) == (loop.note, loop.way_back)


@pytest.mark.parametrize(("parallel", "env", "args"), [*(("threads", *env) for env in ENVS), ("processes", *ENVS[2])])
def test_a_saved_state_goes_on_here_and_in_a_loop(parallel: Any, env: str, args: Any) -> None:
    made: list[Any] = [LocalVector(env, args, 3, seed=SEED, sampler=2)]
    made += [side_by_side(env, args, 3, parallel, sampler=2) for _ in range(2)]
    loop, vector, other = made
    loop.reset()
    vector.reset()
    play(loop, 11)
    play(vector, 11)
    saved, expected = vector.state(), loop.state()
    (arrays, more), (as_arrays, as_more) = trees.split(saved), trees.split(expected)
    assert {key: array.tobytes() for key, array in arrays.items()} == {k: a.tobytes() for k, a in as_arrays.items()}
    assert more == as_more
    rest = play(vector, 8, 11)
    assert other.load(expected) == []
    assert_same(rest, play(other, 8, 11))
    assert loop.load(saved) == []
    assert_same(rest, play(loop, 8, 11))


def test_what_does_not_come_back_is_told_as_by_a_loop() -> None:
    saved = LocalVector("bad_envs:Counter", {"length": 9}, 3, seed=SEED)
    saved.reset()
    play(saved, 5)
    loop, vector = LocalVector("bad_envs:Counter", {}, 3, seed=SEED), side_by_side("bad_envs:Counter", {}, 3)
    with pytest.raises(UsageError, match="no running episodes yet"):
        vector.current()
    (sentence,) = loop.load(saved.state())
    assert vector.load(saved.state()) == [sentence]
    assert "3 of 3 running episodes" in sentence
    assert vector.restarted == loop.restarted == [0, 1, 2]
    np.testing.assert_array_equal(vector.current()["obs"], loop.current()["obs"])
    with pytest.raises(CheckpointError, match="another vector implementation"):
        vector.load({"kind": "native"})
    with pytest.raises(CheckpointError, match=r"saved with observations \[\(3, 2\)\]"):
        side_by_side("bad_envs:Counter", {}, 2).load(saved.state())


@pytest.mark.parametrize(("parallel", "what"), [("processes", "kill"), ("threads", "hang")])
def test_one_that_hangs_or_dies_is_cut_and_the_others_step(parallel: Any, what: str) -> None:
    args = {"script": {derive_seed(SEED, 0, 1, 0): {2: what}}}
    vector = side_by_side("lane_envs:Scripted", args, 3, parallel, hang_seconds=1.5)
    vector.reset()
    first, second, third = play(vector, 3)
    assert [step.cut.tolist() for step in (first, second, third)] == [[], [1], []]
    assert second.valid.tolist() == [True, False, True]
    assert second.obs["obs"][:, 1].tolist() == [2, 0, 2]
    assert third.obs["obs"][:, 1].tolist() == [3, 1, 3]
    assert [(f.lane, f.kind) for f in vector.take_faults()] == [(1, {"kill": "died", "hang": "hung"}[what])]


def test_steps_are_not_written_to_again() -> None:
    vector = side_by_side("lane_envs:Scripted", {}, 2)
    vector.reset()
    one, _ = play(vector, 2)
    assert one.obs["obs"][:, 1].tolist() == [1, 1]
    assert one.reward.tolist() == [1, 1]


def test_make_vector_makes_it() -> None:
    vector = make_vector("CartPole-v1", {}, 2, seed=0, parallel="threads")
    opened.append(vector)
    assert isinstance(vector, ParallelVector)
    loop = LocalVector("CartPole-v1", {}, 2, seed=0)
    np.testing.assert_array_equal(vector.reset()["obs"], loop.reset()["obs"])


def test_nonsense_from_the_start_is_a_contract_error() -> None:
    vector = side_by_side("bad_envs:Bad", {"fault": "old"}, 2)
    vector.reset()
    with pytest.raises(ContractError, match="the old gym interface"):
        play(vector, 3)
