"""Hostile messages by the thousand: nothing but `ProtocolError`, bounded memory, and sessions that go on."""

from __future__ import annotations

import tracemalloc

import pytest
from protocol_fuzz import Crack, Fuzzer

from raynforce.protocol import policy_session

MEMORY = 8 << 20
CODES = ("magic", "version", "type", "flags", "size", "meta", "field", "env", "state")


def test_twenty_thousand_hostile_messages() -> None:
    fuzzer = Fuzzer(seed=0)
    fuzzer.play(18_000)
    counts = fuzzer.counts
    assert counts["went on"] > 100
    for code in CODES:
        assert counts[f"refused: {code}"] > 50, code
    for dropped in ("late", "stale", "duplicate", "session", "type", "closed", "value"):
        assert counts[f"dropped: {dropped}"] > 0, dropped


@pytest.mark.slow
def test_a_million_hostile_messages() -> None:
    fuzzer = Fuzzer(seed=2)
    fuzzer.play(1_000_000)
    assert fuzzer.counts["went on"] > 5_000


def test_hostile_messages_take_little_memory() -> None:
    fuzzer = Fuzzer(seed=1)
    tracemalloc.start()
    try:
        fuzzer.play(2_000)
        assert tracemalloc.get_traced_memory()[1] < MEMORY
    finally:
        tracemalloc.stop()


def test_the_fuzzer_notices_a_result_that_is_taken_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """It can fail: here a policy forgets that an env has answered."""
    monkeypatch.setattr(policy_session.Envs, "finish", lambda self, rows, status: None)
    with pytest.raises(Crack):
        Fuzzer(seed=0).play(500)
