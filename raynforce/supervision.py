"""How a run's roles are kept alive, and what is told and remembered of their failures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raynforce.config import Config
from raynforce.errors import EnvError
from raynforce.experience.ledger import Ledger
from raynforce.experience.record import Receipt
from raynforce.roles.evaluator import Evaluation
from raynforce.runs.faults import FaultHistory, same_cause
from raynforce.runs.repeats import Repeats
from raynforce.runtimes.base import RoleDied, RoleError
from raynforce.runtimes.member import Fault, Job, Member, Rules
from raynforce.runtimes.placing import memory_limit, quorum
from raynforce.runtimes.pool import Pool
from raynforce.trees import Tree

REPEATED = 10  # from here on it is said how often something has happened
MILESTONES = [1, 2, 3, *(10**n for n in range(1, 13))]  # the how-manieth environment that broke is worth a line


class Supervision:
    """Watches the pool of a run: writes its history, tells the user, keeps the counts."""

    def __init__(self, config: Config, ledger: Ledger, say: Callable[[str], None], note: Callable[[str], None]) -> None:
        """`say` is told of faults, `note` of what else a user should know."""
        self.redone_updates = 0
        """Optimiser steps that were taken again because the learner had died."""
        self.env_restarts = 0
        """Environments that broke and were restarted."""
        self.shard_sizes: dict[int, int] = {}
        """Transitions in each replay shard, or in each worker's buffer, as far as is known."""
        self.lost_transitions = 0
        """Of shards and workers that had to begin empty."""
        self.history: FaultHistory | None = None
        """Where faults are written, once the run has a directory."""
        self.steps = 0
        self._config = config
        self._ledger = ledger
        self._say, self._note = say, note
        self._sequences: dict[int, int] = {}  # of the next fragment of each sampler
        self._most = memory_limit(config)
        self._lost = 0  # with the fault that is being told
        self._repeats: Repeats[tuple[str, ...]] = Repeats()  # of what is said
        self._last_cause = ""  # of an environment's fault that was told
        self.flying = 0
        """Steps that the policy of all environments had in its hands when it was last heard of."""

    # -- the rules ----------------------------------------------------------------------------------------

    def rules(self, kind: str) -> Rules:
        """How members of a kind are kept alive."""
        faults = self._config.faults
        common: dict[str, Any] = {
            "restarts": faults.restarts,
            "backoff": faults.backoff,
            "start_seconds": faults.start_seconds,
        }
        env = f"env {self._config.env!r}"
        if kind in ("learner", "shard"):
            hint = "; if it needs that long, raise faults.start_seconds or faults.learn_seconds"
            common |= {"job_seconds": faults.learn_seconds, "hint": hint}
            if kind == "learner":
                return Rules(**common, work=self._learners_work)
            return Rules(**common, work="insert", quorum=self._config.replay.shards, anew=self._empty)
        common["accidents"] = (RoleDied, EnvError, RoleError)
        if kind == "policy":
            hint = f"; if a step of {env} needs that long, raise faults.sample_seconds"
            common |= {"job_seconds": faults.sample_seconds + faults.start_seconds, "hint": hint}
            common["gets_on"] = _has_steps  # it also answers without any, to be told of a newer version
            return Rules(**common, work="produce", has_state=False, anew=self._anew_policy, greeting="note")
        if kind == "host":
            few = quorum(self._config)
            common["hint"] = f"; if a step of {env} needs that long, raise faults.sample_seconds"
            return Rules(**common, work="serve", has_state=False, quorum=few, anew=self._anew_host, greeting="note")
        if kind == "evaluator":
            common["hint"] = f"; if a step of {env} needs that long, raise faults.sample_seconds"
            common["gets_on"] = _is_over  # a restart begins the evaluation again, and may fail at the same place
            return Rules(**common, job_seconds=faults.sample_seconds, work="play", has_state=False, quorum=0)
        return Rules(
            **common,
            job_seconds=faults.sample_seconds,
            absent_seconds=faults.absent_seconds,
            quorum=quorum(self._config),
            work="work" if self._config.topology == "shared-agent" else "produce",
            anew=self._anew,
            greeting="note",
            hint=f"; if {env} needs that long to be made, reset or stepped, raise faults.start_seconds or "
            "faults.sample_seconds",
        )

    @property
    def _learners_work(self) -> str:
        if self._config.topology != "replay":
            return "apply_contributions" if self._config.topology == "shared-agent" else "learn"
        return "learn_drawn" if self._config.replay.shards else "learn_some"

    def _empty(self, member: Member) -> tuple[Any, ...]:
        lost = self.shard_sizes.pop(member.index, 0)
        self.lost_transitions += lost
        self._say(f"{member.name} begins empty: {lost:,} transitions are lost")
        return ("start_fresh", member.attempts)

    def _anew(self, member: Member) -> tuple[Any, ...]:
        sampling = self._config.sampling
        self._lost = sampling.fragment * sampling.envs
        self._ledger.lose(self._lost)
        kept = self.shard_sizes.pop(member.index, 0) if self._config.topology == "shared-agent" else 0
        self.lost_transitions += kept
        also = f", and {kept:,} transitions of its buffer" if kept else ""
        self._say(f"{member.name} starts without its saved state: its episodes in flight are lost{also}")
        sequence = self._sequences.get(member.index, 0) + 1  # a gap, so that nothing is joined across it
        self._sequences[member.index] = sequence
        return ("start_fresh", sequence, member.attempts)

    def _anew_policy(self, member: Member) -> tuple[Any, ...]:
        sampling = self._config.sampling
        self._lost = self.flying + sampling.fragment * sampling.envs
        self._ledger.lose(self._lost)
        self.flying = 0
        sequence = self._sequences.get(0, 0) + 1
        self._sequences[0] = sequence
        return ("start_fresh", sequence, member.attempts)

    def _anew_host(self, member: Member) -> tuple[Any, ...]:
        return ("start_fresh", member.attempts)

    # -- what happens -------------------------------------------------------------------------------------

    def begin_at(self, index: int, sequence: int) -> None:
        """A sampler goes on with this fragment."""
        self._sequences[index] = int(sequence)

    def received(self, receipt: Receipt, pool: Pool, member: Member) -> None:
        """A fragment has come: look at what broke on the way, and at what its sampler takes of the memory."""
        self._sequences[receipt.record.sampler] = receipt.record.sequence + 1
        self.flying = receipt.flying
        if receipt.kept:
            self.shard_sizes[receipt.record.sampler] = receipt.kept
        self.broken(member.name, receipt.faults)
        if pool.runtime.apart and receipt.memory > self._most and member.rules.has_state:
            grown = RoleDied(f"{member.name} has grown to {receipt.memory / 1e6:,.0f} MB (faults.memory_mb)")
            pool.replace(member, Fault(member.name, "memory", grown, "restarted"))

    def broken(self, role: str, faults: Sequence[Mapping[str, Any]]) -> None:
        """Environments broke in a role, and were restarted."""
        for facts in faults:
            self.env_restarts += 1
            role = f"host {facts['host']}" if "host" in facts else role
            if self.env_restarts in MILESTONES:
                so_far = f" ({self.env_restarts:,} so far)" if self.env_restarts > 1 else ""
                cause = "the same again" if facts["cause"] == self._last_cause else facts["cause"]
                self._last_cause = facts["cause"]
                self._say(f"{role}: {cause}; environment restarted{so_far}")
            if self.history is not None:
                self.history.env_fault(role, facts, self.steps)

    def fault(self, fault: Fault, member: Member) -> None:
        error, lost, self._lost = fault.error, self._lost, 0
        if fault.action != "stopped":  # its error ends the run, and is told as that
            attempt = f", attempt {fault.attempt}" if fault.attempt > 1 else ""
            equal = (fault.action, same_cause(fault.role, fault.kind, fault.cause))
            self._say_if_due(f"{fault.cause}; {fault.action}{attempt}", *equal)
        if self.history is not None:
            self.history.role_fault(
                fault.role,
                fault.kind,
                fault.cause,
                fault.action,
                fault.attempt,
                self.steps,
                said=error.said,
                trace=error.trace or "",
                facts={**error.facts, "lost": lost} if lost else error.facts,
                evidence=_evidence(member) if fault.kind in ("died", "hung") else None,
            )

    def recovered(self, role: str, seconds: float) -> None:
        self._say_if_due(f"{role} is back after {seconds:.1f} s", "back", role)
        if self.history is not None:
            self.history.recovered(role, seconds)

    def absent(self, role: str, cause: str) -> None:
        self._say_if_due(f"going on without {role}: {cause}", "absent", role)
        if self.history is not None:
            self.history.absent(role, cause)

    def back(self, role: str) -> None:
        self._say_if_due(f"{role} has joined again", "joined", role)
        if self.history is not None:
            self.history.back(role)

    def note(self, text: str) -> None:
        self._note(f"note: {text}")

    def evaluation_given_up(self, steps: int, failure: EnvError) -> None:
        """The policy of this step could not be evaluated."""
        cause = f"the evaluation of step {steps:,} is given up: {failure}"
        self._say_if_due(cause, "evaluation", same_cause("evaluator", "failed", cause))
        if self.history is not None:
            action = "evaluation given up"
            self.history.role_fault("evaluator", "failed", cause, action, 1, self.steps, facts=failure.facts)

    def _say_if_due(self, text: str, *equal: str) -> None:
        """Say it, unless the same was said often: then only now and then, with how often it has happened."""
        if self._repeats.add(equal):
            count = self._repeats.total(equal)
            self._say(text if count < REPEATED else f"{text} ({count:,} times so far)")

    def redone(self, job: Job) -> None:
        if job.member.kind == "learner" and job.method == job.member.rules.work:
            self.redone_updates += job.result().updates

    @property
    def faults(self) -> int:
        """How often something failed in this process's time."""
        return 0 if self.history is None else self.history.faults

    @property
    def last(self) -> str:
        """What failed last, or nothing."""
        return "" if self.history is None else self.history.last

    def load(self, counts: Tree) -> None:
        """Count on from where a checkpoint was."""
        self.redone_updates = counts.get("redone_updates", 0)
        self.env_restarts = counts.get("env_restarts", 0)
        self.lost_transitions = counts.get("lost_transitions", 0)

    def metrics(self, pool: Pool) -> dict[str, float]:
        return {
            "health/restarts": float(pool.restarts),
            "health/env_restarts": float(self.env_restarts),
            "health/redone_updates": float(self.redone_updates),
            "health/lost_transitions": float(self.lost_transitions),
        }


def _has_steps(receipt: Receipt) -> bool:
    return receipt.record.steps > 0


def _is_over(evaluation: Evaluation) -> bool:
    return evaluation.over


def _evidence(member: Member) -> Callable[[], dict[str, Tree]] | None:
    """What a sampler was at when it failed: its state, and the policy versions it was given since."""
    versions = [job.args[0] for job in member.log if job.method == member.rules.work]
    states = [job.args[0] for job in member.log if job.method == "load"]
    state = member.border if member.border is not None else next(iter(states), None)
    if member.kind != "sampler" or not versions or (state is None and member.attempts):
        return None

    def parts() -> dict[str, Tree]:
        found: dict[str, Tree] = {}
        if state is not None:  # a worker's buffer is of no use there
            found["sampler"] = {name: part for name, part in state.result().items() if name != "worker"}
        return found | {"versions": {str(i): version.result().state() for i, version in enumerate(versions)}}

    return parts
