"""The one place where a plain class becomes a process or a Ray actor: built from data, called by name."""

from __future__ import annotations

import faulthandler
import os
import pickle
import re
import sys
import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from raynforce.errors import RaynforceError, summary
from raynforce.kernels import KernelKind, kind, pin
from raynforce.runtimes.base import Place, RemoteTraceback, RoleError
from raynforce.threads import cap_threads

LAST_LINES = 40  # of what a role said that are kept for when it is gone
WATCHDOG = re.compile(r"Timeout \((?P<limit>\d+:\d\d:\d\d(\.\d+)?)\)!")  # how its report begins
FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
SLOW = ("state", "load")  # methods that may take as long as building


def pack(
    role: str, args: Sequence[Any], name: str, place: Place, path: Sequence[str] | None = None, given: bytes = b""
) -> bytes:
    """What a host needs to build a role; `path` is where modules are, `given` what the user's script defines."""
    settings = role, name, place, [os.path.abspath(p) for p in sys.path] if path is None else path
    from raynforce.given import dumps

    return pickle.dumps((settings, given, dumps(args) if given else pickle.dumps(args, protocol=5)), protocol=5)


class RoleHost:
    """What a role lives in when it has a process of its own."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.place = Place()
        self._role: Any = None
        self._failure: RaynforceError | None = None

    def build(self, packed: bytes) -> KernelKind:
        """Settle in this process, then build the role that `pack` described; returns where it lives."""
        (role, self.name, self.place, path), given, args = pickle.loads(packed)
        settle(self.place, path)
        from raynforce.given import unpack
        from raynforce.imports import load_object

        def built() -> Any:
            unpack(given)
            return load_object(role)(*pickle.loads(args))

        try:
            with watchdog(self.place.start_seconds):
                self._role = self._guarded(built)
        except RaynforceError as error:
            self._failure = error
            raise
        return kind()

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the role; if it could not be built, that is the answer."""
        if self._failure is not None:
            raise self._failure
        limit = self.place.call_seconds
        if method in SLOW and limit:
            limit = max(self.place.start_seconds, limit)
        with watchdog(limit):
            return self._guarded(lambda: getattr(self._role, method)(*args))

    def close(self) -> None:
        if hasattr(self._role, "close"):
            self._role.close()

    def _guarded(self, work: Any) -> Any:
        """Errors leave as ours, which any process can read, with the traceback as text."""
        try:
            return work()
        except Exception as error:
            ours = error if isinstance(error, RaynforceError) else RoleError(summary(error))
            raise said_by(self.name, ours, traceback.format_exc()) from None


@contextmanager
def watchdog(seconds: float) -> Iterator[None]:
    """Print all stacks and end this process after `seconds` (0: no limit), also if the GIL is held; costs 25 µs."""
    if not seconds:
        yield
        return
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)  # whatever `sys.stderr` has become
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


class LastLines:
    """The last lines that a role printed; those of a watchdog are all kept, however deep the stacks are."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._hung = False

    def append(self, line: str) -> bool:
        """Keep a line; whether it is one that users should see at once, which stacks are not."""
        if WATCHDOG.match(line):
            self._lines = deque(self._lines, maxlen=10 * LAST_LINES)
            self._hung = True
        self._lines.append(line)
        return not self._hung

    def __iter__(self) -> Iterator[str]:
        return iter(self._lines)


def hung(said: Iterable[str]) -> str | None:
    """For the last lines of a process that its watchdog has ended: what it was doing, for how long; else None."""
    lines = iter(said)
    limit = next((found["limit"] for line in lines if (found := WATCHDOG.match(line))), None)
    if limit is None:
        return None
    frames = [""]
    for line in lines:  # the innermost first; the thread that runs our calls is the last one
        if line.startswith("Thread "):
            frames = []
        elif found := FRAME.fullmatch(line.rstrip()):
            frames.append(f" in {found['function']} ({os.path.basename(found['file'])}:{found['line']})")
    return f"it hung for {limit}{(frames or [''])[0]}"


def settle(place: Place, path: Sequence[str]) -> None:
    """Cap threads, choose kernels, lower the priority, set the search path; before numpy reads the first two."""
    cap_threads(place.threads)
    pin(place.kernels)
    if place.nice > 0:
        os.setpriority(os.PRIO_PROCESS, 0, max(place.nice, os.getpriority(os.PRIO_PROCESS, 0)))
    sys.path[:] = [*path, *(p for p in sys.path if p not in path)]


def said_by(name: str, error: RaynforceError, trace: str) -> RaynforceError:
    """The same error with the role's name and traceback; of a class of ours, which any process can import."""
    kind = next(k for k in type(error).__mro__ if k.__module__.startswith("raynforce."))
    named: RaynforceError = kind(f"{name}: {error}")
    named.trace, named.role, named.facts = trace, name, error.facts
    return named


def with_cause(error: BaseException) -> BaseException:
    """Put the traceback that came along where Python prints it."""
    trace = getattr(error, "trace", None)
    if trace is not None and error.__cause__ is None:
        error.__cause__ = RemoteTraceback(trace)
    return error
