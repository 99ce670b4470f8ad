"""Environment steps per second of PPO on CartPole-v1: Raynforce beside Stable-Baselines3, on the same work.

Eight environments of 128 steps, four epochs in minibatches of 256, separate 64-64 tanh networks for actor and critic,
and the same hyper-parameters (`ppo_work.py`); one process and one thread, on one core, in turns.

Counted, on both sides: everything from the end of a warm-up of 8,192 steps to the end of the last update. That is
sampling, advantages, learning, episode statistics, and logging: Raynforce writes its metrics to the run directory as
it always does, Stable-Baselines3 collects its own and, being silent, writes them nowhere. Not counted, on either
side: imports, building, evaluation, checkpoints.

What differs is how each library does the work. Stable-Baselines3 steps single environments in a loop (its
`DummyVecEnv`, each with a `Monitor`) and normalises advantages per minibatch. Raynforce steps gymnasium's own vector
CartPole and normalises per batch. That vector environment spends one step on each reset; such steps are neither
counted nor learned from, so Raynforce takes slightly more optimiser steps for the same number of environment steps.
`--loop` adds a side in which Raynforce steps single environments in a loop as well.

Stable-Baselines3 gets a virtual environment of its own, `.venv-sb3` in the repository's root, made at first use; or
set RAYNFORCE_SB3_PYTHON to a Python that has it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

from benchmarks.measure import Row, Table, command, pinned, ratio, row, run, take_turns
from benchmarks.peers import SB3

BAR = 2.5
Facts = dict[str, Any]


def measure(repeats: int = 3, steps: int = 150_000, loop: bool = False) -> list[Table]:
    """Train with each side in turn, every time in a fresh process."""
    sides: dict[str, Callable[[int], Facts]] = {
        "Raynforce": partial(_train, sys.executable, "raynforce", steps),
        "Stable-Baselines3": partial(_train, SB3.python(), "sb3", steps),
    }
    if loop:
        sides["Raynforce, envs in a loop"] = partial(_train, sys.executable, "raynforce-loop", steps)
    seeds = {name: iter(range(repeats)) for name in sides}

    def turn(name: str) -> Facts:
        return sides[name](next(seeds[name]))

    with pinned():
        results = take_turns(repeats, *(partial(turn, name) for name in sides), label=" / ".join(sides))
    found = dict(zip(sides, results, strict=True))
    title = f"PPO on CartPole-v1, {steps:,} steps, {repeats} turns each, one thread"
    return [Table(title, _rows(found), _notes(found))]


def _rows(found: dict[str, list[Facts]]) -> list[Row]:
    both = ("steps_per_second", "steps_per_cpu_second")
    wall, cpu = ({n: [f[key] for f in fs] for n, fs in found.items()} for key in both)
    rows = [row(name, "steps/s", values) for name, values in wall.items()]
    rows += [row(name, "steps/CPU s", values) for name, values in cpu.items()]
    ours, theirs, *looped = found
    rows.append(ratio(f"{ours} / {theirs}", wall[ours], wall[theirs], bar=("at least", BAR)))
    rows.append(ratio("the same in CPU time", cpu[ours], cpu[theirs]))
    rows += [ratio(f"{name} / {theirs}", wall[name], wall[theirs]) for name in looped]
    return rows


def _notes(found: dict[str, list[Facts]]) -> list[str]:
    notes = []
    for name, facts in found.items():
        updates = median(f["updates_per_step"] for f in facts) * 1000
        returns = median(f["return_mean"] for f in facts)
        notes.append(f"{name}: {updates:.1f} optimiser steps per 1,000 environment steps, final return {returns:.0f}")
    reported = median(f["reported"] for f in found["Raynforce"])
    notes.append(f"Raynforce itself reports {reported:,.0f} steps/s, the warm-up included")
    ours, theirs = (facts[0]["versions"] for facts in list(found.values())[:2])
    if ours != theirs:
        notes.append(f"the sides run on different versions: {ours} and {theirs}")
    return notes


def _train(python: str, side: str, steps: int, seed: int) -> Facts:
    script = [python, "-m", "benchmarks.ppo_work", side]
    facts: Facts = json.loads(run([*script, str(steps), str(seed)]).splitlines()[-1])
    return facts


if __name__ == "__main__":
    command(measure, __doc__ or "")
