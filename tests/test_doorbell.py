"""A doorbell wakes one that polls, whatever the order in which threads ring and clear."""

from __future__ import annotations

import os
import select

import pytest

from raynforce.doorbell import Doorbell


def rung(bell: Doorbell) -> bool:
    return bool(select.select([bell], [], [], 0)[0])


def test_it_is_readable_from_ring_to_clear() -> None:
    bell = Doorbell()
    assert not rung(bell)
    bell.ring()
    bell.ring()
    assert rung(bell)
    bell.clear()
    bell.clear()
    assert not rung(bell)
    bell.close()
    bell.ring()  # a thread that is late


def test_it_may_be_cleared_while_it_is_rung(monkeypatch: pytest.MonkeyPatch) -> None:
    bell, write = Doorbell(), os.eventfd_write

    def cleared_first(fd: int, value: int) -> None:
        bell.clear()  # by another thread, at the worst moment
        write(fd, value)
        bell.clear()

    monkeypatch.setattr(os, "eventfd_write", cleared_first)
    bell.ring()
    monkeypatch.undo()
    assert rung(bell)
    bell.clear()
    assert not rung(bell)
    bell.ring()
    assert rung(bell)
    bell.close()
