"""`python -m benchmarks`: all benchmarks with their default sizes, one after the other."""

from benchmarks import (
    central,
    central_learning,
    central_vs_rllib,
    checkpoints,
    dqn_distributed,
    evaluation,
    faults,
    jobs,
    kernels,
    protocol,
    rllib_engine,
    runtimes_calls,
    runtimes_flat,
    runtimes_memory,
    runtimes_overlap,
    runtimes_startup,
    runtimes_uneven,
    serving,
    simulators,
    startup,
    tune,
)
from benchmarks.measure import Table, command

RUNTIMES = (runtimes_startup, runtimes_memory, runtimes_overlap, runtimes_uneven, runtimes_calls, runtimes_flat)
SLOW_ENVS = (central, central_learning, central_vs_rllib)
KEEPING_GOING = (evaluation, faults, checkpoints, protocol, kernels, simulators, rllib_engine, jobs)
AROUND = (tune, serving)


def everything() -> list[Table]:
    """Start-up first: its child processes are started by a small parent."""
    tables = startup.measure()
    for benchmark in (*RUNTIMES, *SLOW_ENVS, *KEEPING_GOING, *AROUND, dqn_distributed):
        tables += benchmark.measure()
    from benchmarks import dqn_vs_peers, lstm_vs_sb3, ppo_vs_sb3, sac_vs_sb3

    tables += ppo_vs_sb3.measure() + dqn_vs_peers.measure() + sac_vs_sb3.measure() + lstm_vs_sb3.measure()
    from benchmarks import frames, images, learner, replay  # import torch, or take much memory

    return tables + replay.measure() + learner.measure() + images.measure() + frames.measure()


if __name__ == "__main__":
    command(everything, "Run every benchmark with its default sizes.")
