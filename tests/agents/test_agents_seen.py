"""What agents see is checked as what one agent sees: masks, and values outside of a space."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from raynforce.envs.agents import Sight, lane_spec
from raynforce.envs.doctor import check_env
from raynforce.envs.joined import JoinedEnv
from raynforce.envs.tiny_agents import Leaving
from raynforce.envs.vector import EnvArgs, probe
from raynforce.errors import UsageError
from raynforce.protocol.agents import without_choice
from raynforce.roles.agents_evaluator import random_actions
from raynforce.spaces import MASK

HERE = "agents.test_agents_seen:"


class Masked(Leaving):
    """After the first step, when `agent_0` leaves, `shown` is the mask of `agent_1`, in what it sees or in its info."""

    def __init__(self, shown: Any = (1, 1, 0), where: str = "obs", several: bool = False) -> None:
        super().__init__(agents=2, n=3)
        self.mask, self.where = np.asarray(shown), where
        self.moves: Any = spaces.MultiDiscrete([2, 1]) if several else spaces.Discrete(3)

    def observation_space(self, agent: str) -> Any:
        seen = spaces.Discrete(self.n)
        return spaces.Dict(seen=seen, action_mask=spaces.MultiBinary(3)) if self.where == "obs" else seen

    def action_space(self, agent: str) -> Any:
        return self.moves

    def _with_masks(self, seen: Any) -> Any:
        late = {"agent_1"} if self.steps == 1 else set()
        masks = {agent: self.mask if agent in late else np.ones(3, np.int8) for agent in seen}
        if self.where == "obs":
            return {agent: {"seen": seen[agent], "action_mask": masks[agent]} for agent in seen}, {}
        return seen, {agent: {"action_mask": mask} for agent, mask in masks.items()}

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        return self._with_masks(super().reset(seed, options)[0])

    def step(self, said: Any) -> Any:
        seen, *others, _ = super().step(dict.fromkeys(said, 0))
        seen, infos = self._with_masks(seen)
        return seen, *others, infos


class FromFive(Leaving):
    """What is seen begins at 5, and is `shown` after the first step."""

    def __init__(self, late: int = 0, shown: Any = 5) -> None:
        super().__init__(late=late)
        self.later = shown

    def observation_space(self, agent: str) -> Any:
        return spaces.Discrete(self.n, start=5)

    def reset(self, seed: int | None = None, options: Any = None) -> Any:
        seen, infos = super().reset(seed, options)
        return dict.fromkeys(seen, 5), infos

    def step(self, said: Any) -> Any:
        seen, *others = super().step(said)
        return dict.fromkeys(seen, self.later), *others


class Limited(Masked):
    """Both see a large number beside their mask, and a limit of time ends the episode after the fourth step."""

    def observation_space(self, agent: str) -> Any:
        return spaces.Dict(place=spaces.Box(-np.inf, np.inf, (1,)), action_mask=spaces.MultiBinary(3))

    def leaves(self, agent: str) -> bool:
        return False

    def _with_masks(self, seen: Any) -> Any:
        mask = np.array([1, 0, 0], np.int8)
        return {agent: {"place": np.full(1, 99, np.float32), "action_mask": mask} for agent in seen}, {}

    def step(self, said: Any) -> Any:
        seen, earned, over, _, infos = super().step(said)
        if self.steps == 4:
            self.agents = []
        return seen, earned, over, dict.fromkeys(over, self.steps == 4), infos


@pytest.mark.parametrize(
    ("shown", "several", "said"),
    [
        ((0, 0, 0), False, "'agent_1': 'obs/action_mask' forbids every choice"),
        ((1, 1, 0), True, "'agent_1': 'obs/action_mask' forbids every choice"),  # nothing for the second element
        ((1, 2, 0), False, r"'obs/action_mask' is \[1, 2, 0\]; expected 0"),
        ((1.0, 1.0, 0.5), False, "'obs/action_mask' has dtype float64"),
        ((1, 1), False, r"'obs/action_mask' has shape \(2,\); expected \(3,\)"),
    ],
)
def test_a_mask_that_is_none_breaks_the_environment(shown: Any, several: bool, said: str) -> None:
    made = JoinedEnv("masked", Masked(shown, several=several))
    made.reset(seed=0)
    with pytest.raises(UsageError, match=said):
        made.step(np.zeros(made.action_space.shape[0], np.float32))  # type: ignore[index]


def test_masks_in_infos_that_came_too_late_are_refused() -> None:
    with pytest.raises(UsageError, match="the info of 'agent_0' has an 'action_mask', and at the first reset none"):
        JoinedEnv("masked", Masked(where="info")).reset(seed=0)


@pytest.mark.parametrize("shown", [np.array(9), np.array(4), np.array(5.5)])
def test_a_number_outside_of_the_space_of_an_agent_breaks_the_environment(shown: np.ndarray) -> None:
    made = JoinedEnv("from five", FromFive(shown=shown))
    made.reset(seed=0)
    with pytest.raises(UsageError, match=r"the observation of 'agent_0': 'obs' (is|has dtype)"):
        made.step(np.zeros(3, np.float32))


def test_agents_that_are_not_there_yet_see_a_number_of_their_space() -> None:
    envs = EnvArgs(f"{HERE}FromFive", 1, 0, {"late": 1}).vector(0)
    assert envs.reset()["obs"].tolist() == [5, 5, 5]


def test_an_agent_that_has_left_may_choose_all_of_what_its_last_mask_forbids() -> None:
    spec = probe(f"{HERE}Masked", {"several": True})
    assert spec.agents is not None
    joined = {"obs/seen_0_0": np.zeros((1, 2), np.int64), "obs/seen_0_1": np.array([[[0, 0, 1], [1, 0, 1]]], np.int8)}
    where = np.zeros(2, np.int64), np.arange(2), 0, np.arange(2)
    masks = Sight(spec.agents).seen(joined, *where)[MASK]
    assert masks.tolist() == [[1, 1, 1], [1, 0, 1]]  # the first had nothing for its first element


def test_random_players_choose_each_element_of_what_is_allowed() -> None:
    action = replace(lane_spec(probe(f"{HERE}Masked", {"several": True})).action, sizes=(2, 3), start=(4, 4))
    mask = np.tile(np.array([0, 1, 1, 0, 1], np.int8), (50, 1))
    chosen = random_actions(action, 50, np.random.default_rng(0), mask)
    assert chosen.shape == (50, 2)
    assert set(map(tuple, chosen.tolist())) == {(1, 0), (1, 2)}  # as they are recorded: from 0


def test_a_simulator_may_not_leave_an_agent_that_acts_nothing_to_choose() -> None:
    agents = probe(f"{HERE}Masked", {"several": True}).agents
    assert agents is not None
    masks = np.array([[[1, 1, 1], [0, 0, 1]], [[1, 1, 1], [0, 0, 1]], [[0, 1, 1], [1, 1, 1]]], np.int8)
    flags = np.zeros((3, 3, 2), np.uint8)
    flags[:, 0] = [[1, 1], [1, 0], [1, 1]]
    assert without_choice({"obs/flags": flags, "obs/seen_0_1": masks}, agents).tolist() == [True, False, False]


def test_the_doctor_tells_of_agents_and_not_of_what_they_are_joined_in() -> None:
    found = {f.title: f.detail for f in check_env(f"{HERE}Limited", steps=40).findings}
    seen = "agent_0, agent_1: observation place box [1], action_mask multibinary [3], action discrete [3]"
    assert found["agents"] == seen
    assert found["episodes"] == "0 terminated and 10 truncated in 40 steps"
    assert found["action masks"].startswith("33% of choices were allowed")
    assert found["observations are large"] == "'obs/place' of 'agent_0': values up to 99 came"
    assert not {"spaces", "terminated may be a time limit", "observation bounds are very large"} & found.keys()
