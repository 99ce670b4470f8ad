"""What has changed between two starts of a run, and what that means for what is learned."""

from __future__ import annotations

from collections.abc import Iterator

from raynforce.config import Config
from raynforce.runs.fitting import differences

NEUTRAL = (
    "runtime",
    "ray.",
    "sampling.parallel",
    "replay.compress",
    "faults.",
    "checkpoint.",
    "eval.",
    "log_every",
    "target",
    "preset",
    "config_version",
)  # settings that may change without changing what is learned


def settings_note(before: Config, now: Config) -> Iterator[str]:
    """What was changed since the run was last started, and whether it still equals one that was never stopped."""
    changed = [row for row in differences(before.to_dict(), now.to_dict()) if row.what != "steps"]
    shown = {row.what: f"{row.what} {row.found} → {row.expected}" for row in changed}
    neutral = [text for name, text in shown.items() if name.startswith(NEUTRAL)]
    others = [text for name, text in shown.items() if not name.startswith(NEUTRAL)]
    if neutral:
        yield f"changed: {', '.join(neutral)}; this changes nothing of what is learned"
    if others:
        yield f"changed: {', '.join(others)}; from here on the run differs from one that was never stopped"


def steps_note(before: int, now: int, done: int) -> Iterator[str]:
    if before != now:
        yield (
            f"steps were {before:,} and are {now:,}: what follows the run's progress (annealed learning rate, epsilon) "
            f"goes on from {done / now:.0%}"
        )
