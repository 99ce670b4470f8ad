"""How fast a simulator answers."""

from __future__ import annotations

import time
from array import array
from typing import NamedTuple

import numpy as np

from raynforce.envs.masks import random_of
from raynforce.envs.simulator_envs import close_simulators, simulators


class Speed(NamedTuple):
    """Of steps of all envs in one message, as fast as they are answered; a round trip's median and 99th percentile."""

    envs: int
    steps_per_second: float
    median_seconds: float
    worst_seconds: float


def speed(env: str, envs: int, seconds: float = 1.0) -> Speed:
    lanes, times = simulators(env, {}, envs), array("d")
    try:
        rng, spec = np.random.default_rng(0), lanes.spec
        actions = random_of(spec, lanes.obs, rng)
        until = time.monotonic() + seconds
        while time.monotonic() < until or len(times) < 10:
            if spec.masked or spec.agents is not None:
                actions = random_of(spec, lanes.obs, rng)
            began = time.perf_counter()
            lanes.step_all(actions)
            times.append(time.perf_counter() - began)
    finally:
        close_simulators(lanes)
    return Speed(envs, envs * len(times) / sum(times), float(np.median(times)), float(np.quantile(times, 0.99)))
