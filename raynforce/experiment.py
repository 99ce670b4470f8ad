"""From layers of settings to one experiment: defaults, those of algorithm, topology and preset, a file, the user."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

from raynforce import engines, settings, topologies
from raynforce.algos import BUILT_IN
from raynforce.algos.presets import preset_for
from raynforce.config import CONFIG_VERSION, REMOVED, Config
from raynforce.errors import UsageError, nearest
from raynforce.imports import require_named


def resolve(*layers: Mapping[str, Any]) -> tuple[Config, dict[str, Any]]:
    """Lay nested settings over the defaults, later layers win; also return the preset that was applied, dotted."""
    given: dict[str, Any] = reduce(settings.merge, layers, {})
    algo, env = settings.coerce(given.get("algo", Config.algo), str, "algo"), given.get("env")
    if not env:
        raise UsageError("no environment given: name a gymnasium id such as CartPole-v1, or module:factory")
    version = given.get("config_version", CONFIG_VERSION)
    if version != CONFIG_VERSION:
        raise UsageError(f"config_version = {version!r} is not one this release reads (it reads {CONFIG_VERSION})")
    engine = settings.coerce(given.get("engine", Config.engine), str, "engine")
    kind = engines.algorithm_of(engine, algo)
    topology = str(given.get("topology", Config.topology))
    preset = preset_for(algo, str(env), topology) if given.get("preset", "auto") == "auto" else {}
    of_topology = kind.topology_defaults.get(topology, {})
    remembering = {key: value for key, value in kind.memory_defaults.items() if key not in of_topology}
    memory = remembering if _remembers(given) else {}
    tuned = (kind.defaults, of_topology, preset, memory)
    own = {"policies": _of_policies(given, remembering)}
    data: dict[str, Any] = reduce(settings.merge, (*map(settings.nested, tuned), own, given), {})
    applied = {key: value for key, value in preset.items() if not (_has(given, key) or key in memory)}

    def hint(path: str, known: Iterable[str]) -> str:
        from raynforce.hints import about_setting  # only once there is a mistake

        return about_setting(path, known, algo) if algo in BUILT_IN or ":" in algo else nearest(path, known)

    config = settings.build(Config, data, {"algorithm": kind.Settings}, hint)
    require_named("engine", config.engine, engines.BUILT_IN, "Class")
    require_named("topology", config.topology, ("auto", *topologies.BUILT_IN), "NAME")
    if config.rllib and config.engine != "rllib":
        name = next(iter(settings.dotted({"rllib": config.rllib})))
        raise UsageError(f"{name} is for --engine rllib, and the engine is {config.engine!r}: leave it out")
    return config, applied


def settings_of(file: Path) -> tuple[dict[str, Any], list[str]]:
    """The settings in a run's config.yaml, without those that there are no more, and what is to be told of these."""
    found, notes = settings.read_yaml(str(file)), []
    if "registry" in found:
        raise UsageError(f"{file.parent} is a registry of policies, not a run: resume the run that a policy came from")
    for dotted, now in REMOVED.items():
        section, _, name = dotted.rpartition(".")
        place = found.get(section) if section else found
        if isinstance(place, dict) and name in place and (had := place.pop(name)) != now:
            notes.append(f"{dotted} = {had!r} is no setting any more: it is {now!r} from here on")
    return found, notes


def _remembers(section: Any) -> bool:
    """Whether the settings of a run, or of one of its policies, ask for memory."""
    network = section.get("network") if isinstance(section, Mapping) else None
    return isinstance(network, Mapping) and network.get("memory", "none") != "none"


def _of_policies(given: Mapping[str, Any], memory: Mapping[str, Any]) -> dict[str, Any]:
    """What policies with memory of their own have by default, by name: all that was not given for the run."""
    policies = given.get("policies")
    mine = settings.nested({key: value for key, value in memory.items() if not _has(given, key)})
    return {name: mine for name, how in policies.items() if _remembers(how)} if isinstance(policies, Mapping) else {}


def _has(tree: Mapping[str, Any], dotted: str) -> bool:
    first, _, rest = dotted.partition(".")
    below = tree.get(first)
    return first in tree and (not rest or (isinstance(below, Mapping) and _has(below, rest)))
