"""Running statistics in float64: what normalises observations and scales rewards, and travels with the policy."""

from __future__ import annotations

import numpy as np

from raynforce.policies.numpy_net import flat_input
from raynforce.policies.spec import NetworkSpec
from raynforce.trees import Tree


class RunningStats:
    """Mean and variance of a stream of vectors, merged batch by batch (Chan et al. 1983)."""

    def __init__(self, size: int) -> None:
        self.count = 0.0
        self.mean = np.zeros(size, np.float64)
        self.m2 = np.zeros(size, np.float64)

    @property
    def variance(self) -> np.ndarray:
        return self.m2 / self.count if self.count else np.ones_like(self.mean)

    def update(self, batch: np.ndarray) -> None:
        n = len(batch)
        if n == 0:
            return
        mean = batch.mean(axis=0, dtype=np.float64)
        self._merge(n, mean, np.square(batch - mean).sum(axis=0))

    def merge(self, tree: Tree) -> None:
        if tree["count"]:
            self._merge(tree["count"], tree["mean"], tree["m2"])

    def _merge(self, n: float, mean: np.ndarray, m2: np.ndarray) -> None:
        delta = mean - self.mean
        total = self.count + n
        self.m2 += m2 + np.square(delta) * (self.count * n / total)
        self.mean += delta * (n / total)
        self.count = total

    def state(self) -> Tree:
        return {"count": self.count, "mean": self.mean.copy(), "m2": self.m2.copy()}

    def load(self, tree: Tree) -> None:
        self.count = float(tree["count"])
        self.mean[...] = tree["mean"]
        self.m2[...] = tree["m2"]


class ObservationNormalizer:
    """Statistics of a network's vector inputs as `(x - shift) * scale`; deviations below 1e-4 count as 1."""

    def __init__(self, spec: NetworkSpec) -> None:
        self._spec = spec
        self.paths = [i.path for i in spec.flat]  # the leaves that it takes in: all but images with convolutions
        self._plain = np.concatenate([np.full(i.width, i.encoding == "vector") for i in spec.flat])
        self.stats = RunningStats(spec.input_width)

    def update(self, obs: dict[str, np.ndarray]) -> None:
        """Take in `[N, ...]` raw observations per leaf; a round that only resets has none."""
        if any(map(len, obs.values())):
            self.stats.update(flat_input(self._spec, obs))

    def begin_from(self, shift: np.ndarray, scale: np.ndarray, seen: int) -> None:
        """Take over what other statistics amounted to after `seen` samples: `affine` gives the same back."""
        count = float(max(seen, 1))
        variance = 1.0 / np.square(scale.astype(np.float64))
        self.stats.load({"count": count, "mean": shift, "m2": count * variance})

    def affine(self) -> tuple[np.ndarray, np.ndarray]:
        """Return float32 `shift` and `scale`, identity before the first update."""
        if not self.stats.count:
            return np.zeros(len(self._plain), np.float32), np.ones(len(self._plain), np.float32)
        deviation = np.sqrt(self.stats.variance)
        deviation[deviation < 1e-4] = 1.0
        shift = np.where(self._plain, self.stats.mean, 0.0)
        scale = np.where(self._plain, 1.0 / deviation, 1.0)
        return shift.astype(np.float32), scale.astype(np.float32)
