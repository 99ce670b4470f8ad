"""Policies to be served: checkpoints with random parameters, and runs whose `best` is changed under a server."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from raynforce.algos import algorithm_class
from raynforce.envs.make import make_probed
from raynforce.experiment import resolve
from raynforce.policies.acting import PolicyVersion
from raynforce.runs import checkpoint

HERE = str(Path(__file__).parent)
TOKEN = "a-token-for-tests"


class Several(gymnasium.Env[Any, Any]):
    """An observation of several parts."""

    def __init__(self, kind: str = "dict") -> None:
        parts: list[spaces.Space[Any]] = [
            spaces.Box(-9, 9, (5,)),
            spaces.Box(0, 255, (12, 12, 1), np.uint8),
            spaces.Discrete(4, start=-2),
            spaces.MultiBinary(6),
        ]
        named = dict(zip(("speed", "camera", "gear", "flags"), parts, strict=True))
        inner: spaces.Space[Any] = spaces.Tuple(parts) if kind == "tuple" else spaces.Dict(named)
        self.observation_space = spaces.Dict({"inner": inner, "extra": spaces.MultiDiscrete([3, 5])})
        self.action_space = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 9.0], np.float32))


def torch_module(spec: Any, heads: Any, **_: Any) -> Any:
    """A user's own network."""
    import torch

    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = torch.nn.ModuleDict({name: torch.nn.Linear(4, size) for name, size in heads.items()})

        def forward(self, obs: Any) -> Any:
            return {name: head(obs) for name, head in self.heads.items()}

    return Own()


def save(
    path: Path, env: str = "CartPole-v1", algo: str = "ppo", number: int = 1, seed: int = 1, **how: Any
) -> tuple[Path, Any]:
    """A checkpoint of random parameters, and the environment's observation space."""
    if HERE not in sys.path:
        sys.path.append(HERE)
    args, factory = how.pop("env_args", {}), how.pop("factory", None)
    config, _ = resolve({"env": env, "env_args": args, "algo": algo, "network": how})
    made, spec = make_probed(env, args)
    acting = algorithm_class(algo)(config, spec).acting()
    rng = np.random.default_rng(seed)
    size = sum(p.size for p in acting.network.params())
    if factory:
        acting = replace(acting, factory=factory)
        size = sum(5 * heads for heads in acting.heads.values())
    width = acting.network.input_width
    normaliser = [rng.normal(0, 1, width).astype(np.float32), rng.uniform(0.1, 2, width).astype(np.float32)]
    params = rng.normal(0, 0.3, size).astype(np.float32)
    version = PolicyVersion(number, params, *(normaliser if acting.network.normalizes else ()))
    checkpoint.save(path, {"policy": {"acting": acting.to_json(), "version": version.state()}}, step=100 * number)
    return path, made.observation_space


class ServedRun:
    """A folder with checkpoints and a link `best`, as a run has."""

    def __init__(self, folder: Path, **how: Any) -> None:
        self.path = folder
        (folder / "checkpoints").mkdir(parents=True)
        self._count = 0
        self.best(**how)

    def best(self, **how: Any) -> Path:
        """Let `best` be a new checkpoint."""
        self._count += 1
        name = self.path / "checkpoints" / f"best_{self._count:012d}"
        made, _ = save(name, **{"number": self._count, "seed": self._count, **how})
        fresh = self.path / ".best"
        fresh.symlink_to(made)
        fresh.replace(self.path / "best")
        return made
