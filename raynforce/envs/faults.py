"""An environment that broke: what is known of it, and all that is needed to see it break again."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from raynforce.errors import EnvError

BREAKS_IN_A_ROW = 3  # how often an env may be made again with no more than `STEPS_BETWEEN` steps in between
STEPS_BETWEEN = 10
TRACE_LENGTH = 4000
# Kinds of what is told of simulator processes that are replaced as `sims` says, and is no fault: that one was replaced,
# that it could not be and stays, and that an episode was cut for it.
RECYCLED, KEPT, CUT = "recycled", "kept", "cut"
MOST_BYTES = 1 << 20  # of an episode's actions that are kept: 131,072 steps of one integer


class Unavailable(EnvError):
    """There is no environment to be had now."""


@dataclass(frozen=True)
class EnvFault:
    """One environment that raised, or gave what is no observation or reward."""

    env: str
    args: Mapping[str, Any]
    kind: str  # `raised`, `garbage` (wrong shape or type, NaN, infinity), or side by side `hung`, `died`
    lane: int | None  # None, as the seed, in an env's own vector implementation
    seed: int | None  # of the episode
    step: int  # in the episode (without a lane: of the vector), the failing one included; 0 if its reset broke
    cause: str  # one line
    trace: str = ""  # the traceback inside the environment, if it raised
    actions: np.ndarray | None = None  # [step, ...] since its reset, the last one included; None if not kept
    too_long: bool = False  # whether they are not kept because they take more than `MOST_BYTES`

    def facts(self) -> dict[str, Any]:
        """As JSON."""
        facts: dict[str, Any] = {"env": self.env, "args": dict(self.args), "kind": self.kind}
        facts |= {} if self.lane is None else {"lane": self.lane, "seed": self.seed}
        facts |= {"step": self.step, "cause": self.cause, "trace": self.trace}
        facts |= {"too_long": True} if self.too_long else {}
        if self.actions is not None:
            facts |= {"actions": self.actions.tolist(), "dtype": str(self.actions.dtype)}
        return facts

    def error(self, kind: type[EnvError] = EnvError, often: str = "") -> EnvError:
        where = f"in lane {self.lane}{often} (episode seed {self.seed}, step {self.step})"
        error = kind(f"env {self.env!r} broke {where}: {self.cause}")
        error.facts = self.facts()
        return error


def count_break(
    fault: EnvFault, breaks: int, steps: int, kind: type[EnvError] = EnvError, cause: BaseException | None = None
) -> int:
    """Breaks in a row with this one, `steps` after the last of `breaks`; an error if there are too many."""
    breaks = 1 if steps > STEPS_BETWEEN else breaks + 1
    if breaks > BREAKS_IN_A_ROW:
        raise fault.error(kind, f", {breaks} times in a row within {STEPS_BETWEEN} steps") from cause
    return breaks


def trace_of(error: BaseException | None) -> str:
    """The traceback below the frame that caught `error`, its last lines if it is long; empty for None."""
    if error is None:
        return ""
    inner = error.__traceback__ and error.__traceback__.tb_next
    return "".join(traceback.format_exception(type(error), error, inner))[-TRACE_LENGTH:]
