"""One sampler of eight made ten times slower: how much of the speed is left, with async and with sync.

Steps only sleep (2 ms), so eight samplers fit on two cores; a fragment of 64 takes about 130 ms, the slow sampler's
about 1.3 s. Whoever does not wait for it keeps at most 7.1 / 8 = 89 % of the speed; whoever does falls to 10 %.
Even and uneven runs take turns. Steps that were sampled and thrown away because they had become too old do not count
as speed.
"""

from __future__ import annotations

from functools import partial

from benchmarks.measure import Bar, Table, command, ratio, row, take_turns
from benchmarks.runs import Trained, train
from raynforce.envs.vector import derive_seed

BAR = 0.85
SAMPLERS, FRAGMENT, SLEEP, SEED = 8, 64, 0.002, 0
SLOW_SAMPLER = 3
SECONDS = {"async": 8, "sync": 4}  # of training
SIDES = (("process", "async"), ("ray", "async"), ("process", "sync"))


def measure(repeats: int = 3) -> list[Table]:
    """Train with even and with uneven samplers, in turns; what has no bar takes one turn."""
    rows, notes = [], []
    for runtime, topology in SIDES:
        name = f"{runtime}, {topology}"
        bar: Bar | None = ("at least", BAR) if (runtime, topology) == SIDES[0] else None
        turns = [partial(_train, runtime, topology, slow) for slow in (False, True)]
        even, uneven = take_turns(repeats if bar else 1, *turns, label=name)
        speeds = [[t.speed for t in side] for side in (even, uneven)]
        rows += [row(f"{name}: {kind}", "steps/s", v) for kind, v in zip(("even", "uneven"), speeds, strict=True)]
        rows.append(ratio(f"{name}: uneven / even", speeds[1], speeds[0], bar=bar))
        dropped = sum(t.facts["dropped_steps"] for t in uneven) / sum(t.facts["steps"] for t in uneven)
        notes.append(f"{name}: {dropped:.1%} of the uneven runs' steps were dropped as too old")
    return [Table(f"IMPALA, one of {SAMPLERS} samplers ten times slower, {repeats} turns each", rows, notes)]


def _train(runtime: str, topology: str, slow: bool) -> Trained:
    rate = SAMPLERS / SLEEP * (0.1 if slow and topology == "sync" else 1)
    settings = {
        "seed": SEED,
        "sampling.samplers": SAMPLERS,
        "sampling.envs": 1,
        "sampling.fragment": FRAGMENT,
        "env_args.seconds": SLEEP,
        "env_args.slow_seed": derive_seed(SEED, SLOW_SAMPLER, 0, 0) if slow else None,
        "ray.sampler_cpus": 0.1,  # it sleeps
        "log_every": SAMPLERS * FRAGMENT,
    }
    return train(
        "benchmarks.envs:Sleeping",
        steps=int(rate * SECONDS[topology]),
        algo="impala",
        runtime=runtime,
        topology=topology,
        settings=settings,
    )


if __name__ == "__main__":
    command(measure, __doc__ or "")
