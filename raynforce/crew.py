"""The roles of a run: started together, asked for their states, put back to where they were."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from raynforce.config import Config
from raynforce.envs.vector import EnvArgs
from raynforce.policies.acting import ActingSpec, PolicyVersion
from raynforce.resuming import Takeover
from raynforce.runtimes.base import Handle, Runtime
from raynforce.runtimes.member import Job
from raynforce.runtimes.placing import memory_limit, stepping
from raynforce.runtimes.pool import Pool
from raynforce.spaces import EnvSpec
from raynforce.supervision import Supervision
from raynforce.topologies.loop import PATIENCE
from raynforce.trees import Tree

SAMPLER = "raynforce.roles.sampler:Sampler"
LEARNER = "raynforce.roles.learner:Learner"  # by name: importing it imports torch, which the driver does without
EVALUATOR = "raynforce.roles.evaluator:Evaluator"
SHARD = "raynforce.roles.shard:Shard"
WORKER = "raynforce.roles.worker:Worker"
CENTRAL = "raynforce.roles.central:Central"
ENV_HOST = "raynforce.roles.env_host:EnvHost"


class Crew:
    """A learner and samplers in a pool that keeps them alive, and what it takes to make an evaluator."""

    def __init__(
        self,
        config: Config,
        env: EnvSpec,
        acting: ActingSpec,
        runtime: Runtime,
        supervision: Supervision,
        say: Callable[[str], None],
    ) -> None:
        """Start all roles at once, the slowest to start first, and wait until each could be built."""
        self.runtime = runtime
        self.pool = Pool(runtime, supervision)
        self._config, self._acting, self._supervision, self._say = config, acting, supervision, say
        place, sampling = runtime.places, config.sampling
        envs = self._envs(sampling.envs)

        def learner(_: int) -> Handle:
            return runtime.spawn(LEARNER, config, env, name="learner", place=place["learner"])

        def sampler(index: int) -> Handle:
            role, *what = SAMPLER, acting, envs, sampling.fragment, index, sampling.samplers
            if self._has_workers:
                role, *what = WORKER, config, acting, envs, index
            return runtime.spawn(role, *what, name=f"sampler {index}", place=place["sampler"])

        def shard(index: int) -> Handle:
            return runtime.spawn(SHARD, config, env, index, name=f"shard {index}", place=place["shard"])

        def host(index: int) -> Handle:
            faults = config.faults
            start = faults.start_seconds if runtime.apart else math.inf
            args = envs, index, faults.sample_seconds, start, memory_limit(config), config.central.one_core
            return runtime.spawn(ENV_HOST, *args, name=f"host {index}", place=place["sampler"])

        def policy(_: int) -> Handle:
            return runtime.spawn(CENTRAL, config, acting, runtime.channel, name="policy", place=place["policy"])

        (self.learner,) = self.pool.add("learner", learner, 1, supervision.rules("learner"))
        self.shards = self.pool.add("shard", shard, config.replay.shards, supervision.rules("shard"))
        central = config.topology == "central"
        self.hosts = self.pool.add("host", host, sampling.samplers * central, supervision.rules("host"))
        if central:
            self.samplers = self.pool.add("policy", policy, 1, supervision.rules("policy"))
        else:
            self.samplers = self.pool.add("sampler", sampler, sampling.samplers, supervision.rules("sampler"))
        notes = self.wait_for([self.pool.submit(member, "note") for member in (*self.samplers, *self.hosts)])
        for note in dict.fromkeys(filter(None, notes)):
            say(f"note: {note}")
        if config.network.factory and not self._has_workers:
            say(f"note: samplers import torch for your own network {config.network.factory}")

    @property
    def _has_workers(self) -> bool:
        """Whether samplers compute gradients, and so have what algorithms keep."""
        return self._config.topology == "shared-agent"

    def evaluator(self, _: int) -> Handle:
        """Start an evaluator."""
        how = self._config.eval
        lanes = self._envs(min(how.envs, how.episodes), evaluating=True)
        place, faults = self.runtime.places["evaluator"], self._config.faults
        args = self._acting, lanes, faults.restarts, faults.sample_seconds
        return self.runtime.spawn(EVALUATOR, *args, name="evaluator", place=place)

    def _envs(self, count: int, *, evaluating: bool = False) -> EnvArgs:
        config = self._config
        exact, parallel = config.sampling.exact_resume, stepping(config, evaluating=evaluating)
        return EnvArgs(config.env, count, config.seed, config.env_args, exact, parallel)

    def wait_for(self, jobs: Sequence[Job]) -> list[Any]:
        """The answers of roles that may still be starting; a wait that a user would notice is explained."""
        patience = PATIENCE
        while not self.pool.wait(jobs, patience):
            names = sorted({job.member.name for job in jobs if not job.settled})
            who = ", ".join(names) if len(names) < 4 else f"{names[0]} and {len(names) - 1} more"
            self._say(f"waiting for {who}{self.runtime.excuse()}")
            patience = min(60.0, 2 * patience)
        return [None if job.fault is not None else job.result() for job in jobs]

    def published(self) -> tuple[Job, int]:
        """The learner's policy version, and its number."""
        job = self.pool.submit(self.learner, "publish")
        version: PolicyVersion = self.wait_for([job])[0]
        return job, version.number

    def begin_from(self, version: PolicyVersion, seen: int) -> None:
        """Let the learner begin with the weights of another run, after so many observations."""
        self.wait_for([self.pool.submit(self.learner, "begin_from", self.runtime.share(version), seen)])

    def states(self, known: Callable[[str], Collection[str]], *, samplers: bool) -> dict[str, Tree]:
        """What a checkpoint holds of each part, without the segments that are known, and of the samplers if asked."""
        parts = {"learner": self.learner} | {f"replay_{shard.index}": shard for shard in self.shards}
        jobs = {name: self.pool.submit(member, "state", sorted(known(name))) for name, member in parts.items()}
        own = (lambda sampler: sorted(known(f"sampler_{sampler.index}"))) if self._has_workers else None
        states = self.pool.states(self.samplers, own) if samplers else []
        self.pool.wait(list(jobs.values()))
        found = {f"sampler_{index}": state for index, state in enumerate(states) if state is not None}
        kept = {name: self.runtime.keep(job.value) for name, job in jobs.items() if job.fault is None}
        return {name: state.result() for name, state in kept.items()} | found

    def load(self, saved: Mapping[str, Tree], takeover: Takeover) -> list[str]:
        """Put every role back to where it was; returns sentences on what could not be restored exactly."""
        share = self.runtime.share
        sequence, attempt = takeover.anew
        loading = [self.pool.submit(self.learner, "load", share(saved["learner"]))]
        for shard in self.shards:
            shard.attempts = attempt
            loading.append(self.pool.submit(shard, "load", share(saved[f"replay_{shard.index}"])))
        for sampler in self.samplers:
            sampler.attempts = attempt
            state = takeover.sampler(sampler.index)
            if state is None:
                self._supervision.begin_at(sampler.index, sequence)
                loading.append(self.pool.submit(sampler, "begin_anew", sequence, attempt))
            else:
                self._supervision.begin_at(sampler.index, state["sequence"])
                loading.append(self.pool.submit(sampler, "load", share(state)))
        for host in self.hosts:
            host.attempts = attempt
            loading.append(self.pool.submit(host, "begin_anew", attempt))
        return list(dict.fromkeys(note for several in self.wait_for(loading) for note in several or ()))
