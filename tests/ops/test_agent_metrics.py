"""What a job tells its node's agent: every metric once, counters by what was added."""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raynforce.ops import agent_metrics
from raynforce.ops.agent_metrics import MOST_EPISODES, AgentSink

Told = dict[str, list[tuple[float, dict[str, str]]]]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    told: Told = defaultdict(list)

    class Metric:
        def __init__(self, name: str, description: str, tag_keys: tuple[str, ...], boundaries: Any = ()) -> None:
            self.name, self.tags = name, set(tag_keys)
            assert all(bound > 0 for bound in boundaries)

        def take(self, value: float, tags: dict[str, str]) -> None:
            assert set(tags) == self.tags
            told[self.name].append((value, tags))

        inc = set = observe = take

    fake = SimpleNamespace(Counter=Metric, Gauge=Metric, Histogram=Metric)
    monkeypatch.setitem(sys.modules, "ray.util.metrics", fake)  # type: ignore[arg-type]
    monkeypatch.setattr(agent_metrics, "_connected", lambda: True)
    monkeypatch.setattr(agent_metrics, "EVERY", 0.0)
    return told


def test_counters_are_told_by_what_was_added(told: Told) -> None:
    sink = AgentSink()
    sink.begin(Path("/runs/mine"), {"steps": 1000, "sampling": {"envs": 4}})
    sink.write(100, {"health/restarts/sampler/died": 1.0, "losses/a": float("nan")})
    sink.write(250, {"health/restarts/sampler/died": 1.0})
    assert [value for value, _ in told["raynforce_steps"]] == [100.0, 150.0]
    assert told["raynforce_restarts"] == [(1.0, {"run": "mine", "role": "sampler", "reason": "died"})]
    assert told["raynforce_planned_steps"][0] == (1000.0, {"run": "mine"})
    assert all(tags["name"] != "losses/a" for _, tags in told["raynforce_metric"])
    sink.close()


def test_episodes_are_told_and_not_too_many(told: Told) -> None:
    sink = AgentSink()
    sink.begin(Path("/runs/mine"), {})
    sink.episodes(1, np.array([1.0, np.nan, 3.0]), np.array([1, 2, 3]))
    assert [value for value, _ in told["raynforce_episode_return"]] == [1.0, 3.0]
    sink.episodes(2, np.ones(10_000), np.ones(10_000, int))
    assert len(told["raynforce_episode_length"]) == 3 + MOST_EPISODES


def test_without_ray_nothing_is_told(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_metrics, "_connected", lambda: False)
    sink = AgentSink()
    sink.episodes(1, np.ones(3), np.ones(3, int))
    sink.write(1, {"a": 1.0})
    sink.close()
    assert not told
