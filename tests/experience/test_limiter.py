"""The samples-per-insert limiter: by hand, and over samplers and learners of any speed."""

from __future__ import annotations

import heapq
import json
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from raynforce.errors import UsageError
from raynforce.experience.limiter import Limiter


def test_by_hand() -> None:
    limiter = Limiter(ratio=2.0, batch=10, starts=100, slack=40)
    assert (limiter.updates(), limiter.room(), limiter.measured) == (0, True, None)
    limiter.insert(99)
    assert (limiter.updates(), limiter.room(0), limiter.room(1000)) == (0, True, False)
    limiter.insert(6)  # 5 beyond the start: 10 samples
    assert limiter.updates() == 1
    limiter.insert(14)  # 38 samples
    assert (limiter.updates(), limiter.room(0), limiter.room(1)) == (3, True, False)
    limiter.sample(30)
    assert (limiter.updates(), limiter.room(15), limiter.room(16)) == (0, True, False)
    assert limiter.measured == pytest.approx(30 / 19)


def test_before_the_start_samplers_run_even_if_much_is_coming() -> None:
    limiter = Limiter(ratio=16.0, batch=64, starts=1000, slack=0)
    limiter.insert(500)
    assert limiter.room(499)
    assert limiter.room(507)  # 7 beyond the start: 112 of 128
    assert not limiter.room(508)


def test_slack_is_raised_to_what_is_needed() -> None:
    assert Limiter(4.0, batch=32, starts=0, slack=0).slack == 64
    assert Limiter(4.0, batch=32, starts=0, slack=1000).slack == 1000


@pytest.mark.parametrize("ratio", [0.0, -1.0, float("nan"), float("inf")])
def test_a_ratio_that_cannot_be_met_is_refused(ratio: float) -> None:
    with pytest.raises(
        UsageError, match=r"^algorithm\.samples_per_insert = \S+ is not allowed: it is above 0"
    ) as error:
        Limiter(ratio, 64, 0, 0)
    assert "\n" not in str(error.value)


def test_it_is_saved_and_goes_on() -> None:
    limiter, other = (Limiter(2.0, 10, 100, 40) for _ in range(2))
    limiter.insert(150)
    limiter.sample(80)
    saved = json.loads(json.dumps(limiter.state()))
    other.load(saved)
    assert (other.updates(), other.measured, other.room(11)) == (2, 1.6, limiter.room(11))
    for changed in (Limiter(20.0, 10, 100, 40), Limiter(0.1, 10, 100, 40), Limiter(2.0, 10, 120, 40)):
        changed.load(saved)  # it does not make up for what another ratio would have done before
        assert (changed.updates(), changed.room(), changed.measured) == (0, True, None)
        changed.insert(1000)
        assert changed.updates() == int(changed.ratio * 100)


@example(ratio=958512.0, batch=1, starts=0, inserted=23_988_471_155, share=0.125, coming=0)  # beyond 2^53
@settings(max_examples=300, deadline=None)
@given(
    ratio=st.floats(1e-6, 1e6),
    batch=st.integers(1, 10**6),
    starts=st.integers(0, 10**6),
    inserted=st.integers(0, 10**12),
    share=st.floats(0, 1),
    coming=st.integers(0, 10**6),
)
def test_someone_can_always_go_on_and_the_ratio_is_never_exceeded(
    ratio: float, batch: int, starts: int, inserted: int, share: float, coming: int
) -> None:
    limiter = Limiter(ratio, batch, starts, slack=0)
    limiter.insert(inserted)
    limiter.sample(int(limiter.updates() * share) * batch)
    updates = limiter.updates()
    assert updates > 0 or limiter.room(0)
    assert limiter.room(0) or not limiter.room(coming)
    limiter.sample(updates * batch)
    assert limiter.sampled <= Fraction(ratio) * max(0, inserted - starts)
    assert limiter.updates() == 0


@settings(max_examples=60, deadline=None)
@given(
    ratio=st.floats(0.25, 32),
    batch=st.sampled_from([32, 64, 256]),
    starts=st.sampled_from([0, 1, 1000]),
    samplers=st.lists(st.tuples(st.integers(16, 600), st.floats(0.001, 10)), min_size=1, max_size=6),
    seconds=st.floats(1e-5, 1),
    job=st.integers(4, 64),
    whole=st.booleans(),
)
def test_the_measured_ratio_is_the_one_that_was_set(
    ratio: float, batch: int, starts: int, samplers: list[tuple[int, float]], seconds: float, job: int, whole: bool
) -> None:
    """Samplers give fragments of their size (or a little less) in their time; the learner needs `seconds` an update."""
    largest = max(size for size, _ in samplers)
    limiter = Limiter(ratio, batch, starts, slack=ratio * largest)
    enough = starts + 11 * (limiter.slack / ratio + largest)
    events: list[tuple[float, int]] = []  # when, and who is done: a sampler's number, -1 the learner
    busy: set[int] = set()
    now = 0.0
    while limiter.inserted < enough:
        for number, (size, pace) in enumerate(samplers):
            if number not in busy and limiter.room(sum(samplers[k][0] for k in busy if k >= 0)):
                busy.add(number)
                heapq.heappush(events, (now + size * pace, number))
        if -1 not in busy and (updates := min(job, limiter.updates())):
            limiter.sample(updates * batch)
            busy.add(-1)
            heapq.heappush(events, (now + updates * seconds, -1))
        assert events, "nobody may go on"
        now, who = heapq.heappop(events)
        busy.remove(who)
        if who >= 0:
            limiter.insert(samplers[who][0] - (0 if whole else samplers[who][0] // 10))
        assert limiter.sampled <= ratio * max(0, limiter.inserted - starts)
    assert limiter.measured is not None
    assert 0.9 * ratio <= limiter.measured <= ratio
