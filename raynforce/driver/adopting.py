"""A run directory for what was trained elsewhere: with a checkpoint as the driver would have written it."""

from __future__ import annotations

import time
from collections.abc import Mapping

from raynforce.config import Config
from raynforce.driver.evaluating import Schedule
from raynforce.driver.status import Tally
from raynforce.policies.acting import ActingSpec, PolicyVersion
from raynforce.runs.directory import RunDirectory
from raynforce.trees import Tree


def adopt(
    run: RunDirectory,
    config: Config,
    acting: ActingSpec,
    version: PolicyVersion,
    *,
    steps: int,
    episodes: int,
    metrics: Mapping[str, float],
    parts: Mapping[str, Tree],
    counts: Tree,
    source: str,
) -> None:
    """Write it whole: config, events, and one checkpoint. `parts` and `counts` are the engine's own."""
    tally = Tally(config, time.monotonic())
    tally.counts.steps, tally.counts.episodes = steps, episodes
    tally.status.metrics.update(metrics)
    schedule = Schedule(config.eval, config.steps, config.target is not None)
    nothing = ("resumes", "redone_updates", "restarts", "env_restarts", "recycled", "recycle_cuts")
    own: Tree = {**tally.state(), **counts, "total_steps": config.steps, **dict.fromkeys(nothing, 0)}
    own |= {"schedule": schedule.state(), "sinks": {}}
    policy = {"acting": acting.to_json(), "version": version.state()}
    run.create(config.to_yaml())
    with run.locked():
        run.event("imported", source=source, steps=steps)
        run.save(steps, {**parts, "policy": policy, "run": own}, keep=config.checkpoint.keep)
        run.event("stopped", reason="imported", steps=steps)
        run.finish()
