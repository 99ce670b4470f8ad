"""The one place where a plain class becomes a process or a Ray actor: built from data, called by name."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from raynforce.errors import RaynforceError, summary
from raynforce.runtimes.base import Place, RemoteTraceback, RoleError
from raynforce.threads import cap_threads


def pack(role: str, args: Sequence[Any], name: str, place: Place, path: Sequence[str] | None = None) -> bytes:
    """All that a host needs to build a role; modules are looked for on `path`, by default as they are here."""
    settings = (
        role,
        name,
        place.threads,
        place.nice,
        place.awake,
        [os.path.abspath(p) for p in sys.path] if path is None else path,
    )
    return pickle.dumps((settings, pickle.dumps(args, protocol=5)), protocol=5)


class Host:
    """What a role lives in when it has a process of its own."""

    def __init__(self) -> None:
        self._role: Any = None
        self._failure: RaynforceError | None = None
        self.name = ""
        self.awake = 0.0

    def build(self, packed: bytes) -> None:
        """Settle in this process, then build the role that `pack` described."""
        (role, self.name, threads, nice, self.awake, path), args = pickle.loads(packed)
        settle(threads, nice, path)
        from raynforce.imports import load_object

        try:
            self._role = self._guarded(lambda: load_object(role)(*pickle.loads(args)))
        except RaynforceError as error:
            self._failure = error
            raise

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the role; if it could not be built, that is the answer."""
        if self._failure is not None:
            raise self._failure
        return self._guarded(lambda: getattr(self._role, method)(*args))

    def close(self) -> None:
        """Let the role close what it has opened."""
        if hasattr(self._role, "close"):
            self._role.close()

    def _guarded(self, work: Any) -> Any:
        """Errors leave as ours, which any process can read, with the traceback as text."""
        try:
            return work()
        except RaynforceError as error:
            raise said_by(self.name, error, traceback.format_exc()) from None
        except Exception as error:
            raise said_by(self.name, RoleError(summary(error)), traceback.format_exc()) from None


def settle(threads: int, nice: int, path: Sequence[str]) -> None:
    """Cap threads, step back in priority, find the user's code. Before numpy is imported: it reads its caps once."""
    cap_threads(threads)
    if nice > 0:
        os.setpriority(os.PRIO_PROCESS, 0, max(nice, os.getpriority(os.PRIO_PROCESS, 0)))
    sys.path[:] = [*path, *(p for p in sys.path if p not in path)]


def said_by(name: str, error: RaynforceError, trace: str) -> RaynforceError:
    """The same error with the role's name in front; its traceback travels along as `trace`.

    A class of the user's own becomes the one of ours that it is derived from: the other process may not be able to
    import it, or to build it from one text.
    """
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
