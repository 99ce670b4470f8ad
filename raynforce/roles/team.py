"""Several policies as data: what each is made from. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from raynforce.config import Config
from raynforce.policies.acting import PolicyVersion
from raynforce.spaces import EnvSpec


@dataclass(frozen=True)
class Plan:
    """One of several policies."""

    config: Config  # with its own settings of algorithm, network and learner
    env: EnvSpec  # what one of its agents takes and gives
    frozen: PolicyVersion | None = None  # it does not learn, and this is what it plays
    opponents: int = 0  # older versions that are kept to play against
    every: int = 1  # versions from one of these to the next
