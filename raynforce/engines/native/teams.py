"""Several policies of one run: who plays whom, what each learns with, and one line for what does not fit."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from raynforce import settings
from raynforce.algos.base import Algorithm
from raynforce.algos.contract import declared
from raynforce.config import Config, PolicyConfig
from raynforce.envs.agents import lane_spec, require_one_kind
from raynforce.envs.vector import derive_seed
from raynforce.errors import CheckpointError, UsageError
from raynforce.hints import about_setting
from raynforce.policies.acting import ActingSpec, PolicyVersion
from raynforce.policies.team import Part, TeamSpec
from raynforce.policy import read_policy
from raynforce.roles.team import Plan
from raynforce.runs.directory import find_policy
from raynforce.runs.mirrored import local_path
from raynforce.spaces import Agents, EnvSpec
from raynforce.topologies import BUILT_IN, topology

OWN = ("algorithm", "network", "learner")  # sections that a policy may have of its own
NAME = re.compile("[A-Za-z_][A-Za-z0-9_]{0,49}")  # a part of names of metrics, and of files


def require_agents(config: Config, algorithm: type[Algorithm[Any]], env: EnvSpec) -> None:
    """Refuse settings that are for several agents where there is one, and topologies that cannot have several."""
    chosen, agents = topology(config.topology), env.agents
    if agents is None:
        given = {"policies": bool(config.policies), "sampling.agent_ids": config.sampling.agent_ids}
        given["algorithm.central_critic"] = bool(getattr(config.algorithm, "central_critic", False))
        for name in [name for name, is_set in given.items() if is_set]:
            what = f"{name} is for environments of several agents, and env {config.env!r} has one"
            raise UsageError(f"{what}: leave it out")
        return
    _require_burn_in_fits(config, agents)
    if not config.policies:
        require_one_kind(env)
        return
    if algorithm.consumes == "data":
        what = f"{config.algo} learns from recorded episodes, which are of one policy, and policies has several"
        raise UsageError(f"{what}: leave them out")
    if not chosen.several:
        able = " or ".join(name for name in BUILT_IN if topology(name).several)
        what = f"topology = {config.topology!r} trains one policy for all agents, and policies has its own"
        raise UsageError(f"{what}: use --topology {able}, or leave policies out")
    if config.start_from is not None:
        fix = "leave it out, or give one as policies.NAME.frozen"
        raise UsageError(f"start_from is for one policy, and there are several: {fix}")


def _require_burn_in_fits(config: Config, agents: Agents) -> None:
    if agents.turns and (burn_in := getattr(config.algorithm, "burn_in", 0)):
        what = f"algorithm.burn_in = {burn_in} is for agents that act at once"
        raise UsageError(f"{what}, and those of env {config.env!r} take turns: leave it out")


def _require_central_critic_of_all(own: Config, config: Config) -> None:
    """All policies learn from the global state, or none: samplers record it for all."""
    mine, all_of_them = (getattr(each.algorithm, "central_critic", False) for each in (own, config))
    if mine != all_of_them:
        what = f"algorithm.central_critic = {str(mine).lower()} differs from that of the run"
        raise UsageError(f"{what}, which is of all policies: give it for the run alone")


def plans(config: Config, env: EnvSpec, algorithm: type[Algorithm[Any]]) -> tuple[TeamSpec, dict[str, Plan]]:
    """How each policy acts, and what it is made from; in the order of the config."""
    agents = env.agents
    assert agents is not None
    given = {name: _read(name, value, config.algo) for name, value in config.policies.items()}
    seats = _seats(given, agents, env.env)
    parts: dict[str, Part] = {}
    made: dict[str, Plan] = {}
    for index, (name, how) in enumerate(given.items()):
        places = seats[name]
        spec = lane_spec(env, _kind(name, how, places, agents), ids=config.sampling.agent_ids)
        own = _config(config, name, how, algorithm, 1 if how.opponents else len(places), index)
        if how.frozen is None:
            with _told_of(name):
                _require_burn_in_fits(own, agents)
                _require_central_critic_of_all(own, config)
                acting = declared(own, spec, algorithm)
            made[name] = Plan(own, spec, None, how.opponents, how.opponents_every)
        else:
            acting, version = _frozen(name, how.frozen, spec)
            made[name] = Plan(own, spec, version)
        parts[name] = Part(acting, places, how.frozen is None, how.opponents > 0)
    if all(plan.frozen is not None for plan in made.values()):
        raise UsageError("policies has frozen ones alone, so that nothing is learned: let one learn")
    return TeamSpec.of(parts), made


def _read(name: str, value: Any, algo: str) -> PolicyConfig:
    if not NAME.fullmatch(name):
        allowed = "a to z, A to Z, _ and, but for the first, digits, at most 50 of them"
        raise UsageError(f"policies has the name {name!r}: use {allowed}")
    if not isinstance(value, Mapping):
        raise UsageError(f"policies.{name} = {value!r} is not a section: give it agents: [...]")
    with _told_of(name):
        return settings.build(PolicyConfig, dict(value), {}, partial(about_setting, algo=algo))


@contextmanager
def _told_of(name: str) -> Iterator[None]:
    """What is refused in here is told with the policy's name."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"policies.{name}: {error}") from None


def _seats(given: Mapping[str, PolicyConfig], agents: Agents, env: str) -> dict[str, tuple[int, ...]]:
    """Whom each policy plays: every agent is one's."""
    seats: dict[str, tuple[int, ...]] = {}
    taken: dict[int, str] = {}
    for name, how in given.items():
        found = [i for i, agent in enumerate(agents.names) if any(fnmatchcase(agent, p) for p in how.agents)]
        if not found:
            what = f"policies.{name}.agents = {list(how.agents)} is nobody in env {env!r}"
            raise UsageError(f"{what}: its agents are {', '.join(agents.names)}")
        for agent in found:
            if agent in taken:
                both = f"policies.{taken[agent]} and policies.{name}"
                raise UsageError(f"agent {agents.names[agent]!r} is played by {both}: leave it to one of them")
            taken[agent] = name
        seats[name] = tuple(found)
    missing = [agent for i, agent in enumerate(agents.names) if i not in taken]
    if missing:
        fix = "add it to one's agents, or give it its own under policies"
        raise UsageError(f"agent {missing[0]!r} of env {env!r} has no policy: {fix}")
    return seats


def _kind(name: str, how: PolicyConfig, places: tuple[int, ...], agents: Agents) -> int:
    """The one kind of agents that a policy plays."""
    kinds = sorted({agents.kind_of(agent) for agent in places})
    if len(kinds) > 1:
        first, other = (next(agents.names[a] for a in places if agents.kind_of(a) == kind) for kind in kinds[:2])
        what = f"policies.{name} plays {first!r} and {other!r}, which have different spaces"
        raise UsageError(f"{what}: give each its own policy")
    if how.opponents and len(places) < 2:
        what = f"policies.{name}.opponents = {how.opponents} needs two agents that play each other"
        raise UsageError(f"{what}, and it plays {agents.names[places[0]]!r} alone: leave it out")
    return kinds[0]


def _config(
    config: Config, name: str, how: PolicyConfig, algorithm: type[Algorithm[Any]], agents: int, index: int
) -> Config:
    """The run's config with what is the policy's own, seen from its learner, for whom lanes are environments."""
    data = config.to_dict()
    for section in OWN:
        data[section] = settings.merge(data[section], getattr(how, section))
    if data["network"].get("memory") == "none" and "sequence" not in how.algorithm:
        data["algorithm"].pop("sequence", None)  # the run's is for those with memory
    data["policies"] = {}
    data["sampling"]["envs"] *= agents
    if index:
        data["seed"] = derive_seed(config.seed, index)
    with _told_of(name):
        return settings.build(Config, data, {"algorithm": algorithm.Settings}, partial(about_setting, algo=config.algo))


def _frozen(name: str, run: str, spec: EnvSpec) -> tuple[ActingSpec, PolicyVersion]:
    """The policy of a run, or of `RUN:NAME` one of several."""
    path, colon, which = run.rpartition(":")
    if not (colon and which.isidentifier()):
        path, which = run, ""
    wanted = f"say which, as policies.{name}.frozen={path}:NAME"
    try:
        acting, version = read_policy(find_policy(local_path(path)), which or None, wanted=wanted)
    except (CheckpointError, UsageError) as error:
        raise UsageError(f"policies.{name}.frozen = {run!r}: {error}") from None
    if (acting.env.obs, acting.env.action) != (spec.obs, spec.action):
        what = f"policies.{name}.frozen = {run!r} was trained with other spaces"
        raise UsageError(f"{what} than its agents have here: give one that was trained for them")
    return acting, version
