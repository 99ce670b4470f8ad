"""What to do about faults of a run, and what bounds it, in a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raynforce.runs.faults import ENV_RESTARTED, FaultGroup

CRASHES = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL")


def advice(group: FaultGroup, config: Mapping[str, Any]) -> str:
    text, learner, section = group.cause + group.said, group.role == "learner", config.get("faults")

    def setting(name: str) -> str:
        value = section.get(name) if isinstance(section, dict) else None
        return f"faults.{name} (now {value:g})" if isinstance(value, int | float) else f"faults.{name}"

    if group.kind == "raised":
        return "fix the environment" + "; the run went on with a new one" * (set(group.actions) == {ENV_RESTARTED})
    if group.kind == "garbage":
        return "let the environment return finite numbers that fit its spaces"
    if group.kind == "hung":
        name = setting("learn_seconds" if learner else "sample_seconds")
        return f"if it is only slow, raise {name} or, at the start, {setting('start_seconds')}"
    if group.kind == "memory":
        limit = f"{setting('memory_mb')} is the limit at which it is replaced"
        return f"if it grows without end, the environment leaks: fix that; {limit}"
    if any(name in text for name in CRASHES):
        return f"native code crashed: {'torch or its driver' if learner else 'most likely the simulator'}"
    if "SIGKILL" in text or "out of memory" in text.lower():
        why = "if that was not you, the kernel was short of memory (sudo dmesg | grep -i oom)"
        if set(group.actions) == {ENV_RESTARTED}:
            return f"{why}: lower sampling.envs; the run went on with a new one"
        fix = "lower sampling.samplers or sampling.envs, or set faults.memory_mb"
        return f"{why}: {fix}, so that samplers that grow are replaced before"
    if "node" in group.cause:
        return "nothing, if the node was meant to leave; its samplers move to others that have room"
    if set(group.actions) == {ENV_RESTARTED}:
        return "what it said last, above, tells why; the run went on with a new one"
    return "the last lines it printed say more" if group.said or group.trace else "the cause is above: fix that"


def bound(told: str) -> str:
    """What bounds a run, of its lines on where the time went: a sentence, or the shares if it has none."""
    head, *lines = told.splitlines() or [""]
    plain = [line.strip() for line in lines if not line.startswith("  ") or " bound " in line]
    return " ".join(plain) or head.partition("where the time went: ")[2]
