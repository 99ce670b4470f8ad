"""A sum tree: draws indices in proportion to their priorities, a whole batch at a time."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from raynforce.errors import UsageError

# Numpy pays per call, hardly per element: a tree of fan-out 8 has four levels where a binary one has twenty, a node's
# children share a cache line or two, and a top of up to 4096 nodes is searched with one cumulative sum.
FANOUT = 8
TOP = 4096


def tree_bytes(capacity: int) -> int:
    return sum(8 * size for size in _level_sizes(capacity))


def _level_sizes(capacity: int) -> list[int]:
    sizes = [capacity]
    while sizes[-1] > TOP:
        parents = -(-sizes[-1] // FANOUT)
        sizes[-1] = parents * FANOUT  # padded, so that a level reshapes to [parents, FANOUT]
        sizes.append(parents)
    return sizes


def importance_weights(priority: np.ndarray, beta: float) -> np.ndarray:
    """`(N * P) ** -beta` over the largest in the minibatch, `[n]` float32: N and the sum of priorities cancel."""
    return ((priority / priority.min(initial=np.inf)) ** -beta).astype(np.float32)


class SumTree:
    """Priorities of `capacity` leaves, zero at first, in float64."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._levels = [np.zeros(size) for size in _level_sizes(capacity)]  # leaves first, the top last
        self.leaves = self._levels[0][:capacity]  # the tree's whole state; change it through `set` or `rebuild`
        self._children = [level.reshape(-1, FANOUT) for level in self._levels[:-1]]  # [parents, FANOUT] views

    @property
    def total(self) -> float:
        return float(self._levels[-1].sum())

    @property
    def nbytes(self) -> int:
        return sum(level.nbytes for level in self._levels)

    def set(self, index: np.ndarray, priority: np.ndarray) -> None:
        """Set the priorities of some leaves; of an index given twice the last one counts."""
        self._check(priority)
        self.leaves[index] = priority
        node = index
        for children, parents in zip(self._children, self._levels[1:], strict=True):
            node = node // FANOUT
            if len(node) > 1:  # of neighbours with the same parent one is enough
                node = node[np.concatenate([[True], node[1:] != node[:-1]])]
            parents[node] = children.take(node, axis=0).sum(
                axis=1
            )  # from scratch, so that rounding errors never add up

    def sample(self, mass: np.ndarray) -> np.ndarray:
        """For each `mass` in `[0, total)` the leaf it falls in; never one of priority zero, whatever the rounding."""
        top = self._levels[-1]
        edge = top.cumsum()  # right edges of the nodes
        if not edge[-1] > 0.0:
            raise UsageError("sum tree: every priority is zero, nothing can be drawn; set a positive priority first")
        # Between zero and just under the last edge, the first edge beyond the mass always belongs to a node above
        # zero. Rounding could carry the mass out of that range, so every level clips it.
        mass = np.asarray(mass, np.float64).clip(0.0, np.nextafter(edge[-1], 0.0))
        node = edge.searchsorted(mass, side="right")
        mass = mass - (edge[node] - top[node])
        each = np.arange(len(mass))
        for level in reversed(self._children):
            child = np.ascontiguousarray(level.take(node, axis=0).T)  # [FANOUT, n]: sums run over whole rows
            edge = child.copy()
            for left, right in pairwise(edge):  # several times as fast as cumsum(axis=0)
                right += left
            mass = np.minimum(np.maximum(mass, 0.0), np.nextafter(edge[-1], 0.0))
            inside = (edge <= mass).sum(axis=0, dtype=np.uint8)  # edges rise: this is the first one beyond the mass
            mass = mass - (edge[inside, each] - child[inside, each])
            node = node * FANOUT + inside
        return node

    def rebuild(self, leaves: np.ndarray) -> None:
        self._check(leaves)
        self.leaves[:] = leaves
        for children, parents in zip(self._children, self._levels[1:], strict=True):
            parents[: len(children)] = children.sum(axis=1)

    @staticmethod
    def _check(priority: np.ndarray) -> None:
        if priority.size and not (priority.min() >= 0.0 and priority.max() < np.inf):  # NaN fails the first test
            bad = priority[~((priority >= 0.0) & (priority < np.inf))][0]
            raise UsageError(f"sum tree: priority {bad} is not allowed; priorities are finite and at least 0")
