"""What a run tells the Ray agent of its node, which Prometheus scrapes: `ray_raynforce_steps_total`, …"""

from __future__ import annotations

import importlib
import math
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from raynforce.prometheus import METRICS, Buckets, Exported, Labels, Reports

EVERY = 5.0  # seconds; the agent exports every 10
MOST_EPISODES = 100  # of one report that go into the agent's histograms, evenly chosen: each is a call


class AgentSink(Reports):
    """For jobs of a Ray cluster, whose nodes have agents that are scraped already."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[str, Any] = {}
        self._counted: dict[tuple[str, Labels], float] = {}
        self._due = 0.0

    def episodes(self, step: int, returns: np.ndarray, lengths: np.ndarray) -> None:
        super().episodes(step, returns, lengths)
        some = np.linspace(0, len(returns) - 1, min(len(returns), MOST_EPISODES)).astype(int)
        for name, values in (("raynforce_episode_return", returns), ("raynforce_episode_length", lengths)):
            for value in values[some].tolist() if _connected() else ():
                if math.isfinite(value):
                    self._metric(next(each for each in METRICS if each.name == name)).observe(value, self._run())

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        super().write(step, metrics)
        if time.monotonic() >= self._due and _connected():
            self._due = time.monotonic() + EVERY
            self._tell()

    def close(self) -> None:
        if _connected():
            self._tell()

    def _tell(self) -> None:
        for exported in METRICS:
            values = exported.read(self._state)
            for labels, value in values.items() if not isinstance(values, Buckets) else ():
                if not math.isfinite(value):
                    continue
                tags = self._run() | dict(zip(exported.labels, labels, strict=True))
                if exported.kind == "gauge":
                    self._metric(exported).set(value, tags)
                elif (more := value - self._counted.get((exported.name, labels), 0.0)) > 0:
                    self._counted[exported.name, labels] = value
                    self._metric(exported).inc(more, tags)

    def _run(self) -> dict[str, str]:
        return {"run": self._state.path.name}

    def _metric(self, exported: Exported) -> Any:
        if exported.name not in self._made:
            metrics = importlib.import_module("ray.util.metrics")
            name = exported.name.removesuffix("_total")  # the agent adds it
            how: dict[str, Any] = {"description": exported.what, "tag_keys": tuple({"run", *exported.labels})}
            if exported.kind == "histogram":
                buckets = exported.read(self._state)
                assert isinstance(buckets, Buckets)
                # Those of 0 and less are refused.
                how["boundaries"] = [bound for bound in buckets.bounds.tolist() if bound > 0]
            kinds = {"counter": metrics.Counter, "gauge": metrics.Gauge, "histogram": metrics.Histogram}
            self._made[exported.name] = kinds[exported.kind](name, **how)
        return self._made[exported.name]


def _connected() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())
