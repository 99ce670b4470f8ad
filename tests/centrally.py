"""Small runs with one policy for all environments, of which nothing may be left."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from failing import ALGOS, SMALL, is_sound
from running import events
from test_failures import family

import raynforce

STEPS = 3000
FRAGMENT = 3 * 16
NAMES = ("lane", "policy")
OURS = (b"raynforce.runtimes.worker", b"raynforce.envs.fork_server")


def train(
    out: Path,
    env: str = "fault_envs:CartPole",
    algo: str = "ppo",
    *,
    steps: int = STEPS,
    settings: Any = None,
    **more: Any,
) -> raynforce.Run:
    given = SMALL | ALGOS[algo] | dict(settings or {})
    how: dict[str, Any] = {"topology": "central", "runtime": "inline", "progress": "quiet", "seed": 7} | more
    return raynforce.train(env, algo, steps=steps, out=out, settings=given, **how)


def is_whole(run: raynforce.Run) -> None:
    """Nothing failed, and nothing is missing."""
    is_sound(run)
    result = run.result
    assert (result.restarts, result.env_restarts, result.lost_steps, result.dropped_steps) == (0, 0, 0, 0)
    assert run.config.steps <= result.steps <= run.config.steps + 2 * run.config.sampling.samplers * 2 * FRAGMENT
    assert not events(run.path, "fault")


def ours() -> list[str]:
    """Processes that runs have started here and not ended."""
    found = []
    for pid in family(os.getpid()):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            if pid != os.getpid() and any(module in words for module in OURS):
                found.append(words.decode())
    return found


@contextlib.contextmanager
def nothing_is_left() -> Iterator[None]:
    """No process, and no thread of a lane, of what happens in the block."""
    before = set(threading.enumerate())  # environments that hang for ever in other tests have threads, too
    yield
    deadline = time.monotonic() + 5
    while left := ours() + [t.name for t in set(threading.enumerate()) - before if t.name.startswith(NAMES)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)
