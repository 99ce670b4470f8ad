"""What searching for settings costs and finds.

PPO on CartPole, the same drawn settings three times on all cores: stopped by ASHA, all to the end under Tune, and all
to the end by a shell loop of `raynforce train`, as many at a time as Tune has. The best setting of ASHA then trains new
seeds. The end of a run is the target of 475, or its steps. PBT on Pendulum is held against its own first generation:
the same settings trained to the end unchanged.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.measure import ROOT, Row, Table, command, ratio, row
from raynforce.runtimes.placing import cores

ASHA_BAR, OVERHEAD_BAR, TARGET = 1 / 3, 1.1, 475
RAYNFORCE = [sys.executable, "-m", "raynforce"]
PBT_SEARCH = ["algorithm.learning_rate=log(1e-5,1e-2)", "algorithm.gamma=choice(0.9,0.95,0.98,0.99)"]
PBT_SEARCH += ["algorithm.epochs=int(2,20)", "algorithm.entropy_coef=log(1e-5,0.1)"]


def measure(
    only: str = "all",
    trials: int = 20,
    each: int = 3,
    steps: int = 200_000,
    seeds: int = 5,
    population: int = 8,
    pbt: int = 100_000,
) -> list[Table]:
    """Trials of `each` seeds under ASHA, overhead, and the best setting on new `seeds`; then PBT, for `pbt` steps."""
    tables = []
    with TemporaryDirectory(prefix="rnf-bench-") as folder:
        if only != "pbt":
            tables += _halving(Path(folder), trials, each, steps, seeds)
        if only != "asha":
            tables.append(_population(Path(folder), population, pbt))
    return tables


def _halving(folder: Path, trials: int, each: int, steps: int, seeds: int) -> list[Table]:
    words = ["ppo", "CartPole-v1", "--trials", str(trials), "--seeds", str(each), "--steps", str(steps)]
    words += ["--target", str(TARGET)]
    _tell("asha")
    halved, asha = _tune(*words, "--scheduler", "asha", "--out", str(folder / "asha"))
    _tell("all to the end, under Tune")
    everything, whole = _tune(*words, "--scheduler", "random", "--out", str(folder / "all"))
    _tell("all to the end, by a shell loop")
    loop = _loop(folder / "all", folder / "loop")
    rows = [
        row("ASHA, from the command to its end", "s", [asha]),
        row("all trials to the end, under Tune", "s", [whole]),
        row(f"the same runs in a shell loop, {cores()} at a time", "s", [loop]),
        ratio("ASHA / all to the end", [asha], [whole], bar=("at most", ASHA_BAR)),
        ratio("under Tune / shell loop", [whole], [loop], bar=("at most", OVERHEAD_BAR)),
        row("steps trained by ASHA, of all", "share", [_steps(halved) / _steps(everything)]),
    ]
    tables = [Table(f"PPO on CartPole to {TARGET}, {trials} trials of {each} seeds, {steps:,} steps at most", rows)]
    _tell("new seeds with the best setting")
    found = _json("train", "--config", halved["config"], "--seeds", str(seeds), "--seed", "1000",
                  "--target", str(TARGET), "--out", str(folder / "new"))  # fmt: skip
    solved = int(found["summary"]["solved"])
    met = f"bar: all {seeds}, {'met' if solved == seeds else 'missed'}"
    tables.append(Table("The best setting on new seeds", [row(f"seeds that reach {TARGET}", "seeds", [solved], met)]))
    return tables


def _population(folder: Path, population: int, steps: int) -> Table:
    words = ["ppo", "Pendulum-v1", "--trials", str(population), "--seeds", "1", "--steps", str(steps)]
    words += ["--search", *PBT_SEARCH, "--set", "eval.final_episodes=20"]
    _tell("pbt")
    bred, seconds = _tune(*words, "--scheduler", "pbt", "--out", str(folder / "pbt"))
    _tell("its first generation, unchanged")
    first, _ = _tune(*words, "--scheduler", "random", "--out", str(folder / "first"))
    ours, theirs = _returns(bred), _returns(first)
    met = f"bar: above {median(theirs):.0f}, {'met' if median(ours) > median(theirs) else 'missed'}"
    rows: list[Row] = [
        row("PBT, its population at the end", "return", ours, met),
        row("its first generation, trained unchanged", "return", theirs),
        row("PBT, from the command to its end", "s", [seconds]),
    ]
    return Table(f"PBT on Pendulum, {population} trials of {steps:,} steps", rows)


def _tune(*words: str) -> tuple[dict[str, Any], float]:
    began = time.monotonic()
    found = _json("tune", *words)
    return found, time.monotonic() - began


def _json(*words: str) -> dict[str, Any]:
    done = subprocess.run([*RAYNFORCE, *words, "--json", "--quiet"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{shlex.join(words)} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _loop(search: Path, out: Path) -> float:
    """Train every run of a search again by commands of its own, as many at a time as there are cores."""
    out.mkdir()
    lines = []
    for number, config in enumerate(sorted(search.glob("trial_*/seed*/config.yaml"))):
        words = [*RAYNFORCE, "train", "--config", str(config), "--quiet", "--out", str(out / str(number))]
        lines.append(shlex.join(words))
    began = time.monotonic()
    text = "\n".join(shlex.quote(line) for line in lines)
    shell = ["xargs", "-P", str(cores()), "-I", "{}", "sh", "-c", "{}"]
    subprocess.run(shell, input=text, text=True, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - began


def _steps(found: dict[str, Any]) -> int:
    return sum(trial["steps"] for trial in found["trials"])


def _returns(found: dict[str, Any]) -> list[float]:
    return [trial["objective"] for trial in found["trials"] if trial["objective"] is not None]


def _tell(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    command(measure, __doc__ or "")
