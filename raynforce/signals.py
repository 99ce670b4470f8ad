"""Ctrl-C and SIGTERM: the first asks, the second ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class StopRequest:
    """Remembers the first SIGINT or SIGTERM; the second raises `KeyboardInterrupt` wherever the program is.

    Later ones change nothing: by then everything is being ended as fast as it can.
    """

    def __init__(self, announce: Callable[[], None]) -> None:
        self.number: int | None = None
        self._announce = announce
        self._at_once = False
        self._ending = False

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
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _received(self, number: int, frame: Any) -> None:
        if self._at_once or self.number is not None:
            if not self._ending:
                self._ending = True
                raise KeyboardInterrupt(number)
            return
        self.number = number
        self._announce()
