"""A limit of time for what the driver itself asks of an environment."""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Iterator

from raynforce.errors import EnvError

_deadlines: list[float] = []  # of the limits that are in force, one inside the other


def left() -> float:
    """Seconds until the first of the limits in force runs out."""
    return min(_deadlines, default=math.inf) - time.monotonic()


@contextlib.contextmanager
def patience(seconds: float, what: str) -> Iterator[None]:
    """Interrupt what takes longer, as Ctrl-C would; only where signals arrive, and not in C code that ignores them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    late = threading.Event()

    def interrupt() -> None:
        late.set()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN  # as shells have it for what runs in the background
    if ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        timer.start()
        _deadlines.append(time.monotonic() + seconds)
        try:
            yield
        finally:
            _deadlines.pop()
            timer.cancel()
            timer.join()  # an interrupt that is on its way arrives here, not in what comes after
    except KeyboardInterrupt:
        if not late.is_set():
            raise
        raise EnvError(f"{what} takes longer than faults.start_seconds = {seconds:g}; raise it if need be") from None
    finally:
        if ignored:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
