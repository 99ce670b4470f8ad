"""The sum tree against plain sums: what is set is what is drawn, in proportion."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raynforce.errors import UsageError
from raynforce.experience.sumtree import FANOUT, TOP, SumTree, tree_bytes

ONE_LEVEL, TWO_LEVELS, THREE_LEVELS = 100, TOP + 5, 200_000
CAPACITIES = (1, ONE_LEVEL, TWO_LEVELS, THREE_LEVELS)


@pytest.mark.parametrize("capacity", CAPACITIES)
def test_set_equals_naive_and_rebuild(capacity: int) -> None:
    rng = np.random.default_rng(0)
    tree, naive = SumTree(capacity), np.zeros(capacity)
    for _ in range(30):
        index = rng.integers(capacity, size=50)
        priority = rng.random(50)
        tree.set(index, priority)
        for i, p in zip(index, priority, strict=True):  # of duplicates the last one counts
            naive[i] = p
        np.testing.assert_array_equal(tree.leaves[index], naive[index])
        assert tree.total == pytest.approx(naive.sum())
    np.testing.assert_array_equal(tree.leaves, naive)
    again = SumTree(capacity)
    again.rebuild(tree.leaves)
    assert again.total == tree.total  # to the bit: no trace of the order of updates
    mass = rng.random(1000) * tree.total
    np.testing.assert_array_equal(again.sample(mass), tree.sample(mass))
    assert tree.nbytes == tree_bytes(capacity)


def test_duplicates_last_wins() -> None:
    tree = SumTree(TWO_LEVELS)
    tree.set(np.array([7, 9, 7]), np.array([5.0, 1.0, 2.0]))
    assert tree.leaves[[7, 9]].tolist() == [2.0, 1.0]
    assert tree.total == 3.0


@pytest.mark.parametrize("capacity", CAPACITIES[1:])
def test_mass_falls_where_the_running_sum_says(capacity: int) -> None:
    tree = SumTree(capacity)
    priority = np.random.default_rng(1).integers(0, 5, capacity).astype(float)  # integers: sums are exact
    tree.rebuild(priority)
    edges = priority.cumsum()
    mass = np.concatenate([[0.0], edges[:-1], edges - 0.5])
    mass = mass[mass < edges[-1]]
    np.testing.assert_array_equal(tree.sample(mass), np.searchsorted(edges, mass, side="right"))


def test_draws_in_proportion() -> None:
    rng = np.random.default_rng(2)
    tree = SumTree(TWO_LEVELS)
    index, priority = np.array([0, 31, 32, 4000, TWO_LEVELS - 1]), np.array([1.0, 2.0, 3.0, 4.0, 10.0])
    tree.set(index, priority)
    drawn = tree.sample(rng.random(40_000) * tree.total)
    share = np.array([np.mean(drawn == i) for i in index])
    np.testing.assert_allclose(share, priority / 20, atol=0.01)
    assert set(drawn) == set(index)


@settings(max_examples=100, deadline=None)
@given(
    capacity=st.sampled_from([1, 33, ONE_LEVEL, TWO_LEVELS]),
    priorities=st.lists(st.floats(1e-300, 1e300), min_size=1, max_size=8),
    seed=st.integers(0, 2**32 - 1),
)
def test_zero_priority_is_never_drawn(capacity: int, priorities: list[float], seed: int) -> None:
    rng = np.random.default_rng(seed)
    index = rng.integers(capacity, size=len(priorities))
    tree = SumTree(capacity)
    tree.set(index, np.array(priorities))
    total = tree.total
    mass = np.concatenate([rng.random(50) * total, [0.0, total, np.nextafter(total, 0.0), np.nextafter(total, np.inf)]])
    drawn = tree.sample(mass)
    assert drawn.min() >= 0
    assert drawn.max() < capacity
    assert (tree.leaves[drawn] > 0).all()


@pytest.mark.parametrize("seed", range(5))
def test_rounding_at_the_edges_of_inner_nodes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    priority = rng.random((1000, FANOUT)) * 10 ** rng.uniform(-8, 8, (1000, FANOUT))
    priority[:, [0, 1, -2, -1]] = 0.0  # a step too far in either direction lands on these
    tree = SumTree(priority.size)
    tree.rebuild(priority.reshape(-1))
    edge = priority.sum(axis=1).cumsum()
    drawn = tree.sample(np.concatenate([edge, np.nextafter(edge, 0.0), np.nextafter(edge, np.inf)]))
    assert (tree.leaves[drawn] > 0).all()


def test_zeroed_leaves_leave_nothing_behind() -> None:
    tree = SumTree(THREE_LEVELS)
    rng = np.random.default_rng(3)
    index = rng.permutation(THREE_LEVELS)[:5000]
    tree.set(index, rng.random(5000) * 1e9)
    tree.set(index, np.zeros(5000))
    assert tree.total == 0.0  # an incremental tree would keep rounding errors
    tree.set(np.array([123_456]), np.array([1e-9]))
    assert set(tree.sample(np.linspace(0, tree.total, 10))) == {123_456}


def test_refuses_what_would_poison_it() -> None:
    tree = SumTree(10)
    for bad in (np.nan, -1.0, np.inf):
        with pytest.raises(UsageError, match="finite and at least 0"):
            tree.set(np.array([1, 2]), np.array([1.0, bad]))
    assert tree.total == 0.0
    with pytest.raises(UsageError, match="every priority is zero"):
        tree.sample(np.zeros(1))
