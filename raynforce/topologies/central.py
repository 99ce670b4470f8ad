"""Central: env hosts step all environments side by side, and one policy chooses for whoever is ready.

Hosts and policy talk to each other; the driver tells hosts where the policy is, and asks it for fragments as `async`
asks samplers: one batch is learned from while the next is gathered.
"""

from __future__ import annotations

from collections.abc import Sequence

from raynforce.experience.record import Receipt
from raynforce.roles.served import Outcome
from raynforce.runtimes.base import Pending, RoleDied
from raynforce.runtimes.member import Fault, Job, Member
from raynforce.topologies.loop import AWAY, PATIENCE, Roles, Sample, Start
from raynforce.topologies.stream import Stream


class Central(Stream):
    """The loop of a run whose only sampler is the policy of all env hosts."""

    def __init__(self, roles: Roles, start: Start, *, max_lag: int) -> None:
        super().__init__(roles, start, preset="async", batch=1, max_lag=max_lag)
        self._hosts = roles.hosts
        (self._policy,) = roles.samplers
        self._serving: dict[Member, Job] = {}
        self._address: Job | Pending | None = None
        self._attempts = 0  # of the policy whose address this is

    def _tend(self) -> None:
        """Send hosts that serve nobody to where the policy is."""
        policy, apart = self._policy, self._pool.runtime.apart
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
            if job is not None and _ended_as(Outcome.GROWN, job):
                grown = RoleDied(f"{host.name} {job.result().reason} (faults.memory_mb)")
                self._pool.replace(host, Fault(host.name, "memory", grown, "restarted"))
                del self._serving[host]
            elif job is None or (job.settled and not _ended_as(Outcome.JOINED, job)):
                self._serving[host] = self._pool.submit(host, "serve", self._address)
        if not apart:  # nothing happens there while somebody else is at work
            self._pool.wait(list(self._serving.values()))

    @property
    def _is_another(self) -> bool:
        """Whether the policy was replaced, and hosts are to find it somewhere else."""
        return self._attempts != self._policy.attempts

    def _sample(self, member: Member) -> Sample:
        self._tend()
        return super()._sample(member)

    def _arrived(self, samples: Sequence[Sample]) -> list[Sample]:
        """Those that are there; calls that only told the policy of a newer version gave nothing but a receipt."""
        self._until([sample.job for sample in samples if sample.job])
        full = []
        for sample in samples:
            job = sample.job
            receipt: Receipt | None = None if job is None or job.fault is not None else job.result()
            for host in (self._hosts[index] for index in receipt.silent) if receipt is not None else ():
                self._pool.fail(host, RoleDied(f"{host.name} does not answer the policy"))
            for index in receipt.served if receipt is not None else ():
                self._pool.works(self._hosts[index])
            if job is not None and receipt is not None and not receipt.record.steps:
                self._receipts.append((receipt, self._turn(job, sum(receipt.seconds.values()))))
            else:
                full.append(sample)
        return super()._arrived(full)

    def _first(self, jobs: Sequence[Job]) -> None:
        while True:
            self._tend()
            serving = [job for job in self._serving.values() if not job.settled]
            away = self._is_another
            done = self._pool.next([*jobs, *serving], AWAY if away else PATIENCE)
            if not jobs or any(job.settled for job in jobs):
                return
            if not done and not away:
                self._waiting(", ".join(sorted({job.member.name for job in jobs if not job.settled})))


def _ended_as(outcome: Outcome, job: Job) -> bool:
    """Whether a host's `serve` is done, and ended so."""
    return job.settled and job.fault is None and job.result().outcome is outcome
