"""Everything in this process, each call run to its end when it is made: the debug mode, and the reference."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack, suppress
from copy import deepcopy
from functools import partial
from typing import Any

from raynforce.imports import load_object
from raynforce.kernels import KernelKind, kind
from raynforce.runtimes.base import Handle, Pending, Place, RoleDied, Runtime, Split
from raynforce.threads import capped_threads


class _Answer(Pending):
    def __init__(self, name: str, work: Callable[[], Any]) -> None:
        self.name = name
        self.value: Any = None
        self._error: Exception | None = None
        try:
            self.value = work()
        except Exception as error:
            self._error = error

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self.value

    def failure(self) -> BaseException | None:
        return self._error


class _Watch:
    """Says which role keeps this process busy for longer than it may: here, nobody can end it."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._busy: tuple[str, float, float] | None = None  # who, since when, and for how long it may be
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._main = threading.get_ident()

    def guard(self, name: str, seconds: float, work: Callable[[], Any]) -> Any:
        if self._thread is None and seconds:
            self._thread = threading.Thread(target=self._look, name="raynforce-inline-watch", daemon=True)
            self._thread.start()
        self._busy = (name, time.monotonic(), seconds)
        try:
            return work()
        finally:
            self._busy = None

    def _look(self) -> None:
        told = None
        while not self._over.wait(0.5):
            busy = self._busy
            if busy is None or busy is told or not 0 < busy[2] < time.monotonic() - busy[1]:
                continue
            told = busy
            where = traceback.extract_stack(sys._current_frames()[self._main])[-1]
            place = f"{where.name} ({where.filename}:{where.lineno})"
            self._say(
                f"{busy[0]} has not answered for {busy[2]:g} s: it is in {place}. The inline runtime cannot end it "
                "(Ctrl-C twice does); --runtime process would, after faults.start_seconds or faults.sample_seconds"
            )

    def close(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()


class _Inline(Handle):
    def __init__(self, runtime: InlineRuntime, name: str, place: Place, build: Callable[[], Any]) -> None:
        self.name = name
        self._runtime, self._place, self._build = runtime, place, build
        self._role: _Answer | None = None  # built at its first call, so that mistakes in others show before torch loads

    def call_parts(self, method: str, args: Sequence[Any], parts: int) -> list[Pending]:
        guard, place = self._runtime.watch.guard, self._place
        if self._role is None:
            self._role = _Answer(self.name, lambda: guard(self.name, place.start_seconds, self._build))
        role = self._role

        def work() -> Any:
            values = [a.result() if isinstance(a, Pending) else a for a in args]
            return getattr(role.result(), method)(*values)

        def part(index: int) -> Any:
            return whole.result()[index]

        whole = _Answer(self.name, lambda: guard(self.name, place.call_seconds, work))
        return [whole] if parts == 1 else [_Answer(self.name, partial(part, index)) for index in range(parts)]

    def end(self) -> None:
        with suppress(Exception):  # what broke may not be able to close either
            self.close()
        if self in self._runtime.roles:
            self._runtime.roles.remove(self)

        def gone() -> Any:
            raise RoleDied(f"{self.name} was ended")

        self._role = _Answer(self.name, gone)

    def close(self) -> None:
        if self._role is not None and hasattr(self._role.value, "close"):
            self._role.value.close()


class InlineRuntime(Runtime):
    has_processes = False
    channel = "direct"

    def __init__(self, places: Mapping[str, Place], say: Callable[[str], None] = lambda _: None) -> None:
        super().__init__(places)
        self.watch = _Watch(say)
        self.roles: list[_Inline] = []
        self._opened = ExitStack()
        self._opened.enter_context(capped_threads())  # as in processes of their own

    def spawn(self, role: str, *args: Any, name: str, place: Place | None = None) -> Handle:
        self.roles.append(_Inline(self, name, place or Place(), lambda: load_object(role)(*args)))
        return self.roles[-1]

    def wait(self, pendings: Sequence[Pending], count: int | None = None, timeout: float | None = None) -> Split:
        return list(pendings), []

    def share(self, value: Any) -> Pending:
        return _Answer("shared", lambda: value)

    def kinds(self) -> Set[KernelKind]:
        self._kinds = self._kinds or {kind()}  # not known before roles have loaded their libraries
        return frozenset(self._kinds)

    def keep(self, pending: Pending) -> Pending:
        return _Answer(pending.name, lambda: deepcopy(pending.result()))  # the role goes on writing into its own

    def close(self, *, now: bool = False) -> None:
        self.watch.close()
        with self._opened:
            while self.roles:
                self.roles.pop().close()
