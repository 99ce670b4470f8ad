"""How far a run with a target trains beyond what it needs: steps trained and seconds, each runtime beside inline.

PPO on CartPole-v1 with its preset until 20 greedy episodes average at least 475, as the README's commands have it.
Inline, a version is evaluated between two rounds, so training ends where the target is met. Elsewhere an evaluator
plays beside training, which goes on meanwhile. All have the same settings. Counted are all steps that were trained
until the run ended. The sides take turns, with another seed in each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.measure import Bar, Table, command, ratio, row, take_turns
from benchmarks.runs import Trained, train

TARGET = 475.0
BAR: Bar = ("at most", 2.0)
SIDES = {
    "inline": ("inline", "sync", 8),
    "process, overlap": ("process", "overlap", 8),
    "ray, sync": ("ray", "sync", 8),
    "process, central": ("process", "central", 8),
}


def measure(seeds: int = 5) -> list[Table]:
    """Train each way in turn, with one seed after the other."""
    turns: list[Callable[[], Trained]] = [partial(_turn, name, iter(range(seeds))) for name in SIDES]
    found = dict(zip(SIDES, take_turns(seeds, *turns, label=" / ".join(SIDES)), strict=True))
    steps = {name: [float(run.facts["steps"]) for run in runs] for name, runs in found.items()}
    rows = [row(f"{name}: trained", "steps", values) for name, values in steps.items()]
    for name, runs in found.items():
        rows.append(row(f"{name}: solved by the version of", "steps", [run.facts["solved_steps"] for run in runs]))
    rows += [row(f"{name}: whole run", "s", [run.facts["seconds"] for run in runs]) for name, runs in found.items()]
    rows += [ratio(f"steps, {name} / inline", steps[name], steps["inline"], bar=BAR) for name in list(SIDES)[1:]]
    return [Table(f"PPO on CartPole-v1 to {TARGET:g}, {seeds} seeds each", rows)]


def _turn(name: str, seeds: Iterator[int]) -> Trained:
    runtime, topology, envs = SIDES[name]
    settings = {"preset": "auto", "seed": next(seeds), "target": TARGET, "sampling.envs": envs}
    settings |= {"eval.every": 5_000, "eval.episodes": 20, "eval.max_length": 500}
    run = train("CartPole-v1", steps=200_000, runtime=runtime, topology=topology, settings=settings)
    if run.facts["solved_steps"] is None:
        raise SystemExit(f"{name} has not solved it with seed {settings['seed']}")
    return run


if __name__ == "__main__":
    command(measure, __doc__ or "")
