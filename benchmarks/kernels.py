"""What portable kernels cost: they hold numpy and torch to AVX2, beside native ones, which are all that the CPU has.

PPO and DQN on CartPole-v1 with their presets, PPO on images with the default networks. Two processes take turns of a
fraction of a second each, and count the CPU time of one thread, so that others who use the machine hardly matter. A
ratio above 1 says that portable kernels are slower. On a processor without AVX-512 both choose nearly the same.
"""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack
from typing import Any, NamedTuple

from benchmarks.measure import ROOT, Table, command, ratio, row, take_turns
from raynforce.kernels import pins

BAR = 1.05
PICTURES = {"algo": "ppo", "env": "benchmarks.envs:Pictures", "sampling": {"fragment": 32}}


class Work(NamedTuple):
    """What is trained, and how many rounds are one turn."""

    name: str
    rounds: int
    layers: dict[str, Any]


WORK = (
    Work("PPO on CartPole-v1", 5, {"algo": "ppo", "env": "CartPole-v1"}),
    Work("DQN on CartPole-v1", 20, {"algo": "dqn", "env": "CartPole-v1", "algorithm": {"learning_starts": 1000}}),
    Work("PPO on images of 16x16x3", 1, {**PICTURES, "env_args": {"shape": [16, 16, 3]}}),
    Work("PPO on images of 84x84x4", 1, {**PICTURES, "env_args": {"shape": [84, 84, 4]}}),
)


def measure(repeats: int = 40) -> list[Table]:
    """Let portable and native kernels do the same work in turn."""
    if not pins():
        raise SystemExit("this processor has no AVX2: kernels are native whatever is set")
    rows = []
    for work in WORK:
        with ExitStack() as stack:
            portable, native = (_Side(kernels, work, stack) for kernels in ("portable", "native"))
            take_turns(3, portable, native)  # to warm up
            held, free = take_turns(repeats, portable, native, label=work.name)
        rows += [row(f"{work.name}: portable", "CPU ms", held), row(f"{work.name}: native", "CPU ms", free)]
        rows.append(ratio(f"{work.name}: portable / native", held, free, bar=("at most", BAR)))
    return [Table(f"A round of sampling and learning, {repeats} turns each", rows)]


class _Side:
    """A process with one kind of kernels; called, it takes a turn and returns the milliseconds of a round."""

    def __init__(self, kernels: str, work: Work, stack: ExitStack) -> None:
        layers = json.dumps({"learner": {"device": "cpu", "threads": 1}, **work.layers})
        self._rounds = work.rounds
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.kernels_work", kernels, layers],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        stack.enter_context(self._process)  # which closes its stdin, and so ends it

    def __call__(self) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(self._rounds, file=self._process.stdin, flush=True)
        return 1e3 * float(self._process.stdout.readline()) / self._rounds


if __name__ == "__main__":
    command(measure, __doc__ or "")
