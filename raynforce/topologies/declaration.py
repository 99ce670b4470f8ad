"""What a topology declares: its roles, its loop, and what it needs. Nothing else asks for a topology's name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from raynforce.algos import BUILT_IN, algorithm_class
from raynforce.algos.base import Algorithm
from raynforce.config import Config, SimsConfig
from raynforce.envs.addresses import is_remote
from raynforce.envs.launching import is_simulator
from raynforce.envs.vector import EnvArgs, Recycle
from raynforce.errors import EnvError, UsageError
from raynforce.policies.acting import ActingSpec
from raynforce.roles.team import Plan
from raynforce.runtimes.base import RoleDied, RoleError, Runtime
from raynforce.runtimes.member import Member, Rules
from raynforce.runtimes.placing import Demands, memory_limit, quorum
from raynforce.spaces import EnvSpec
from raynforce.topologies import topology
from raynforce.topologies.loop import Loop, Roles, Start
from raynforce.trees import Tree

ROW_BYTES = 48  # of a transition beside its observations
MEMORY = 0.8  # share of this machine's free memory that what is gathered, or shards, may take


@dataclass(frozen=True)
class Blueprint:
    """What the roles of a run are made from."""

    config: Config
    env: EnvSpec
    acting: ActingSpec
    runtime: Runtime
    team: Mapping[str, Plan] = field(default_factory=dict)  # several policies, by name; `acting` is then a `TeamSpec`

    @property
    def lanes(self) -> Config:
        """The config as it looks from a learner, for whom each lane is an environment."""
        if self.env.agents is None:
            return self.config
        sampling = self.config.sampling
        return replace(self.config, sampling=replace(sampling, envs=sampling.envs * self.env.lanes))

    @property
    def envs(self) -> EnvArgs:
        return env_args(self.config, self.config.sampling.envs, masked=self.env.masked)


@dataclass(frozen=True)
class Kind:
    """The members of one kind."""

    name: str
    role: str  # its class as `module:Class`: by name, because importing the learner imports torch
    args: Callable[[int], Sequence[Any]]  # what number so-and-so is built with
    rules: Rules  # how its members are kept alive
    count: int = 1
    place: str = ""  # which of the runtime's places they get, if not that of their name
    samples: bool = False  # whether the loop asks them for fragments
    buffers: bool = False  # whether they have transitions of a replay buffer


@dataclass(frozen=True)
class Setup:
    """What a loop is made from."""

    config: Config
    env: EnvSpec
    algorithm: type[Algorithm[Any]]
    roles: Roles
    start: Start
    saved: Mapping[str, Tree] | None  # the checkpoint that the run goes on from
    sizes: MutableMapping[int, int]  # transitions in each replay shard; the loop keeps them up to date


@dataclass(frozen=True)
class Topology:
    """One way for the roles of a run to work together."""

    name: str
    kinds: Callable[[Blueprint], Sequence[Kind]]  # in the order in which they are started: the slowest first
    loop: Callable[[Setup], Loop]
    require: Callable[[Config, type[Algorithm[Any]], EnvSpec], None] = lambda config, algorithm, env: None
    """Refuses, with one line, an algorithm or settings that it cannot train."""
    exact: bool = True  # checkpoints hold all that was sampled; else fragments in flight are discarded, and counted
    overlaps: bool = True  # samplers work while the learner learns
    lags: bool = True  # the learner gets fragments of older policy versions
    paced_by_envs: bool = False  # environments go their own pace, side by side, with one policy for all
    gathers_gradients: bool = False  # samplers send gradients, and have what the algorithm keeps, such as a buffer
    shards: bool = False  # the replay buffer may be divided among shards
    reads_data: bool = False  # recorded episodes are learned from, and nothing is sampled
    several: bool = False  # there may be several policies

    def check(self, config: Config, algorithm: type[Algorithm[Any]], env: EnvSpec) -> None:
        if config.replay.shards and not self.shards:
            problem = f"replay.shards = {config.replay.shards} divides the buffer of topology replay"
            raise UsageError(f"{problem}, and this is {config.topology!r}: use --topology replay, or leave it out")
        if config.sims != SimsConfig() and not is_simulator(config.env):
            name, value = next((k, v) for k, v in config.to_dict()["sims"].items() if v)
            raise UsageError(f"sims.{name} = {value} is for simulators, and env {config.env!r} is none: leave it out")
        if config.data is not None and algorithm.consumes != "data":
            able = algorithms_that(lambda found: found.consumes == "data")
            given = f"data = {config.data!r} is for algorithms that learn from recorded episodes, such as {able}"
            raise UsageError(f"{given}, and {config.algo} samples its own: leave it out")
        if algorithm.consumes == "data" and not self.reads_data:
            problem = f"topology = {config.topology!r} samples, and {config.algo} learns from recorded episodes"
            raise UsageError(f"{problem}: use --topology dataset, or leave it out")
        if self.lags and algorithm.max_lag == 0:
            needs = f"{config.algo} from the newest alone (its max_lag is 0): use --topology sync"
            raise UsageError(f"topology = {config.topology!r} learns from older policy versions, and {needs}")
        if self.paced_by_envs and getattr(config.algorithm, "gsde", False):
            what = f"algorithm.gsde = true keeps its noise in samplers, which topology {config.topology} has none of"
            raise UsageError(f"{what}: use another, such as sync")
        if config.sampling.inference == "client":
            self._check_client(config, env)
        self.require(config, algorithm, env)

    def _check_client(self, config: Config, env: EnvSpec) -> None:
        asked = "sampling.inference = 'client'"
        if not is_simulator(env.env):
            what = f"{asked} is for simulators, which choose their own actions, and env {env.env!r} is none"
            raise UsageError(f"{what}: leave it out")
        if env.agents is not None:
            what = f"{asked} is for simulators of one agent, and env {env.env!r} has {len(env.agents.names)}"
            raise UsageError(f"{what}: use --inference server")
        if self.paced_by_envs or self.gathers_gradients:
            raise UsageError(f"{asked} goes with topology sync, overlap, async or replay, not {config.topology!r}")

    def demands(self, config: Config, *, torch: bool) -> Demands:
        """What its roles ask of the machine beyond the settings; `torch` if samplers need it to act."""
        return Demands(
            serving=self.paced_by_envs,
            buffering=self.gathers_gradients,
            torch=torch or self.gathers_gradients,
            processes=config.sampling.envs if stepping(config) == "processes" else 0,
            simulators=int(is_simulator(config.env) and not is_remote(config.env)),
        )


def stepping(config: Config) -> Literal["no", "threads", "processes"]:
    """How the environments of one sampler, host or evaluator are stepped."""
    side_by_side = topology(config.topology).paced_by_envs
    if side_by_side and config.runtime == "inline":
        return "no"  # the reference: one after another, always in the same order
    asked = config.sampling.parallel
    if asked == "auto":
        return "threads" if side_by_side else "no"
    return asked


def env_args(config: Config, count: int, *, masked: bool = False) -> EnvArgs:
    recycle = Recycle(config.sims.recycle_episodes, config.sims.recycle_hours, config.sims.recycle_bytes)
    how = config.sampling.exact_resume, stepping(config), recycle
    agents = config.sampling.agent_ids, bool(getattr(config.algorithm, "central_critic", False))
    return EnvArgs(config.env, count, config.seed, config.env_args, *how, _gateway(config), masked, *agents)


def _gateway(config: Config) -> Any:
    """Where roles ask for simulators that others started; None for other environments."""
    if not is_remote(config.env):
        return None
    from raynforce.envs.addresses import own_ip
    from raynforce.envs.gateway import gateway  # in the driver alone

    opened = gateway(config.env)
    return opened.address if all_here(config) else opened.inner("tcp", own_ip())


def algorithms_that(can: Callable[[type[Algorithm[Any]]], bool]) -> str:
    """The names of the built-in algorithms that can."""
    *others, last = [name for name in BUILT_IN if can(algorithm_class(name))]
    return f"{', '.join(others)} or {last}" if others else last


def all_here(config: Config) -> bool:
    return config.runtime != "ray" or config.ray.address in (None, "local")


# -- the kinds of roles -----------------------------------------------------------------------------------


def learner(plan: Blueprint, work: str = "learn", *, gathers_gradients: bool = False) -> Kind:
    seconds = plan.config.faults.learn_seconds
    hint = "; if it needs that long, raise faults.start_seconds or faults.learn_seconds"
    rules = _rules(plan.config, work, hint, job_seconds=seconds, restartable=(RoleDied,))
    if plan.team:
        return Kind("learner", "raynforce.roles.team_learner:TeamLearner", lambda _: (plan.config, plan.team), rules)
    args = plan.lanes, plan.env, gathers_gradients
    return Kind("learner", "raynforce.roles.learner:Learner", lambda _: args, rules)


def samplers(plan: Blueprint) -> Kind:
    acting, envs, how = plan.acting, plan.envs, plan.config.sampling
    if how.inference == "client":
        from raynforce.roles.client_sampler import require_readable  # which loads the protocol

        require_readable(acting)
        hang = 0.9 * plan.config.faults.sample_seconds  # before the role itself is taken to hang
        client, ahead = (acting, envs, how.fragment), not topology(plan.config.topology).exact
        role = "raynforce.roles.client_sampler:ClientSampler"
        return _sampling(plan, role, lambda index: (*client, index, how.samplers, hang, ahead), "produce")
    role = "raynforce.roles.team_sampler:TeamSampler" if plan.team else "raynforce.roles.sampler:Sampler"
    return _sampling(plan, role, lambda index: (acting, envs, how.fragment, index, how.samplers), "produce")


def reader(plan: Blueprint) -> Kind:
    config, faults = plan.config, plan.config.faults
    sampling, data = config.sampling, str(config.data)
    hint = "; if the data takes that long to be read, raise faults.start_seconds"
    rules = _rules(config, "produce", hint, job_seconds=faults.sample_seconds, greeting="note")
    args = data, plan.env, sampling.envs, sampling.fragment, config.seed
    return Kind("reader", "raynforce.roles.reader:Reader", lambda _: args, rules, place="sampler", samples=True)


def learner_and_samplers(plan: Blueprint) -> list[Kind]:
    return [learner(plan), samplers(plan)]


def gradient_workers(plan: Blueprint) -> Kind:
    config = plan.lanes
    role = "raynforce.roles.gradient_worker:GradientWorker"
    kind = _sampling(plan, role, lambda index: (config, plan.acting, plan.envs, index), "work")
    return replace(kind, buffers=True)


def _sampling(plan: Blueprint, role: str, args: Callable[[int], Sequence[Any]], work: str) -> Kind:
    config, faults = plan.config, plan.config.faults
    needs = f"; if env {config.env!r} needs that long to be made, reset or stepped"
    rules = _rules(
        config,
        work,
        f"{needs}, raise faults.start_seconds or faults.sample_seconds",
        job_seconds=faults.sample_seconds,
        absent_seconds=faults.absent_seconds,
        quorum=quorum(config),
        greeting="note",
        evidence=sampler_evidence,
    )
    return Kind("sampler", role, args, rules, config.sampling.samplers, samples=True)


def replay_shards(plan: Blueprint) -> Kind:
    count = plan.config.replay.shards
    rules = replace(learner(plan).rules, work="insert", quorum=count)
    role = "raynforce.roles.replay_shard:ReplayShard"
    return Kind("shard", role, lambda index: (plan.lanes, plan.env, index), rules, count, buffers=True)


def env_hosts(plan: Blueprint) -> Kind:
    config, faults = plan.config, plan.config.faults
    start = faults.start_seconds if plan.runtime.has_processes else math.inf
    how = faults.sample_seconds, start, memory_limit(config), config.central.one_core
    rules = _rules(config, "serve", _slow_step(config), has_state=False, quorum=quorum(config), greeting="note")
    role, count = "raynforce.roles.env_host:EnvHost", config.sampling.samplers
    return Kind("host", role, lambda index: (plan.envs, index, *how), rules, count, place="sampler")


def policy_server(plan: Blueprint) -> Kind:
    config, faults = plan.config, plan.config.faults
    seconds = faults.sample_seconds + faults.start_seconds
    rules = _rules(config, "produce", _slow_step(config), job_seconds=seconds, has_state=False, greeting="note")
    # It also answers without any steps, to be told of a newer version.
    rules = replace(rules, shows_progress=lambda receipt: receipt.record.steps > 0)
    args = config, plan.acting, plan.runtime.channel
    return Kind("policy", "raynforce.roles.policy_server:PolicyServer", lambda _: args, rules, samples=True)


def evaluator_rules(config: Config) -> Rules:
    """How a run's evaluator is kept alive: a restart begins the evaluation again, and may fail at the same place."""
    seconds = config.faults.sample_seconds
    rules = _rules(config, "play", _slow_step(config), job_seconds=seconds, has_state=False, quorum=0)
    return replace(rules, shows_progress=lambda evaluation: evaluation.over)


def _rules(config: Config, work: str, hint: str, **more: Any) -> Rules:
    how: dict[str, Any] = {"restartable": (RoleDied, EnvError, RoleError), **more}
    faults = config.faults
    return Rules(faults.restarts, faults.backoff, faults.start_seconds, work=work, hint=hint, **how)


def _slow_step(config: Config) -> str:
    return f"; if a step of env {config.env!r} needs that long, raise faults.sample_seconds"


def sampler_evidence(member: Member) -> Callable[[], dict[str, Tree]] | None:
    """What a sampler was at when it failed: its state, and the policy versions it was given since."""
    versions = [job.args[0] for job in member.log if job.method == member.rules.work]
    states = [job.args[0] for job in member.log if job.method == "load"]
    state = member.recovery_point if member.recovery_point is not None else next(iter(states), None)
    if not versions or (state is None and member.attempts):
        return None

    def parts() -> dict[str, Tree]:
        found: dict[str, Tree] = {}
        if state is not None:  # a worker's buffer is of no use there
            found["sampler"] = {name: part for name, part in state.result().items() if name != "worker"}
        return found | {"versions": {str(i): version.result().state() for i, version in enumerate(versions)}}

    return parts
