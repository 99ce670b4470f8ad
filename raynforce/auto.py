"""`auto`: which runtime and topology suit an environment, this machine, and what was asked for."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from typing import Any, Literal

import gymnasium

from raynforce.algos import algorithm_class
from raynforce.config import Config, RayConfig
from raynforce.envs.cost import PATIENCE, probe_cost
from raynforce.envs.make import locate
from raynforce.envs.patience import patience
from raynforce.envs.vector import probe
from raynforce.runtimes.placing import cores
from raynforce.spaces import EnvSpec

# Seconds of an environment's step. Learning costs 20 to 200 µs a step with small networks on a CPU.
SHARED = 30e-6  # from here on several samplers gain more in processes than their messages cost
COSTLY = 100e-6  # from here on sampling costs as much as learning: it pays to do other things meanwhile
SLOW = 2e-3  # from here on, shared among the samplers, learning is next to nothing and need not be hidden

Runtime = Literal["auto", "inline", "process", "ray"]
Topology = Literal["auto", "sync", "overlap", "async", "replay", "shared-agent"]


@dataclass(frozen=True)
class Facts:
    """All that a choice depends on."""

    step_seconds: float | None = None
    """Of the environment; infinite: more than was waited for; None: not known."""
    samplers: int = 1
    tolerates_lag: bool = True
    """Whether the algorithm can learn from the version before the newest."""
    obstacle: str = ""
    """Why roles cannot be at work side by side on this machine."""
    wants_ray: bool = False
    """Whether a setting is given that only Ray heeds."""


def choose(runtime: Runtime, topology: Topology, facts: Facts) -> tuple[Runtime, Topology]:
    """The runtime and topology that `auto` stands for; what is not `auto` stays.

    The topology, which decides what is learned, depends on what is trained alone, not on where it runs.
    """
    cost = facts.step_seconds or 0.0
    if topology == "auto":
        pays = cost >= COSTLY and cost / facts.samplers < SLOW
        topology = "overlap" if pays and facts.tolerates_lag else "sync"
    if runtime == "auto":
        # Evaluation goes on beside training in processes, and an environment that hangs can be ended there.
        side_by_side = topology != "sync" or cost >= (COSTLY if facts.samplers == 1 else SHARED)
        here: Runtime = "process" if side_by_side and not facts.obstacle else "inline"
        runtime = "ray" if facts.wants_ray else here
    return runtime, topology


def settle(config: Config) -> tuple[Config, EnvSpec, str]:
    """The config without `auto`, what its environment takes and gives, and one line that says what was chosen."""
    tolerates_lag = algorithm_class(config.algo).max_lag != 0
    facts = Facts(None, config.sampling.samplers, tolerates_lag, _obstacle(config.env), config.ray != RayConfig())
    possible = {
        choose(config.runtime, config.topology, replace(facts, step_seconds=s)) for s in (0.0, COSTLY, math.inf)
    }
    with patience(config.faults.start_seconds, f"making env {config.env!r}"):
        if len(possible) == 1:  # whatever a step costs
            spec = probe(config.env, config.env_args)
        else:
            spec, seconds = probe_cost(config.env, config.env_args)
            facts = replace(facts, step_seconds=seconds)
    runtime, topology = choose(config.runtime, config.topology, facts)
    settled = replace(config, runtime=runtime, topology=topology)
    return settled, spec, _sentence(config, settled, facts) if settled != config else ""


def _obstacle(env: str) -> str:
    if cores() == 1:
        return "there is one core"
    if sys.platform != "linux":
        return "roles in processes need Linux"
    return "" if _known_elsewhere(env) else f"{env} is registered in this process alone"


def _known_elsewhere(env: str) -> bool:
    """Whether a new process finds this environment: not if it is an id that the user's own script registered."""
    if ":" in env:
        return True  # its module is imported wherever it is made
    registered = gymnasium.registry[str(locate(env))]
    entry: Any = registered.entry_point or registered.vector_entry_point
    package = _package(entry if isinstance(entry, str) else entry.__module__)
    if package in ("gymnasium", "ale_py"):
        return True
    return package in {_package(plugin.value) for plugin in entry_points(group="gymnasium.envs")}


def _package(path: str) -> str:
    return path.partition(":")[0].partition(".")[0]


def _sentence(asked: Config, chosen: Config, facts: Facts) -> str:
    found = [getattr(chosen, k) for k in ("runtime", "topology") if getattr(asked, k) == "auto"]
    why: list[str] = []
    if asked.topology == "auto":
        newest = f"{chosen.algo} learns from the newest policy version alone"
        why.append(_cost(chosen.env, facts.step_seconds) if facts.tolerates_lag else newest)
    if asked.runtime == "auto":
        why += _where(asked, chosen, facts)
    return f"auto: {' and '.join(found)}, because {' and '.join(dict.fromkeys(why))}"


def _where(asked: Config, chosen: Config, facts: Facts) -> list[str]:
    """Why this runtime."""
    if chosen.runtime == "ray":
        return ["settings for ray are given"]
    without = replace(facts, obstacle="")
    if choose("auto", chosen.topology, without)[0] != chosen.runtime:
        return [facts.obstacle]
    if asked.topology != "auto" and chosen.topology != "sync":
        return [f"{chosen.topology} samples while it learns"]
    samplers = f"there are {facts.samplers} samplers"
    shared = chosen.runtime == "process" and chosen.topology == "sync" and facts.samplers > 1
    return [_cost(chosen.env, facts.step_seconds), *([samplers] if shared else [])]


def _cost(env: str, seconds: float | None) -> str:
    if seconds is None:
        return f"{env} could not be timed"
    if math.isinf(seconds):
        return f"{env} was not through its first step in {PATIENCE * 1e3:.0f} ms"
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"a step of {env} takes {seconds / size:.2g} {unit}"
    return f"a step of {env} takes {seconds * 1e6:.0f} µs"
