"""Stream: samplers send fragments to the learner, the learner sends policy versions back."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from raynforce.policies.acting import PolicyVersion

if TYPE_CHECKING:  # the learner's module imports torch
    from raynforce.roles.learner import Learned, Learner
    from raynforce.roles.sampler import Sampler


class Round(NamedTuple):
    """One turn of the loop."""

    learned: Learned
    sample_seconds: float
    learn_seconds: float


def sync(samplers: Sequence[Sampler], learner: Learner, version: PolicyVersion) -> Iterator[Round]:
    """Lag 0: everyone samples with the newest version, then the learner trains on exactly that."""
    while True:
        began = time.monotonic()
        fragments = [sampler.sample(version) for sampler in samplers]
        sampled = time.monotonic()
        learned = learner.learn(fragments)
        version = learned.version
        yield Round(learned, sampled - began, time.monotonic() - sampled)
