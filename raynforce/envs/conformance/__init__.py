"""The conformance kit: cases of docs/protocol.md that any simulator can be held against, in any language."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from raynforce.envs.conformance.achieving import Speed, speed
from raynforce.envs.conformance.cases import CASES
from raynforce.envs.launching import is_simulator
from raynforce.envs.peer import Failed, Skipped
from raynforce.errors import UsageError

# Each adds its cases, in this order.
from raynforce.envs.conformance import episodes, endings, states, acting  # noqa: F401  # isort: skip

__all__ = ["CASES", "Speed", "check", "speed"]


def check(env: str, only: Sequence[str] = ()) -> Iterator[tuple[str, str, str]]:
    """Try each case: its name, what it asks, and why it does not hold; empty if it does, `skipped: …` if it cannot."""
    if not is_simulator(env):
        raise UsageError(f"{env!r} is no simulator: give its command, such as ./my_sim")
    for name, (title, run) in CASES.items():
        if only and name not in only:
            continue
        try:
            run(env)
        except Skipped as reason:
            yield name, title, f"skipped: {reason}"
        except Failed as reason:
            yield name, title, str(reason)
            if name == "hello":  # there is nothing to try the other cases on
                return
        else:
            yield name, title, ""
