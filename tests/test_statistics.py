"""Statistics over few runs, against scipy and by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from raynforce.errors import UsageError
from raynforce.statistics import bootstrap, iqm, probability_of_improvement

SCORES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30)


@given(SCORES)
def test_iqm_is_scipys_trimmed_mean(scores: list[float]) -> None:
    assert iqm(scores) == pytest.approx(stats.trim_mean(scores, 0.25), rel=1e-9, abs=1e-6)


def test_one_seed_that_fails_counts_for_little() -> None:
    assert iqm([500.0, 500.0, 500.0, 0.0]) == 500.0
    assert iqm([1.0, 2.0, 6.0]) == 3.0


def test_bootstrap_covers_what_it_says() -> None:
    rng, hits = np.random.default_rng(0), 0
    for trial in range(200):
        found = bootstrap(rng.normal(3.0, 1.0, 30), lambda values, axis: values.mean(axis), repeats=400, seed=trial)
        hits += found.low <= 3.0 <= found.high
    assert 0.88 <= hits / 200 <= 0.99
    alone = bootstrap([7.0])
    assert (alone.estimate, alone.low, alone.high) == (7.0, 7.0, 7.0)


def test_each_column_has_an_interval_of_its_own() -> None:
    found = bootstrap(np.array([[0.0, 10.0], [1.0, 10.0], [2.0, 10.0]]))
    assert found.estimate.tolist() == [1.0, 10.0]
    assert found.low[0] < 1.0 < found.high[0]
    assert (found.low[1], found.high[1]) == (10.0, 10.0)


@given(SCORES, SCORES)
def test_probability_of_improvement_is_mann_whitneys_u(ours: list[float], theirs: list[float]) -> None:
    found = probability_of_improvement(ours, theirs, repeats=10)
    assert found.estimate == pytest.approx(stats.mannwhitneyu(ours, theirs).statistic / len(ours) / len(theirs))


def test_no_scores_are_refused() -> None:
    for wrong in (lambda: iqm([]), lambda: bootstrap([]), lambda: probability_of_improvement([], [1.0])):
        with pytest.raises(UsageError, match="needs"):
            wrong()
