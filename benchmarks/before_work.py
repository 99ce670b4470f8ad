"""One side of `before`: trains with whichever Raynforce is found first.

    PYTHONPATH=TREE python benchmarks/before_work.py ppo|dqn|impala STEPS SEED

Prints one JSON object. It imports nothing of this folder, which an older tree does not have.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ALONE: dict[str, Any] = {"preset": "none", "runtime": "inline", "learner.threads": 1, "sampling.envs": 8}
ALONE |= {"eval.every": 0, "eval.episodes": 1, "eval.max_length": 1, "eval.final_episodes": 0}
ALONE |= {"checkpoint.every": 0, "checkpoint.seconds": 0, "network.hidden": [64, 64]}
PLAIN = {"network.normalize_obs": False, "learner.scale_rewards": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "ppo": {
        "topology": "sync",
        "sampling.fragment": 128,
        "algorithm.epochs": 4,
        "algorithm.minibatch_size": 256,
        **PLAIN,
    },
    "dqn": {"topology": "sync", "sampling.fragment": 16},
    "impala": {"topology": "async", "sampling.fragment": 20},
}
WARM_UP = 8_192  # environment steps before the clock starts


def work(algo: str, steps: int, seed: int) -> dict[str, Any]:
    import raynforce

    marks: list[tuple[float, int]] = []

    def note(status: Any) -> None:
        if status.steps >= WARM_UP:
            marks.append((time.process_time(), status.steps))

    how: dict[str, Any] = {"settings": ALONE | SETTINGS[algo], "callbacks": [note], "progress": "quiet", "seed": seed}
    with TemporaryDirectory() as folder:
        done = raynforce.train("CartPole-v1", algo, steps=WARM_UP + steps, out=f"{folder}/run", **how)
    (began, first), (ended, last) = marks[0], marks[-1]
    tree = str(Path(raynforce.__file__).parents[1])
    rate = (last - first) / (ended - began)
    return {"steps_per_cpu_second": rate, "weights": done.result.weights_sha256, "tree": tree}


if __name__ == "__main__":
    print(json.dumps(work(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
