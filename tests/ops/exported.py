"""Policies of many kinds as checkpoints, without an environment: what an export has to carry over."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from raynforce.algos import algorithm_class
from raynforce.envs.describe import describe
from raynforce.experiment import resolve
from raynforce.policies.acting import ActingSpec, PolicyVersion
from raynforce.policies.spec import Activation, Conv, LayerNorm, Linear, NetworkSpec, Tower
from raynforce.runs import checkpoint

SEEN: dict[str, spaces.Space[Any]] = {
    "vector": spaces.Box(-9, 9, (5,)),
    "double": spaces.Box(-9, 9, (2, 2), np.float64),
    "colour": spaces.Box(0, 255, (8, 6, 3), np.uint8),
    "planes": spaces.Box(0, 255, (3, 6, 6), np.uint8),
    "gray": spaces.Box(0, 255, (5, 6), np.uint8),
    "choice": spaces.Discrete(4, start=-2),
    "choices": spaces.MultiDiscrete([3, 5]),
    "flags": spaces.MultiBinary(6),
    "bytes": spaces.Box(0, 255, (7,), np.uint8),
    "whole": spaces.Box(-100, 100, (2, 3), np.int16),
}
DICT = spaces.Dict({**SEEN, "nested": spaces.Dict({"deep": SEEN["vector"]})})
BOUNDED = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 1000.0], np.float32))
OPEN = spaces.Box(-np.inf, np.inf, (3,))
HALF_OPEN = spaces.Box(np.array([0.0, -np.inf], np.float32), np.array([np.inf, 0.1], np.float32))

CASES: dict[str, tuple[Any, Any, str, dict[str, Any]]] = {
    "mlp discrete": (SEEN["vector"], spaces.Discrete(3), "ppo", {"normalize_obs": True}),
    "dqn": (SEEN["vector"], spaces.Discrete(5, start=10), "dqn", {"activation": "relu", "hidden": [32]}),
    "continuous": (SEEN["vector"], BOUNDED, "ppo", {"activation": "silu", "normalize_obs": True}),
    "unbounded": (SEEN["double"], OPEN, "ppo", {"activation": "elu"}),
    "half open": (SEEN["vector"], HALF_OPEN, "ppo", {}),
    "cnn": (SEEN["colour"], spaces.Discrete(4), "ppo", {}),
    "planes": (SEEN["planes"], spaces.MultiDiscrete([3, 4], start=[1, -1]), "impala", {"conv": [[8, 3, 2]]}),
    "flat image": (SEEN["gray"], spaces.Discrete(3), "ppo", {"conv": [], "normalize_obs": True}),
    "dict": (DICT, BOUNDED, "ppo", {"normalize_obs": True}),
    "one choice": (SEEN["choice"], spaces.Discrete(2), "ppo", {"normalize_obs": True}),
}


def acting(seen: Any, done: Any, algo: str, network: dict[str, Any]) -> ActingSpec:
    config, _ = resolve({"env": "CartPole-v1", "algo": algo, "network": network, "preset": "none"})
    return algorithm_class(algo)(config, describe("some-env", seen, done)).acting()


def layered(gaussian: Any) -> ActingSpec:
    """Layer normalisation and padded convolutions, with actions that are squashed or not."""
    spec = acting(SEEN["colour"], BOUNDED, "ppo", {})
    layers = Conv(4, 4, 3, padding="same"), LayerNorm(), Activation("relu"), Conv(3, 2, 1, padding="same")
    policy = Tower("policy", (*layers, Linear(9), LayerNorm(0.1), Activation("tanh"), Linear(4)))
    network = NetworkSpec(spec.network.inputs, (policy,))
    return replace(spec, network=network, heads={"policy": 4}, gaussian=gaussian)


def saved(folder: Path, spec: ActingSpec, name: str = "policy") -> Path:
    """With random parameters and statistics, as after some training."""
    rng = np.random.default_rng(1)
    params = spec.network.initial(rng)
    params += rng.normal(0, 0.03, params.shape).astype(np.float32)
    width = spec.network.input_width
    shift, scale = rng.normal(0, 1, width).astype(np.float32), rng.uniform(0.5, 2, width).astype(np.float32)
    version = PolicyVersion(7, params, *((shift, scale) if spec.network.normalizes else ()), schedules={"epsilon": 0.1})
    path = folder / name
    checkpoint.save(path, {"policy": {"acting": spec.to_json(), "version": version.state()}}, step=1)
    return path


def nested(obs: dict[str, np.ndarray]) -> Any:
    """Observations by leaf in the form that an environment gives them."""
    found: dict[str, Any] = {}
    for path, array in obs.items():
        *parents, last = path.split("/")
        level = found
        for key in parents:
            level = level.setdefault(key, {})
        level[last] = array
    return found["obs"]
