"""Small runs on environments that fail, and what holds for every one of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from running import events, metrics

import raynforce

SMALL: dict[str, Any] = {"eval.episodes": 2, "eval.final_episodes": 0, "eval.every": 0, "checkpoint.every": 0}
SMALL |= {"log_every": 96, "sampling.samplers": 2, "sampling.envs": 3, "preset": "none"}
ALGOS: dict[str, dict[str, Any]] = {
    "ppo": {"sampling.fragment": 16, "algorithm.minibatch_size": 32},
    "dqn": {"sampling.fragment": 16, "algorithm.learning_starts": 100, "algorithm.prioritized": True},
    "impala": {"sampling.fragment": 16},
}
ROUND, ROUNDS = 96, 40
STEPS = ROUND * ROUNDS

ROLE, ENV = "restarted", "environment restarted"


def train(
    out: Path, env: str = "CartPole", algo: str = "ppo", *, steps: int = STEPS, settings: Any = None, **more: Any
) -> raynforce.Run:
    given = SMALL | ALGOS[algo] | dict(settings or {})
    return raynforce.train(
        f"fault_envs:{env}", algo, steps=steps, seed=7, out=out, settings=given, progress="quiet", **more
    )


def is_sound(run: raynforce.Run) -> None:
    """The books balance at every report, no line is there twice, and every fault of a role has its line."""
    reports = [line for line in metrics(run.path) if "health/produced_steps" in line]
    assert reports
    for line in reports:
        used = line["step"] + line["health/dropped_steps"] + line["health/in_flight_steps"]
        assert line["health/produced_steps"] == used, line
    steps = [line["step"] for line in reports]
    assert steps == sorted(set(steps))
    for line in metrics(run.path):
        assert all(math.isfinite(value) for value in line.values()), line
    faults = events(run.path, "fault")  # a line may stand for several
    done = {action: sum(f.get("count", 1) for f in faults if f["action"] == action) for action in (ROLE, ENV)}
    assert done == {ROLE: run.result.restarts, ENV: run.result.env_restarts}
