"""A descriptor by which threads wake one that polls."""

from __future__ import annotations

import os
import threading


class Doorbell:
    """A descriptor that is readable once it was rung, until it is cleared. Rung by many threads, cleared by one."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._rung = False
        self._open = threading.Lock()  # a thread that is late must not write to a descriptor that is another's by now

    def fileno(self) -> int:
        return self._fd

    def ring(self) -> None:
        if self._rung:  # a system call less for most
            return
        with self._open:
            if self._fd >= 0 and not self._rung:
                os.eventfd_write(self._fd, 1)
                self._rung = True  # last: what is cleared must have been written

    def clear(self) -> None:
        """What is looked at after this either is there already or will ring again."""
        if self._rung:
            os.eventfd_read(self._fd)
            self._rung = False

    def close(self) -> None:
        with self._open:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
