"""A slow CartPole, 64 environments: what PPO takes to solve it with topology `central`, in steps and in seconds.

Each step sleeps 5 to 25 ms (`slow_envs.SlowCartPole`). Three ways to step the same 64 environments on runtime
`process`, all with the same settings, those of the preset for CartPole-v1, with fragments of `--fragment` steps:
`central`, whose hosts (`--hosts`) step them in threads, whoever is ready; `sync` with 8 samplers that step 8 each, one
after another; and a lockstep, `sync` with as many samplers as there are hosts, whose environments take each step side
by side, in threads, and wait for the slowest. Every way, a round learns from 64 fragments, or about as many steps.

Solved is a policy version whose 20 greedy episodes have a mean return of 475 or more; a version is evaluated after
every 5,000 steps, beside training, by a process whose environments do not sleep. Counted are the steps and the seconds
until that version was there, from the start of the process, start-up included; how long its evaluation took is not.
A run that has not solved it after `--steps` counts with what it took until then.

RLlib is measured beside, with the same number of environments and the same settings, in the faster of its ways to step
them: `--runners` runners with a process for each environment (see `central_vs_rllib`). It is evaluated in the same way,
while its clock stands still. `--beside nobody` leaves it out.

The sides take turns, with another seed in each.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from benchmarks.measure import ROOT, Bar, Table, command, ratio, row, take_turns
from benchmarks.peers import RLLIB
from benchmarks.runs import apart, train, watched
from raynforce.algos.presets import PRESETS
from raynforce.envs.vector import derive_seed

ENVS, TARGET, EVERY = 64, 475.0, 5_000
STEP = 0.015  # mean seconds of a step
STEPS_BAR: Bar = ("at most", 1.3)
SYNC_BAR: Bar = ("at least", 3.0)
LOCKSTEP_BAR: Bar = ("at least", 1.3)
CENTRAL, SYNC, LOCKSTEP = "central", "sync, 8 samplers × 8 envs", "lockstep of 64 envs"
RLLIB_ASYNC = "RLlib, async"
TOPOLOGIES = {CENTRAL: "central", SYNC: "sync", LOCKSTEP: "sync"}


class Solved(NamedTuple):
    """What a run took."""

    steps: float
    seconds: float
    solved: bool
    speed: float
    """Environment steps per second."""
    up: float
    """Seconds to the first update, which are part of those that it took."""


def measure(
    seeds: int = 5, fragment: int = 64, hosts: int = 2, steps: int = 400_000, runners: int = 2, beside: str = "rllib"
) -> list[Table]:
    """Train each way in turn, with one seed after the other."""
    sides = {CENTRAL: hosts, SYNC: 8, LOCKSTEP: hosts}
    next_seed = {name: iter(range(seeds)) for name in sides}
    turns: list[Callable[[], Solved]] = [
        partial(_turn, name, samplers, next_seed[name], fragment, steps) for name, samplers in sides.items()
    ]
    if beside == "rllib":
        sides[RLLIB_ASYNC] = runners
        turns.append(partial(_theirs, runners, iter(range(seeds)), fragment, steps))
    found = dict(zip(sides, take_turns(seeds, *turns, label=" / ".join(sides)), strict=True))
    taken = {name: [one.steps for one in ones] for name, ones in found.items()}
    lasted = {name: [one.seconds for one in ones] for name, ones in found.items()}
    rows = [row(f"{name}: solved after", "steps", values) for name, values in taken.items()]
    rows += [row(f"{name}: solved after", "s", values) for name, values in lasted.items()]
    rows += [row(f"{name}: first update after", "s", [one.up for one in ones]) for name, ones in found.items()]
    rows += [row(f"{name}: speed", "steps/s", [one.speed for one in ones]) for name, ones in found.items()]
    rows.append(ratio(f"steps, {CENTRAL} / sync", taken[CENTRAL], taken[SYNC], bar=STEPS_BAR))
    rows.append(ratio(f"seconds, sync / {CENTRAL}", lasted[SYNC], lasted[CENTRAL], bar=SYNC_BAR))
    rows.append(ratio(f"seconds, lockstep / {CENTRAL}", lasted[LOCKSTEP], lasted[CENTRAL], bar=LOCKSTEP_BAR))
    if beside == "rllib":
        rows.append(ratio(f"seconds, RLlib / {CENTRAL}", lasted[RLLIB_ASYNC], lasted[CENTRAL]))
    notes = [f"{name}: {sum(one.solved for one in ones)} of {seeds} runs solved it" for name, ones in found.items()]
    return [Table(f"PPO on CartPole-v1 with steps of 5 to 25 ms, {ENVS} envs, {seeds} seeds each", rows, notes)]


def _turn(name: str, samplers: int, seeds: Any, fragment: int, steps: int) -> Solved:
    seed, envs, topology = next(seeds), ENVS // samplers, TOPOLOGIES[name]
    lanes = [(0, lane) for lane in range(ENVS)]
    if topology == "sync":
        lanes = [(sampler, lane) for sampler in range(samplers) for lane in range(envs)]
    settings = dict(PRESETS["ppo", "CartPole-v1"]) | {
        "seed": seed,
        "target": TARGET,
        "eval.every": EVERY,
        "eval.episodes": 20,
        "eval.max_length": 500,
        "sampling.samplers": samplers,
        "sampling.envs": envs,
        "sampling.fragment": fragment,
        "sampling.parallel": "no" if name == SYNC else "threads",
        "env_args.slow_seeds": [derive_seed(seed, *lane, 0) for lane in lanes],
        "log_every": 1,  # a line of metrics for each round
    }
    env = "benchmarks.slow_envs:SlowCartPole"
    run = train(env, steps=steps, runtime="process", topology=topology, settings=settings)
    if run.speed > ENVS / STEP:
        raise SystemExit(f"{name}: {run.speed:,.0f} steps per second are more than slow environments can take")
    solved = run.facts["solved_steps"]
    lines = [line for line in run.metrics if "charts/updates" in line and (solved is None or line["step"] <= solved)]
    return Solved(lines[-1]["step"], lines[-1]["time/seconds"], solved is not None, run.speed, run.startup)


def _theirs(runners: int, seeds: Any, fragment: int, steps: int) -> Solved:
    script = [RLLIB.python(), str(ROOT / "benchmarks" / "central_learning_rllib_work.py")]
    sizes = next(seeds), runners, ENVS // runners, fragment, steps, EVERY, TARGET
    with apart() as environment:
        printed = watched([*script, *map(str, sizes), "async"], environment)
    return Solved(**json.loads(printed.splitlines()[-1]))


if __name__ == "__main__":
    command(measure, __doc__ or "")
