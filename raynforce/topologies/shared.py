"""Shared agent: workers sample and compute gradients with their copies of the network, one agent applies them all.

The agent, which is the learner, takes gradients in the order in which they come, each once, and refuses those that are
too old (A3C, arXiv 1602.01783; for value learning Gorila, 1507.04296). A worker waits for the version that its own
gradients have led to, and for nobody else. What comes while the agent is at work is taken together, in one call: the
outcome is the same, and the more workers there are, the fewer calls there are for each.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from raynforce.roles.learned import Learned
from raynforce.runtimes.member import Job, Member
from raynforce.topologies.loop import Learning, Loop, Round, Sample


class SharedAgent(Loop):
    """The loop of workers and the agent they share; what is held are contributions."""

    work = "work"

    def rounds(self) -> Iterator[Round]:
        began = sampled = time.monotonic()
        while True:
            for worker in self._idle():
                self._ask(worker)
            if self._learning is None and self._held:
                sampled = time.monotonic()
                held, self._held = self._held, []
                self._apply(held)
            learning = self._next()
            if learning is not None:
                now = time.monotonic()
                yield self._round(learning, sampled - began, now - sampled)
                began = now

    def _idle(self) -> list[Member]:
        """Workers without a contribution that is under way."""
        taken = self._learning.fragments if self._learning else ()
        busy = {sample.record.sampler for sample in (*self._held, *taken)}
        return [worker for worker in super()._idle() if worker.index not in busy]

    def _arrived(self, samples: Sequence[Sample]) -> list[Sample]:
        return sorted(super()._arrived(samples), key=lambda sample: sample.job.answered if sample.job else 0.0)

    def _apply(self, contributions: Sequence[Sample]) -> Learning:
        return self._update(
            "apply_contributions", *(sample.argument for sample in contributions), fragments=contributions
        )

    def _again(self, learning: Learning) -> Learning:
        return self._apply(self._without_lost(learning.fragments))

    def _learned(self, job: Job, learned: Learned) -> None:
        super()._learned(job, learned)
        for refused in learned.dropped:
            self._ledger.drop(refused)
