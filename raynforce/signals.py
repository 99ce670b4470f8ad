"""Ctrl-C and SIGTERM: the first asks, the second ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class StopRequest:
    """Remembers the first SIGINT or SIGTERM; the second raises `KeyboardInterrupt` wherever the program is."""

    def __init__(self, announce: Callable[[], None]) -> None:
        self.number: int | None = None
        self._announce = announce

    @property
    def name(self) -> str | None:
        return None if self.number is None else signal.Signals(self.number).name

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Take over both signals; in a thread, which receives none, do nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._received) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _received(self, number: int, frame: Any) -> None:
        if self.number is not None:
            raise KeyboardInterrupt(number)
        self.number = number
        self._announce()
