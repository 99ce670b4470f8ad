"""RLlib as an engine: what our side costs, both engines on the same experiments, and runs that are stopped and resumed.

`--only` takes one part, or several with commas; all are measured without it.

- `overhead`: steps per second and start-up of `raynforce train ALGO CartPole-v1 --engine rllib`, beside the script that
  the same command prints with `--print-config`, run with plain RLlib. Equal on both sides: config, seed, steps, CPUs of
  Ray, one torch thread. Speed is counted from step 2,000 on, reports included, evaluation and checkpoints not. Start-up
  is from the start of the process to the end of the first `train()` that has learned. The sides take turns, each time
  in a fresh process.
- `table`: our own engine and RLlib through `--engine rllib` on the same experiments: CartPole by PPO and DQN to 475,
  CartPole with steps of 5 ms on average and 8 envs, and images. Steps per second while training, start-up, the most
  memory that all processes of a run have at once (PSS, looked at every second), and seconds from the start of the
  process to the target. Runtime and topology are as `auto` has them. Written to `docs/rllib.md`, between the marks
  `<!-- table: rllib -->` and `<!-- /table -->`.
- `resume`: PPO on CartPole-v1 with a learning rate that anneals and a normaliser, stopped by Ctrl-C in the middle and
  resumed, beside runs of the same seeds that were never stopped. Steps, learning rate and the normaliser's count must
  go on where they were; the returns at the end must lie within those of the runs never stopped.
"""

from __future__ import annotations

import json
import pickle
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np

from benchmarks.faults import training
from benchmarks.measure import ROOT, Bar, Table, command, machine_line, ratio, replace_table, row, run, take_turns
from benchmarks.runs import Settings, Trained, apart, held, tree_megabytes, watched
from benchmarks.settings import TRAINING_ALONE
from raynforce.engines.rllib.filters import normalizer_from
from raynforce.runs.directory import RunDirectory

PARTS = ("overhead", "table", "resume")
PAGE, MARK = ROOT / "docs" / "rllib.md", "rllib"
SPEED_BAR: Bar = ("at least", 0.97)
STARTUP_BAR: Bar = ("at most", 1.0)  # seconds more
WARMUP = 2_000  # steps
CPUS = 2  # of Ray, as our engine asks for one env runner and the learner
ALONE = TRAINING_ALONE | {"preset": "auto"}
TARGET = 475.0
LOOK = 1.0  # seconds between two looks at memory
ANNEALED = {"algorithm.anneal_learning_rate": True, "network.normalize_obs": True}
RESUMED = TRAINING_ALONE | {"preset": "auto", "log_every": 1} | ANNEALED


def measure(repeats: int = 5, steps: int = 20_000, most: int = 200_000, seeds: int = 5, only: str = "") -> list[Table]:
    """Measure all parts, or those of `only`; `most` are the steps of runs with a target, `steps` those of others."""
    wanted = only.split(",") if only else list(PARTS)
    if unknown := [name for name in wanted if name not in PARTS]:
        raise SystemExit(f"--only {unknown[0]} is unknown; known are {', '.join(PARTS)}")
    parts: dict[str, Callable[[], list[Table]]] = {
        "overhead": lambda: [_overhead("ppo", repeats, steps), _overhead("dqn", repeats, steps // 2)],
        "table": lambda: _table(min(repeats, 3), steps, most),
        "resume": lambda: [_resume(seeds, steps)],
    }
    return [table for name in wanted for table in parts[name]()]


def raynforce_train(
    algo: str, env: str, engine: str, steps: int, settings: Settings, target: float | None = None, memory: bool = False
) -> tuple[Trained, float]:
    """Run `raynforce train`; with `memory`, also the most megabytes of all of its processes."""
    peak = [0.0]

    def look(driver: int) -> None:
        peak.append(tree_megabytes(driver))

    with apart() as environment:
        folder = Path(environment["HOME"]) / "run"
        words = [*_train_words(algo, env, engine, steps, settings), "--out", str(folder), "--json", "--quiet"]
        words += [] if target is None else ["--target", str(target)]
        printed = watched(words, environment, look if memory else None, LOOK)
        lines = (folder / "metrics.jsonl").read_text().splitlines()
    return Trained(json.loads(printed.splitlines()[-1]), [json.loads(line) for line in lines]), max(peak)


def _train_words(algo: str, env: str, engine: str, steps: int, settings: Settings) -> list[str]:
    words = [sys.executable, "-m", "raynforce", "train", algo, env, "--engine", engine, "--steps", str(steps)]
    return words + [word for name, value in settings.items() for word in ("--set", f"{name}={json.dumps(value)}")]


# -- overhead -----------------------------------------------------------------------------------------------


class Side(NamedTuple):
    """One run: steps per second after the warm-up, seconds to the first update, RLlib's mean return at the end."""

    speed: float
    startup: float
    returned: float


def _overhead(algo: str, repeats: int, steps: int) -> Table:
    if steps <= 2 * WARMUP:
        raise SystemExit(f"{algo} with {steps:,} steps: more than {2 * WARMUP:,} are needed, {WARMUP:,} are warm-up")
    mine, others = count(), count()
    sides = (lambda: _engine(algo, steps, next(mine)), lambda: _alone(algo, steps, next(others)))
    ours, theirs = take_turns(repeats, *sides, label=f"{algo}: engine / RLlib alone")
    more = row(
        "start-up, engine - RLlib alone", "s", [a.startup - b.startup for a, b in zip(ours, theirs, strict=True)]
    )
    rows = [
        row("engine", "steps/s", [side.speed for side in ours]),
        row("RLlib alone", "steps/s", [side.speed for side in theirs]),
        ratio("engine / RLlib alone", [side.speed for side in ours], [side.speed for side in theirs], bar=SPEED_BAR),
        row("start-up, engine", "s", [side.startup for side in ours]),
        row("start-up, RLlib alone", "s", [side.startup for side in theirs]),
        held(more, STARTUP_BAR),
    ]
    returns = " and ".join(f"{median(side.returned for side in sides):.0f}" for sides in (ours, theirs))
    title = f"{algo.upper()} of RLlib on CartPole-v1, {steps:,} steps, {repeats} turns each"
    return Table(title, rows, [f"mean return by RLlib's count, engine and RLlib alone: {returns}"])


def _engine(algo: str, steps: int, seed: int) -> Side:
    found, _ = raynforce_train(algo, "CartPole-v1", "rllib", steps, ALONE | {"seed": seed})
    steady = found.after(WARMUP)
    return Side(steady.steps, found.startup, steady.last["rllib/env_runners/episode_return_mean"])


def _alone(algo: str, steps: int, seed: int) -> Side:
    words = _train_words(algo, "CartPole-v1", "rllib", steps, ALONE | {"seed": seed})
    with apart() as environment:
        script = Path(environment["HOME"]) / "experiment.py"
        script.write_text(run([*words, "--print-config"]))
        sizes = map(str, (steps, WARMUP, CPUS, time.monotonic()))
        work = [sys.executable, str(ROOT / "benchmarks" / "rllib_engine_work.py"), str(script), *sizes]
        facts = json.loads(watched(work, environment).splitlines()[-1])
    return Side(facts["steps_per_second"], facts["startup_seconds"], facts["return_mean"])


# -- table --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Experiment:
    """What both engines train."""

    name: str
    algo: str
    env: str = "CartPole-v1"
    settings: Mapping[str, Any] = field(default_factory=dict)
    target: float | None = None
    share: float = 1.0
    """Of the steps that runs have."""
    own: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Settings of one engine alone, by its name."""


SLOW = {"env_args.env": "CartPole-v1", "env_args.milliseconds": 5.0, "sampling.envs": 8, "sampling.fragment": 64}
CATCH = {"env": "raynforce.envs.tiny:Catch", "frames": 2, "args": {"length": 20, "width": 20}}
EXPERIMENTS = (
    Experiment("CartPole to 475, PPO", "ppo", target=TARGET),
    Experiment("CartPole to 475, DQN", "dqn", target=TARGET),
    Experiment("steps of 5 ms, 8 envs, PPO", "ppo", "raynforce.envs.slow:slowed", SLOW, share=0.5,
               own={"rllib": {"sampling.parallel": "processes"}}),
    Experiment("images 21x20x2, PPO", "ppo", "raynforce.envs.frames:stacked", {"env_args": CATCH}),
)  # fmt: skip
ENGINES = {"native": "Raynforce", "rllib": "RLlib"}
COLUMNS = {"steps/s": "steps/s", "start-up": "s", "memory": "MB", "time to target": "s"}
Figures = dict[str, float | None]


def _table(repeats: int, steps: int, most: int) -> list[Table]:
    tables, found = [], {}
    for experiment in EXPERIMENTS:
        many = int(experiment.share * (most if experiment.target else steps))
        seeds = {engine: count() for engine in ENGINES}
        sides = [partial(_figures, experiment, engine, many, seeds[engine]) for engine in ENGINES]
        turns = take_turns(repeats, *sides, label=f"{experiment.name}: {' / '.join(ENGINES.values())}")
        rows = []
        for engine, of in zip(ENGINES, turns, strict=True):
            found[experiment.name, engine] = middle(of)
            for column, unit in COLUMNS.items():
                if known := [value for one in of if (value := one[column]) is not None]:
                    missed = f"{len(of) - len(known)} of {len(of)} did not reach it" if len(known) < len(of) else ""
                    rows.append(row(f"{ENGINES[engine]}, {column}", unit, known, missed))
        tables.append(Table(f"{experiment.name}, {many:,} steps at most, {repeats} turns each", rows))
    text = markdown(found) + f"\n\nGenerated by `benchmarks/rllib_engine.py` on: {machine_line()}."
    if replace_table(PAGE, MARK, text):
        note = f"written to {PAGE.relative_to(ROOT)}"
    else:
        print(text, file=sys.stderr)
        note = f"{PAGE.relative_to(ROOT)} has no <!-- table: {MARK} -->: the table is printed instead"
    return [*tables[:-1], Table(tables[-1].title, tables[-1].rows, [note])]


def _figures(experiment: Experiment, engine: str, steps: int, seeds: count[int]) -> Figures:
    settings = ALONE | dict(experiment.settings) | dict(experiment.own.get(engine, {})) | {"seed": next(seeds)}
    if experiment.target is not None:
        settings |= {"eval.every": 5_000, "eval.episodes": 20, "eval.max_length": 500}
    found, megabytes = raynforce_train(
        experiment.algo, experiment.env, engine, steps, settings, experiment.target, memory=True
    )
    solved = found.facts["solved_at"]
    seconds = {"steps/s": found.speed, "start-up": found.startup, "memory": megabytes}
    return {**seconds, "time to target": None if solved is None else float(solved)}


def middle(turns: list[Figures]) -> Figures:
    """The median of each figure; None where one of the runs has none."""
    columns = {name: [turn[name] for turn in turns] for name in turns[0]}
    return {
        name: None if any(v is None for v in values) else median(v for v in values if v is not None)
        for name, values in columns.items()
    }


def markdown(found: Mapping[tuple[str, str], Figures]) -> str:
    """A line for each experiment, both engines in each cell's column."""
    heads = [f"{name}, {unit}" if unit != name else name for name, unit in COLUMNS.items()]
    lines = ["| experiment | engine | " + " | ".join(heads) + " |", "|---|---|" + "---:|" * len(heads)]
    for (experiment, engine), figures in found.items():
        cells = [_shown(figures[name]) for name in COLUMNS]
        lines.append(f"| {experiment} | {ENGINES[engine]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


# -- resume -------------------------------------------------------------------------------------------------


def _resume(seeds: int, steps: int) -> Table:
    """Runs that are stopped in the middle and resumed, beside runs that are not, seed by seed."""
    stopped, straight = count(), count()
    sides = (lambda: _in_two(steps, next(stopped)), lambda: _in_one(steps, next(straight)))
    twice, once = take_turns(seeds, *sides, label="resumed / never stopped")
    low, high = min(once), max(once)
    within = low <= median(twice) <= high
    remark = f"bar: {low:.0f} to {high:.0f}, {'met' if within else 'missed'}"
    resumed = replace(row("return, resumed", "", twice, remark), met=within)
    rows = [resumed, row("return, never stopped", "", once)]
    note = f"steps, learning rate and normaliser went on in all {seeds} resumed runs"
    return Table(f"PPO of RLlib on CartPole-v1, {steps:,} steps, stopped in the middle, {seeds} seeds", rows, [note])


def _in_one(steps: int, seed: int) -> float:
    found, _ = raynforce_train("ppo", "CartPole-v1", "rllib", steps, RESUMED | {"seed": seed})
    return _return_of(found.metrics)


def _in_two(steps: int, seed: int) -> float:
    half, words = steps // 2, ("--engine", "rllib", "--steps", str(steps))
    with (
        apart() as environment,
        training("CartPole-v1", environment, RESUMED | {"seed": seed}, *words) as running,
    ):
        running.wait_for(lambda: any(line["step"] >= half for line in running.read("metrics.jsonl")), seconds=600)
        running.end(signal.SIGINT)
        at, before = normalizer_count(running.folder)
        watched([sys.executable, "-m", "raynforce", "resume", str(running.folder), "--json", "--quiet"], environment)
        end, after = normalizer_count(running.folder)
        lines = running.read("metrics.jsonl")
    require_continued(lines, at, end, steps)
    _require(at < steps, f"it was stopped at step {at:,} of {steps:,}, too late")
    _require(before >= 0.9 * at and after >= 0.9 * end, f"the normaliser has seen {before:,} and {after:,} samples, "
             f"of {at:,} and {end:,} steps")  # fmt: skip
    return _return_of(lines)


def require_continued(lines: list[dict[str, float]], at: int, end: int, steps: int) -> None:
    """Refuse metrics that do not go on after step `at` as they were before: RLlib's own count and learning rate."""
    reports = [line for line in lines if "charts/learning_rate" in line]
    order = [int(line["step"]) for line in reports]
    _require(order == sorted(set(order)), "steps are reported twice, or go back")
    after = [line for line in reports if line["step"] > at]
    _require(bool(after) and len(after) < len(reports), f"there are no reports before or after step {at:,}")
    _require(after[-1]["step"] == end, f"the last report is of step {after[-1]['step']:,}, the checkpoint of {end:,}")
    for line in reports:
        theirs = line.get("rllib/env_runners/num_env_steps_sampled_lifetime", line["step"])
        _require(theirs == line["step"], f"RLlib counts {theirs:,} steps at step {line['step']:,}")
    first = reports[0]
    base = first["charts/learning_rate"] / (1 - first["step"] / steps)
    for line in reports:
        due = base * max(0.0, 1 - line["step"] / steps)
        rate = line["charts/learning_rate"]
        _require(bool(np.isclose(rate, due, atol=1e-9)), f"learning rate {rate} at step {line['step']:,}, not {due}")


def normalizer_count(folder: Path) -> tuple[int, int]:
    """The step of a run's newest checkpoint, and the samples that RLlib's filter in it has seen."""
    loaded = RunDirectory(folder).load_newest()
    assert loaded is not None
    tree = loaded.parts["rllib"]
    index = next(i for i, name in enumerate(tree["names"]) if name.endswith("/MeanStdFilter/state.pkl"))
    state = pickle.loads(tree["files"][str(index)].tobytes())  # of a run of our own, under its manifest
    return int(loaded.manifest["step"]), normalizer_from(state)[2]


def _return_of(lines: list[dict[str, float]]) -> float:
    """The mean of what was reported over the last fifth of a run."""
    found = [line["charts/episodic_return"] for line in lines if "charts/episodic_return" in line]
    return mean(found[-max(1, len(found) // 5) :])


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise SystemExit(f"resume: {otherwise}")


if __name__ == "__main__":
    command(measure, __doc__ or "")
