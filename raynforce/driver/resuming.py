"""What a run goes on from, or begins with: whether it fits the config, and what has changed since."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from raynforce import settings
from raynforce.config import Config
from raynforce.errors import CheckpointError, RaynforceError, summary
from raynforce.policies.acting import ActingSpec, PolicyVersion
from raynforce.policies.spec import NetworkSpec, several
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
    note: str  # one line on where they are from, and what is taken if it is not all
    places: Sequence[tuple[slice, slice]] = ()  # from where to where, if they are parts of another network

    def over(self, fresh: PolicyVersion) -> PolicyVersion:
        """A network's own first parameters, with the parts that are taken."""
        params = fresh.params.copy()
        for source, target in self.places:
            params[target] = self.version.params[source]
        return replace(self.version, params=params)


def weights_to_begin_with(config: Config, acting: ActingSpec) -> Weights | None:
    """The weights that `start_from` stands for, if they fit; None if it is not set."""
    if config.start_from is None:
        return None
    path = find_policy(local_path(config.start_from))
    saved, version = read_policy(path)
    run = path.resolve().parents[1]  # RUN/checkpoints/NAME
    found, expected = _networks(run, config)
    step, env = int(checkpoint.manifest(path).get("step", 0)), saved.env.env
    where = "" if env == config.env else f", trained on {env}"
    note = f"begins with the weights of {path} at step {step:,}{where}"
    if taken := _parts_of_actor(saved, acting):
        own, other = acting.network, saved.network
        places = [(other.parts[name], at) for name, at in own.parts.items() if name.partition(".")[0] in taken]
        new, left = ([p for p in _parts(spec) if p not in taken] for spec in (own, other))
        told = [f"{', '.join(taken)} taken", f"{', '.join(new)} new" if new else ""]
        told.append(f"{', '.join(left)} left out" if left else "")
        return Weights(version, step, f"{note}: {'; '.join(filter(None, told))}", places)
    different = {k: found[k] for k in expected if found[k] != expected[k]}
    shown = {k: v if isinstance(v, str) else json.dumps(v, separators=(",", ":")) for k, v in different.items()}
    changes = [f"--set network.{k}={v}" for k, v in shown.items()]
    hint, made_by = "", _settings(run).get("algo", config.algo)
    if _ways_to_act(saved) != _ways_to_act(acting) and made_by != config.algo:
        problem = f"the checkpoint is of {made_by}, whose policy acts in another way than that of {config.algo}"
        clone = "" if config.algo in ("td3", "dqn") else ", or with a clone made for it (docs/algorithms/bc.md)"
        hint = f"{problem}: begin with a run of {config.algo}{clone}"
    elif changes and all(saved.heads.get(name) == acting.heads.get(name) for name in acting.distribution().outputs):
        hint = f"the checkpoint's own settings: {' '.join(changes)}"
    fitting.require_fit(
        saved.facts(weights_alone=True),
        acting.facts(weights_alone=True),
        config.start_from,
        settings=({"network": found}, {"network": expected}),
        hint=hint,
    )
    return Weights(version, step, note)


def _parts_of_actor(saved: ActingSpec, acting: ActingSpec) -> list[str]:
    """Towers and free vectors that two networks have in common, if they differ and the whole actor is among these."""
    if saved.factory or acting.factory or "policy" not in acting.distribution().outputs:
        return []
    both = []
    for spec in (saved, acting):
        network = spec.network.facts()
        world = {k: v for k, v in spec.facts(weights_alone=True).items() if k not in network and k != "heads"}
        facts: dict[str, dict[str, Any]] = {"": world | {"normalize": network["network.normalize_obs"]}}
        for name, value in network.items():
            facts.setdefault(name.partition(".")[0], {})[name] = value
        both.append(json.loads(json.dumps(facts, default=str)))
    found, expected = both
    equal = {name for name in _parts(acting.network) if found.get(name) == expected[name]}
    for tower in acting.network.towers:  # one counts with all that it reads, which comes before it
        if any(source not in equal for source in several(tower.source) if source in _parts(acting.network)):
            equal.discard(tower.name)
    acts = found[""] == expected[""] and equal.issuperset(acting.distribution().outputs)
    same = saved.network.facts() == acting.network.facts()
    return [name for name in _parts(acting.network) if name in equal] if acts and not same else []


def _parts(network: NetworkSpec) -> list[str]:
    return [*(tower.name for tower in network.towers), *(free.name for free in network.free)]


def require_fit(found: Tree | None, acting: ActingSpec, config: Config, run: RunDirectory) -> None:
    """Refuse to go on with a run as another environment, network or heads than it was saved with."""
    try:
        saved = ActingSpec.from_json(found or {}).facts()
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"the checkpoint in {run.shown} holds no policy: {summary(error)}") from None
    before, now = _networks(run.path, config)
    fitting.require_fit(saved, acting.facts(), run.shown, settings=({"network": before}, {"network": now}))


def _ways_to_act(spec: ActingSpec) -> tuple[Any, ...]:
    """Which outputs become actions, and how, whatever the environment."""
    return spec.gaussian, spec.exploration, spec.distribution().outputs


def _settings(run: Path) -> Mapping[str, Any]:
    try:
        return settings.read_yaml(str(RunDirectory(run).config))
    except RaynforceError:  # a checkpoint that was taken out of its run
        return {}


def _networks(run: Path, config: Config) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The settings of the network that a run's file and a config both have."""
    found, expected = _settings(run).get("network"), config.to_dict()["network"]
    found = found if isinstance(found, dict) else {}
    return ({k: found[k] for k in expected if k in found}, {k: v for k, v in expected.items() if k in found})
