"""Environment steps and updates per second of distributed DQN on Ray: Raynforce beside a parameter server.

Raynforce trains on CartPole-v1 with topology `replay` on runtime `ray`, two samplers of 64 environments and the buffer
in the learner. The other side is the script `--baseline`, a DQN with a parameter server as tutorials write it: two
workers send each step to a buffer actor, and a trainer asks that actor for each batch. It is run as it is, for
`--seconds` at a time; if it is not there, Raynforce is measured alone.

Both learn with a 4-24-48-2 relu network, batches of 64 drawn uniformly, one-step targets from a target network that is
copied every 1,000 updates, and Adam at 1e-3. What differs: Raynforce uses the Huber loss and clips gradients, the
script has the squared loss alone; and Raynforce learns from each transition 0.9 times on average, which its limiter
holds, the script as often as it can.

Counted, on both sides: what is done in a second once it runs. Raynforce reports it in its metrics, from step 50,000
on; what the script counts is divided by the time since its first step.
"""

from __future__ import annotations

import json
import math
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.measure import Row, Table, command, ratio, row, take_turns
from benchmarks.runs import apart, held, train, watched

BARS = {"env steps": (30_000, 50), "updates": (400, 100)}  # a second, and beside the parameter server
WARM_UP = 50_000  # environment steps before the clock starts
PER_INSERT = 0.9
ROLES = ("time/sampler/", "time/learner/")
SETTINGS = {
    "sampling.samplers": 2,
    "sampling.envs": 64,
    "sampling.fragment": 64,
    "network.hidden": [24, 48],
    "algorithm.learning_rate": 1e-3,
    "algorithm.batch_size": 64,
    "algorithm.samples_per_insert": PER_INSERT,
    "algorithm.n_step": 1,
    "algorithm.double": False,
    "algorithm.target_every": 1000,
    "log_every": 20_000,
}


class Turn(NamedTuple):
    """What a side did."""

    steps: float
    """Environment steps per second."""
    updates: float
    """Updates per second."""
    note: str
    kept: float = 1.0
    """Samples per insert, measured / set."""


def measure(repeats: int = 3, steps: int = 500_000, seconds: int = 60, baseline: str = "") -> list[Table]:
    """Train with each side in turn."""
    sides = {"Raynforce": partial(_ours, steps)}
    there = Path(baseline).is_file()
    if there:
        sides["parameter server"] = partial(_theirs, baseline, seconds)
    found = dict(zip(sides, take_turns(repeats, *sides.values(), label=" / ".join(sides)), strict=True))
    rows = _rates("env steps", "steps/s", {name: [turn.steps for turn in turns] for name, turns in found.items()})
    rows += _rates("updates", "updates/s", {name: [turn.updates for turn in turns] for name, turns in found.items()})
    kept = [turn.kept for turn in found["Raynforce"]]
    rows.append(held(row("samples per insert, measured / set", "ratio", kept), ("at least", 0.9)))
    notes = [f"{name}: {turn.note}" for name, turns in found.items() for turn in turns]
    if not there:
        notes.append("no parameter server was measured: give the path of its script with --baseline")
    return [Table(f"DQN on CartPole-v1, on Ray, batches of 64, {repeats} turns each", rows, notes)]


def _rates(what: str, unit: str, found: dict[str, list[float]]) -> list[Row]:
    least, times = BARS[what]
    ours, *others = found
    rows = [held(row(f"{ours}, {what}", unit, found[ours]), ("at least", least))]
    for name in others:
        rows.append(row(f"{name}, {what}", unit, found[name]))
        rows.append(ratio(f"{what}, {ours} / {name}", found[ours], found[name], bar=("at least", times)))
    return rows


def _ours(steps: int) -> Turn:
    found = train("CartPole-v1", algo="dqn", steps=WARM_UP + steps, runtime="ray", topology="replay", settings=SETTINGS)
    steady = found.after(WARM_UP)
    last, loss = steady.last, steady.last["losses/td_loss"]
    if not math.isfinite(loss):
        raise SystemExit(f"training diverged: the loss is {loss}")
    shares = {name.removeprefix("time/"): share for name, share in last.items() if name.startswith(ROLES)}
    spent = ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.05)
    note = f"loss {loss:.2g}, return {found.facts['return_mean']:.0f}; {spent}"
    return Turn(steady.steps, steady.updates, note, last["replay/samples_per_insert"] / PER_INSERT)


def _theirs(path: str, seconds: int) -> Turn:
    with apart() as environment:
        ask = [sys.executable, "-m", "benchmarks.parameter_server", path, str(seconds)]
        *_, said, printed = watched(ask, environment).splitlines()
    facts = json.loads(printed)
    return Turn(facts["steps"], facts["updates"], f"says {said!r} itself, with {facts['startup']:.1f} s to start")


if __name__ == "__main__":
    command(measure, __doc__ or "")
