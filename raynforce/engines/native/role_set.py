"""The roles of a run: started together, kept alive, asked for their states, put back to where they were."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from raynforce.engines.base import Supervisor
from raynforce.engines.native.takeover import Takeover
from raynforce.experience.counts import Receipt
from raynforce.experience.ledger import Ledger
from raynforce.runtimes.base import Handle, RoleDied
from raynforce.runtimes.member import Fault, Job, Member
from raynforce.runtimes.placing import memory_limit
from raynforce.runtimes.pool import Pool, member_name
from raynforce.topologies.declaration import Blueprint, Kind, Topology
from raynforce.topologies.loop import TELL_AFTER
from raynforce.trees import Tree


class RoleSet:
    def __init__(
        self, plan: Blueprint, topology: Topology, ledger: Ledger, supervisor: Supervisor, say: Callable[[str], None]
    ) -> None:
        """Start all roles at once, the slowest to start first, and wait until each could be built."""
        self.runtime = plan.runtime
        self.pool = Pool(plan.runtime, supervisor)
        self.sizes: dict[int, int] = {}  # transitions in each replay shard, or each worker's buffer, as far as known
        self.lost_transitions = 0  # of shards and workers that had to begin empty
        self._flying: dict[int, int] = {}  # steps that each sampler had in its hands when it was last heard of
        self._config, self._topology, self._lanes = plan.config, topology, plan.env.lanes
        self._ledger, self._supervisor, self._say = ledger, supervisor, say
        self._sequences: dict[int, int] = {}  # of the next fragment of each sampler
        self._most = memory_limit(plan.config, buffering=topology.gathers_gradients)
        self._kinds: dict[str, Kind] = {kind.name: kind for kind in topology.kinds(plan)}
        members = {kind.name: self._start(kind) for kind in self._kinds.values()}
        (self.learner,) = members["learner"]
        self.shards: Sequence[Member] = members.get("shard", [])
        self.hosts: Sequence[Member] = members.get("host", [])
        sampling = [kind.name for kind in self._kinds.values() if kind.samples]
        self.samplers: Sequence[Member] = [member for name in sampling for member in members[name]]
        notes = self.wait_for([self.pool.submit(member, "note") for member in (*self.samplers, *self.hosts)])
        for note in dict.fromkeys(filter(None, notes)):
            say(f"note: {note}")
        own = plan.config.network.factory
        if own and not topology.gathers_gradients:
            say(f"note: samplers import torch for your own network {own}")

    @property
    def flying(self) -> int:
        """Steps that are to become parts of fragments, as far as known."""
        return sum(self._flying.values())

    def _start(self, kind: Kind) -> list[Member]:
        place = self.runtime.places[kind.place or kind.name]

        def make(index: int) -> Handle:
            name = member_name(kind.name, index, kind.count)
            return self.runtime.spawn(kind.role, *kind.args(index), name=name, place=place)

        rules = kind.rules if kind.name == "learner" else replace(kind.rules, start_fresh=self._start_fresh)
        return self.pool.add(kind.name, make, kind.count, rules)

    def wait_for(self, jobs: Sequence[Job]) -> list[Any]:
        """The answers of roles that may still be starting; a wait that a user would notice is explained."""
        seconds = TELL_AFTER
        while not self.pool.wait(jobs, seconds):
            names = sorted({job.member.name for job in jobs if not job.settled})
            who = ", ".join(names) if len(names) < 4 else f"{names[0]} and {len(names) - 1} more"
            self._say(f"waiting for {who}{self.runtime.pending_reason()}")
            seconds = min(60.0, 2 * seconds)
        return [None if job.fault is not None else job.result() for job in jobs]

    def states(self, known: Callable[[str], Collection[str]]) -> dict[str, Tree]:
        """What a checkpoint holds of each part, without the segments that are known to be saved."""
        parts = {"learner": self.learner} | {f"replay_{shard.index}": shard for shard in self.shards}
        jobs = {name: self.pool.submit(member, "state", sorted(known(name))) for name, member in parts.items()}
        segmented = self._topology.gathers_gradients
        own = (lambda sampler: sorted(known(f"sampler_{sampler.index}"))) if segmented else None
        states = self.pool.states(self.samplers, own) if self._topology.exact else []
        self.pool.wait(list(jobs.values()))
        found = {f"sampler_{index}": state for index, state in enumerate(states) if state is not None}
        kept = {name: self.runtime.keep(job.value) for name, job in jobs.items() if job.fault is None}
        return {name: state.result() for name, state in kept.items()} | found

    def load(self, saved: Mapping[str, Tree], takeover: Takeover) -> list[str]:
        """Put every role back to where it was; returns sentences on what could not be restored exactly."""
        share, submit = self.runtime.share, self.pool.submit
        sequence, attempt = takeover.fresh
        for member in (*self.shards, *self.samplers, *self.hosts):
            member.attempts = attempt
        loading = [submit(self.learner, "load", share(saved["learner"]))]
        loading += [submit(shard, "load", share(saved[f"replay_{shard.index}"])) for shard in self.shards]
        for sampler in self.samplers:
            state = takeover.sampler(sampler.index)
            self._sequences[sampler.index] = sequence if state is None else int(state["sequence"])
            call = ("start_fresh", sequence, attempt) if state is None else ("load", share(state))
            loading.append(submit(sampler, *call))
        loading += [submit(host, "start_fresh", attempt) for host in self.hosts]
        return list(dict.fromkeys(note for several in self.wait_for(loading) for note in several or ()))

    def received(self, receipt: Receipt) -> None:
        """A fragment has come: look at what broke on the way, and at what its sampler takes of the memory."""
        index = receipt.record.sampler
        member = self.samplers[index]
        self._sequences[index] = receipt.record.sequence + 1
        self._flying[index] = receipt.flying
        if receipt.kept:
            self.sizes[index] = receipt.kept
        self._supervisor.env_faults(member.name, receipt.faults)
        if self.runtime.has_processes and receipt.memory > self._most and member.rules.has_state:
            grown = RoleDied(f"{member.name} has grown to {receipt.memory / 1e6:,.0f} MB (faults.memory_mb)")
            self.pool.replace(member, Fault(member.name, "memory", grown, "restarted"))

    def _start_fresh(self, member: Member) -> Sequence[Any]:
        """A member has lost its state: count what was lost with it; returns the call that lets it start fresh."""
        kind, sampling = self._kinds[member.kind], self._config.sampling
        transitions = self.sizes.pop(member.index, 0) if kind.buffers else 0
        self.lost_transitions += transitions
        if not kind.samples:
            if kind.buffers:
                self._supervisor.say(f"{member.name} begins empty: {transitions:,} transitions are lost")
            return "start_fresh", member.attempts
        self._supervisor.lost = self._flying.pop(member.index, 0) + sampling.fragment * sampling.envs * self._lanes
        self._ledger.lose(self._supervisor.lost)
        if member.rules.has_state:
            also = f", and {transitions:,} transitions of its buffer" if transitions else ""
            self._supervisor.say(f"{member.name} starts without its saved state: its episodes in flight are lost{also}")
        sequence = self._sequences.get(member.index, 0) + 1  # a gap, so that nothing is joined across it
        self._sequences[member.index] = sequence
        return "start_fresh", sequence, member.attempts
