"""What presets learn: trains a list of algorithms and environments with several seeds, and writes docs/benchmarks.md.

`python -m benchmarks.presets` trains what takes less than two minutes of one core a run, into `runs/benchmarks`, then
renders tables and curves. Of each run that went to its end `benchmarks/results/presets` keeps a directory with its
config, its evaluations and its result, a run like any other to `raynforce plot`: it is in the repository, so results
of several machines add up. Runs that are kept are not trained again, so it can be stopped and started. `--all` trains
the others too, `--only WORD` those with the word in their name, `--render` renders alone.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import raynforce
from benchmarks.measure import ROOT
from raynforce.charts.reading import RunData, runs_of
from raynforce.statistics import bootstrap, iqm

SEEDS = 3
DOCS = ROOT / "docs"
KEPT = ROOT / "benchmarks" / "results" / "presets"


@dataclass(frozen=True)
class Work:
    """One row of a table: the preset of an algorithm for an environment."""

    algo: str
    env: str
    steps: int
    quick: bool = False  # less than two minutes of one core
    args: Mapping[str, Any] = field(default_factory=dict)  # env_args
    native: bool = False  # kernels, where products of 256 by 256 are most of the work

    @property
    def title(self) -> str:
        return str(self.args.get("game", self.env))

    @property
    def directory(self) -> str:
        return re.sub(r"[^A-Za-z0-9.-]+", "_", f"{self.algo}-{self.title}")

    def command(self, seed: int | str, out: Path | str) -> list[str]:
        given = [part for name, value in self.args.items() for part in ("--set", f"env_args.{name}={value}")]
        given += ["--set", "kernels=native"] if self.native else []
        named = ["--steps", str(self.steps), "--seed", str(seed), "--out", str(out)]
        return ["train", self.algo, self.env, *given, *named]


def atari(algo: str, game: str, steps: int) -> Work:
    """Of images of 42 by 42: networks then take a ninth of the time of those for 84 by 84."""
    return Work(algo, "raynforce.envs.atari:make", steps, args={"game": game, "screen": 42})


WORKS: Sequence[Work] = (
    Work("ppo", "CartPole-v1", 100_000, quick=True),
    Work("dqn", "CartPole-v1", 50_000, quick=True),
    Work("impala", "CartPole-v1", 200_000, quick=True),
    Work("ppo", "MountainCar-v0", 200_000, quick=True),
    Work("dqn", "MountainCar-v0", 120_000, quick=True),
    Work("ppo", "MountainCarContinuous-v0", 100_000, quick=True),
    Work("sac", "MountainCarContinuous-v0", 20_000, quick=True),
    Work("ppo", "Pendulum-v1", 150_000, quick=True),
    Work("sac", "Pendulum-v1", 10_000, quick=True),
    Work("td3", "Pendulum-v1", 10_000, quick=True),
    Work("ppo", "Acrobot-v1", 200_000),
    Work("ppo", "LunarLander-v3", 1_000_000),
    Work("dqn", "LunarLander-v3", 150_000),
    Work("ppo", "BipedalWalker-v3", 1_000_000),
    Work("sac", "BipedalWalker-v3", 100_000, native=True),
    *(Work("ppo", env, 1_000_000) for env in ("Hopper-v5", "HalfCheetah-v5", "Walker2d-v5", "Ant-v5")),
    *(Work("sac", env, 100_000, native=True) for env in ("Hopper-v5", "HalfCheetah-v5", "Walker2d-v5")),
    *(Work("td3", env, 100_000, native=True) for env in ("Hopper-v5", "HalfCheetah-v5")),
    atari("ppo", "Pong", 3_000_000),
    atari("ppo", "Breakout", 1_000_000),
    Work("ppo", "minigrid:MiniGrid-Empty-5x5-v0", 100_000),
    Work("ppo", "minigrid:MiniGrid-DoorKey-5x5-v0", 200_000),
)


ZOO: Mapping[tuple[str, str], tuple[float, str, str]] = {
    # What rl-baselines3-zoo's benchmark.md has of one run each, greedy but for Atari games: return, steps, environment.
    ("ppo", "CartPole-v1"): (500.0, "100k", ""),
    ("dqn", "CartPole-v1"): (500.0, "50k", ""),
    ("ppo", "MountainCar-v0"): (-110.4, "1M", ""),
    ("dqn", "MountainCar-v0"): (-100.8, "120k", ""),
    ("ppo", "MountainCarContinuous-v0"): (88.3, "20k", ""),
    ("sac", "MountainCarContinuous-v0"): (94.7, "50k", ""),
    ("ppo", "Pendulum-v1"): (-172.2, "100k", ""),
    ("sac", "Pendulum-v1"): (-157.0, "20k", ""),
    ("td3", "Pendulum-v1"): (-151.9, "20k", ""),
    ("ppo", "Acrobot-v1"): (-73.5, "1M", ""),
    ("ppo", "LunarLander-v3"): (242.1, "1M", "v2"),
    ("dqn", "LunarLander-v3"): (154.4, "100k", "v2"),
    ("ppo", "BipedalWalker-v3"): (213.3, "5M", ""),
    ("sac", "BipedalWalker-v3"): (297.7, "500k", ""),
    ("ppo", "Hopper-v5"): (2410.4, "1M", "v3"),
    ("sac", "Hopper-v5"): (2325.5, "1M", "v3"),
    ("td3", "Hopper-v5"): (3606.4, "1M", "v3"),
    ("ppo", "HalfCheetah-v5"): (5819.1, "1M", "v3"),
    ("sac", "HalfCheetah-v5"): (9535.5, "1M", "v3"),
    ("td3", "HalfCheetah-v5"): (9655.7, "1M", "v3"),
    ("ppo", "Walker2d-v5"): (3478.8, "1M", "v3"),
    ("sac", "Walker2d-v5"): (3863.2, "1M", "v3"),
    ("ppo", "Ant-v5"): (1327.2, "1M", "v3"),
    ("ppo", "Pong"): (21.0, "10M", ""),
    ("ppo", "Breakout"): (398.0, "10M", ""),
}


def train(works: Sequence[Work], seeds: int, runs: Path, kept: Path = KEPT) -> None:
    for work in works:
        for seed in range(seeds):
            out, place = runs / work.directory / str(seed), kept / work.directory / str(seed)
            if place.exists():
                continue
            line = [sys.executable, "-m", "raynforce", *work.command(seed, out), "--resume", "--runtime", "inline"]
            print(f"{work.algo} on {work.title}, seed {seed}", flush=True)
            subprocess.run([*line, "--topology", "sync", "--quiet"], check=True)
            keep(out, place)


def keep(run: Path, place: Path) -> None:
    """Keep what the page shows of a run: its config, its evaluations, and how it ended."""
    place.mkdir(parents=True)
    (place / "config.yaml").write_bytes((run / "config.yaml").read_bytes())
    for name, wanted in (("metrics.jsonl", _is_evaluation), ("events.jsonl", _is_told)):
        lines = (run / name).read_text(encoding="utf-8").splitlines(keepends=True)
        (place / name).write_text("".join(line for line in lines if wanted(json.loads(line))), encoding="utf-8")


def _is_evaluation(line: Mapping[str, Any]) -> bool:
    return "eval/return" in line


def _is_told(event: Mapping[str, Any]) -> bool:
    return event["event"] in ("started", "stopped", "result")


def _found(place: Path) -> list[RunData]:
    """The runs there that went to their end."""
    return [run for run in runs_of([place]) if run.result.get("stopped") == "steps done"] if place.exists() else []


def render(runs: Path = KEPT, docs: Path = DOCS) -> str:
    """The page, with a picture for each environment that has runs."""
    lines = [HEAD.strip(), ""]
    for title, group in groupby(sorted(WORKS, key=lambda work: work.title), key=lambda work: work.title):
        lines += _section(title, list(group), runs, docs)
    text = "\n".join(lines).rstrip() + "\n"
    (docs / "benchmarks.md").write_text(text, encoding="utf-8")
    return text


def _section(title: str, works: list[Work], runs: Path, docs: Path) -> Iterator[str]:
    yield f"## {title}"
    yield ""
    yield "| algorithm | steps | seeds | return of the best policy | 95 % interval | zoo | command |"
    yield "|---|---|---|---|---|---|---|"
    there: list[Path] = []
    for work in works:
        place = runs / work.directory
        found = _found(place)
        shown = shlex.join(["raynforce", *work.command("SEED", f"runs/{work.directory}/SEED")])
        rest = f"{_published(work)} | `{shown}` |"
        if not found:
            yield f"| {work.algo} | {work.steps:,} | – | not run yet | – | {rest}"
            continue
        there.append(place)
        returns = [run.result["eval_return"] for run in found]
        interval = bootstrap(returns)
        spread = f"{interval.low:.1f} to {interval.high:.1f}" if len(returns) > 1 else "–"  # of one seed there is none
        measured = f"{iqm(returns):.1f} | {spread}"
        yield f"| {work.algo} | {work.steps:,} | {len(found)} | {measured} | {rest}"
    yield ""
    if there:
        name = f"images/preset_{re.sub(r'[^A-Za-z0-9]+', '_', title).lower()}.png"
        raynforce.plot(there, docs / name, metric="eval/return")
        yield f"![{title}: return of evaluations over steps]({name})"
        yield ""


def _published(work: Work) -> str:
    if (work.algo, work.title) not in ZOO:
        return "–"
    found, steps, version = ZOO[work.algo, work.title]
    return f"{found:g} after {steps}" + (f" ({version})" if version else "")


HEAD = """
# What the presets learn

Written by `python -m benchmarks.presets` from [run directories](../benchmarks/results/presets), of which config,
evaluations and result are kept; nothing but zoo's column is typed by hand. A return is the mean of
fresh greedy episodes of a run's best policy, without wrappers of rewards; over seeds it is the interquartile mean, with
a 95 % bootstrap interval. Curves are evaluations during training. All runs used one thread, inline and sync. "Zoo" is
what rl-baselines3-zoo publishes
([benchmark.md](https://github.com/DLR-RM/rl-baselines3-zoo/blob/master/benchmark.md)): the last policy of one run, its
own settings, often after more steps and on an older version of the environment. What Stable-Baselines3 learns in the
same steps is in [comparisons.md](comparisons.md).

"Not run yet" has the command. SAC and TD3 on Ant have no row: a run of SAC had not learned to walk in 75,000 steps. The
settings are those of [the presets](../raynforce/algos/presets.py), which say where they are from; `raynforce train …
--print-config` prints them. MuJoCo environments need `pip install "gymnasium[mujoco]"`, BipedalWalker and LunarLander
`"raynforce[box2d]"`, games `"raynforce[atari]"`, MiniGrid `minigrid`.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="train what takes longer, too")
    parser.add_argument("--only", metavar="WORD", default="", help="train those whose name has this word")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"of each, {SEEDS} by default")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "benchmarks", help="where runs are trained")
    parser.add_argument("--render", action="store_true", help="render what is there, train nothing")
    given = parser.parse_args()
    if not given.render:
        chosen = [w for w in WORKS if (w.quick or given.all) and given.only in f"{w.algo} {w.title}"]
        train(chosen, given.seeds, given.runs)
    render()


if __name__ == "__main__":
    main()
