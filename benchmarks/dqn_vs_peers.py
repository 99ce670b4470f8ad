"""Environment steps per second of DQN on CartPole-v1: Raynforce beside Stable-Baselines3 and RLlib, on the same work.

Equal on all sides (`dqn_work.py`): a 64-64 relu network, batches of 64 drawn uniformly from a buffer of 100,000, one
update for every four environment steps, learning from step 1,000 on, one-step targets, the Huber loss, no double or
dueling networks, a target copied every 250 updates, gradients clipped at 10, Adam at 1e-3, epsilon from 1 to 0.05, one
torch thread. The sides take turns, each time in a fresh process.

Raynforce steps 16 environments: inline, where all takes turns in one process, and with topology `replay` on runtimes
`process` and `ray`, where that is done beside learning; the fastest of these stands in the ratio. So does the fastest
peer. Stable-Baselines3, which has one process, is measured with 4 environments and an update after each step of them
all, and with 16 and four updates; with one it is slower. RLlib (new API stack, environments and learner in one process)
has 64 environments of 4 steps between two stretches of learning; with fewer, or with one or two environment runners in
processes of their own, it is slower. It takes some steps more than it counts its updates by when episodes end.

Counted: what is done in a second from the end of a warm-up of 2,000 steps on, logging included. Not counted: imports,
building, evaluation, checkpoints. Where a side is one process, steps per second of CPU time stand beside it: other
work on the machine hardly moves that figure.

Each peer gets a virtual environment of its own, `.venv-sb3` and `.venv-rllib` in the repository's root, made at first
use; or set RAYNFORCE_SB3_PYTHON and RAYNFORCE_RLLIB_PYTHON to Pythons that have them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

from benchmarks.measure import Table, command, ratio, row, take_turns
from benchmarks.peers import RLLIB, SB3, Peer
from benchmarks.runs import apart, watched

BAR = 3.0
INLINE = "Raynforce, inline"
RUNTIMES = {INLINE: "inline", "Raynforce, process": "process", "Raynforce, ray": "ray"}
ENVS, SB3_ENVS, RLLIB_ENVS = 16, (4, 16), 64
Facts = dict[str, Any]


def measure(repeats: int = 3, steps: int = 40_000) -> list[Table]:
    """Train with each side in turn; peers take fewer steps, so that all take about as long."""
    sides: dict[str, Callable[[int], Facts]] = {}
    for envs in SB3_ENVS:
        sides[f"{SB3.title}, {envs} envs"] = partial(_train, SB3, SB3.name, steps // 4, envs)
    sides |= {name: partial(_train, None, runtime, steps, ENVS) for name, runtime in RUNTIMES.items()}
    sides[RLLIB.title] = partial(_train, RLLIB, RLLIB.name, steps // 16, RLLIB_ENVS)
    seeds = {name: iter(range(repeats)) for name in sides}

    def turn(name: str) -> Facts:
        return sides[name](next(seeds[name]))

    turns = take_turns(repeats, *(partial(turn, name) for name in sides), label=" / ".join(sides))
    found = dict(zip(sides, turns, strict=True))
    wall, cpu = (
        {n: [f[f"steps_per_{key}"] for f in fs] for n, fs in found.items()} for key in ("second", "cpu_second")
    )
    ours = max(RUNTIMES, key=lambda name: median(wall[name]))
    peer = max(wall.keys() - RUNTIMES.keys(), key=lambda name: median(wall[name]))
    rows = [row(name, "steps/s", values) for name, values in wall.items()]
    rows += [row(name, "steps/CPU s", cpu[name]) for name in found if name == INLINE or name not in RUNTIMES]
    rows.append(ratio(f"{ours} / {peer}", wall[ours], wall[peer], bar=("at least", BAR)))
    rows += [ratio(f"{name} / {peer}", wall[name], wall[peer]) for name in RUNTIMES if name != ours]
    rows.append(ratio(f"{INLINE} / {peer}, in CPU time", cpu[INLINE], cpu[peer]))
    rows.append(ratio(f"{ours} / {RLLIB.title}", wall[ours], wall[RLLIB.title]))
    return [Table(f"DQN on CartPole-v1, {steps:,} steps, {repeats} turns each", rows, _notes(found))]


def _notes(found: dict[str, list[Facts]]) -> list[str]:
    notes, versions = [], found[INLINE][0]["versions"]
    for name, turns in found.items():
        updates = median(facts["updates_per_step"] for facts in turns) * 1000
        returns = median(facts["return_mean"] for facts in turns)
        other = {k: v for k, v in turns[0]["versions"].items() if v != versions[k]}
        notes.append(f"{name}: {updates:.0f} updates per 1,000 environment steps, final return {returns:.0f}")
        notes[-1] += "".join(f", with {k} {v}, not {versions[k]}" for k, v in other.items())
    return notes


def _train(peer: Peer | None, side: str, steps: int, envs: int, seed: int) -> Facts:
    script = [sys.executable if peer is None else peer.python(), "-m", "benchmarks.dqn_work"]
    with apart() as environment:
        printed = watched([*script, side, *map(str, (steps, seed, envs))], environment)
    facts: Facts = json.loads(printed.splitlines()[-1])
    return facts


if __name__ == "__main__":
    command(measure, __doc__ or "")
