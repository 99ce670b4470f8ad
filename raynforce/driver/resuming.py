"""What a run goes on from, or begins with: whether it fits the config, and what has changed since."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from raynforce import settings
from raynforce.config import Config
from raynforce.errors import CheckpointError, RaynforceError, summary
from raynforce.policies.acting import ActingSpec, PolicyVersion
from raynforce.policy import read_policy
from raynforce.runs import checkpoint, fitting
from raynforce.runs.directory import RunDirectory, find_policy
from raynforce.runs.mirrored import local_path
from raynforce.trees import Tree

# Settings that may change without changing what is learned.
NEUTRAL: tuple[str, ...] = ("runtime", "ray.", "sampling.parallel", "replay.compress", "faults.", "checkpoint.")
NEUTRAL += ("eval.", "log_every", "target", "preset", "config_version")


def settings_note(before: Config, now: Config) -> Iterator[str]:
    """What was changed since the run was last started, and whether it still equals one that was never stopped."""
    changed = [row for row in fitting.differences(before.to_dict(), now.to_dict()) if row.what != "steps"]
    shown = {row.what: f"{row.what} {row.found} → {row.expected}" for row in changed}
    neutral = [text for name, text in shown.items() if name.startswith(NEUTRAL)]
    others = [text for name, text in shown.items() if not name.startswith(NEUTRAL)]
    if neutral:
        yield f"changed: {', '.join(neutral)}; this changes nothing of what is learned"
    if others:
        yield f"changed: {', '.join(others)}; from here on the run differs from one that was never stopped"


def steps_note(before: int, now: int, done: int) -> Iterator[str]:
    if before != now:
        what = "what follows the run's progress (annealed learning rate, epsilon)"
        yield f"steps were {before:,} and are {now:,}: {what} goes on from {done / now:.0%}"


class Weights(NamedTuple):
    version: PolicyVersion
    step: int  # of the run they are from: as much as its normaliser has seen
    note: str  # one line on where they are from


def weights_to_begin_with(config: Config, acting: ActingSpec) -> Weights | None:
    """The weights that `start_from` stands for, if they fit; None if it is not set."""
    if config.start_from is None:
        return None
    path = find_policy(local_path(config.start_from))
    saved, version = read_policy(path)
    found, expected = _networks(path.resolve().parents[1], config)  # RUN/checkpoints/NAME
    different = {k: found[k] for k in expected if found[k] != expected[k]}
    shown = {k: v if isinstance(v, str) else json.dumps(v, separators=(",", ":")) for k, v in different.items()}
    changes = [f"--set network.{k}={v}" for k, v in shown.items()]
    helps = changes and saved.heads == acting.heads  # else it is another algorithm's network
    fitting.require_fit(
        saved.facts(weights_alone=True),
        acting.facts(weights_alone=True),
        config.start_from,
        settings=({"network": found}, {"network": expected}),
        hint=f"the checkpoint's own settings: {' '.join(changes)}" if helps else "",
    )
    step, env = int(checkpoint.manifest(path).get("step", 0)), saved.env.env
    where = "" if env == config.env else f", trained on {env}"
    return Weights(version, step, f"begins with the weights of {path} at step {step:,}{where}")


def require_fit(found: Tree | None, acting: ActingSpec, config: Config, run: RunDirectory) -> None:
    """Refuse to go on with a run as another environment, network or heads than it was saved with."""
    try:
        saved = ActingSpec.from_json(found or {}).facts()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"the checkpoint in {run.shown} holds no policy: {summary(error)}") from None
    before, now = _networks(run.path, config)
    fitting.require_fit(saved, acting.facts(), run.shown, settings=({"network": before}, {"network": now}))


def _networks(run: Path, config: Config) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The settings of the network that a run's file and a config both have."""
    try:
        found = settings.read_yaml(str(RunDirectory(run).config)).get("network")
    except RaynforceError:  # a checkpoint that was taken out of its run
        found = None
    expected = config.to_dict()["network"]
    found = found if isinstance(found, dict) else {}
    return ({k: found[k] for k in expected if k in found}, {k: v for k, v in expected.items() if k in found})
