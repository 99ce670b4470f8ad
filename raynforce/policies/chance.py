"""Acting by chance alone: what a sampler takes in place of a policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from raynforce.policies.acting import PolicyVersion, action_map
from raynforce.policies.distributions import masked, policy_distribution
from raynforce.policies.spec import NetworkSpec
from raynforce.spaces import MASK, EnvSpec


@dataclass(frozen=True)
class ChanceSpec:
    env: EnvSpec
    record: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    sequence: int = 0
    network: NetworkSpec = NetworkSpec((), ())  # noqa: RUF009  (frozen)


class ChanceActor:
    """Uniform among allowed choices; of a box uniform between its bounds, and standard normal where it has none."""

    note = ""

    def __init__(self, env: EnvSpec) -> None:
        self.spec, self.distribution = ChanceSpec(env), self
        self.to_env = action_map(env.action)
        self._choices = policy_distribution(env.action)

    def load(self, version: PolicyVersion) -> None:
        pass

    def outputs(self, obs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Every choice is worth the same."""
        return {"policy": np.zeros((len(next(iter(obs.values()))), sum(self.spec.env.action.sizes)), np.float32)}

    def masked(self, out: Mapping[str, np.ndarray], seen: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        return {"policy": masked(out["policy"], seen[MASK])} if MASK in seen else out

    def noise(self, rng: np.random.Generator, steps: int, lanes: int) -> Any:
        """Of a box the actions themselves."""
        action = self.spec.env.action
        if action.kind != "box":
            return self._choices.noise(rng, steps, lanes)
        shape, bounded = (steps, lanes, *action.shape), np.isfinite([*action.low, *action.high]).all()
        return (rng.uniform(-1, 1, shape) if bounded else rng.standard_normal(shape)).astype(np.float32)

    def sample(self, out: Mapping[str, np.ndarray], noise: Any) -> np.ndarray:
        if self.spec.env.action.kind != "box":
            return self._choices.sample(out, noise, {})
        found: np.ndarray = noise
        return found
