"""`auto`: which runtime and topology suit an environment, its policy, this machine, and what was asked for."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from typing import Any, Literal

import gymnasium

from raynforce import topologies
from raynforce.algos import algorithm_class
from raynforce.algos.contract import declared
from raynforce.config import Config, RayConfig
from raynforce.envs.cost import TRIAL_SECONDS, Cost
from raynforce.envs.launching import is_simulator
from raynforce.envs.make import locate
from raynforce.envs.patience import patience
from raynforce.envs.vector import as_lane, probe
from raynforce.given import obstacle
from raynforce.imports import bare
from raynforce.measured import cost_of_acting, cost_of_env
from raynforce.policies.cost import PolicyCost
from raynforce.runtimes.placing import cores
from raynforce.spaces import EnvSpec

# Seconds of an environment's step. Learning costs 20 to 200 µs a step with small networks on a CPU.
SHARED = 20e-6  # from here on several samplers gain more in processes than their messages cost
COSTLY = 100e-6  # from here on sampling costs as much as learning: it pays to do other things meanwhile
SLOW = 2e-3  # from here on, shared among the samplers, learning is next to nothing and need not be hidden
WAITS = 0.5  # share of a step below which it waits more than it computes: threads do that side by side
HANDLING = 50e-6  # seconds that one policy for all takes for each of their steps beside its forward pass
STEPPING = 100e-6  # seconds of a core that a host's threads take for each step beside the environment itself
FILLED = 0.6  # of a core that one host is to take, at most
PER_HOST = 128  # environments in the threads of one process, at most

Runtime = Literal["auto", "inline", "process", "ray"]
Parallel = Literal["auto", "no", "threads", "processes"]


@dataclass(frozen=True)
class Choice:
    """What `auto` may stand for: in what is asked for, and in what is chosen."""

    runtime: Runtime = "auto"
    topology: str = "auto"
    parallel: Parallel = "auto"
    samplers: int = 1
    envs: int = 8

    @staticmethod
    def of(config: Config) -> Choice:
        sampling = config.sampling
        return Choice(config.runtime, config.topology, sampling.parallel, sampling.samplers, sampling.envs)

    def applied(self, config: Config) -> Config:
        sampling = replace(config.sampling, parallel=self.parallel, samplers=self.samplers, envs=self.envs)
        return replace(config, runtime=self.runtime, topology=self.topology, sampling=sampling)


@dataclass(frozen=True)
class Facts:
    """All that a choice depends on."""

    cost: Cost = Cost(None)  # noqa: RUF009  (frozen)
    """Of the environment."""
    policy: PolicyCost | None = None  # None: not measured
    tolerates_lag: bool = True  # whether the algorithm can learn from the version before the newest
    streams: bool = True  # whether it learns from each step once, as it comes, and one policy here chooses actions
    from_data: bool = False  # whether it learns from recorded episodes
    obstacle: str = ""  # why roles cannot be at work side by side on this machine
    wants_ray: bool = False  # whether a setting is given that only Ray heeds
    cores: int = 1

    @property
    def slow(self) -> bool:
        return (self.cost.seconds or 0.0) >= SLOW

    def round_seconds(self, envs: int) -> float:
        """What one policy takes to choose for each of so many environments once."""
        return HANDLING * envs + (self.policy.all * envs / self.policy.envs if self.policy else 0.0)


def choose(asked: Choice, facts: Facts) -> Choice:
    """What `auto` stands for; what is not `auto` stays, but for a single sampler's environments, which may be divided.

    The topology decides what is learned, so it depends on what is trained and not on where it runs; but one that needs
    processes for its environments is chosen only where these can be at work side by side.
    """
    seconds = facts.cost.seconds or 0.0
    topology, parallel = asked.topology, asked.parallel
    if topology == "auto" and facts.from_data:
        topology = "dataset"
    if topology == "auto":
        parallel = _side_by_side(asked, facts)
        if _one_policy_pays(asked, facts) and _one_policy_suffices(asked, facts):
            topology = "central"
        else:
            if asked.parallel == "auto" and (parallel == "processes" or asked.envs == 1):
                parallel = "no"
            each = seconds / asked.samplers / (1 if parallel == "no" else asked.envs)
            topology = "overlap" if seconds >= COSTLY and each < SLOW and facts.tolerates_lag else "sync"
    if parallel == "auto":
        computes = (facts.cost.computing or 0.0) >= WAITS and not facts.obstacle
        parallel = "no" if not paced_by_envs(topology) else "processes" if computes else "threads"
    runtime = asked.runtime
    if runtime == "auto":
        # Evaluation goes on beside training in processes, and an environment that hangs can be ended there.
        side_by_side = topologies.topology(topology).overlaps or seconds >= (COSTLY if asked.samplers == 1 else SHARED)
        here: Runtime = "process" if side_by_side and not facts.obstacle else "inline"
        runtime = "ray" if facts.wants_ray else here
    chosen = replace(asked, runtime=runtime, topology=topology, parallel=parallel)
    return _divided(chosen, facts) if asked.topology == "auto" else chosen


def paced_by_envs(topology: str) -> bool:
    return topologies.topology(topology).paced_by_envs


def _side_by_side(asked: Choice, facts: Facts) -> Parallel:
    """How it pays to step environments side by side, if it does."""
    if asked.parallel != "auto":
        return asked.parallel
    computing = facts.cost.computing
    if not facts.slow or computing is None:
        return "no"
    if computing < WAITS:
        return "threads"
    return "processes" if facts.cost.uneven and not facts.obstacle else "no"


def _one_policy_pays(asked: Choice, facts: Facts) -> bool:
    """Whether there are several slow environments that can be stepped side by side, and any age of data is learned."""
    several = asked.samplers * asked.envs > 1 and _side_by_side(asked, facts) != "no"
    return facts.slow and several and facts.streams and facts.tolerates_lag


def _one_policy_suffices(asked: Choice, facts: Facts) -> bool:
    """Whether choosing for all environments takes no longer than their steps."""
    return facts.round_seconds(asked.samplers * asked.envs) <= (facts.cost.seconds or 0.0)


def _divided(plan: Choice, facts: Facts) -> Choice:
    """The environments of a single host among as many as their threads keep busy, at most one for each core."""
    if not paced_by_envs(plan.topology) or plan.parallel != "threads" or plan.runtime != "process" or plan.samplers > 1:
        return plan
    busy = STEPPING / FILLED / max(STEPPING, facts.cost.seconds or 0.0)  # of a host, for each environment
    wanted = plan.envs * max(1 / PER_HOST, busy, facts.cost.computing or 0.0)
    fits = [n for n in range(1, facts.cores + 1) if plan.envs % n == 0]
    hosts = next((n for n in fits if n >= wanted), fits[-1])
    return replace(plan, samplers=hosts, envs=plan.envs // hosts)


# Environments of every kind that a choice may depend on: raising, cheap, costly, not known, waiting, computing.
KINDS = (*map(Cost, (None, 0.0, COSTLY, math.inf)), Cost(10.0, computing=0.0), Cost(10.0, spread=(1, 10), computing=1))


def settle(config: Config) -> tuple[Config, EnvSpec, str]:
    """The config without `auto`, what its environment takes and gives, and one line that says what was chosen."""
    asked, facts = Choice.of(config), facts_of(config)
    possible = {choose(asked, replace(facts, cost=cost)) for cost in KINDS}
    with patience(config.faults.start_seconds, f"making env {config.env!r}"):
        if len(possible) == 1:  # whatever a step costs
            spec = probe(config.env, config.env_args)
        else:
            spec, cost = cost_of_env(config.env, config.env_args)
            facts = replace(facts, cost=cost)
    if asked.topology == "auto" and paced_by_envs(choose(asked, facts).topology):
        facts = replace(facts, policy=cost_of_policy(config, spec))
    settled, line = decide(config, facts)
    return settled, as_lane(spec, ids=config.sampling.agent_ids), line


def facts_of(config: Config, cost: Cost = KINDS[0]) -> Facts:
    """What is known before anything is tried."""
    algorithm = algorithm_class(config.algo)
    return Facts(
        cost,
        tolerates_lag=algorithm.max_lag != 0,
        streams=algorithm.consumes == "stream" and config.sampling.inference == "server" and not config.policies,
        from_data=algorithm.consumes == "data",
        obstacle=_obstacle(config),
        wants_ray=config.ray != RayConfig(),
        cores=cores(),
    )


def cost_of_policy(config: Config, spec: EnvSpec) -> PolicyCost | None:
    """What acting costs with this run's network for all of its environments."""
    acting = declared(config, spec, algorithm_class(config.algo))
    return cost_of_acting(acting, config.sampling.samplers * config.sampling.envs)


def decide(config: Config, facts: Facts) -> tuple[Config, str]:
    """The config without `auto`, and one line that says what was chosen, and why."""
    chosen = choose(asked := Choice.of(config), facts)
    return chosen.applied(config), _sentence(config, asked, chosen, facts)


def side_by_side(config: Config, step_seconds: float) -> str:
    """Options for stepping a run's environments side by side; "" if they are already, or `auto` would not do it."""
    sampling = config.sampling
    if step_seconds < SLOW or sampling.parallel != "no":
        return ""
    everywhere = replace(sampling, parallel="auto", samplers=1, envs=sampling.samplers * sampling.envs)
    asked = replace(config, topology="auto", sampling=everywhere)
    asked = replace(asked, runtime="auto") if config.runtime == "inline" else asked
    try:
        with patience(config.faults.start_seconds, f"making env {config.env!r}"):
            spec, cost = cost_of_env(config.env, config.env_args)
        chosen, _ = decide(asked, replace(facts_of(asked, cost), policy=cost_of_policy(asked, spec)))
    except Exception:  # one that can be made only once: the run is over, and this is but advice
        return ""
    if chosen.sampling.parallel == "no":
        return ""
    where: list[tuple[str, Any, Any]] = [("runtime", chosen, config), ("topology", chosen, config)]
    where += [("samplers", chosen.sampling, sampling), ("envs", chosen.sampling, sampling)]
    words = [f"--{k} {value}" for k, new, old in where if (value := getattr(new, k)) != getattr(old, k)]
    words += [f"--set sampling.parallel={chosen.sampling.parallel}"] if not paced_by_envs(chosen.topology) else []
    return " ".join(words)


def _obstacle(config: Config) -> str:
    """Why roles cannot be at work side by side on this machine."""
    if cores() == 1:
        return "there is one core"
    if sys.platform != "linux":
        return "roles in processes need Linux"
    if not _known_elsewhere(config.env):
        return f"{config.env} is registered in this process alone"
    # What a script defines has to be sent there; asked only if that decides something.
    return obstacle((config.env, config.algo, config.network.factory)) if config.runtime == "auto" else ""


def _known_elsewhere(env: str) -> bool:
    """Whether a new process finds this environment: not if it is an id that the user's own script registered."""
    if ":" in env or is_simulator(env):
        return True  # its module is imported, or its program started, wherever it is made
    registered = gymnasium.registry[str(locate(env))]
    entry: Any = registered.entry_point or registered.vector_entry_point
    module = entry if isinstance(entry, str) else entry.__module__
    plugins = [plugin.value for plugin in entry_points(group="gymnasium.envs")]
    package, *known = (re.split("[:.]", path)[0] for path in (module, *plugins))
    return package in ("gymnasium", "ale_py", *known)


def _sentence(config: Config, asked: Choice, chosen: Choice, facts: Facts) -> str:
    found = " and ".join(getattr(chosen, k) for k in ("runtime", "topology") if getattr(asked, k) == "auto")
    if asked.parallel == "auto" != chosen.parallel != "no":
        found = f"{found} with {chosen.parallel}" if found else chosen.parallel
    if chosen.samplers != asked.samplers:
        found += f" in {chosen.samplers} hosts of {chosen.envs} environments"
    why: list[str] = []
    if asked.topology == "auto" and facts.from_data:
        why.append(f"{bare(config.algo)} learns from recorded episodes")
    elif asked.topology == "auto":
        why += [] if facts.tolerates_lag else [f"{config.algo} learns from the newest policy version alone"]
        why += [cost_line(config.env, facts.cost)] if facts.tolerates_lag or chosen.parallel != "no" else []
        if _one_policy_pays(asked, facts) and not _one_policy_suffices(asked, facts):
            envs, seconds = asked.samplers * asked.envs, facts.round_seconds(asked.samplers * asked.envs)
            why.append(f"one policy would take {duration(seconds)} to choose for all {envs} environments")
    elif asked.parallel == "auto" and chosen.parallel != "no":
        why.append(cost_line(config.env, facts.cost))
    if asked.runtime == "auto":
        why += _where(config.env, asked, chosen, facts)
    return f"auto: {found}, because {' and '.join(dict.fromkeys(why))}" if found else ""


def _where(env: str, asked: Choice, chosen: Choice, facts: Facts) -> list[str]:
    if chosen.runtime == "ray":
        return ["settings for ray are given"]
    if choose(replace(chosen, runtime="auto"), replace(facts, obstacle="")).runtime != chosen.runtime:
        return [facts.obstacle]
    overlaps = topologies.topology(chosen.topology).overlaps
    if asked.topology != "auto" and overlaps:
        return [f"{chosen.topology} samples while it learns"]
    shared = chosen.runtime == "process" and not overlaps and asked.samplers > 1
    return [cost_line(env, facts.cost), *([f"there are {asked.samplers} samplers"] if shared else [])]


def cost_line(env: str, cost: Cost) -> str:
    env = bare(env)
    if cost.seconds is None:
        return f"{env} could not be timed"
    computing = cost.computing
    if math.isinf(cost.seconds):
        share = "" if computing is None else f", of which it computed {computing:.0%}"
        return f"{env} was not through its first step in {TRIAL_SECONDS * 1e3:.0f} ms{share}"
    line = f"a step of {env} takes {duration(cost.seconds)}"
    if cost.seconds < SLOW or computing is None:
        return line
    low, high = (duration(x) for x in cost.spread)
    if low.split()[1] == high.split()[1]:
        low = low.split()[0]
    return line + (f" ({low}–{high})" if low != high.split()[0] else "") + f", of which it computes {computing:.0%}"


def duration(seconds: float) -> str:
    """As a person would say it: 14 µs, 1.2 ms, 31 ms, 2 s."""
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:.{1 if seconds < 9.5 * size else 0}f} {unit}".replace(".0 ", " ")
    return f"{seconds * 1e6:.0f} µs"
