"""A slowed environment is the one inside, later."""

from __future__ import annotations

import time

import numpy as np
import pytest

from raynforce.envs.make import make
from raynforce.envs.slow import slowed
from raynforce.envs.snapshots import KNOWN
from raynforce.errors import UsageError


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What was waited for, without waiting."""
    found: list[float] = []
    monkeypatch.setattr(time, "sleep", found.append)
    return found


def test_each_step_waits_and_changes_nothing(waits: list[float]) -> None:
    plain, slow = make("CartPole-v1"), make("raynforce.envs.slow:slowed", {"milliseconds": 20})
    assert (slow.observation_space, slow.action_space) == (plain.observation_space, plain.action_space)
    assert np.array_equal(slow.reset(seed=3)[0], plain.reset(seed=3)[0])
    assert waits == []
    for steps in range(1, 9):
        expected, found = plain.step(steps % 2), slow.step(steps % 2)
        assert np.array_equal(found[0], expected[0])
        assert found[1:] == expected[1:]
        assert len(waits) == steps
    assert all(0 <= wait <= 0.04 for wait in waits)
    assert len(set(waits)) == len(waits)  # uneven


def test_another_environment_with_its_arguments(waits: list[float]) -> None:
    made = slowed("CartPole-v1", 5.0, {"max_episode_steps": 2})
    made.reset(seed=0)
    assert [made.step(0)[3] for _ in range(2)] == [False, True]
    assert all(wait <= 0.01 for wait in waits)


def test_running_episodes_are_saved_through_it() -> None:
    assert isinstance(slowed(), KNOWN)


@pytest.mark.parametrize("milliseconds", [-1.0, float("nan"), float("inf")])
def test_a_time_that_is_none(milliseconds: float) -> None:
    with pytest.raises(UsageError, match="milliseconds"):
        make("raynforce.envs.slow:slowed", {"milliseconds": milliseconds})
