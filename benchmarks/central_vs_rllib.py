"""Environment steps per second of PPO with slow and uneven environments: Raynforce beside RLlib, for comparison.

Each step of 64 environments sleeps 10 to 50 ms (`slow_envs.Uniform`), which count their steps themselves; see
`central` for what is counted and when. Raynforce has topology `central` on runtime `process`, with `--hosts` host
processes. RLlib (new API stack) is measured in two ways: 8 environment runners that step 8 environments each, one after
another, which is its default; and `--runners` runners that step theirs side by side, in a process for each, with
gymnasium's `async` vector environment. In both, everybody waits for the slowest, and nobody samples while PPO learns.

Equal on all sides (`central_rllib_work.py`): 64-64 tanh networks, one for the policy and one for values, fragments of
32 steps, batches of 2,048, four epochs in minibatches of 256, Adam at 3e-4, one torch thread.

RLlib gets a virtual environment of its own, `.venv-rllib` in the repository's root, made at first use; or set
RAYNFORCE_RLLIB_PYTHON to a Python that has it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.central import FRAGMENT, SETTLING, STEP, Looks, train_slow
from benchmarks.measure import ROOT, Table, command, ratio, row, take_turns
from benchmarks.peers import RLLIB
from benchmarks.runs import apart, watched

ENVS = 64


def measure(repeats: int = 3, seconds: int = 20, hosts: int = 2, runners: int = 2) -> list[Table]:
    """Train with each side in turn."""
    ours = f"Raynforce, {hosts} hosts × {ENVS // hosts} envs"
    sides: dict[str, Callable[[], float]] = {
        ours: lambda: train_slow("process", ENVS, hosts, seconds).pace.all,
        f"RLlib, 8 runners × {ENVS // 8} envs": partial(_theirs, 8, "sync", seconds),
        f"RLlib, {runners} runners × {ENVS // runners} envs, async": partial(_theirs, runners, "async", seconds),
    }
    speeds = dict(zip(sides, take_turns(repeats, *sides.values(), label=" / ".join(sides)), strict=True))
    rows = [row(name, "steps/s", values) for name, values in speeds.items()]
    for name, values in speeds.items():
        rows.append(row(f"{name}, share of the limit", "ratio", [value * STEP / ENVS for value in values]))
    theirs = max((name for name in sides if name != ours), key=lambda name: median(speeds[name]))
    rows.append(ratio("Raynforce / the faster of RLlib's ways", speeds[ours], speeds[theirs]))
    return [Table(f"PPO with steps of 10 to 50 ms, {ENVS} envs, {repeats} turns each", rows)]


def _theirs(runners: int, mode: str, seconds: int) -> float:
    script = [RLLIB.python(), str(ROOT / "benchmarks" / "central_rllib_work.py")]
    with TemporaryDirectory(dir="/tmp") as folder, apart() as environment:
        looks = Looks(Path(folder), ENVS)
        sizes = (runners, ENVS // runners, FRAGMENT, int(SETTLING + seconds + 2))
        watched([*script, *map(str, sizes), mode, folder], environment, looks, every=0.5)
        return looks.pace(seconds).all


if __name__ == "__main__":
    command(measure, __doc__ or "")
