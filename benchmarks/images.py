"""Networks with convolutions: acting with numpy and with torch side by side, and one update of PPO and of DQN.

Acting: milliseconds of one forward pass of PPO's default network for an image of bytes, stacked frames first, on so
many environments at once, one thread. `raynforce.policies.acting.TORCH_FROM` comes from the ratios.

Learning: milliseconds of one optimiser step (forward, loss, backward, clipping, Adam) on frames of 4x84x84 with one
hidden layer of 512; a minibatch of 256 for PPO, of 64 for DQN, whose loss takes two more forward passes. The backward
pass written out and autograd take turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.measure import Table, command, pinned, ratio, row, take_turns
from raynforce.algos import algorithm_class
from raynforce.experiment import resolve
from raynforce.policies.acting import ActingSpec
from raynforce.policies.numpy_net import NumpyNet
from raynforce.policies.torch_net import SpecNet, TorchActor
from raynforce.roles.learner import Learner
from raynforce.spaces import ActionSpec, EnvSpec, ObsLeaf

SHAPES = ((4, 10, 10), (3, 16, 16), (4, 32, 32), (4, 48, 48), (4, 64, 64), (4, 84, 84))
LANES = (1, 8, 32)
ACTIONS = 6


def measure(repeats: int = 15) -> list[Table]:
    torch.set_num_threads(1)
    with pinned():
        return [_acting(repeats), _learning(repeats)]


def _layers(algo: str, **more: Any) -> dict[str, Any]:
    return {"env": "images", "algo": algo, "preset": "none", "learner": {"device": "cpu", "threads": 1}, **more}


def _env(shape: tuple[int, ...]) -> EnvSpec:
    action = ActionSpec("discrete", (), "int64", sizes=(ACTIONS,), start=(0,))
    return EnvSpec("images", (ObsLeaf("obs", "box", shape, "uint8"),), action)


def _acting(repeats: int) -> Table:
    rows = []
    rng = np.random.default_rng(0)
    for shape in SHAPES:
        spec: ActingSpec = algorithm_class("ppo")(resolve(_layers("ppo"))[0], _env(shape)).acting()
        params = spec.network.initial(rng)
        nets = NumpyNet(spec.network, ("policy",)), TorchActor(spec)
        for net in nets:
            net.load(params)
        millions = spec.network.conv_products / 1e6
        for lanes in LANES:
            obs = {"obs": rng.integers(256, size=(lanes, *shape)).astype(np.uint8)}
            times = max(2, int(60 / (1 + lanes * millions)))
            sides = [lambda net=net, obs=obs, times=times: _milliseconds(lambda: net(obs), times) for net in nets]
            take_turns(1, *sides)
            with_numpy, with_torch = take_turns(repeats, *sides)
            name = f"{'x'.join(map(str, shape))} ({millions:.1f} million products), {lanes} envs"
            rows += [row(f"{name}: numpy", "ms", with_numpy), row(f"{name}: torch", "ms", with_torch)]
            rows.append(ratio(f"{name}: numpy / torch", with_numpy, with_torch))
    return Table("One forward pass to act", rows)


def _milliseconds(call: Callable[[], object], times: int) -> float:
    began = time.process_time()  # on one thread, so that others who use the machine count less
    for _ in range(times):
        call()
    return (time.process_time() - began) / times * 1e3


def _learning(repeats: int) -> Table:
    rows = []
    for algo, size in (("ppo", 256), ("dqn", 64)):
        more: dict[str, Any] = {"network": {"hidden": [512], "activation": "relu"}}
        if algo == "dqn":
            more["algorithm"] = {"buffer_size": 2_000}
        learner = Learner(resolve(_layers(algo, **more))[0], _env((4, 84, 84)))
        net, minibatch = learner._net, _minibatch(size)
        assert isinstance(net, SpecNet)

        def update(by_hand: bool, learner: Learner = learner, net: SpecNet = net, minibatch: Any = minibatch) -> float:
            net._by_hand = by_hand
            step = lambda: learner.apply(learner.gradients(learner._algo.loss(net, minibatch)), 1e-4)  # noqa: E731
            return _milliseconds(step, 1)

        sides = (lambda update=update: update(False), lambda update=update: update(True))
        take_turns(1, *sides)
        autograd, by_hand = take_turns(repeats, *sides)
        rows += [row(f"{algo}, {size} samples: autograd", "ms", autograd), row("the same: written out", "ms", by_hand)]
        rows.append(ratio("autograd / written out", autograd, by_hand))
    return Table("One update on frames of 4x84x84", rows)


def _minibatch(size: int) -> dict[str, torch.Tensor]:
    """Columns for either algorithm."""
    rng = np.random.default_rng(0)
    frames = [torch.from_numpy(rng.integers(256, size=(size, 4, 84, 84)).astype(np.uint8)) for _ in range(2)]
    numbers = {k: torch.from_numpy(rng.standard_normal(size, dtype=np.float32)) for k in ("advantage", "returns")}
    constants = {
        "logp": -1.8,
        "floor": 0.8,
        "ceiling": 1.2,
        "value": 0.0,
        "reward": 1.0,
        "discount": 0.9,
        "weight": 1.0,
    }
    return {
        "obs": frames[0],
        "next_obs": frames[1],
        "action": torch.from_numpy(rng.integers(ACTIONS, size=size)),
        **numbers,
        **{k: torch.full((size,), float(v)) for k, v in constants.items()},
    }


if __name__ == "__main__":
    command(measure, __doc__ or "")
