"""Networks, batches and runs for the tests of what has an actor and two critics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from nets import ACTIONS

import raynforce
from raynforce.algos import algorithm_class
from raynforce.algos.base import LearningRound, Loss
from raynforce.experiment import resolve
from raynforce.policies.torch_net import SpecNet, build
from raynforce.spaces import EnvSpec, ObsLeaf

ENV = EnvSpec("test", (ObsLeaf("obs", "box", (3,), "float32"),), ACTIONS["box"])
ROWS = 40
SMALL: dict[str, Any] = {
    "eval.every": 0,
    "eval.episodes": 1,
    "eval.final_episodes": 0,
    "checkpoint.every": 200,
    "log_every": 100,
    "sampling.samplers": 2,
    "sampling.envs": 2,
    "sampling.fragment": 8,
    "algorithm.learning_starts": 100,
    "algorithm.buffer_size": 400,  # smaller than the run: the ring goes round
    "algorithm.batch_size": 16,
    "algorithm.samples_per_insert": 4.0,
    "network.hidden": [16],
}


def made(algo: str, env: EnvSpec = ENV, network: dict[str, Any] | None = None, **hp: Any) -> tuple[Any, SpecNet]:
    """An algorithm, and a network whose target is another."""
    network = {"hidden": [8, 8]} | (network or {})
    config, _ = resolve({"env": "test", "algo": algo, "preset": "none", "network": network, "algorithm": hp})
    found = algorithm_class(algo)(config, env)
    net = build(found.network(), None, found.heads(), env.obs, 0, torch.device("cpu"))
    assert isinstance(net, SpecNet)
    found.begin(net)
    generator = torch.Generator().manual_seed(1)
    net.flat += 0.3 * torch.randn(net.flat.shape, generator=generator)
    found.target.copy_(net.flat + 0.1 * torch.randn(net.flat.shape, generator=generator))
    found.round = LearningRound(scheduled=found.schedules(0.0))
    return found, net


def batch(action: torch.Tensor) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    columns = {name: torch.rand(ROWS, generator=generator) for name in ("reward", "discount", "weight")}
    seen = {name: torch.randn(ROWS, 3, generator=generator) for name in ("obs", "next_obs")}
    return {**columns, **seen, "action": action, "index": torch.arange(ROWS)}


def gradient(algo: Any, net: SpecNet, columns: dict[str, torch.Tensor]) -> tuple[Loss, torch.Tensor]:
    torch.manual_seed(3)
    loss = algo.loss(net, columns)
    assert loss.gradients is not None
    return loss, net.backward(loss.gradients).clone()


def train(algo: str, out: Path, settings: dict[str, Any], env: str = "Pendulum-v1", **how: Any) -> raynforce.Run:
    given = {"steps": 600, "seed": 1, "runtime": "inline", "topology": "sync", "progress": "quiet"} | how
    return raynforce.train(env, algo, out=out, settings=SMALL | {"preset": "none"} | settings, **given)
