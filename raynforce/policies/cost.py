"""What a forward pass of a policy costs, found in some milliseconds."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from raynforce.policies.acting import ActingSpec, Actor, PolicyVersion

SECONDS = 2e-3  # for each of the two sizes, unless one pass takes longer
PASSES = 5  # at most, of which the fastest counts: nothing holds that one up
LARGEST = 256  # observations in one pass; more cost as much each


@dataclass(frozen=True)
class PolicyCost:
    one: float  # for one observation
    all: float  # for the observations of so many `envs`, in one pass
    envs: int


def policy_cost(spec: ActingSpec, envs: int) -> PolicyCost | None:
    """What it costs to act by `spec`; None if that takes torch, whose import would take longer."""
    if spec.acts_with == "torch":
        return None
    actor = Actor(spec)
    width = spec.network.input_width
    size = sum(param.size for param in spec.network.params())  # zeros take as long as any other numbers
    normalizer = np.zeros(width, np.float32), np.ones(width, np.float32)
    actor.load(PolicyVersion(0, np.zeros(size, np.float32), *normalizer, {"epsilon": 0.5}))
    one = _pass_seconds(actor, 1)
    some = min(envs, LARGEST, max(1, int(PASSES * SECONDS / one)))
    return PolicyCost(one, one if envs == 1 else _pass_seconds(actor, some) * envs / some, envs)


def _pass_seconds(actor: Actor, batch: int) -> float:
    leaves = [(leaf, np.reshape(leaf.start, leaf.shape) if leaf.start else 0) for leaf in actor.spec.env.obs]
    obs = {leaf.path: np.full((batch, *leaf.shape), first, leaf.dtype) for leaf, first in leaves}
    noise = actor.distribution.noise(np.random.default_rng(0), 1, batch)[0]
    fastest, until = float("inf"), time.monotonic() + SECONDS
    for turn in range(PASSES):
        began = time.perf_counter()
        actor.to_env(actor.sample(actor.outputs(obs), noise))
        fastest = min(fastest, time.perf_counter() - began)
        if turn and time.monotonic() > until:  # the first pass finds nothing in the caches
            break
    return fastest
