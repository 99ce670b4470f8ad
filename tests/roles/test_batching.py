"""The batch former: who is taken, and when."""

from __future__ import annotations

import math

import numpy as np

from raynforce.roles.batching import BatchFormer


def test_by_hand() -> None:
    former = BatchFormer(lanes=8, least=3, most=4, wait=0.5)
    assert former.due_in(0.0, coming=8) == math.inf
    former.add(np.array([5, 2]), 1.0)
    assert former.due_in(1.25, coming=6) == 0.25
    assert former.due_in(1.25, coming=0) == 0.0  # nobody else will come
    assert former.due_in(1.5, coming=6) == 0.0
    former.add(np.array([7]), 1.3)
    assert former.due_in(1.3, coming=5) == 0.0
    former.add(np.array([0, 1, 3]), 1.4)
    lanes, since = former.next_batch()
    assert lanes.tolist() == [5, 2, 7, 0]
    assert since.tolist() == [1.0, 1.0, 1.3, 1.4]
    assert len(former) == 2
    assert former.due_in(1.4, coming=6) == 0.5
    former.remove(np.array([1, 6]))
    assert former.next_batch()[0].tolist() == [3]
    assert len(former) == 0


def test_those_who_wait_longest_come_first() -> None:
    former = BatchFormer(lanes=4, least=1, most=2, wait=1.0)
    former.add(np.array([3, 1, 0]), 0.0)
    assert former.next_batch()[0].tolist() == [3, 1]
    former.add(np.array([1]), 1.0)
    assert former.next_batch()[0].tolist() == [0, 1]
