"""What is told and remembered of a run's failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from raynforce.envs.faults import CUT, KEPT, RECYCLED
from raynforce.errors import EnvError
from raynforce.runs.faults import FaultHistory, kind_of, same_cause
from raynforce.runs.repeats import Repeats
from raynforce.runtimes.member import Fault, Job, Member
from raynforce.runtimes.pool import Pool
from raynforce.trees import Tree

REPEATED = 10  # from here on it is said how often something has happened
MILESTONES = [1, 2, 3, *(10**n for n in range(1, 13))]  # the how-manieth environment that broke is worth a line


class Supervision:
    def __init__(self, say: Callable[[str], None], note: Callable[[str], None]) -> None:
        """`say` is for faults and their consequences, `note` for what else a user should know."""
        self.redone_updates = 0  # optimiser steps that were taken again because the learner had died
        self.env_restarts = 0  # environments that broke and were restarted
        self.recycled = 0  # simulator processes that were replaced as `sims` says
        self.recycle_cuts = 0  # episodes that were cut for that
        self.reasons: Counter[str] = Counter()  # how often `restarts/sampler/died`, `given_up/sampler/hung`, …
        self.history: FaultHistory | None = None  # where faults are written, once the run has a directory
        self.steps = 0  # where the run is
        self.lost = 0  # steps that were lost with the fault that will be told next
        self.say, self._note = say, note
        self._repeats: Repeats[tuple[str, ...]] = Repeats()  # of what is said
        self._last_cause = ""  # of an environment's fault that was told

    def env_faults(self, role: str, faults: Sequence[Mapping[str, Any]]) -> None:
        for facts in faults:
            role = f"host {facts['host']}" if "host" in facts else role
            if facts["kind"] in (RECYCLED, KEPT, CUT):
                self._recycled(role, facts)
                continue
            self.env_restarts += 1
            self.reasons[f"restarts/env/{facts['kind']}"] += 1
            if self.env_restarts in MILESTONES:
                so_far = f" ({self.env_restarts:,} so far)" if self.env_restarts > 1 else ""
                cause = "the same again" if facts["cause"] == self._last_cause else facts["cause"]
                self._last_cause = facts["cause"]
                self.say(f"{role}: {cause}; environment restarted{so_far}")
            if self.history is not None:
                self.history.env_fault(role, facts, self.steps)

    def _recycled(self, role: str, facts: Mapping[str, Any]) -> None:
        """As the settings say, and no fault: it is counted, and told now and then."""
        if facts["kind"] == CUT:
            self.recycle_cuts += 1
            return
        if facts["kind"] == KEPT:
            self._say_if_due(f"{role}: {facts['cause']}; it stays", KEPT, role)
            return
        self.recycled += 1
        if self.recycled in MILESTONES:
            so_far = f" ({self.recycled:,} so far)" if self.recycled > 1 else ""
            self.note(f"{role}: {facts['cause']}{so_far}")

    def fault(self, fault: Fault, member: Member) -> None:
        error, lost, self.lost = fault.error, self.lost, 0
        done = {"restarted": "restarts", "given up": "given_up"}.get(fault.action, "left_out")
        self.reasons[f"{done}/{kind_of(fault.role)}/{fault.kind}"] += 1
        if fault.action != "stopped":  # its error ends the run, and is told as that
            attempt = f", attempt {fault.attempt}" if fault.attempt > 1 else ""
            equal = (fault.action, same_cause(fault.role, fault.kind, fault.cause))
            self._say_if_due(f"{fault.cause}; {fault.action}{attempt}", *equal)
        if self.history is not None:
            what = fault.role, fault.kind, fault.cause, fault.action, fault.attempt
            self.history.role_fault(
                *what,
                self.steps,
                said=error.said,
                trace=error.trace or "",
                facts={**error.facts, "lost": lost} if lost else error.facts,
                evidence=member.rules.evidence(member) if fault.kind in ("died", "hung") else None,
            )

    def role_failed(self, role: str, cause: str, action: str) -> None:
        """A role that is in no pool of ours."""
        self._say_if_due(f"{role}: {cause}; {action}", action, same_cause(role, "failed", cause))
        self.reasons[f"restarts/{kind_of(role)}/died"] += 1
        if self.history is not None:
            self.history.role_fault(role, "died", cause, action, 1, self.steps)

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
        cause = f"the evaluation of step {steps:,} is given up: {failure}"
        self._say_if_due(cause, "evaluation", same_cause("evaluator", "failed", cause))
        if self.history is not None:
            action = "evaluation given up"
            self.history.role_fault("evaluator", "failed", cause, action, 1, self.steps, facts=failure.facts)

    def _say_if_due(self, text: str, *equal: str) -> None:
        """Say it, unless the same was said often: then only now and then, with how often it has happened."""
        if self._repeats.add(equal):
            count = self._repeats.total(equal)
            self.say(text if count < REPEATED else f"{text} ({count:,} times so far)")

    def redone(self, job: Job) -> None:
        if job.member.kind == "learner" and job.method == job.member.rules.work:
            self.redone_updates += job.result().updates

    def load(self, counts: Tree) -> None:
        self.redone_updates = counts["redone_updates"]
        self.env_restarts = counts["env_restarts"]
        self.recycled, self.recycle_cuts = counts.get("recycled", 0), counts.get("recycle_cuts", 0)
        self.reasons.update(counts.get("reasons", {}))

    def metrics(self, pool: Pool) -> dict[str, float]:
        counts = {"restarts": pool.restarts, "env_restarts": self.env_restarts, "redone_updates": self.redone_updates}
        if self.recycled:
            counts |= {"recycled": self.recycled, "recycle_cuts": self.recycle_cuts}
        counts |= self.reasons
        return {f"health/{name}": float(count) for name, count in counts.items()}
