"""Ctrl-C and SIGTERM: the first asks, the second ends."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

AGAIN = 5.0  # seconds after which an end must have happened: Python drops what is raised in a `__del__`


class StopRequest:
    """The first SIGINT or SIGTERM asks to stop, the second raises `KeyboardInterrupt`; later ones every `AGAIN`
    seconds."""

    def __init__(self, announce: Callable[[], None]) -> None:
        self.number: int | None = None
        self._announce = announce
        self._at_once = False
        self._ending_since = -math.inf
        self._newest: int = signal.SIGINT

    @property
    def name(self) -> str | None:
        return None if self.number is None else signal.Signals(self.number).name

    @contextmanager
    def watching(self, *, at_once: bool = False) -> Iterator[None]:
        """Take over both signals; in a thread, which receives none, do nothing. With `at_once` the first one ends."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._at_once = at_once
        before = {number: signal.signal(number, self._received) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        except KeyboardInterrupt as interrupt:  # a library may have caught it and raised it again without the number
            raise KeyboardInterrupt(*(interrupt.args or (self._newest,))) from None
        finally:
            for number, handler in before.items():
                signal.signal(number, handler or signal.SIG_DFL)  # None: installed by a library in C

    def ask(self) -> None:
        """As the first SIGTERM would."""
        if self.number is None:
            self.number = signal.SIGTERM
            self._announce()

    def _received(self, number: int, frame: Any) -> None:
        if self._at_once or self.number is not None:
            if time.monotonic() - self._ending_since > AGAIN:
                self._ending_since, self._newest = time.monotonic(), number
                raise KeyboardInterrupt(number)
            return
        self.number = number
        self._announce()
