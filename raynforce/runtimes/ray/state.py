"""What Ray changes in the process that uses it, and how it is put back: environment, signals, output."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raynforce.runtimes.ray import private

PACKAGE = Path(__file__).parents[2]
AUTH = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
CHANGED = ("RAY_ADDRESS", "PYTHONBREAKPOINT")  # what Ray sets in this process, to be put back
DRIVER = {"RAY_get_check_signal_interval_milliseconds": "100"}  # how soon Ctrl-C is noticed while waiting


@contextmanager
def environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables for a while; None removes one."""
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if any(name.startswith("RAY_") for name in values):
        private.reread_environment()


def unchanged() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in CHANGED}


@contextmanager
def silent() -> Iterator[None]:
    """Keep what Ray's C++ side writes to stderr from the screen; only around calls that end soon."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@contextmanager
def own_signals() -> Iterator[list[int]]:
    """Keep Ctrl-C and SIGTERM from `ray.init`, which they crash, and give those that came; the second interrupts."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def note(number: int, frame: Any) -> None:
        received.append(number)
        if len(received) > 1:
            raise KeyboardInterrupt(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with private.own_sigterm():
            yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def token_file() -> Path:
    return Path.home() / ".ray" / "auth_token"
