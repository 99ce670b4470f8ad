"""Roles in processes of their own: how tests start them and wait for what they do."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import raynforce
from raynforce.runtimes.base import Handle, Place, Runtime

HERE = Path(__file__).parent
PATH = os.pathsep.join([str(Path(raynforce.__file__).parents[1]), str(HERE)])
DEADLINE = 15.0
HERE_TOO = Place()


def spawn(runtime: Runtime, role: str, *args: object, place: Place = HERE_TOO) -> Handle:
    return runtime.spawn(f"roles_for_tests:{role}", *args, name=role.lower(), place=place)


def until(condition: Callable[[], bool], seconds: float = DEADLINE) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
