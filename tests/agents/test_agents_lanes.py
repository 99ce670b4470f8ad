"""Lanes of agents: who acts, who has left, whose turn it is; and fragments of turns, held against a plain count."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from raynforce.envs.joined import JoinedEnv
from raynforce.envs.tiny_agents import Nim
from raynforce.envs.vector import EnvArgs, probe
from raynforce.errors import UsageError
from raynforce.experience.fragment import Fragment
from raynforce.experience.turns import Turns
from raynforce.spaces import ACTING

TINY = "raynforce.envs.tiny_agents:"


def test_a_lane_is_one_agent_in_one_environment() -> None:
    envs = EnvArgs(f"{TINY}Leaving", 2, 0).vector(0)
    seen = envs.reset()["obs"]
    assert envs.num_envs == 6
    valid, ends = [], []
    for _ in range(3):
        step = envs.step(seen)
        assert step.reward.tolist() == step.valid.tolist()  # it says what it sees: 1 for whoever is there
        valid.append(step.valid[:3].tolist())
        ends.append(step.terminated[:3].tolist())
        seen, final = step.obs["obs"], step.final_lanes
    assert valid == [[True, True, True], [False, True, True], [False, False, True]]
    assert ends == [[True, False, False], [False, True, False], [False, False, True]]
    assert final.tolist() == [2, 5]  # the others left before: they saw the end themselves
    assert envs.step(seen).valid.all()


def test_random_moves_are_those_that_masks_allow() -> None:
    made = JoinedEnv("nim", Nim(heap=4, masked=True))
    masks = [array for key, array in made._seen.items() if array.shape[1:] == (3,)]
    made.action_space.seed(0)
    moves = []
    for seed in range(20):
        made.reset(seed=seed)
        over = False
        while not over:
            (agent,) = np.flatnonzero(made._flags[ACTING])
            action = made.action_space.sample()
            moves.append(int(action[agent]))
            assert masks[0][agent, moves[-1]]
            over = made.step(action)[2]
    assert set(moves) == {0, 1, 2}


def test_an_agent_may_come_later() -> None:
    envs = EnvArgs(f"{TINY}Leaving", 1, 0, {"late": 1}).vector(0)
    seen = envs.reset()["obs"]
    step = envs.step(seen)
    assert step.valid.tolist() == [True, True, False]
    assert envs.step(step.obs["obs"]).valid.tolist() == [False, True, True]


@pytest.mark.parametrize(("name", "flag"), [("Leaves", "truncated"), ("Stays", "terminated")])
def test_an_agent_that_is_over_ends_once_however_its_environment_says_so(name: str, flag: str) -> None:
    """As truncated if nothing but its absence does; one that stays listed is not asked to act again."""
    envs = EnvArgs(f"leaving_envs:{name}", 1, 0).vector(0)
    envs.reset()
    valid, ends = [], []
    for _ in range(8):
        step = envs.step(np.zeros(2, np.int64))
        valid.append(step.valid.tolist())
        ends.append(getattr(step, flag)[1])
    assert valid == [[True, t < 3] for t in range(8)]
    assert ends == [t == 2 for t in range(8)]


def test_one_moves_at_a_time_and_is_paid_when_it_is_next_to_move() -> None:
    envs = EnvArgs(f"{TINY}Nim", 1, 3).vector(0)
    left = int(envs.reset()["obs"][0])
    mover = 0
    for _ in range(left - 1):
        step = envs.step(np.zeros(2, np.int64))
        assert step.valid.tolist() == [mover == 0, mover == 1]
        assert not step.reward.any()
        assert not step.terminated.any()
        mover = 1 - mover
    step = envs.step(np.zeros(2, np.int64))
    assert step.reward[mover] == 1
    assert step.reward[1 - mover] == -1
    assert step.terminated.all()


def test_different_spaces_need_policies_of_their_own() -> None:
    with pytest.raises(UsageError, match="different spaces"):
        EnvArgs(f"{TINY}Hunt", 1, 0).vector(0)
    agents = probe(f"{TINY}Hunt").agents
    assert agents is not None
    assert [kind.agents for kind in agents.kinds] == [(0,), (1, 2)]


def test_the_global_state_is_all_that_all_see() -> None:
    envs = EnvArgs(f"{TINY}Together", 2, 0, states=True).vector(0)
    seen = envs.reset()
    assert seen["global_state"].shape == (4, 2)
    assert (seen["global_state"] == seen["obs"][:, None]).all()


def test_processes_step_environments_of_several_agents_as_this_one_does() -> None:
    ways = [EnvArgs(f"{TINY}Leaving", 2, 7, parallel=how).vector(0) for how in ("no", "processes")]
    seen = [envs.reset() for envs in ways]
    for _ in range(5):
        assert np.array_equal(seen[0]["obs"], seen[1]["obs"])
        seen = [envs.step(now["obs"]).obs for envs, now in zip(ways, seen, strict=True)]
    for envs in ways:
        envs.close()


def fragment(rows: list[tuple[int, float, str]], number: int) -> tuple[Fragment, list[np.ndarray]]:
    """One lane: whether it moved, what it got, and whether the episode ended (`.`, `t`, or `x`: cut) in each row."""
    count = len(rows)
    columns: dict[str, Any] = {name: np.zeros((count, 1), np.bool_) for name in ("terminated", "truncated", "valid")}
    columns |= {"reward": np.zeros((count, 1), np.float32), "action": np.zeros((count, 1), np.int64)}
    columns["obs"] = (100 * number + np.arange(count + 1, dtype=np.float32))[:, None, None]
    columns["logp"] = columns["obs"][:-1, :, 0].copy()
    index, cuts = [], []
    for t, (moved, reward, end) in enumerate(rows):
        columns["valid"][t], columns["reward"][t] = bool(moved) and end != "x", reward if end != "x" else 0.0
        columns["terminated"][t] = end == "t"
        if end == "t":
            index.append(t)
        if end == "x":
            cuts.append(np.array([t]))
    columns["final/index"] = np.array(index, np.int64)
    columns["final/obs"] = np.array([[-1.0 - 100 * number - t] for t in index], np.float32).reshape(-1, 1)
    columns |= {"first": np.zeros((count, 1), np.bool_), "episode/return": np.zeros(0, np.float32)}
    columns["episode/length"] = np.zeros(0, np.int64)
    return Fragment(columns, number, 0, number), cuts


def by_hand(raw: list[tuple[int, float, str]]) -> tuple[list[tuple[float, float, bool]], list[float]]:
    """Of all rows in one: observation, reward and end of each move with an outcome; and returns of whole episodes."""
    moves: list[tuple[float, float, bool]] = []
    returns: list[float] = []
    obs: float | None = None
    earned, total = 0.0, 0.0
    for t, (moved, reward, end) in enumerate(raw):
        if end == "x":  # the move under way has no outcome
            obs, total = None, 0.0
            continue
        if moved:
            if obs is not None:
                moves.append((obs, earned, False))
                total += earned
            obs, earned = float(t), 0.0
        if obs is not None:
            earned += reward
        if end == "t":
            if obs is not None:
                moves.append((obs, earned, True))
                returns.append(total + earned)
            obs, total = None, 0.0
    return moves, returns


@pytest.mark.parametrize("seed", range(200))
def test_turns_over_fragments_are_what_they_are_in_one(seed: int) -> None:
    rng = random.Random(seed)
    several = [
        [(rng.randint(0, 1), rng.choice([0.0, 1.0, -2.0]), rng.choice(".....tx")) for _ in range(3)] for _ in range(6)
    ]
    turns, found, returns = Turns(1), [], []
    for number, rows in enumerate(several):
        raw, cuts = fragment(rows, number)
        saved, turns = turns.state(), Turns(1)  # as if it had been resumed
        turns.load(saved)
        made = turns.compact(raw, cuts)
        valid = made["valid"][:, 0]
        assert not valid[np.argmin(valid) :].any() or valid.all()  # no holes
        for t in np.flatnonzero(valid):
            row = made["obs"][t, 0, 0]
            place = 3 * (row // 100) + row % 100
            found.append((float(place), float(made["reward"][t, 0]), bool(made["terminated"][t, 0])))
            assert made["logp"][t, 0] == row
        returns += made["episode/return"].tolist()
    moves, totals = by_hand([row for rows in several for row in rows])
    assert found == moves
    assert returns == totals
