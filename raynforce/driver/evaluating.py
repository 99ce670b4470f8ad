"""Evaluations of a run: pinned policy versions, played by a role of their own while training goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from raynforce.config import EvalConfig
from raynforce.errors import EnvError
from raynforce.infos import NOTHING, Values
from raynforce.roles.evaluator import Evaluation
from raynforce.runtimes.base import Handle, Pending
from raynforce.runtimes.member import Job, Member, Rules
from raynforce.runtimes.pool import Pool
from raynforce.trees import Tree

PIECE = 0.25  # seconds of play between two looks at progress and signals, where training waits for it
BESIDE = 2.0  # the same at least where it does not; longer where rounds take longer
FINAL = 1  # the purpose of the last evaluation: other episodes than those that chose the best policy
TIMES, TIMES_TO_TARGET = 20, 40  # evaluations in a run, if nothing else is set: without a target, and with one
FINAL_EPISODES = 100
DURING, ALL = 1 / 12, 1 / 10  # steps of evaluation for each of training: during the run, and with the last evaluation
AHEAD = 1 / 4
"""Of the planned steps, what `DURING` is of from the beginning: early evaluations are what a target needs."""
LOCKSTEP_COST = 1 / 12
"""What a step of an environment's own vector implementation costs in evaluation, beside one in training: PPO on
CartPole, where it is dearest, learning being cheap."""


class Pinned(NamedTuple):
    """A policy version to be evaluated, and where the run was when it was published."""

    version: Job | Pending
    number: int
    steps: int


class Played(NamedTuple):
    """The outcome of an evaluation."""

    pinned: Pinned
    returns: np.ndarray


class Schedule:
    """When evaluations are due, and how many episodes the last one has.

    By default they are spread evenly, and take about a tenth of an inline run's time at most. Time is counted in steps,
    so that equal runs are evaluated at equal steps: `spent` is what evaluations have cost so far.
    """

    def __init__(self, how: EvalConfig, steps: int, to_target: bool = False) -> None:
        self.spent = 0.0
        self._how, self._planned = how, steps
        self._to_target = to_target
        self._every = max(1, steps // (TIMES_TO_TARGET if to_target else TIMES)) if how.every is None else how.every
        self._length = 0.0  # of the episodes in training, when the newest evaluation was due
        self._per_episode: float | None = None  # what one of that evaluation cost

    def is_due(self, before: int, after: int, length: float) -> bool:
        """Whether the round that led from one step count to another has led to one; episodes have this `length`."""
        if not self._every or before // self._every == after // self._every:
            return False
        if self._how.every is not None:
            return True
        cost = self._how.episodes * self._expected(length)
        if self._to_target and self._per_episode is None:  # its cost is not known, and the target may be met already
            self._length = length
            return True
        most = ALL * self._planned - (cost if self._how.final_episodes is None else 0.0)
        most = max(most, cost) if self._to_target else most  # a target is tested once more at least
        if self.spent + cost > min(most, DURING * (after + AHEAD * self._planned)):
            return False
        self._length = length
        return True

    def _expected(self, length: float) -> float:
        """What an episode will cost: as much as the newest, or less if those in training have become shorter."""
        if self._per_episode is None:
            return length
        return self._per_episode * (min(1.0, length / self._length) if self._length else 1.0)

    def add(self, played: Evaluation) -> None:
        """Count an evaluation that has come to its end."""
        cost = played.steps * (LOCKSTEP_COST if played.lockstep else 1.0)
        if self._per_episode is not None or not self._to_target:  # the first one to a target is free
            self.spent += cost
        if len(played.returns):
            self._per_episode = cost / len(played.returns)

    def final_episodes(self, steps: int) -> int:
        """Episodes of the last evaluation, after so many steps."""
        if self._how.final_episodes is not None:
            return self._how.final_episodes
        left = ALL * steps - self.spent
        fit = left / self._per_episode if self._per_episode else FINAL_EPISODES
        return int(min(max(fit, self._how.episodes), FINAL_EPISODES))

    def state(self) -> Tree:
        return {"spent": self.spent, "per_episode": self._per_episode, "length": self._length}

    def load(self, tree: Tree) -> None:
        self.spent, self._per_episode, self._length = tree["spent"], tree["per_episode"], tree.get("length", 0.0)


@dataclass(eq=False)
class Evaluations:
    """Evaluates versions beside training where roles have processes of their own, and between two rounds where not.

    Beside training, one evaluation is played at a time; the newest that is due takes its turn after it, and those
    between are skipped.
    """

    pool: Pool
    make: Callable[[int], Handle]
    rules: Rules
    how: EvalConfig
    schedule: Schedule
    longest: float  # seconds that a single answer of the evaluator may take
    show: Callable[[str, float | None], None]  # progress, and the seconds left
    stopped: Callable[[], bool]  # whether to end early
    broken: Callable[[Mapping[str, Any]], None]  # called for each environment that broke
    gave_up: Callable[[int, EnvError], None]  # called for a step whose policy could not be evaluated

    def __post_init__(self) -> None:
        self.count = 0  # evaluations that were completed
        self.skipped = 0  # versions that were due, and superseded by newer ones or given up
        self.waited = 0.0  # seconds that training has waited
        self.info: Values = NOTHING  # numbers in `info` at the ends of the episodes that were evaluated last
        self._looked = time.monotonic()
        self._member: Member | None = None
        self._running: tuple[Pinned, Job] | None = None
        self._due: Pinned | None = None

    @property
    def unfinished(self) -> list[Pinned]:
        """What is being played or has still to be."""
        running = [] if self._running is None else [self._running[0]]
        return running + ([] if self._due is None else [self._due])

    def begin(self, pinned: Pinned) -> Played | None:
        """A version is due. Its outcome, if it was played here and now."""
        if not self.pool.runtime.has_processes:
            return self.play(pinned, self.how.episodes, "evaluating")
        self.skipped += self._due is not None
        self._due = pinned
        self._start_due()
        return None

    def finished(self) -> Played | None:
        """What has been played in the meantime."""
        if self._running is None:
            return None
        pinned, job = self._running
        now = time.monotonic()
        self._looked, between = now, now - self._looked
        if not job.settled:
            return None
        played = self._result(pinned, job)
        if played is not None and not played.over:
            self._running = (pinned, self._submit(pinned, self.how.episodes, 0, max(BESIDE, 2 * between)))
            return None
        self._running = None
        self._start_due()
        return None if played is None else Played(pinned, played.returns)

    def drop_due(self) -> None:
        """What is due after the one that is being played is not played any more."""
        self.skipped += self._due is not None
        self._due = None

    def wait(self) -> Played | None:
        """Let what is being played come to its end."""
        began = time.monotonic()
        outcome = self.finished()
        while self._running is not None and outcome is None:
            self.show("waiting for the evaluation to end", None)
            self.pool.next([self._running[1]], PIECE)
            outcome = self.finished()
            if self.stopped():
                self.stop()
        self.waited += time.monotonic() - began
        return outcome

    def stop(self) -> None:
        """Give up what is being played."""
        if self._running is not None and self._member is not None:
            self.pool.remove(self._member)
            self._member = None
        self._running = self._due = None

    def play(self, pinned: Pinned, episodes: int, doing: str, purpose: int = 0) -> Played | None:
        """Play to the end, with progress; None if the run was stopped in the meantime, or it was given up."""
        began = time.monotonic()
        try:
            while True:
                job = self._submit(pinned, episodes, purpose, PIECE)
                self.pool.wait([job])
                so_far = self._result(pinned, job)
                if so_far is None:
                    return None
                if so_far.over:
                    return Played(pinned, so_far.returns)
                done, seconds = len(so_far.returns), time.monotonic() - began
                left = seconds * (episodes - done) / done if done else None
                self.show(f"{doing}: {done} of {episodes} episodes", left)
                if self.stopped():
                    return None
        finally:
            self.waited += time.monotonic() - began

    def _start_due(self) -> None:
        if self._running is None and self._due is not None:
            self._running, self._due = (self._due, self._submit(self._due, self.how.episodes, 0, BESIDE)), None

    def _result(self, pinned: Pinned, job: Job) -> Evaluation | None:
        """What was played; None if the environment or the evaluator failed too often."""
        if job.fault is not None:  # the next evaluation gets a new one
            self.skipped += 1
            self.pool.members.remove(job.member)
            self._member = None
            return None
        played: Evaluation = job.result()
        for facts in played.faults:
            self.broken(facts)
        if played.over:
            self.schedule.add(played)
            self.count += played.failure is None
        if played.failure is not None:
            self.skipped += 1
            self.gave_up(pinned.steps, played.failure)
            return None
        if played.over:
            self.info = played.info
        return played

    def _submit(self, pinned: Pinned, episodes: int, purpose: int, seconds: float) -> Job:
        if self._member is None:  # not earlier: it would compete with the others for the cores as they start
            (self._member,) = self.pool.add("evaluator", self.make, 1, self.rules)
        how = (episodes, self.how.max_length, purpose, min(seconds, self.longest))
        return self.pool.submit(self._member, "play", pinned.version, *how)
