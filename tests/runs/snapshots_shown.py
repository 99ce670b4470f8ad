"""Where a run stands, for tests of what the terminal shows."""

from raynforce.runs.progress import ProgressState

SNAPSHOT = ProgressState(
    steps=40_960,
    total_steps=200_000,
    seconds=2.2,
    steps_per_second=18_311.4,
    episodes=312,
    updates=160,
    return_mean=143.21,
    best_eval=210.0,
    target=475.0,
    losses={"policy": -0.0124, "value": 12.34},
)
