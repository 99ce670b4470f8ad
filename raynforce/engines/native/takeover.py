"""A checkpoint seen from the config that goes on from it: what can be taken up again, and what becomes of the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from raynforce.config import Config
from raynforce.errors import UsageError
from raynforce.experience.fragment import Fragment
from raynforce.roles.learned import Contribution
from raynforce.topologies import topology
from raynforce.trees import Tree

ATTEMPTS = 1_000  # to start fresh between two resumes, at most


def require_same_buffers(before: Config, now: Config, run: str) -> None:
    """Refuse to go on with replay buffers that are divided otherwise, or with other roles."""
    had, wanted = before.replay.shards, now.replay.shards
    if had != wanted:
        problem = f"replay.shards of {run} is {had} and cannot become {wanted}: its buffer was saved that way"
        raise UsageError(f"{problem}; leave it out")
    if topology(before.topology).gathers_gradients != topology(now.topology).gathers_gradients:
        problem = f"topology of {run} is {before.topology!r} and cannot become {now.topology!r}"
        why = "what workers of a shared agent have, such as replay buffers, others do not"
        raise UsageError(f"{problem}: {why}; leave it out, or begin a new run with --from {run}")


class Takeover:
    def __init__(self, saved: Mapping[str, Tree], config: Config) -> None:
        counts, sampling = saved["run"], config.sampling
        had: int = counts["samplers"]
        self._saved = saved
        declared = topology(config.topology)
        self._has_states = not declared.paced_by_envs  # there, the policy server starts fresh
        layout = counts["envs"], counts["exact_resume"], counts.get("inference", "server")
        self._fits = layout == (sampling.envs, sampling.exact_resume, sampling.inference)
        self._resumes: int = counts["resumes"]
        going_on = [index for index in range(min(had, sampling.samplers)) if self.sampler(index) is not None]
        self.abandoned = (had - len(going_on)) * counts["envs"]  # episodes in flight that cannot be gone on with
        gone = (saved.get(f"sampler_{index}", {}) for index in range(had) if index not in going_on)
        self.lost_transitions = sum(int(tree.get("worker", {}).get("kept", 0)) for tree in gone)  # in their buffers
        self.new_workers = sampling.samplers - len(going_on) if declared.gathers_gradients else 0  # without a state
        waiting = saved.get("stream", {}).values()
        self.held: Sequence[Fragment | Contribution] = []  # what to learn from first
        self.dropped: Sequence[Fragment] = []  # fragments that do not fit the samplers of now
        if declared.gathers_gradients:  # they fit any sampler
            self.held = [Contribution.from_state(tree) for tree in waiting]
        elif self._fits and had == sampling.samplers:
            self.held = [Fragment.from_state(tree) for tree in waiting]
        else:
            self.dropped = [Fragment.from_state(tree) for tree in waiting]

    def sampler(self, index: int) -> Tree | None:
        """The state to go on from; None for one that has to start fresh."""
        return self._saved.get(f"sampler_{index}") if self._fits and self._has_states else None

    @property
    def fresh(self) -> tuple[int, int]:
        """For those that start fresh: a sequence number and an attempt beyond all used, so that no episode repeats."""
        return int(self._saved["run"]["steps"]) + 1, ATTEMPTS * (1 + self._resumes)

    def notes(self) -> Iterator[str]:
        if self.abandoned:
            yield f"{self.abandoned:,} episodes that were in flight start over"
        if self.new_workers:
            several = "workers start" if self.new_workers > 1 else "worker starts"
            yield f"{self.new_workers:,} {several} without a saved state"
        if self.lost_transitions:
            yield f"{self.lost_transitions:,} transitions in the buffers of workers that are gone are lost"
        if self.dropped:
            lost = sum(fragment.record.steps for fragment in self.dropped)
            yield f"{lost:,} steps that were sampled for other samplers are dropped"
