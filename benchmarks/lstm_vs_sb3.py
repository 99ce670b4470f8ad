"""Environment steps per second of PPO with an LSTM, on CartPole without velocities: Raynforce beside sb3-contrib.

Equal on both sides (`lstm_work.py`): eight environments of 128 steps, four epochs in minibatches of 256, sequences of
128 steps, one LSTM of 64 that actor and critic share and a hidden layer of 64, the same hyper-parameters, one process
and one thread, on one core. The sides take turns, each time in a fresh process. What differs: the hidden layer comes
before the LSTM here, and after it, one for each of actor and critic, in sb3-contrib's RecurrentPPO.

Counted: everything from the end of a warm-up of 2,048 steps on: sampling, advantages, learning, episode statistics and
logging. Not counted: imports, building, evaluation, checkpoints. Steps per second of CPU time stand beside it.

sb3-contrib gets a virtual environment of its own, `.venv-contrib` in the repository's root, made at first use; or set
RAYNFORCE_CONTRIB_PYTHON to a Python that has it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

from benchmarks.measure import Table, command, pinned, ratio, row, run, take_turns
from benchmarks.peers import CONTRIB

BAR = 2.5
Facts = dict[str, Any]


def measure(repeats: int = 3, steps: int = 20_480) -> list[Table]:
    """Train with each side in turn, every time in a fresh process."""
    sides: dict[str, Callable[[int], Facts]] = {
        "Raynforce": partial(_train, sys.executable, "raynforce", steps),
        CONTRIB.title: partial(_train, CONTRIB.python(), "contrib", steps),
    }
    seeds = {name: iter(range(repeats)) for name in sides}

    def turn(name: str) -> Facts:
        return sides[name](next(seeds[name]))

    with pinned():
        results = take_turns(repeats, *(partial(turn, name) for name in sides), label=" / ".join(sides))
    found = dict(zip(sides, results, strict=True))
    both = ("steps_per_second", "steps_per_cpu_second")
    wall, cpu = ({n: [f[key] for f in fs] for n, fs in found.items()} for key in both)
    rows = [row(name, "steps/s", values) for name, values in wall.items()]
    rows += [row(name, "steps/CPU s", values) for name, values in cpu.items()]
    ours, theirs = sides
    rows.append(ratio(f"{ours} / {theirs}", wall[ours], wall[theirs], bar=("at least", BAR)))
    rows.append(ratio("the same in CPU time", cpu[ours], cpu[theirs]))
    title = f"PPO with an LSTM on CartPole without velocities, {steps:,} steps, {repeats} turns each, one thread"
    return [Table(title, rows, [f"{name}: final return {_returns(facts):.0f}" for name, facts in found.items()])]


def _returns(facts: list[Facts]) -> float:
    return median(each["return_mean"] for each in facts)


def _train(python: str, side: str, steps: int, seed: int) -> Facts:
    script = [python, "-m", "benchmarks.lstm_work", side]
    facts: Facts = json.loads(run([*script, str(steps), str(seed)]).splitlines()[-1])
    return facts


if __name__ == "__main__":
    command(measure, __doc__ or "")
