"""What overlap gains where sampling costs as much as learning: steps per second beside inline, one after the other.

The environment is CartPole with a loop in `step` whose number of turns is found first, such that one round's sampling
takes as long as its learning (`time/sample` and `time/learn` of inline runs). A loop needs a core, so what two
processes take from each other shows. PPO, one sampler with 8 environments of 128 steps, 10 epochs in minibatches of
256; all sides train the same number of rounds and take turns. Twice as fast is the limit. How much of that limit a
machine gives at the moment is measured in the same turns, with two processes that do nothing but the loop.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from statistics import mean

from benchmarks.measure import ROOT, Table, command, ratio, row, take_turns
from benchmarks.runs import Trained, train

BAR = 1.6
ENV = "benchmarks.envs:Burning"
ENVS, FRAGMENT = 8, 128
SETTINGS = {
    "sampling.envs": ENVS,
    "sampling.fragment": FRAGMENT,
    "algorithm.epochs": 10,
    "algorithm.minibatch_size": 256,
}
PARTS = ("sample", "learn")
SIDES = (("inline", "sync"), ("process", "overlap"), ("process", "sync"), ("ray", "overlap"))
LOOP = "from time import monotonic as t; from benchmarks.envs import burn; a = t(); burn(30_000_000); print(t() - a)"


def measure(repeats: int = 5, rounds: int = 80) -> list[Table]:
    """Find the work of a step, then train with each side in turn."""
    work = calibrate()
    loops: list[float] = []

    def turn(runtime: str, topology: str) -> Trained:
        if runtime == "inline":
            loops.append(_two_loops())
        return burning(work, rounds, runtime, topology)

    found = dict(zip(SIDES, take_turns(repeats, *(partial(turn, *s) for s in SIDES), label="overlap"), strict=True))
    speed = {side: [t.speed for t in trained] for side, trained in found.items()}
    base = speed["inline", "sync"]
    rows = []
    for part in PARTS:
        milliseconds = [1e3 * trained.median(f"time/{part}") for trained in found["inline", "sync"]]
        rows.append(row(f"inline, time/{part} of a round", "ms", milliseconds))
    rows += [row(f"{runtime}, {topology}", "steps/s", values) for (runtime, topology), values in speed.items()]
    rows.append(ratio("process overlap / inline", speed["process", "overlap"], base, bar=("at least", BAR)))
    rows.append(ratio("process sync / inline", speed["process", "sync"], base))
    rows.append(ratio("ray overlap / inline", speed["ray", "overlap"], base))
    rows.append(row("two loops at once / one", "ratio", loops, "what two cores give here"))
    gains = [a / b for a, b in zip(speed["process", "overlap"], base, strict=True)]
    notes = [f"two loops gave {x:.2f}, overlap in the same turn {y:.2f}" for x, y in zip(loops, gains, strict=True)]
    title = f"Overlap, {work:,} turns of a loop in each step, {rounds} rounds, {repeats} turns each"
    return [Table(title, rows, notes)]


def calibrate() -> int:
    """Turns of the loop with which a round's sampling takes as long as its learning."""
    idle, busy = 0, 2000
    pairs = take_turns(2, partial(burning, idle, 20), partial(burning, busy, 20), label="calibrating")
    (without, by_idle), (with_loop, by_busy) = (
        tuple(mean(t.median(f"time/{part}") for t in side) for part in PARTS) for side in pairs
    )
    per_turn = (with_loop - without) / (busy - idle)
    return max(0, round((mean((by_idle, by_busy)) - without) / per_turn))


def burning(work: int, rounds: int, runtime: str = "inline", topology: str = "sync") -> Trained:
    """Train on the environment with so much work in each step."""
    settings = SETTINGS | {"env_args.work": work}
    return train(ENV, steps=rounds * ENVS * FRAGMENT, runtime=runtime, topology=topology, settings=settings)


def _two_loops() -> float:
    """How many times as much two processes get done as one."""
    alone, together = _loops(1), _loops(2)
    return 2 * alone / together


def _loops(count: int) -> float:
    """Mean seconds that a loop takes in each of `count` processes at once."""
    command = [sys.executable, "-c", LOOP]
    running = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    return mean(float(process.communicate(timeout=120)[0]) for process in running)


if __name__ == "__main__":
    command(measure, __doc__ or "")
