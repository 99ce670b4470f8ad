"""What is learned in the same steps: Raynforce beside Stable-Baselines3 and sb3-contrib; writes docs/comparisons.md.

Both sides get equal settings (`learning_work.py`), equal steps and seeds, one thread and no presets. The judgement is
the same: the mean return of fresh greedy episodes of the last policy, after training; none is chosen by its results.

`python -m benchmarks.learning_vs_sb3` trains what has no result yet, then renders. A result is one JSON file for each
comparison, side and seed in `benchmarks/results/learning`, which is in the repository, so those of several machines add
up; it can be stopped and started. `--only WORD` trains those with the word in
their directory, `--jobs N` so many at once, `--render` renders alone.

It needs `pip install "raynforce[agents,mujoco]" mpe2`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import gymnasium

import raynforce
from benchmarks.learning_work import GAME, GAMMA, HIDDEN, LSTM, MASKED, REPLAY, ROLLOUT, SMALL, SPREAD, judged
from benchmarks.measure import ROOT
from benchmarks.peers import CONTRIB
from raynforce.envs.tiny import MaskedGrid
from raynforce.statistics import Interval, bootstrap

SEEDS, MANY = 3, 10  # many of what takes less than two minutes
RUNS = ROOT / "runs" / "learning"
KEPT = ROOT / "benchmarks" / "results" / "learning"
PAGE = ROOT / "docs" / "comparisons.md"
JUDGED_BY = 12_345  # the seed of the episodes that judge our side, where they are not the peer's
SAME_EPISODES = ("sac", "td3", "ppo-masked")
Side = Literal["raynforce", "peer"]
SIDES: Sequence[Side] = ("raynforce", "peer")
Settings = dict[str, Any]


@dataclass(frozen=True)
class Comparison:
    """The same task on both sides."""

    name: str  # in `learning_work.WORKS`
    title: str
    peer: str
    algo: str
    env: str
    steps: int
    episodes: int  # that judge
    settings: Mapping[str, Any] = field(default_factory=dict)
    seeds: int = SEEDS

    def command(self, seed: int | str, out: Path | str) -> list[str]:
        given = [part for name, value in self.settings.items() for part in ("--set", f"{name}={_text(value)}")]
        named = ["--steps", str(self.steps), "--seed", str(seed), "--out", str(out), "--no-preset"]
        return ["train", self.algo, self.env, *named, *given]

    @property
    def directory(self) -> str:
        return f"{self.name}-{self.steps}"

    def place(self, side: Side, seed: int, kept: Path) -> Path:
        return kept / self.directory / f"{side}-{seed}.json"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _replay(given: Mapping[str, Any] = REPLAY) -> Settings:
    return {
        "sampling.envs": 1,
        "sampling.fragment": 8,
        "algorithm.learning_starts": given["learning_starts"],
        "algorithm.buffer_size": given["buffer_size"],
        "algorithm.batch_size": given["batch_size"],
        "algorithm.samples_per_insert": given["batch_size"],  # an update for every step
        "algorithm.learning_rate": given["learning_rate"],
        "algorithm.target_tau": given["tau"],
        "algorithm.gamma": GAMMA,
        "network.hidden": [given.get("hidden", HIDDEN["off-policy"])] * 2,
    }


def _ppo(given: Mapping[str, Any], layers: int = 2) -> Settings:
    both = {**ROLLOUT, **given}
    return {
        "sampling.envs": both["envs"],
        "sampling.fragment": both["n_steps"],
        "algorithm.minibatch_size": both["batch_size"],
        "algorithm.epochs": both["n_epochs"],
        "algorithm.learning_rate": both["learning_rate"],
        "algorithm.entropy_coef": both["ent_coef"],
        "algorithm.clip": both["clip_range"],
        "algorithm.gae_lambda": both["gae_lambda"],
        "algorithm.value_coef": 2 * both["vf_coef"],  # our value loss is half of theirs
        "algorithm.max_grad_norm": both["max_grad_norm"],
        "algorithm.gamma": GAMMA,
        "network.hidden": [HIDDEN["ppo"]] * layers,
        "network.normalize_obs": False,
        "learner.scale_rewards": False,
    }


MEMORY = {"network.memory": "lstm", "network.memory_size": HIDDEN["ppo"], "algorithm.sequence": LSTM["n_steps"]}
NORMALIZED = {"network.normalize_obs": True, "learner.scale_rewards": True}
SELF_PLAY = {"policies.hero.agents": ["player_*"], "policies.hero.opponents": 8}
COMPARISONS: Sequence[Comparison] = (
    Comparison("sac-pendulum", "SAC, Pendulum-v1", "SAC", "sac", "Pendulum-v1", 10_000, 50, _replay(SMALL), MANY),
    Comparison("sac-hopper", "SAC, Hopper-v5", "SAC", "sac", "Hopper-v5", 50_000, 20, _replay()),
    Comparison("td3-hopper", "TD3, Hopper-v5", "TD3", "td3", "Hopper-v5", 50_000, 20, _replay()),
    Comparison("sac-halfcheetah", "SAC, HalfCheetah-v5", "SAC", "sac", "HalfCheetah-v5", 50_000, 10, _replay()),
    Comparison(
        "ppo-lstm-normalized",
        "PPO with an LSTM, CartPole without velocities, observations and rewards normalised",
        "RecurrentPPO",
        "ppo",
        "raynforce.envs.tiny:blind_cartpole",
        61_440,
        50,
        {**_ppo(LSTM, layers=1), **MEMORY, **NORMALIZED},
        MANY,
    ),
    Comparison(
        "ppo-lstm",
        "the same, neither normalised",
        "RecurrentPPO",
        "ppo",
        "raynforce.envs.tiny:blind_cartpole",
        61_440,
        50,
        {**_ppo(LSTM, layers=1), **MEMORY},
        MANY,
    ),
    Comparison(
        "ppo-masked",
        "masked PPO, a grid with forbidden moves",
        "MaskablePPO",
        "ppo",
        "raynforce.envs.tiny:MaskedGrid",
        16_384,
        100,
        _ppo(MASKED),
        MANY,
    ),
    Comparison(
        "mappo-spread",
        "PPO with a central critic, simple_spread",
        "PPO, one policy for all agents",
        "ppo",
        "mpe2.simple_spread_v3:parallel_env",
        150_000,
        100,
        {**_ppo(SPREAD), "algorithm.central_critic": True},
        MANY,
    ),
    Comparison(
        "self-play",
        "PPO in self-play, tic-tac-toe against a random player",
        "MaskablePPO against itself",
        "ppo",
        "pettingzoo.classic.tictactoe_v3:env",
        30_720,
        200,
        {**_ppo(GAME), **SELF_PLAY},
        MANY,
    ),
)
LEAST = {"eval.every": 0, "eval.episodes": 1, "eval.envs": 1, "eval.final_episodes": 0}  # it is judged afterwards


def train(comparisons: Sequence[Comparison], seeds: int | None, kept: Path, jobs: int) -> None:
    """Train and judge what is not there yet, one comparison after the other."""
    todo = [
        partial(_train, comparison, side, seed, comparison.place(side, seed, kept))
        for comparison in comparisons
        for seed in range(seeds or comparison.seeds)
        for side in SIDES
        if not comparison.place(side, seed, kept).exists()
    ]
    if todo:
        CONTRIB.python()  # installs it, once
    with ThreadPoolExecutor(jobs) as pool:
        for done in [pool.submit(each) for each in todo]:
            done.result()


def _train(comparison: Comparison, side: Side, seed: int, out: Path) -> None:
    print(f"{time.strftime('%H:%M:%S')} {comparison.name}, {side}, seed {seed}", flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    if side == "peer":
        numbers = map(str, (comparison.steps, seed, comparison.episodes))
        _run([CONTRIB.python(), "-m", "benchmarks.learning_work", comparison.name, *numbers, str(out)])
        return
    began, run = time.monotonic(), RUNS / comparison.directory / str(seed)
    if run.exists():  # it was stopped in the middle
        shutil.rmtree(run)
    given = [part for name, value in LEAST.items() for part in ("--set", f"{name}={value}")]
    ours = [sys.executable, "-m", "raynforce"]
    _run([*ours, *comparison.command(seed, run), *given, "--runtime", "inline", "--topology", "sync", "--quiet"])
    facts = {"mean": judge(comparison, run), "episodes": comparison.episodes, "steps": comparison.steps}
    out.write_text(json.dumps(facts | {"seconds": round(time.monotonic() - began, 1)}), encoding="utf-8")


def judge(comparison: Comparison, run: Path) -> float:
    """The mean return of the last policy: of one agent without memory in the very episodes that judge the peer."""
    if comparison.name.startswith(SAME_EPISODES):
        policy = raynforce.load(run / "last")
        masked = comparison.name == "ppo-masked"
        env: Any = MaskedGrid() if masked else gymnasium.make(comparison.env)
        returns = judged(env, lambda obs: policy.act(obs, mask=env.mask() if masked else None), comparison.episodes)
        return sum(returns) / len(returns)
    line = ["eval", str(run), "--checkpoint", "last", "--episodes", str(comparison.episodes), "--json"]
    found = _run([sys.executable, "-m", "raynforce", *line, "--seed", str(JUDGED_BY)])
    return float(json.loads(found.splitlines()[-1])["mean"])


def _run(line: list[str]) -> str:
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, cwd=ROOT, env=one_thread, text=True, stdout=subprocess.PIPE, check=True)
    return done.stdout


def results(comparison: Comparison, side: Side, kept: Path) -> list[float]:
    """The mean return of each seed that is there."""
    folder = kept / comparison.directory
    paths = sorted(folder.glob(f"{side}-*.json"), key=lambda path: int(path.stem.rpartition("-")[2]))
    found = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    return [facts["mean"] if "mean" in facts else sum(facts["returns"]) / len(facts["returns"]) for facts in found]


def reaches(ours: Interval, theirs: Interval) -> str:
    """Whether our interval reaches theirs or lies above it, and whether our mean is at least theirs."""
    if ours.high < theirs.low:
        return "no"
    return "yes" if ours.estimate >= theirs.estimate else "yes, with a lower mean"


def render(kept: Path, page: Path = PAGE) -> str:
    lines = [
        HEAD.strip(),
        "",
        "| task | steps | seeds | Raynforce | peer | | reaches it |",
        "|---|---|---|---|---|---|---|",
    ]
    for comparison in COMPARISONS:
        ours, theirs = (results(comparison, side, kept) for side in SIDES)
        row = [comparison.title, f"{comparison.steps:,}"]
        if min(len(ours), len(theirs)) < SEEDS:
            row += [f"{len(ours)} and {len(theirs)}", "not run yet", "not run yet", comparison.peer, "–"]
        else:
            found = bootstrap(ours), bootstrap(theirs)
            count = str(len(ours)) if len(ours) == len(theirs) else f"{len(ours)} and {len(theirs)}"
            row += [count, _shown(found[0]), _shown(found[1]), comparison.peer, reaches(*found)]
        lines.append(f"| {' | '.join(row)} |")
    lines += ["", "## Each seed", "", "| task | Raynforce | peer |", "|---|---|---|"]
    for comparison in COMPARISONS:
        both = (", ".join(map(_number, results(comparison, side, kept))) or "–" for side in SIDES)
        lines.append(f"| {comparison.title} | {' | '.join(both)} |")
    lines += ["", "## Commands", "", "```sh"]
    for comparison in COMPARISONS:
        lines.append(shlex.join(["raynforce", *comparison.command("SEED", f"runs/{comparison.directory}/SEED")]))
    lines += ["```", ""]
    text = "\n".join(lines)
    page.write_text(text, encoding="utf-8")
    return text


def _shown(found: Interval) -> str:
    return f"{_number(found.estimate)} [{_number(found.low)}, {_number(found.high)}]"


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


HEAD = f"""
# Learning beside Stable-Baselines3

Written by `python -m benchmarks.learning_vs_sb3` from result files; nothing here is typed by hand. Both sides got equal
settings ([learning_work.py](../benchmarks/learning_work.py)), equal steps and seeds, and one thread; the peer is
Stable-Baselines3 or sb3-contrib, by its class. A seed's result is the mean return of fresh greedy episodes of its last
policy: in SAC, TD3 and masked PPO the same episodes on both sides, else others. Over seeds it is the interquartile
mean, which of three seeds is their mean, with a 95 % bootstrap interval. Three seeds say little: their interval lies
between the worst and the best of them.

"Reaches it": our interval overlaps the peer's or lies above it. "Not run yet" is a task with fewer than {SEEDS} seeds
of a side. Step counts are what a small machine had time for: of the MuJoCo tasks they are the beginning of learning.
Curves of presets are in [benchmarks.md](benchmarks.md).

Pendulum was begun with networks of 256 by 256 and cut to 64 by 64 after one seed of each side, for time.
The MuJoCo tasks were run with 5,000 and 10,000 steps first, at which neither side does more than fall; then, on our
side, with orthogonal initial weights (SAC: Hopper 417, HalfCheetah 1169; TD3: Hopper 345), which torch's, those of
Stable-Baselines3 too, have replaced ([performance.md](performance.md#initial-weights)). The row of an
LSTM that begins with "the same" was run first, that above it was added after its results were seen.

Where the sides differ: until `learning_starts`, SAC and TD3 act uniformly at random there and by their first policy
here, and learn after each step there and after each eighth here, eight times. There the LSTM comes before the hidden
layer, here after it. There the critic's gradient stops before the LSTM; here it does so where rewards are not scaled
([memory.md](algorithms/memory.md#rewards-and-the-critic)), a rule that was made after it had learned nothing (9.3) in
this very row.

Stable-Baselines3 has no central critic and no pool of opponents: on
simple_spread one policy plays all agents, and in tic-tac-toe one network moves for both sides, as in PettingZoo's
tutorial. Both are judged against a random player, half of the games as each player; steps are moves that are learned
from.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="WORD", default="", help="train those with this word in NAME-STEPS")
    parser.add_argument("--seeds", type=int, help=f"of each side; {SEEDS} by default, {MANY} of what is quick")
    parser.add_argument("--jobs", type=int, default=1, help="how many train at once")
    parser.add_argument("--results", type=Path, default=KEPT, help="where they are")
    parser.add_argument("--render", action="store_true", help="render what is there, train nothing")
    given = parser.parse_args()
    if not given.render:
        train([c for c in COMPARISONS if given.only in c.directory], given.seeds, given.results, given.jobs)
    render(given.results)


if __name__ == "__main__":
    main()
