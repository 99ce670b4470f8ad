"""Pools: roles that are kept alive.

A member that dies, hangs or raises is spawned again, given its *recovery point* (its last known state), and asked again
for the jobs in its *log* (those since). Roles are determined by their state and what they are given, so the answers are
those that were lost. Repeated failure backs off, then gives the member up; below the quorum the run stops.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from raynforce.errors import CheckpointError, ContractError, RaynforceError, UsageError, summary
from raynforce.runtimes.base import Handle, Pending, RoleDied, RoleError, Runtime
from raynforce.runtimes.member import Fault, Job, Kind, Member, Rules, Saving, Watcher
from raynforce.runtimes.role_host import SLOW, hung

RECOVERY_SECONDS = 1.0  # of work between two recovery points at least: what a restart has to do again
RECOVERY_COST = 50  # times what a recovery point costs are between two of them at least: 2 % of the time at most
LOG_BYTES = 256_000_000  # that the jobs of a log may hold on to before a recovery point is taken early
STATE_BYTES = 1_000_000_000  # a larger state is not kept beside its role
LONGEST_BACKOFF = 60.0
LONGEST_WAIT = 3600.0  # at once; nobody can wait for ever
GRACE = 3.0  # seconds that a role has to end itself, with its stack printed, before it is killed
NUMBERED = ("sampler", "shard", "host")  # kinds of which there may be several
EXACT_TRIES = 3  # restarts of a role that died where it was; then it starts fresh


class Pool:
    """All roles of a run. `submit` jobs, and let `next` say which are done; restarts happen in between."""

    def __init__(self, runtime: Runtime, watcher: Watcher) -> None:
        self.runtime = runtime
        self.restarts = 0  # of roles, so far
        self.members: list[Member] = []
        self._watcher = watcher

    def add(self, kind: str, make: Callable[[int], Handle], count: int, rules: Rules) -> list[Member]:
        """Start `count` members of one kind, made by a factory from their index; one alone is called by its kind."""
        names = [member_name(kind, index, count) for index in range(count)]
        made = [Member(name, index, kind, make, rules, RECOVERY_SECONDS) for index, name in enumerate(names)]
        for member in made:
            self._spawn(member)
        self.members += made
        return made

    def present(self, members: Iterable[Member]) -> list[Member]:
        return [m for m in members if not (m.gone or m.absent)]

    def submit(self, member: Member, method: str, *args: Any, parts: int = 1, weight: int = 0) -> Job:
        """Ask a member for something. `args` may be jobs, whose first part goes there; `weight` is their size."""
        job = Job(member, method, args, parts, weight)
        if member.gone:
            job.settled, job.fault = True, Fault(member.name, "lost", RoleDied(f"{member.name} is gone"), "left out")
            return job
        member.log.append(job)
        member.logged += weight
        member.open.append(job)
        self._advance(member)
        return job

    def next(self, jobs: Sequence[Job], timeout: float) -> list[Job]:
        """Wait until at least one of these jobs is done (it has a result or a `fault`); none if the time is over."""
        until = time.monotonic() + timeout
        while True:
            self._make_what_can_be()
            done = [job for job in jobs if job.settled]
            now = time.monotonic()
            if done or now >= until:
                return done
            watched = self._watched()
            left = min(until, self._next_event(), now + LONGEST_WAIT) - now
            if watched:
                for pending in self.runtime.wait(list(watched), 1, max(0.0, left))[0]:
                    watched[pending]()
            else:
                time.sleep(max(0.0, min(left, 1.0)))
            self._look_at_clock()

    def wait(self, jobs: Sequence[Job], timeout: float = math.inf) -> bool:
        """Wait until all of them are done; False if the time was over before."""
        until = time.monotonic() + timeout
        while left := [job for job in jobs if not job.settled]:
            if not self.next(left, until - time.monotonic()) and time.monotonic() >= until:
                return False
        return True

    def states(self, members: Sequence[Member], known: Callable[[Member], Any] | None = None) -> list[Any]:
        """The state of each member, its recovery point if nothing is `known`; None for one that is away without."""
        jobs: dict[Member, Job] = {}
        for member in self.present(members):
            if known is None:
                member.saving = None  # this one comes later, so it is the better one
            jobs[member] = self.submit(member, "state", *(() if known is None else (known(member),)))
        self.wait(list(jobs.values()))
        states = {member: member.recovery_point for member in members}
        for member, job in jobs.items():
            if job.fault is None:
                states[member] = state = self.runtime.keep(job.value)
                there = job in member.log and job not in member.open  # else it failed, and is on its way there again
                if there and known is None:
                    covered = member.log[: member.log.index(job) + 1]
                    self.wait(covered)
                    self._new_recovery_point(member, state, covered)
        return [None if state is None else state.result() for state in states.values()]

    def replace(self, member: Member, fault: Fault) -> None:
        """Replace a member's process: at its next recovery point, losing nothing, or at once if it has no state."""
        if not member.rules.has_state:
            self._watcher.fault(fault, member)
            self._forget_way(member)
            self._put_down(member)
        elif member.renew is None and member.handle is not None:
            member.renew = fault
            self._save(member)

    def works(self, member: Member) -> None:
        """Take note that a member gets on with a job that may have no end."""
        if member.handle is not None and member.loading is None:
            member.proven, member.failures = True, 0
            self._hear(member)
            self._recovered(member)

    def fail(self, member: Member, error: RoleDied) -> None:
        """Treat a member as dead, though its process may not be."""
        if member.handle is not None and not member.gone:
            self._down(member, error)

    def remove(self, member: Member) -> None:
        """End a member that is not needed any more, whatever it is doing."""
        member.gone = True
        self._put_down(member)
        for job in tuple(member.open):
            self._settle_without(job, Fault(member.name, "lost", RoleDied(f"{member.name} was ended"), "left out"))
        self.members.remove(member)

    # -- its steps ----------------------------------------------------------------------------------------

    def _make_what_can_be(self) -> None:
        now = time.monotonic()
        for member in self.members:
            if member.handle is None and not member.gone and member.wake <= now:
                self._restart(member)
            if member.open:
                self._advance(member)
            if member.handle is not None and not member.handle.has_room():
                member.heard = now
            elif member.absent and member.handle is not None and member.loading is None and not member.open:
                self._back(member)  # nothing will be heard of it before it is asked for something

    def _spawn(self, member: Member) -> Handle:
        handle = member.handle = member.make(member.index)
        member.spawned = member.heard = member.recovery_at = time.monotonic()
        member.fresh = True
        return handle

    def _advance(self, member: Member) -> None:
        """Make the member's jobs, in order, as far as their arguments are there: none may overtake another."""
        handle = member.handle
        if handle is None or member.loading is not None:
            return
        for job in tuple(member.open):
            if job.watched is not None:
                continue
            given = [a for a in job.args if isinstance(a, Job)]
            lost = next((a.fault for a in given if a.fault is not None), None)
            if lost is not None:
                self._settle_without(job, lost)
                continue
            if not all(a.settled for a in given):
                return
            job.asked = time.monotonic()
            args = [a.value if isinstance(a, Job) else a for a in job.args]
            pendings = handle.call_parts(job.method, args, job.parts)
            if job.settled:
                job.again = pendings[-1]
            else:
                job.pendings = pendings

    def _watched(self) -> dict[Pending, Callable[[], None]]:
        watched: dict[Pending, Callable[[], None]] = {}
        for member in self.members:
            if member.handle is None:
                continue
            if member.loading is not None:
                watched[member.loading] = partial(self._loaded, member, member.loading)
            for job in member.open:
                pending = job.watched
                if pending is None:
                    break
                watched[pending] = partial(self._answered, job, pending)
            if member.saving is not None:
                watched[member.saving.state] = partial(self._saved, member, member.saving)
        return watched

    def _answered(self, job: Job, pending: Pending) -> None:
        member = job.member
        if job.watched is not pending or job not in member.open:
            return  # its member failed a moment ago
        error = pending.failure()
        if isinstance(error, RoleDied) and error.role != member.name:  # an argument is lost for good
            self._settle_without(job, Fault(member.name, "lost", error, "left out"))
            return
        if error is not None:
            self._down(member, error)
            return
        self._hear(member)
        member.open.remove(job)
        if job.settled:
            job.again = None
            self._watcher.redone(job)
            if not member.open:
                self._recovered(member)
            return
        job.settled, job.answered = True, member.heard
        if job.method == member.rules.work:
            member.proven = True
            if member.failures and member.rules.shows_progress(job.result()):
                member.failures = 0
        if not member.remembers:
            member.log.remove(job)
        self._recovered(member)
        due = time.monotonic() - member.recovery_at >= member.recovery_every
        due |= member.logged > LOG_BYTES or member.renew is not None
        if due and member.remembers:
            self._save(member)

    def _recovered(self, member: Member) -> None:
        if member.down_since is not None:
            since, member.down_since = member.down_since, None
            self._watcher.recovered(member.name, member.heard - since)

    def _hear(self, member: Member) -> None:
        member.heard = time.monotonic()
        member.fresh = False
        if member.absent:
            self._back(member)

    def _back(self, member: Member) -> None:
        member.absent = False
        self._watcher.back(member.name)

    def _loaded(self, member: Member, loading: Pending) -> None:
        if member.loading is not loading:
            return  # it failed a moment ago
        member.loading = None
        error = loading.failure()
        if error is not None:
            self._down(member, error)
            return
        self._hear(member)
        member.greeted = loading
        notes = loading.result()
        for note in notes if isinstance(notes, list) else ():  # of what could not be taken back exactly
            self._watcher.note(f"{member.name}: {note}")
        if not member.open:
            self._recovered(member)

    # -- recovery points ------------------------------------------------------------------------------------

    def _save(self, member: Member) -> None:
        """Ask for the member's state after all jobs that it has been given."""
        if member.saving is not None or member.handle is None:
            return
        made = [job for job in member.log if job not in member.open or job.watched is not None]
        state = self.runtime.keep(member.handle.call("state"))  # at once: inline, the next job may write into it
        member.saving = Saving(state, made, time.monotonic())

    def _saved(self, member: Member, saving: Saving) -> None:
        if member.saving is not saving:
            return  # it failed a moment ago
        if not all(job.settled for job in saving.covered):
            return  # the answers before it will be seen in a moment: some runtimes keep no order there
        member.saving, pending = None, saving.state
        error = pending.failure()
        if error is not None:
            self._down(member, error)
            return
        began, now = max(member.heard, saving.asked), time.monotonic()
        self._hear(member)
        member.recovery_cost = min(now - began, 2 * member.recovery_cost)  # once, the driver may have looked late
        member.recovery_every = min(LONGEST_BACKOFF, max(RECOVERY_SECONDS, RECOVERY_COST * member.recovery_cost))
        if pending.size > STATE_BYTES:
            large = f"the state of the {member.name} takes {pending.size / 1e9:.1f} GB and is not kept beside it"
            self._watcher.note(f"{large}: if it dies, the run ends, and resume goes on from the last checkpoint")
            member.recovery_every, member.recovery_point = math.inf, None
            member.log = [job for job in member.open if not job.settled]
            return
        self._new_recovery_point(member, pending, saving.covered)
        if member.renew is not None:
            fault, member.renew = member.renew, None
            self._watcher.fault(fault, member)
            self._put_down(member)

    def _new_recovery_point(self, member: Member, state: Pending, covered: Sequence[Job]) -> None:
        """The state after these jobs is known: they will not have to be done again."""
        before = set(covered)
        member.recovery_point, member.recovery_at = state, time.monotonic()
        member.log = [job for job in member.log if job not in before]
        member.logged = sum(job.weight for job in member.log)
        member.open = [job for job in member.open if not (job.settled and job in before)]

    # -- failures -----------------------------------------------------------------------------------------

    def _down(self, member: Member, error: BaseException) -> None:
        """A member has failed: end what is left of it, and see to it that it is restarted, or given up."""
        ours = error if isinstance(error, RaynforceError) else RoleError(f"{member.name}: {summary(error)}")
        kind: Kind = "failed"
        if isinstance(error, RoleDied):
            what = hung(error.said.splitlines())
            if what is None and time.monotonic() >= self._limit(member):
                what = "it does not answer"
            kind, ours = ("died", ours) if what is None else ("hung", self._hangs(member, what, ours))
        member.failures += 1
        if self._is_hopeless(member, kind, ours):
            self._watcher.fault(Fault(member.name, kind, ours, "stopped", member.failures), member)
            raise error if ours is error or kind == "failed" else ours
        if member.failures > member.rules.restarts:
            self._give_up(member, kind, ours)
            return
        wait = member.rules.backoff * 2 ** (member.failures - 2) if member.failures > 1 else 0.0
        member.wake = time.monotonic() + min(LONGEST_BACKOFF, wait)
        tries = EXACT_TRIES if kind == "died" else 1  # the same way may lead there again
        if member.failures > tries or math.isinf(member.recovery_every) or not member.rules.has_state:
            self._forget_way(member)
        self._put_down(member)
        if not wait:
            self._restart(member)
        self._watcher.fault(Fault(member.name, kind, ours, "restarted", member.failures), member)

    def _is_hopeless(self, member: Member, kind: Kind, error: RaynforceError) -> bool:
        permanent = isinstance(error, UsageError | CheckpointError | ContractError)
        if permanent or not isinstance(error, member.rules.restartable):
            return True
        if math.isinf(member.recovery_every) and member.rules.start_fresh is None:
            return True
        unbuilt = self._is_starting(member) if kind == "hung" else not isinstance(error, RoleDied)
        return not member.proven and unbuilt

    def _is_starting(self, member: Member) -> bool:
        return member.fresh and member.rules.has_state

    def _forget_way(self, member: Member) -> None:
        if member.rules.start_fresh is not None:
            member.attempts += 1
            member.origin = member.rules.start_fresh(member)
            member.recovery_point, member.log = None, [job for job in member.open if not job.settled]

    def _put_down(self, member: Member) -> None:
        if member.handle is not None:
            member.handle.end()
        member.handle = member.loading = member.saving = member.greeted = member.renew = None
        member.heard = time.monotonic()
        member.down_since = member.heard if member.down_since is None else member.down_since
        member.open = [job for job in member.log if not job.settled or member.rules.has_state]
        for job in member.open:
            job.again = None
            if not job.settled:
                job.pendings, job.disturbed = [], True

    def _restart(self, member: Member) -> None:
        self.restarts += 1
        try:
            handle = self._spawn(member)
        except OSError as error:  # too many files or processes, or no memory, for the moment
            self._down(member, RoleDied(f"{member.name} could not be started again: {summary(error)}"))
            return
        if member.recovery_point is not None:
            member.loading = handle.call("load", member.recovery_point)
        elif member.origin:
            member.loading = handle.call(*member.origin)

    def _give_up(self, member: Member, kind: Kind, error: RaynforceError) -> None:
        member.gone = True
        fault = Fault(member.name, kind, error, "given up", member.failures)
        self._put_down(member)
        for job in tuple(member.open):
            self._settle_without(job, fault)
        self._watcher.fault(fault, member)
        peers = [m for m in self.members if m.kind == member.kind]
        left = [m for m in peers if not m.gone]
        if len(left) < member.rules.quorum:
            often = f"failed {member.failures} times in a row (faults.restarts = {member.rules.restarts})"
            few = f", and {len(left)} of {len(peers)} {member.kind}s are left" if len(peers) > 1 else ""
            stopped = RaynforceError(f"{member.name} {often}{few}: {error}")
            stopped.role, stopped.said, stopped.trace, stopped.facts = member.name, error.said, error.trace, error.facts
            raise stopped from error

    def _settle_without(self, job: Job, fault: Fault) -> None:
        member = job.member
        if not job.settled:
            job.settled, job.fault, job.answered = True, fault, time.monotonic()
        for jobs in (member.open, member.log):
            if job in jobs:
                jobs.remove(job)

    # -- the clock ----------------------------------------------------------------------------------------

    def _limit(self, member: Member) -> float:
        """When it has to have answered."""
        rules = member.rules
        if member.handle is None or not member.handle.has_room():
            return math.inf
        doing = next((job for job in member.open if job.watched is not None), None)
        if member.loading is None and member.saving is None and doing is None:
            return math.inf
        since = [member.heard, *(asked.asked for asked in (doing, member.saving) if asked is not None)]
        seconds = rules.start_seconds if self._is_starting(member) else rules.job_seconds
        slow = doing is not None and doing.method in SLOW
        if member.loading is not None or member.saving is not None or slow:
            seconds = max(rules.start_seconds, rules.job_seconds)
        return max(since) + seconds + GRACE

    def _misses(self, member: Member) -> float:
        """When others stop waiting for it."""
        if member.absent or not any(not job.settled for job in member.open):
            return math.inf
        if member.handle is not None and member.loading is None and member.handle.has_room():
            return math.inf
        return self._away_since(member) + member.rules.absent_seconds

    def _away_since(self, member: Member) -> float:
        return member.spawned if member.down_since is None else member.down_since

    def _next_event(self) -> float:
        events = [math.inf]
        for member in self.members:
            if member.handle is None and not member.gone:
                events.append(member.wake)
            if member.open or member.saving or member.loading:
                events += [self._limit(member), max(self._misses(member), time.monotonic() + 0.2)]
            if member.handle is not None and (member.open or member.absent) and not member.handle.has_room():
                events.append(time.monotonic() + 0.5)  # room may be found without anything being answered
        return min(events)

    def _look_at_clock(self) -> None:
        now = time.monotonic()
        for member in self.members:
            if not (member.open or member.saving or member.loading):
                continue
            if self._limit(member) <= now:
                self._down(member, RoleDied(f"{member.name} does not answer"))
            elif self._misses(member) <= now:
                self._leave_out(member)

    def _hangs(self, member: Member, what: str, error: RaynforceError) -> RoleDied:
        """What to say of a member that did not answer in time, or has ended itself because of that."""
        rules = member.rules
        when = f"has not started within {rules.start_seconds:g} s"
        if not self._is_starting(member):
            when = f"has not answered for {rules.job_seconds:g} s" if rules.job_seconds < math.inf else "does not go on"
        where = re.sub(r"it hung for \S+", "it hangs", what)
        return RoleDied(f"{member.name} {when}: {where}{rules.hint}", member.name, error.said, error.trace)

    def _leave_out(self, member: Member) -> None:
        """Let the others go on without it, if they are enough; it joins them again when it is back."""
        peers = [m for m in self.members if m.kind == member.kind and not m.gone]
        if len(self.present(peers)) <= (min(1, member.rules.quorum) if self.runtime.grows else member.rules.quorum):
            late = time.monotonic() - self._away_since(member) > member.rules.start_seconds
            if late and not self.runtime.grows:
                raise RoleDied(f"{member.name} could not be replaced{self.runtime.pending_reason()}", member.name)
            return
        member.absent = True
        cause = self.runtime.pending_reason().lstrip(": ") or "it is being replaced"
        fault = Fault(member.name, "absent", RoleDied(f"{member.name} is away: {cause}"), "left out")
        for job in [j for j in member.open if not j.settled]:
            self._settle_without(job, fault)
        self._watcher.absent(member.name, cause)


def member_name(kind: str, index: int, count: int) -> str:
    return f"{kind} {index}" if kind in NUMBERED or count > 1 else kind
