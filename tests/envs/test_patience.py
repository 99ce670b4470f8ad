"""The limit of time for what the driver itself asks of an environment."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from raynforce.envs.patience import patience
from raynforce.errors import EnvError


@pytest.mark.parametrize("before", [signal.default_int_handler, signal.SIG_IGN], ids=["terminal", "background"])
def test_what_takes_too_long_is_interrupted(before: signal.Handlers) -> None:
    was = signal.signal(signal.SIGINT, before)
    try:
        began = time.monotonic()
        with pytest.raises(EnvError, match=r"a step takes longer than .* = 0\.1"), patience(0.1, "a step"):
            time.sleep(20)
        assert time.monotonic() - began < 10
        assert signal.getsignal(signal.SIGINT) == before
    finally:
        signal.signal(signal.SIGINT, was)


def test_what_is_in_time_goes_on() -> None:
    threads = threading.enumerate()
    with patience(5, "a step"):
        pass
    assert not set(threading.enumerate()) - set(threads)


def test_an_interrupt_by_the_user_is_not_taken_for_it() -> None:
    with pytest.raises(KeyboardInterrupt), patience(5, "a step"):
        raise KeyboardInterrupt
