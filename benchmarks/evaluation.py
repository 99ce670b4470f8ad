"""How much evaluation slows the learner down: seconds of each update with evaluations beside it, and without any.

PPO on CartPole-v1, processes with overlap: an evaluator plays 20 greedy episodes every 10,000 steps, as by default, in
a process of its own that steps back for the learner. Both sides train the same steps, to the same weights, and take
turns. The learner's seconds are those that it measures itself; what a machine has too few cores for shows in the steps
per second as well.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from statistics import mean

from benchmarks.measure import Table, command, ratio, row, take_turns
from benchmarks.runs import Trained, train
from benchmarks.settings import TRAINING_ALONE

BAR = 1.03
SETTINGS = TRAINING_ALONE | {"preset": "auto", "log_every": 1, "sampling.samplers": 1, "eval.max_length": 500}
EVALUATING = {"eval.every": 10_000, "eval.episodes": 20}


def measure(repeats: int = 7, steps: int = 200_000) -> list[Table]:
    """Train with and without evaluations in turn."""
    sides = (partial(_train, steps, EVALUATING), partial(_train, steps, {}))
    busy, quiet = take_turns(repeats, *sides, label="evaluation")
    if {run.facts["weights_sha256"] for run in busy + quiet} != {quiet[0].facts["weights_sha256"]}:
        raise SystemExit("evaluation changed what was learned")
    evaluations = [float(sum("eval/return" in line for line in run.metrics) - 1) for run in busy]
    work = [[1e3 * _learner_seconds(run) for run in side] for side in (busy, quiet)]
    speed = [[run.speed for run in side] for side in (busy, quiet)]
    rows = [
        row("evaluations beside training", "", evaluations),
        row("learner, an update beside evaluation", "ms", work[0]),
        row("learner, an update without", "ms", work[1]),
        ratio("beside evaluation / without", work[0], work[1], bar=("at most", BAR)),
        row("speed beside evaluation", "steps/s", speed[0]),
        row("speed without", "steps/s", speed[1]),
        ratio("beside evaluation / without", speed[0], speed[1]),
    ]
    return [Table(f"Evaluation every 10,000 steps, {steps:,} steps, process with overlap, {repeats} turns each", rows)]


def _train(steps: int, more: dict[str, int]) -> Trained:
    return train("CartPole-v1", steps=steps, runtime="process", topology="overlap", settings=SETTINGS | more)


def _learner_seconds(run: Trained) -> float:
    """Mean seconds of work of the learner in a round, by its own clock: its shares of the time between two reports."""
    reports = [line for line in run.metrics if "time/learner/learn" in line]
    found = []
    for before, line in pairwise(reports):
        share = line["time/learner/learn"] + line.get("time/learner/prepare", 0.0)
        found.append(share * (line["time/seconds"] - before["time/seconds"]))
    return mean(found[len(found) // 10 :])  # the first ones warm up


if __name__ == "__main__":
    command(measure, __doc__ or "")
