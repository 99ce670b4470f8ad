"""Environments that break: made anew alone, told of, and given up when that does not help."""

from __future__ import annotations

import json
from typing import Any

import bad_envs
import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from test_native import Batch

from raynforce import trees
from raynforce.envs import faults
from raynforce.envs.local import LocalVector
from raynforce.envs.native import NativeVector
from raynforce.envs.vector import Step, derive_seed, make_vector, require_finite
from raynforce.errors import ContractError, EnvError, UsageError

SEED = 4


def scripted(script: dict[tuple[int, int], tuple[int, str]], lanes: int = 3, **more: Any) -> LocalVector:
    """`script` names what breaks by (lane, episode)."""
    by_seed = {derive_seed(SEED, 0, lane, episode): what for (lane, episode), what in script.items()}
    return LocalVector("bad_envs:Scripted", {"script": by_seed, **more}, lanes, seed=SEED)


def actions(count: int, lanes: int = 3) -> np.ndarray:
    return np.random.default_rng(0).integers(2, size=(count, lanes))


def run(vector: LocalVector, count: int) -> list[Step]:
    return [vector.step(a) for a in actions(count, vector.num_envs)]


def same(a: Step, b: Step) -> bool:
    arrays = [*a[1:6], a.cut, *a.obs.values(), *a.final_obs.values()]
    others = [*b[1:6], b.cut, *b.obs.values(), *b.final_obs.values()]
    return all(x.tobytes() == y.tobytes() for x, y in zip(arrays, others, strict=True))


KINDS = {
    "raise": "step raised ZeroDivisionError: division by zero",
    "exit": "step raised SystemExit: 3",
    "nan": "obs = nan; observations and rewards must be finite numbers",
    "inf": "obs = inf; observations and rewards must be finite numbers",
    "shape": "the observation 'obs' has shape (1,); expected (2,)",
    "none": "the observation 'obs' is a NoneType; expected float32 of shape (2,)",
    "tensor": "the observation 'obs' is a Tensor that is no array: RuntimeError: detach it",
    "reward": "the reward is array([1., 1.]) (ndarray); expected one number",
    "text": "the reward is '1' (str); expected one number",
    "nan reward": "reward = nan; observations and rewards must be finite numbers",
    "large reward": "reward = inf; observations and rewards must be finite numbers",
    "huge": f"the reward is {'1'.ljust(117, '0')}... (int); expected one number",
    "flag": "terminated and truncated are False and None; expected True or False",
    "old": "step returned 4 values (the old gym interface); expected (obs, reward, terminated, truncated, info)",
}


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [2, 5])  # in the middle, and in the step in which the episode would end
def test_one_lane_begins_its_next_episode_in_a_new_env(kind: str, at: int) -> None:
    quiet, vector = scripted({}), scripted({(1, 0): (at, kind)})
    np.testing.assert_array_equal(quiet.reset()["obs"], vector.reset()["obs"])
    old = vector._lanes[1].env
    before, after = run(quiet, 9), run(vector, 9)
    for lane in (0, 2):  # the neighbours notice nothing
        for a, b in zip(before, after, strict=True):
            assert a.obs["obs"][lane].tobytes() == b.obs["obs"][lane].tobytes()
            assert [x[lane] for x in a[1:5]] == [x[lane] for x in b[1:5]]
    assert [s.cut.tolist() for s in after] == [[1] if t == at - 1 else [] for t in range(9)]
    step = after[at - 1]
    assert (step.valid[1], step.reward[1], step.terminated[1], step.truncated[1]) == (False, 0, False, False)
    assert step.valid[[0, 2]].all()
    assert 1 not in step.final_lanes
    assert all(s.valid.all() for t, s in enumerate(after) if t != at - 1)
    assert after[0].valid is after[-1].valid  # nothing is made for steps that go well
    seed = vector._lanes[1].env.seed_seen  # type: ignore[attr-defined]
    assert seed == derive_seed(SEED, 0, 1, 1 if at == 5 else 1 + (9 - at) // 5)
    assert step.obs["obs"][1, 1] == 0
    assert [s.reward[1] for s in after[at : at + 3]] == [1, 2, 3]
    assert vector._lanes[1].env is not old

    (fault,) = vector.take_faults()
    assert vector.take_faults() == []
    facts = json.loads(json.dumps(fault.facts()))
    assert (facts["lane"], facts["seed"], facts["step"]) == (1, derive_seed(SEED, 0, 1, 0), at)
    assert facts["cause"] == KINDS[kind]
    assert facts["kind"] == ("raised" if kind in ("raise", "exit") else "garbage")
    assert ("in broken" in facts["trace"]) == (kind in ("raise", "exit"))
    assert "_advance" not in facts["trace"]
    assert facts["actions"] == actions(9)[:at, 1].tolist()
    assert facts["dtype"] == "int64"


@pytest.mark.parametrize("kind", ["raise", "exit", "nan", "shape", "none", "tensor"])
def test_a_reset_that_breaks_after_an_episodes_end_spoils_no_step(kind: str) -> None:
    vector = scripted({(1, 1): (0, kind)})
    vector.reset()
    start = vector.current()["obs"][1, 0]
    steps = run(vector, 6)
    assert all(s.valid.all() and not len(s.cut) for s in steps)
    assert steps[4].final_lanes.tolist() == [0, 1, 2]
    assert steps[4].final_obs["obs"][1].tolist() == [start, 5]
    assert steps[4].truncated.all()
    assert vector._lanes[1].env.seed_seen == derive_seed(SEED, 0, 1, 2)  # type: ignore[attr-defined]
    assert steps[5].obs["obs"][:, 1].tolist() == [1, 1, 1]
    (fault,) = vector.take_faults()
    assert (fault.lane, fault.step, fault.seed) == (1, 0, derive_seed(SEED, 0, 1, 1))
    assert fault.actions is not None
    assert len(fault.actions) == 0


def test_broken_envs_are_closed() -> None:
    vector = scripted({(0, 0): (2, "raise"), (0, 1): (0, "nan")})
    bad_envs.Scripted.closed = bad_envs.Scripted.made = 0
    vector.reset()
    run(vector, 3)
    assert bad_envs.Scripted.closed == bad_envs.Scripted.made == 2
    assert [f.step for f in vector._shared.faults] == [2, 0]


def test_several_lanes_at_once_and_two_steps_in_a_row() -> None:
    vector = scripted({(0, 0): (2, "nan"), (2, 0): (2, "raise"), (2, 1): (1, "raise")})
    vector.reset()
    assert [s.cut.tolist() for s in run(vector, 4)] == [[], [0, 2], [2], []]
    assert [(f.lane, f.step) for f in vector.take_faults()] == [(0, 2), (2, 2), (2, 1)]


def flaky(seed: int, lanes: int = 4, p: float = 0.1, p_reset: float = 0.0) -> LocalVector:
    return LocalVector("bad_envs:Flaky", {"p": p, "p_reset": p_reset}, lanes, seed=seed)


def test_a_run_with_faults_follows_from_its_seed_and_is_resumed_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "BREAKS_IN_A_ROW", 20)
    first, second = flaky(1, p_reset=0.2), flaky(1, p_reset=0.2)
    first._shared.proven = second._shared.proven = True  # its first resets break too
    first.reset()
    second.reset()
    steps, again = run(first, 60), run(second, 60)
    assert all(same(a, b) for a, b in zip(steps, again, strict=True))
    assert sum(len(s.cut) for s in steps) > 10
    arrays, rest = trees.split(first.state())
    tree = trees.join({k: v.copy() for k, v in arrays.items()}, json.loads(json.dumps(rest)))
    fresh = flaky(1, p_reset=0.2)
    assert fresh.load(tree) == []
    first.take_faults()
    after, resumed = run(first, 60), run(fresh, 60)
    assert all(same(a, b) for a, b in zip(after, resumed, strict=True))
    told, told_again = ([json.dumps(f.facts()) for f in v.take_faults()] for v in (first, fresh))
    assert told == told_again
    assert len(told) > 10
    assert [v.tobytes() for k, v in first.state().items() if isinstance(v, np.ndarray)] == [
        v.tobytes() for k, v in fresh.state().items() if isinstance(v, np.ndarray)
    ]


@pytest.mark.parametrize("resumed", [False, True])
def test_a_lane_that_does_not_get_on_is_an_error(resumed: bool) -> None:
    vector = LocalVector("bad_envs:Scripted", {"every": 3}, 2, seed=SEED)
    vector.reset()
    run(vector, 7)  # two breaks
    if resumed:  # the count is part of the state
        tree = vector.state()
        vector = LocalVector("bad_envs:Scripted", {"every": 3}, 2, seed=SEED)
        assert vector.load(tree) == []
    run(vector, 4)
    with pytest.raises(EnvError, match=r"in lane 0, 4 times in a row within 10 steps") as caught:
        vector.step(np.zeros(2, np.int64))
    error, seed = caught.value, derive_seed(SEED, 0, 0, 3)
    assert not isinstance(error, ContractError)
    assert str(error).endswith(f"(episode seed {seed}, step 3): step raised ZeroDivisionError: division by zero")
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert {k: error.facts[k] for k in ("lane", "seed", "step")} == {"lane": 0, "seed": seed, "step": 3}
    assert len(error.facts["actions"]) == 3


@pytest.mark.parametrize(("every", "survives"), [(10, False), (11, True)])
def test_ten_good_steps_are_progress(every: int, survives: bool) -> None:
    vector = LocalVector("bad_envs:Scripted", {"every": every, "length": 99}, 1, seed=0)
    vector.reset()
    if survives:
        assert sum(len(s.cut) for s in run(vector, 110)) == 10
    else:
        with pytest.raises(EnvError, match="4 times in a row"):
            run(vector, 110)


def test_resets_that_break_for_ever_are_an_error() -> None:
    script = {(0, episode): (0, "raise") for episode in range(1, 9)}
    vector = scripted(script, 1)
    vector.reset()
    with pytest.raises(EnvError, match=r"4 times in a row .*step 0\): reset raised ZeroDivisionError"):
        run(vector, 5)


def test_an_env_that_cannot_be_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (scripted({(0, 0): (2, "raise")}, 1) for _ in range(2))
    one.reset()
    two.reset()

    def make(*args: Any) -> Any:
        raise UsageError("no licence")

    monkeypatch.setattr("raynforce.envs.make.make", make)
    with pytest.raises(EnvError, match="it could not be made again: UsageError: no licence"):
        run(one, 2)
    monkeypatch.setattr("raynforce.envs.make.make", lambda *args: bad_envs.Bad("discrete"))
    with pytest.raises(EnvError, match="made again, it has other spaces"):
        run(two, 2)


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("raise", "exit")])
@pytest.mark.filterwarnings("ignore:overflow")
def test_what_is_wrong_from_the_start_is_not_tried_again(kind: str) -> None:
    vector = scripted({(lane, episode): (1, kind) for lane in range(8) for episode in range(2)})
    vector.reset()
    run(vector, 1)
    with pytest.raises(ContractError, match=r"broke in lane 0 \(episode seed \d+, step 1\)") as caught:
        run(vector, 1)
    assert caught.value.facts["kind"] == "garbage"
    assert caught.value.facts["cause"] == KINDS[kind]


def test_one_lane_that_is_wrong_in_its_first_step_is_an_accident() -> None:
    vector = scripted({(1, 0): (1, "nan")})
    vector.reset()
    run(vector, 3)
    assert [fault.lane for fault in vector.take_faults()] == [1]


def test_nan_in_the_first_reset_is_wrong_from_the_start() -> None:
    with pytest.raises(ContractError, match="obs = nan"):
        scripted({(1, 0): (0, "nan")}).reset()


def test_a_first_reset_that_raises_is_an_error_and_a_first_step_is_tried_again() -> None:
    with pytest.raises(EnvError, match="reset raised ZeroDivisionError") as caught:
        scripted({(1, 0): (0, "raise")}).reset()
    assert not isinstance(caught.value, ContractError)
    assert caught.value.facts["lane"] == 1
    vector = scripted({(1, 0): (1, "raise")})
    vector.reset()
    assert run(vector, 1)[0].cut.tolist() == [1]


def test_later_resets_restart_lanes_too() -> None:
    vector = scripted({(1, 1): (0, "raise")})
    vector.reset()
    run(vector, 1)
    assert vector.reset()["obs"][:, 1].tolist() == [0, 0, 0]
    assert vector.state()["episodes"].tolist() == [1, 2, 1]


def test_an_env_that_breaks_while_it_is_replayed_begins_anew() -> None:
    vector = scripted({})
    vector.reset()
    run(vector, 4)
    fresh = scripted({(1, 0): (3, "raise"), (2, 1): (0, "nan"), (2, 0): (0, "raise")})
    (sentence,) = fresh.load(vector.state())
    assert "2 of 3 running episodes" in sentence
    assert fresh.restarted == [1, 2]
    assert fresh.current()["obs"][:, 1].tolist() == [4, 0, 0]
    assert fresh.state()["episodes"].tolist() == [0, 1, 2]
    assert [s.obs["obs"][1, 1] for s in run(fresh, 3)] == [1, 2, 3]


def test_actions_are_not_kept_without_record() -> None:
    vector = LocalVector("bad_envs:Scripted", {"every": 3}, 1, seed=0, record=False)
    vector.reset()
    run(vector, 3)
    assert "actions" not in vector.take_faults()[0].facts()


@pytest.mark.parametrize(("steps", "too_long"), [(4, False), (5, True)])
def test_the_actions_of_a_very_long_episode_are_left_out(
    steps: int, too_long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raynforce.envs.lane.MOST_BYTES", 4 * 8)
    vector = LocalVector("bad_envs:Scripted", {"every": steps, "length": 9}, 1, seed=0)
    vector.reset()
    run(vector, steps)
    (fault,) = vector.take_faults()
    facts = fault.facts()
    assert facts["step"] == steps
    assert facts.get("too_long", False) == too_long
    assert ("actions" in facts) == (fault.actions is not None) == (not too_long)


class Deep(bad_envs.Counter):
    def step(self, action: Any) -> Any:
        def dig(depth: int) -> None:
            if depth == 0:
                raise RuntimeError("here")
            (dig if depth % 2 else lambda d: dig(d))(depth - 1)  # not the same line over and over

        dig(200)


def test_long_traces_keep_their_end() -> None:
    vector = LocalVector(f"{__name__}:Deep", {}, 1, seed=0)
    vector.reset()
    run(vector, 1)
    (fault,) = vector._shared.faults
    assert len(fault.trace) == 4000
    assert fault.trace.endswith("RuntimeError: here\n")


@pytest.mark.parametrize("env", ["CartPole-v1", "bad_envs:Counter"])
def test_beginning_anew_plays_other_episodes_and_can_be_saved(env: str) -> None:
    starts = set()
    for attempt in (0, 1, 2):
        vector = make_vector(env, {}, 3, seed=0)
        starts |= set((vector.start_fresh(attempt) if attempt else vector.reset())["obs"][:, 0].tolist())
    assert len(starts) == 9
    for a in actions(7):
        vector.step(a)
    fresh = make_vector(env, {}, 3, seed=0)
    assert fresh.load(vector.state()) == []
    for a in actions(30):
        assert same(vector.step(a), fresh.step(a))
    with pytest.raises(UsageError, match="attempt is 0"):
        vector.start_fresh(0)


class BreakingBatch(Batch):
    def __init__(self, what: str, at: int) -> None:
        super().__init__(AutoresetMode.NEXT_STEP)
        self.what, self.at = what, at

    def step(self, actions: np.ndarray) -> Any:
        self.at -= 1
        obs, *rest = super().step(actions)
        if self.at:
            return obs, *rest
        if self.what == "raise":
            raise ZeroDivisionError("division by zero")
        if self.what == "ragged":
            return [[1], [1, 2]], *rest
        return obs, "ab", *rest[1:]


@pytest.mark.parametrize("what", ["raise", "ragged", "reward"])
@pytest.mark.parametrize("at", [1, 2])
def test_vector_implementations_break_as_a_whole(what: str, at: int) -> None:
    vector = NativeVector("batch", BreakingBatch(what, at), seed=0, env_args={"size": 3})
    vector.reset()
    for _ in range(at - 1):
        vector.step(np.zeros(2, np.int64))
    with pytest.raises(EnvError) as caught:
        vector.step(np.zeros(2, np.int64))
    assert isinstance(caught.value, ContractError) == (at == 1 and what != "raise")
    facts = dict(caught.value.facts)
    assert ("ZeroDivisionError" in facts.pop("trace")) == (what == "raise")
    assert facts.pop("cause") in str(caught.value)
    kind = "raised" if what == "raise" else "garbage"
    assert facts == {"env": "batch", "args": {"size": 3}, "kind": kind, "step": at}
    assert vector.take_faults() == []


def test_require_finite_says_what_is_known() -> None:
    with pytest.raises(EnvError, match=r"env 'e' returned reward = nan, step 1, lane 0; ") as caught:
        require_finite("e", {"reward": np.array([[0.0], [np.nan]])}, ("step", "lane"), {"a": 1})
    cause = "reward = nan, step 1, lane 0"
    assert caught.value.facts == {"env": "e", "args": {"a": 1}, "kind": "garbage", "cause": cause, "trace": ""}


def test_a_gymnasium_env_is_made_again_with_its_wrappers() -> None:
    vector = LocalVector("Pendulum-v1", {"max_episode_steps": 6}, 2, seed=0)
    vector.reset()
    zeros = np.zeros((2, 1), np.float32)
    vector.step(zeros)
    vector._lanes[0].env.step = lambda action: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    steps = [vector.step(zeros) for _ in range(8)]
    assert [s.cut.tolist() for s in steps] == [[0]] + [[]] * 7
    assert [s.truncated.tolist() for s in steps].index([True, False]) == 6  # six steps after the break
    assert isinstance(vector._lanes[0].env, gymnasium.wrappers.TimeLimit)
