"""The ledger balances, and says so when it does not."""

from __future__ import annotations

import pytest

from raynforce.experience.counts import Record
from raynforce.experience.ledger import Ledger, LedgerError


@pytest.fixture
def ledger() -> Ledger:
    """Four fragments were produced: one was learned from, one dropped, two are held."""
    ledger = Ledger()
    for key, steps in {(0, 0): 8, (0, 1): 7, (1, 0): 6, (1, 1): 5}.items():
        ledger.produce(Record(*key, steps))
    ledger.train([Record(0, 0, 8)])
    ledger.drop(Record(1, 0, 6))
    return ledger


def test_every_step_is_somewhere(ledger: Ledger) -> None:
    ledger.check([(1, 1), (0, 1)])
    assert (ledger.produced, ledger.trained, ledger.dropped, ledger.in_flight, ledger.lost) == (26, 8, 6, 12, 0)
    ledger.train([Record(0, 1, 7), Record(1, 1, 5)])
    ledger.check([])
    assert ledger.in_flight == 0


def test_an_empty_ledger_balances() -> None:
    Ledger().check([])


def test_a_fragment_that_is_produced_twice(ledger: Ledger) -> None:
    with pytest.raises(LedgerError, match="has fragment 1 of sampler 0 twice"):
        ledger.produce(Record(0, 1, 8))


def test_a_fragment_that_is_learned_from_twice(ledger: Ledger) -> None:
    with pytest.raises(LedgerError, match="8 steps of fragment 0 of sampler 0 were used, which no sampler"):
        ledger.train([Record(0, 0, 8)])


def test_a_fragment_that_is_learned_from_after_it_was_dropped(ledger: Ledger) -> None:
    with pytest.raises(LedgerError, match="6 steps of fragment 0 of sampler 1 were used"):
        ledger.train([Record(1, 0, 6)])


def test_a_fragment_that_nobody_has_produced(ledger: Ledger) -> None:
    with pytest.raises(LedgerError, match="5 steps of fragment 9 of sampler 3 were used, which no sampler"):
        ledger.drop(Record(3, 9, 5))


def test_a_fragment_that_has_changed_on_its_way(ledger: Ledger) -> None:
    with pytest.raises(
        LedgerError, match="6 steps of fragment 1 of sampler 0 were used, of which a sampler produced 7"
    ):
        ledger.train([Record(0, 1, 6)])


@pytest.mark.parametrize(
    ("held", "named"),
    [
        ([(0, 1)], "fragments: 1 of sampler 1"),
        ([(0, 1), (1, 1), (2, 4)], "fragments: 4 of sampler 2"),
        ([(0, 1), (1, 1), (1, 1)], "some twice"),
    ],
)
def test_a_run_that_holds_something_else(ledger: Ledger, held: list[tuple[int, int]], named: str) -> None:
    with pytest.raises(LedgerError, match=named):
        ledger.check(held)


def test_counts_that_do_not_add_up(ledger: Ledger) -> None:
    ledger.trained += 1
    with pytest.raises(LedgerError, match="26 steps produced, 9 trained, 6 dropped, 12 in flight"):
        ledger.check([(0, 1), (1, 1)])


def test_what_was_lost_is_counted_and_not_expected_any_more(ledger: Ledger) -> None:
    ledger.lose(100, [(0, 1)])
    ledger.check([(1, 1)])
    assert (ledger.produced, ledger.lost) == (19, 107)
    ledger.lose(3)
    ledger.check([(1, 1)])
    assert ledger.lost == 110


def test_what_nobody_asked_for_is_produced_and_dropped(ledger: Ledger) -> None:
    ledger.skip(10)
    ledger.check([(0, 1), (1, 1)])
    assert (ledger.produced, ledger.dropped) == (36, 16)


def test_saved_and_loaded_it_goes_on(ledger: Ledger) -> None:
    ledger.lose(3)
    other = Ledger()
    other.load(ledger.state(), [Record(0, 1, 7), Record(1, 1, 5)])
    other.check([(0, 1), (1, 1)])
    assert other.metrics() == ledger.metrics()
    other.train([Record(1, 1, 5)])
    other.check([(0, 1)])


def test_a_checkpoint_without_its_fragments_does_not_balance(ledger: Ledger) -> None:
    other = Ledger()
    other.load(ledger.state(), [Record(0, 1, 7)])
    with pytest.raises(LedgerError, match="does not balance"):
        other.check([(0, 1)])


def test_metrics(ledger: Ledger) -> None:
    assert ledger.metrics() == {
        "health/produced_steps": 26.0,
        "health/dropped_steps": 6.0,
        "health/lost_steps": 0.0,
        "health/in_flight_steps": 12.0,
    }
