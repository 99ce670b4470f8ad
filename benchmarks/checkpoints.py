"""What a checkpoint costs: how long training stops for it, and how much the next one writes.

DQN on CartPole-v1 with a replay of one million transitions, nearly all of the time spent sampling. The first part fills
the replay and ends with a checkpoint of everything; the second goes on and writes one every 50,000 steps. The pause is
the time between two rounds in which training waits for the copy that is then written beside it.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import raynforce
from benchmarks.measure import Row, Table, command, ratio, row
from benchmarks.runs import RUNTIMES, Settings
from benchmarks.settings import TRAINING_ALONE

PAUSE = 100.0  # ms
SHARE = 0.2
SETTINGS = TRAINING_ALONE | {
    "algorithm.buffer_size": 1_000_000,
    "algorithm.samples_per_insert": 0.02,
    "sampling.envs": 64,
    "sampling.fragment": 32,
    "log_every": 2_000,
}


def measure(filled: int = 1_000_000, more: int = 400_000, every: int = 50_000) -> list[Table]:
    """Fill the replay, then go on with checkpoints, on each runtime."""
    kinds: dict[str, Settings] = {"uniform": {}, "prioritised": {"algorithm.prioritized": True}}
    return [
        Table(
            f"{kind} replay of {filled:,} transitions, runtime {runtime}", _measure(runtime, how, filled, more, every)
        )
        for kind, how in kinds.items()
        for runtime in RUNTIMES
    ]


def _measure(runtime: str, how: Settings, filled: int, more: int, every: int) -> list[Row]:
    with TemporaryDirectory() as folder:
        out, all_of_it = Path(folder) / "run", _Seen()
        first = raynforce.train(
            "CartPole-v1",
            "dqn",
            steps=filled,
            out=out,
            settings={**SETTINGS, **how},
            runtime=runtime,
            topology="sync",
            callbacks=[all_of_it],
            progress="quiet",
        )
        whole = sum(file.stat().st_size for file in (out / "checkpoints").rglob("*") if file.is_file())
        seen = _Seen()
        raynforce.resume(
            out,
            steps=first.result.steps + more,
            settings={"checkpoint.every": every},
            callbacks=[seen],
            progress="quiet",
        )
    pauses = [1e3 * pause for pause in (all_of_it.pauses[-1], *seen.pauses)]
    sizes = [size / 1e6 for size in seen.sizes]
    return [
        row("the first checkpoint writes", "MB", [whole / 1e6]),
        row("each one after it writes", "MB", sizes),
        ratio("after / first", sizes, [whole / 1e6] * len(sizes), bar=("at most", SHARE)),
        row("training stops for the first", "ms", [1e3 * all_of_it.pauses[-1]]),
        row("training stops for each one after it", "ms", [1e3 * pause for pause in seen.pauses]),
        ratio("longest stop / 100 ms", [max(pauses)], [PAUSE], bar=("at most", 1.0)),
        row("each one after it is written in, beside training", "ms", [1e3 * seconds for seconds in seen.seconds]),
    ]


class _Seen(raynforce.Callback):
    """Notes what every checkpoint cost."""

    def __init__(self) -> None:
        self.sizes: list[float] = []
        self.pauses: list[float] = []
        self.seconds: list[float] = []

    def on_round(self, status: raynforce.Status) -> None:
        found = status.metrics
        for name, seen in (("bytes", self.sizes), ("pause", self.pauses), ("seconds", self.seconds)):
            value = found.get(f"disk/checkpoint_{name}")
            if value is not None and (not seen or seen[-1] != value):
                seen.append(value)

    on_end = on_round


if __name__ == "__main__":
    command(measure, __doc__ or "")
