"""Everything in this process, each call run to its end when it is made: the debug mode, and the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from raynforce.imports import load_object
from raynforce.runtimes.base import Handle, Pending, Place, RoleDied, Runtime
from raynforce.threads import capped_threads


class _Answer(Pending):
    def __init__(self, name: str, work: Callable[[], Any]) -> None:
        self.name = name
        self._error: Exception | None = None
        self.value: Any = None
        try:
            self.value = work()
        except Exception as error:
            self._error = error

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self.value


def _part(whole: Pending, index: int) -> Any:
    return whole.result()[index]


def _gone(name: str) -> Any:
    raise RoleDied(f"{name} was ended")


class _Inline(Handle):
    def __init__(self, name: str, build: Callable[[], Any]) -> None:
        self.name = name
        self._build = build
        self._role: _Answer | None = None  # built at its first call, so that mistakes in others show before torch loads

    def call_parts(self, method: str, args: Sequence[Any], parts: int) -> list[Pending]:
        if self._role is None:
            self._role = _Answer(self.name, self._build)
        role = self._role

        def work() -> Any:
            values = [a.result() if isinstance(a, Pending) else a for a in args]
            return getattr(role.result(), method)(*values)

        whole = _Answer(self.name, work)
        return [whole] if parts == 1 else [_Answer(self.name, partial(_part, whole, i)) for i in range(parts)]

    def end(self) -> None:
        with suppress(Exception):  # what broke may not be able to close either
            self.close()
        self._role = _Answer(self.name, partial(_gone, self.name))

    def close(self) -> None:
        if self._role is not None and hasattr(self._role.value, "close"):
            self._role.value.close()


class InlineRuntime(Runtime):
    """Roles are objects of this process."""

    def __init__(self, places: Mapping[str, Place]) -> None:
        self.places = places
        self._roles: list[_Inline] = []
        self._opened = ExitStack()
        self._opened.enter_context(capped_threads())  # as in processes of their own

    def spawn(self, role: str, *args: Any, name: str, place: Place | None = None) -> Handle:
        self._roles.append(_Inline(name, lambda: load_object(role)(*args)))
        return self._roles[-1]

    def wait(
        self, pendings: Sequence[Pending], count: int | None = None, timeout: float | None = None
    ) -> tuple[list[Pending], list[Pending]]:
        return list(pendings), []

    def share(self, value: Any) -> Pending:
        return _Answer("shared", lambda: value)

    def close(self, *, now: bool = False) -> None:
        with self._opened:
            while self._roles:
                self._roles.pop().close()
