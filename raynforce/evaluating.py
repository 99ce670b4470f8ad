"""Evaluations of a run: pinned policy versions, played by a role of their own while training goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from raynforce.config import EvalConfig
from raynforce.roles.evaluator import Evaluation
from raynforce.runtimes.base import Handle, Pending
from raynforce.runtimes.member import Job, Member, Rules
from raynforce.runtimes.pool import Pool

PIECE = 0.25  # seconds of play between two looks at progress and signals, where training waits for it
BESIDE = 2.0  # the same at least where it does not; longer where rounds take longer
FINAL = 1  # the purpose of the last evaluation: other episodes than those that chose the best policy


class Pinned(NamedTuple):
    """A policy version to be evaluated, and where the run was when it was published."""

    version: Job | Pending
    number: int
    steps: int


class Evaluations:
    """Evaluates versions beside training where roles have processes of their own, and between two rounds where not.

    Training never waits: if a version is due while another is being played, it takes its turn after it, unless a newer
    one is due by then.
    """

    def __init__(
        self,
        pool: Pool,
        make: Callable[[int], Handle],
        rules: Rules,
        how: EvalConfig,
        show: Callable[[str], None],
        longest: float,
        stopped: Callable[[], bool],
        broken: Callable[[Mapping[str, Any]], None],
    ) -> None:
        """`show` is told of progress, `broken` of environments that broke; `stopped` says whether to give up.

        No single answer of the evaluator takes longer than `longest` seconds.
        """
        self.skipped = 0
        """Versions that were due and never played, because newer ones were due before their turn."""
        self.waited = 0.0
        """Seconds that training has waited."""
        self._pool, self._make, self._rules, self._how = pool, make, rules, how
        self._longest = longest
        self._show, self._stopped, self._broken = show, stopped, broken
        self._looked = time.monotonic()
        self._member: Member | None = None
        self._running: tuple[Pinned, Job] | None = None
        self._due: Pinned | None = None

    @property
    def unfinished(self) -> list[Pinned]:
        """What is being played or has still to be."""
        running = [] if self._running is None else [self._running[0]]
        return running + ([] if self._due is None else [self._due])

    def begin(self, pinned: Pinned) -> tuple[Pinned, np.ndarray] | None:
        """A version is due. The returns of its episodes, if they were played here and now."""
        if self._pool.runtime.apart:
            self.skipped += self._due is not None
            self._due = pinned
            self._start_due()
            return None
        returns = self.play(pinned, self._how.episodes, "evaluating")
        return None if returns is None else (pinned, returns)

    def finished(self) -> tuple[Pinned, np.ndarray] | None:
        """What has been played in the meantime."""
        if self._running is None:
            return None
        pinned, job = self._running
        now = time.monotonic()
        self._looked, between = now, now - self._looked
        if not job.settled:
            return None
        played = self._result(job)
        if played is None:
            self._running = None
            return None
        if not played.over:
            self._running = (pinned, self._submit(pinned, self._how.episodes, 0, max(BESIDE, 2 * between)))
            return None
        self._running = None
        self._start_due()
        return pinned, played.returns

    def wait(self) -> tuple[Pinned, np.ndarray] | None:
        """Let what is being played come to its end; what was due after it is not played any more."""
        self._due = None
        evaluated = self.finished()
        while self._running is not None and evaluated is None:
            self._show("waiting for the evaluation to end")
            self._pool.next([self._running[1]], PIECE)
            evaluated = self.finished()
            if self._stopped():
                self.stop()
        return evaluated

    def stop(self) -> None:
        """Give up what is being played."""
        if self._running is not None and self._member is not None:
            self._pool.remove(self._member)
            self._member = None
        self._running = self._due = None

    def play(self, pinned: Pinned, episodes: int, doing: str, purpose: int = 0) -> np.ndarray | None:
        """Play to the end, with progress; None if the run was stopped in the meantime."""
        began = time.monotonic()
        try:
            while True:
                job = self._submit(pinned, episodes, purpose, PIECE)
                self._pool.wait([job])
                so_far = self._result(job)
                if so_far is None:
                    return None
                if so_far.over:
                    return so_far.returns
                self._show(f"{doing}: {len(so_far.returns)} of {episodes} episodes")
                if self._stopped():
                    return None
        finally:
            self.waited += time.monotonic() - began

    def _start_due(self) -> None:
        if self._running is None and self._due is not None:
            self._running, self._due = (self._due, self._submit(self._due, self._how.episodes, 0, BESIDE)), None

    def _result(self, job: Job) -> Evaluation | None:
        """What was played; None if the evaluator failed too often. The next evaluation gets a new one."""
        if job.fault is not None:
            self.skipped += 1
            self._pool.members.remove(job.member)
            self._member = None
            return None
        played: Evaluation = job.result()
        for facts in played.faults:
            self._broken(facts)
        return played

    def _submit(self, pinned: Pinned, episodes: int, purpose: int, seconds: float) -> Job:
        if self._member is None:  # not earlier: it would compete with the others for the cores as they start
            (self._member,) = self._pool.add("evaluator", self._make, 1, self._rules)
        how = (episodes, self._how.max_length, purpose, min(seconds, self._longest))
        return self._pool.submit(self._member, "play", pinned.version, *how)
