"""Threads of numerical libraries: capped before they are loaded where that is possible, and while roles run where not.

A matrix product rounds otherwise when it is split over threads, so the cap is part of the promise that equal seeds give
equal runs wherever roles live; and on small networks more threads only fight over the cores.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import AbstractContextManager, suppress

VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_TIMER_SLACK = 29  # prctl's PR_SET_TIMERSLACK


def cap_threads(count: int = 1) -> None:
    """For libraries that this process has not loaded yet, and for its children."""
    for variable in VARIABLES:
        os.environ[variable] = str(count)


def capped_threads(count: int = 1) -> AbstractContextManager[object]:
    """For linear algebra that is loaded already, until the block is left; torch has its own setting."""
    import numpy  # noqa: F401  # its library must be there to be found
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    limits: AbstractContextManager[object] = threadpool_limits(count, user_api="blas")
    return limits


def exact_timers() -> None:
    """Let sleeps of this thread, and of those it starts from now on, end when they are due, not up to 50 µs later."""
    with suppress(OSError, AttributeError):  # Linux alone has this
        ctypes.CDLL(None).prctl(_TIMER_SLACK, 1, 0, 0, 0)
