"""Short runs, whose weights are to be equal on every processor: `python emulated_runs.py FOLDER` prints their hashes.

A program, because processors are compared that this machine does not have: it is run as it is, and by an emulator.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from raynforce import kernels

if "--native" not in sys.argv:
    kernels.pin()

import raynforce

SHORT: dict[str, Any] = {"runtime": "inline", "topology": "sync", "eval.every": 0, "eval.final_episodes": 0}
FEW: dict[str, Any] = {"sampling.envs": 4, "sampling.fragment": 32, "network.hidden": [64, 64]}
FEW |= {"algorithm.epochs": 2, "algorithm.minibatch_size": 64}
RUNS: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "ppo": ("CartPole-v1", "ppo", 512, FEW),
    "pendulum": ("Pendulum-v1", "ppo", 384, FEW | {"network.normalize_obs": True, "learner.scale_rewards": True}),
    "autograd": ("Acrobot-v1", "ppo", 256, FEW | {"network.activation": "silu"}),
    "impala": ("CartPole-v1", "impala", 384, {"sampling.envs": 4, "sampling.fragment": 32}),
    "dqn": ("CartPole-v1", "dqn", 400, {"algorithm.learning_starts": 200, "algorithm.prioritized": True}),
}


def main(folder: Path) -> None:
    found = {}
    for name, (env, algo, steps, settings) in RUNS.items():
        run = raynforce.train(
            env, algo, steps=steps, out=folder / name, settings=SHORT | settings, config={"preset": "none"},
            progress="quiet",
        )  # fmt: skip
        assert run.result.updates > 0, name
        found[name] = run.result.weights_sha256
        print(f"{name}: {run.result.seconds:.1f} s", file=sys.stderr, flush=True)
    print(json.dumps({"kernels": kernels.kind().kernels, "weights": found}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
