"""RLlib's side of `rllib_engine`: the script that `raynforce train … --engine rllib --print-config` prints, timed.

    python rllib_engine_work.py SCRIPT STEPS WARMUP CPUS BEGAN

The config is the script's own; its loop is repeated here with a clock. BEGAN is when this process was started, on the
monotonic clock. It is run by path, so nothing of Raynforce is imported. The last line that is printed is JSON.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

TRAINED = "num_module_steps_trained_lifetime"


def main(script: str, steps: int, warmup: int, cpus: int, began: float) -> None:
    import torch

    torch.set_num_threads(1)  # as Raynforce's learner by default
    found: dict[str, Any] = {"__name__": "experiment"}
    exec(compile(Path(script).read_text(), script, "exec"), found)
    ray, config = found["ray"], found["config"]
    ray.init(num_cpus=cpus, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    algo = config.build_algo()
    startup: float | None = None
    clock: list[tuple[int, float]] = []
    while not clock or clock[-1][0] < steps:
        result = algo.train()
        clock.append((int(result["num_env_steps_sampled_lifetime"]), time.monotonic()))
        learners = result.get("learners") or {}
        if startup is None and (learners.get("default_policy") or {}).get(TRAINED):
            startup = clock[-1][1] - began
    steady = [(step, at) for step, at in clock if step >= warmup]
    (first, since), (last, until) = steady[0], steady[-1]
    facts = {"startup_seconds": startup, "steps_per_second": (last - first) / (until - since), "steps": last}
    facts["return_mean"] = result["env_runners"].get("episode_return_mean")
    algo.stop()
    ray.shutdown()
    print(json.dumps(facts))


if __name__ == "__main__":
    steps, warmup, cpus = map(int, sys.argv[2:5])
    main(sys.argv[1], steps, warmup, cpus, float(sys.argv[5]))
