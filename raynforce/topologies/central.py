"""Central: env hosts step all environments side by side, and one policy chooses for those that are ready."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from raynforce.algos.base import Algorithm
from raynforce.config import Config
from raynforce.errors import UsageError
from raynforce.experience.counts import Receipt
from raynforce.experience.storage import observation_bytes
from raynforce.memory import require_memory
from raynforce.roles.learned import ServeOutcome
from raynforce.runtimes.base import Pending, RoleDied
from raynforce.runtimes.member import Fault, Job, Member
from raynforce.spaces import EnvSpec
from raynforce.topologies import declaration
from raynforce.topologies.asynchronous import Async
from raynforce.topologies.declaration import MEMORY, ROW_BYTES, Blueprint, Kind, Setup, Topology
from raynforce.topologies.loop import AWAY, TELL_AFTER, Asked, Roles, Sample, Start

COPIES = 4  # of all rows that are gathered: filling, complete, cut to a fragment, on the way


class Central(Async):
    def __init__(self, roles: Roles, start: Start) -> None:
        super().__init__(roles, start, batch=1)
        self._hosts = roles.hosts
        (self._policy,) = roles.samplers
        self._serving: dict[Member, Job] = {}
        self._address: Job | Pending | None = None
        self._attempts = 0  # of the policy whose address this is

    def _tend(self) -> None:
        """Send hosts that serve nobody to where the policy is."""
        policy, apart = self._policy, self._pool.runtime.has_processes
        if self._address is None:
            self._address, self._attempts = self._pool.submit(policy, "address"), policy.attempts
        elif self._is_another:
            if policy.greeted is None:
                return
            self._address, self._attempts = policy.greeted, policy.attempts
            if not apart:
                self._serving.clear()
        for host in self._pool.present(self._hosts):
            job = self._serving.get(host)
            if job is not None and _ended_as(ServeOutcome.GROWN, job):
                grown = RoleDied(f"{host.name} {job.result().reason} (faults.memory_mb)")
                self._pool.replace(host, Fault(host.name, "memory", grown, "restarted"))
                del self._serving[host]
            elif job is None or (job.settled and not _ended_as(ServeOutcome.JOINED, job)):
                self._serving[host] = self._pool.submit(host, "serve", self._address)
        if not apart:  # nothing happens there while somebody else is at work
            self._pool.wait(list(self._serving.values()))

    @property
    def _is_another(self) -> bool:
        """Whether the policy was replaced, and hosts are to find it somewhere else."""
        return self._attempts != self._policy.attempts

    def _sample(self, member: Member) -> Asked:
        self._tend()
        return super()._sample(member)

    def _arrived(self, asked: Sequence[Asked]) -> list[Sample]:
        """Those that are there; calls that only told the policy of a newer version gave nothing but a receipt."""
        self._until([each.job for each in asked])
        full = []
        for each in asked:
            if each.job.fault is not None:
                continue
            receipt: Receipt = each.job.result()
            for index in receipt.silent:
                host = self._hosts[index]
                self._pool.fail(host, RoleDied(f"{host.name} does not answer the policy", host.name))
            for index in receipt.served:
                self._pool.works(self._hosts[index])
            if receipt.record.steps:
                full.append(each)
            else:
                self._receive(each.job, receipt)
        return super()._arrived(full)

    def _first(self, jobs: Sequence[Job]) -> None:
        while True:
            self._tend()
            serving = [job for job in self._serving.values() if not job.settled]
            away = self._is_another
            done = self._pool.next([*jobs, *serving], AWAY if away else TELL_AFTER)
            if not jobs or any(job.settled for job in jobs):
                return
            if not done and not away:
                self._tell_waiting(jobs)


def _ended_as(outcome: ServeOutcome, job: Job) -> bool:
    """Whether a host's `serve` is done, and ended so."""
    return job.settled and job.fault is None and job.result().outcome is outcome


def _kinds(plan: Blueprint) -> list[Kind]:
    return [declaration.learner(plan), declaration.env_hosts(plan), declaration.policy_server(plan)]


def _require(config: Config, algorithm: type[Algorithm[Any]], env: EnvSpec) -> None:
    if algorithm.consumes != "stream":
        problem = "topology = 'central' needs an algorithm that learns from each step once, such as ppo or impala"
        raise UsageError(f"{problem}, and {config.algo} learns from replay: use --topology replay")
    sampling, least = config.sampling, config.central.batch_min
    envs = sampling.samplers * sampling.envs
    if least > envs:
        problem = f"central.batch_min = {least} is more than there are environments ({envs})"
        raise UsageError(f"{problem}: lower it, or raise --envs")
    row = observation_bytes(env.obs) + ROW_BYTES
    needed = COPIES * envs * env.lanes * (sampling.fragment + 1) * row
    what = f"central: gathering {sampling.fragment} steps of each of {envs:,} environments"
    require_memory(needed, MEMORY, what, fix="lower --envs or sampling.fragment")


def _loop(setup: Setup) -> Central:
    return Central(setup.roles, setup.start)


CENTRAL = Topology("central", _kinds, _loop, _require, exact=False, paced_by_envs=True)
