"""`python -m benchmarks`: all benchmarks with their default sizes, one after the other."""

from benchmarks import startup
from benchmarks.measure import Table, command


def everything() -> list[Table]:
    """Start-up first: its child processes are started by a small parent."""
    tables = startup.measure()
    from benchmarks import ppo_vs_sb3

    tables += ppo_vs_sb3.measure()
    from benchmarks import learner  # imports torch

    return tables + learner.measure()


if __name__ == "__main__":
    command(everything, "Run every benchmark with its default sizes.")
