"""What portable kernels cost: training with `kernels: portable`, which holds numpy and torch to AVX2, beside `native`.

PPO and DQN on CartPole-v1, and PPO on images, with the default networks, inline: everything is in one process. The two
take turns. A ratio above 1 says that portable kernels are faster. Steps per second of CPU time are those of the whole
process, start-up included: look at them on a machine that is busy with other things. On a processor without AVX-512
both choose nearly the same.
"""

from __future__ import annotations

import resource
from functools import partial
from typing import Any, NamedTuple

from benchmarks.measure import Table, command, ratio, row, take_turns
from benchmarks.runs import train

BAR = 0.95
PICTURES = "benchmarks.envs:Pictures"


class Work(NamedTuple):
    """What is trained, and how long."""

    name: str
    env: str
    algo: str
    steps: int
    settings: dict[str, Any]


WORK = (
    Work("PPO on CartPole-v1", "CartPole-v1", "ppo", 200_000, {"preset": "auto"}),
    Work("DQN on CartPole-v1", "CartPole-v1", "dqn", 40_000, {"preset": "auto"}),
    Work("PPO on images of 16x16x3", PICTURES, "ppo", 8_192, {"env_args.shape": [16, 16, 3]}),
    Work("PPO on images of 84x84x4", PICTURES, "ppo", 1_024, {"env_args.shape": [84, 84, 4], "sampling.fragment": 32}),
)


def measure(repeats: int = 7) -> list[Table]:
    """Train with portable and native kernels in turn."""
    tables = []
    for work in WORK:
        sides = (partial(_speed, work, "portable"), partial(_speed, work, "native"))
        portable, native = take_turns(repeats, *sides, label=work.name)
        rows = []
        for index, unit in enumerate(("steps/s", "steps/CPU s")):
            held, free = ([speed[index] for speed in side] for side in (portable, native))
            rows += [row("portable", unit, held), row("native", unit, free)]
            rows.append(ratio("portable / native", held, free, bar=("at least", BAR)))
        tables.append(Table(f"{work.name}, {work.steps:,} steps, {repeats} turns each", rows))
    return tables


def _speed(work: Work, kernels: str) -> tuple[float, float]:
    """Steps per second of training, and per second of CPU time."""
    before = _cpu_seconds()
    run = train(work.env, algo=work.algo, steps=work.steps, settings={**work.settings, "kernels": kernels})
    return run.speed, work.steps / (_cpu_seconds() - before)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    command(measure, __doc__ or "")
