"""An environment that broke: what is known of it, and all that is needed to see it break again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class EnvFault:
    """One environment that raised, or gave what is no observation or reward."""

    env: str
    args: Mapping[str, Any]
    kind: str
    """`raised`, or `garbage`: a wrong shape, a wrong type, NaN or infinity."""
    lane: int
    seed: int
    """Of the episode."""
    step: int
    """Steps taken in the episode; 0 if its reset broke."""
    cause: str
    """One line."""
    trace: str = ""
    """The traceback inside the environment, if it raised."""
    actions: np.ndarray | None = None
    """`[step, ...]` as given to the environment since its reset, the last one included; None if not recorded."""

    def facts(self) -> dict[str, Any]:
        """As JSON, for the history of the run."""
        facts: dict[str, Any] = {"env": self.env, "args": dict(self.args), "kind": self.kind, "lane": self.lane}
        facts |= {"seed": self.seed, "step": self.step, "cause": self.cause, "trace": self.trace}
        if self.actions is not None:
            facts |= {"actions": self.actions.tolist(), "dtype": str(self.actions.dtype)}
        return facts
