"""Runs that tests make: until they have learned something, and what they have written."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import raynforce


def solve(env: str, algo: str, out: Path, *, steps: int, target: float, **more: Any) -> raynforce.Run:
    """Train within so many steps until the target is reached, and see that it was."""
    run = raynforce.train(env, algo, steps=steps, target=target, out=out, progress="quiet", **more)
    assert run.result.solved_steps is not None, run.result
    return run


def metrics(run: Path) -> list[dict[str, Any]]:
    return _lines(run / "metrics.jsonl")


def events(run: Path, *kinds: str) -> list[dict[str, Any]]:
    """Those of some kinds, or all."""
    return [line for line in _lines(run / "events.jsonl") if not kinds or line["event"] in kinds]


def without(lines: Iterable[Mapping[str, Any]], *prefixes: str) -> list[dict[str, Any]]:
    """Lines of metrics, but for those numbers whose names begin like this."""
    return [{name: value for name, value in line.items() if not name.startswith(prefixes)} for line in lines]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
