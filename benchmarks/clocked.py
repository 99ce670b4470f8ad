"""What the sides of a comparison share: a warm-up, then the same work under the clock, here or in Stable-Baselines3.

It is imported in every side's own virtual environment, so it imports nothing but Python's own modules.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from benchmarks.settings import TRAINING_ALONE

Facts = dict[str, Any]


class Mark(NamedTuple):
    seconds: float
    cpu_seconds: float
    steps: int
    updates: int


def mark(steps: int, updates: int) -> Mark:
    return Mark(time.monotonic(), time.process_time(), steps, updates)


def train_ours(
    env: str, algo: str, *, warm_up: int, steps: int, seed: int, settings: Mapping[str, Any]
) -> tuple[Facts, Any]:
    """Train with Raynforce; the clock runs from the end of the warm-up to the end of the last round."""
    from raynforce import Status, train

    given = TRAINING_ALONE | {"learner.threads": 1} | dict(settings)
    marks: list[Mark] = []

    def note(status: Status) -> None:
        if status.steps >= warm_up:
            marks.append(mark(status.steps, status.updates))

    how: dict[str, Any] = {"steps": warm_up + steps, "seed": seed, "settings": given, "callbacks": [note]}
    with TemporaryDirectory() as folder:
        done = train(env, algo, out=f"{folder}/run", progress="quiet", **how)
    return facts(marks[0], marks[-1], done.result.return_mean or 0.0), done.result


def learn_theirs(model: Any, updates: Callable[[], int], *, warm_up: int, steps: int) -> Facts:
    """Train with Stable-Baselines3; the clock runs during `learn()`, after a first `learn()` as warm-up."""
    model.learn(warm_up)
    first = mark(model.num_timesteps, updates())
    model.learn(steps, reset_num_timesteps=False)
    last = mark(model.num_timesteps, updates())
    episodes = [episode["r"] for episode in model.ep_info_buffer]
    return facts(first, last, sum(episodes) / len(episodes))


def facts(first: Mark, last: Mark, return_mean: float) -> Facts:
    seconds, cpu_seconds, steps, updates = (b - a for a, b in zip(first, last, strict=True))
    return {
        "steps_per_second": steps / seconds,
        "steps_per_cpu_second": steps / cpu_seconds,
        "updates_per_second": updates / seconds,
        "updates_per_cpu_second": updates / cpu_seconds,
        "updates_per_step": updates / steps,
        "return_mean": float(return_mean),
        "versions": {name: version(name) for name in ("torch", "numpy", "gymnasium")},
    }
