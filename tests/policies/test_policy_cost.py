"""What acting costs is measured quickly, with the run's own network, and never with torch."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from raynforce.algos import algorithm_class
from raynforce.envs.vector import probe
from raynforce.experiment import resolve
from raynforce.policies import cost
from raynforce.policies.acting import ActingSpec
from raynforce.policies.cost import PolicyCost, policy_cost


class Odd(gymnasium.Env[Any, Any]):
    """Choices that do not begin with zero, an image, and several actions."""

    observation_space = spaces.Dict(
        {"card": spaces.Discrete(3, start=7), "eye": spaces.Box(0, 255, (12, 12, 3), np.uint8)}
    )
    action_space = spaces.MultiDiscrete([2, 3])


def acting(env: str, algo: str = "ppo", **settings: Any) -> ActingSpec:
    config, _ = resolve({"env": env, "algo": algo, **settings})
    return algorithm_class(algo)(config, probe(env)).acting()


@pytest.mark.parametrize(("env", "algo"), [("CartPole-v1", "ppo"), ("CartPole-v1", "dqn"), ("Pendulum-v1", "impala")])
def test_it_costs_some_microseconds(env: str, algo: str) -> None:
    spec = acting(env, algo, network={"normalize_obs": True})
    several = [policy_cost(spec, 64) for _ in range(5)]  # on a busy machine a single one says little
    found = [one for one in several if one is not None]
    assert {one.envs for one in found} == {64}
    assert all(1e-6 < one.one < 1 for one in found)
    assert min(one.all for one in found) < 64 * min(one.one for one in found), "together is cheaper"


def test_any_observation_will_do() -> None:
    assert policy_cost(acting("test_policy_cost:Odd"), 3) is not None


def test_a_larger_network_costs_more() -> None:
    small, large = (policy_cost(acting("CartPole-v1", network={"hidden": [n, n]}), 8) for n in (16, 1024))
    assert small is not None
    assert large is not None
    assert large.one > 2 * small.one


def test_it_is_quick_however_many(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    monkeypatch.setattr(cost, "_pass_seconds", lambda actor, batch: sizes.append(batch) or 1e-5 * batch)
    assert policy_cost(acting("CartPole-v1"), 1) == PolicyCost(1e-5, 1e-5, 1)
    found = policy_cost(acting("CartPole-v1"), 100_000)
    assert sizes == [1, 1, 256]
    assert found is not None
    assert found.all == pytest.approx(1.0), "of the part that was tried"
    sizes.clear()
    monkeypatch.setattr(cost, "_pass_seconds", lambda actor, batch: sizes.append(batch) or 1e-2 * batch)
    assert policy_cost(acting("CartPole-v1"), 100_000) is not None
    assert sizes[0] == 1
    assert sizes[1] * 1e-2 <= max(1e-2, cost.PASSES * cost.SECONDS), "fewer of a slow network"


def test_torch_is_not_imported_to_find_out() -> None:
    spec = acting("CartPole-v1", network={"factory": "no_such_module:net"})
    assert spec.acts_with == "torch"
    assert policy_cost(spec, 8) is None
