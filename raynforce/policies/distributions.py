"""Action distributions for acting: network outputs and noise in, actions and log-probabilities out, in numpy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from raynforce.errors import UsageError
from raynforce.spaces import ActionSpec

Noise = Sequence[Any] | np.ndarray
LOG_2PI = math.log(2 * math.pi)


class Categorical:
    """One choice of n: Gumbel-max sampling of `policy` logits.

    Noise is drawn for a whole fragment, so that a step is only arithmetic and random streams end at fragment borders.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        (self.size,) = sizes
        self.outputs: tuple[str, ...] = ("policy",)  # that it reads; the first, `[B, n]`, is kept to record `logp`

    def noise(self, rng: np.random.Generator, steps: int, lanes: int) -> Noise:
        """Randomness for `steps` calls of `sample` on `lanes` rows."""
        return rng.gumbel(size=(steps, lanes, self.size)).astype(np.float32)

    def sample(self, out: Mapping[str, np.ndarray], noise: Any, schedules: Mapping[str, float]) -> np.ndarray:
        """Actions `[B, ...]` as fragments record them."""
        return (out["policy"] + noise).argmax(axis=1)

    def mode(self, out: Mapping[str, np.ndarray]) -> np.ndarray:
        """The greedy actions `[B, ...]`."""
        return out["policy"].argmax(axis=1)

    def logp(self, out: Mapping[str, np.ndarray], action: np.ndarray) -> np.ndarray:
        """Log-probabilities `[N]` of actions `[N, ...]`."""
        x = out["policy"]
        x = x - x.max(axis=1, keepdims=True)
        logs: np.ndarray = x[np.arange(len(x)), action] - np.log(np.exp(x).sum(axis=1))
        return logs


class MultiCategorical:
    """Several independent choices: `policy` holds their logits side by side."""

    def __init__(self, sizes: Sequence[int], shape: Sequence[int]) -> None:
        self.sizes, self.shape = tuple(sizes), tuple(shape)
        self.cuts = np.cumsum(self.sizes)[:-1]
        self.outputs: tuple[str, ...] = ("policy",)

    def noise(self, rng: np.random.Generator, steps: int, lanes: int) -> Noise:
        return rng.gumbel(size=(steps, lanes, sum(self.sizes))).astype(np.float32)

    def _best(self, scores: np.ndarray) -> np.ndarray:
        parts = [part.argmax(axis=1) for part in np.split(scores, self.cuts, axis=1)]
        return np.stack(parts, axis=1).reshape(-1, *self.shape)

    def sample(self, out: Mapping[str, np.ndarray], noise: Any, schedules: Mapping[str, float]) -> np.ndarray:
        return self._best(out["policy"] + noise)

    def mode(self, out: Mapping[str, np.ndarray]) -> np.ndarray:
        return self._best(out["policy"])

    def logp(self, out: Mapping[str, np.ndarray], action: np.ndarray) -> np.ndarray:
        choices = action.reshape(len(action), -1)
        logits = np.split(out["policy"], self.cuts, axis=1)
        each = [np.take_along_axis(_log_softmax(x), choices[:, i : i + 1], axis=1) for i, x in enumerate(logits)]
        return np.concatenate(each, axis=1).sum(axis=1)


class Gaussian:
    """Independent normals: means from `policy`, log standard deviations from the free vector `log_std`."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)
        self.size = math.prod(self.shape)
        self.outputs: tuple[str, ...] = ("policy", "log_std")

    def noise(self, rng: np.random.Generator, steps: int, lanes: int) -> Noise:
        return rng.standard_normal((steps, lanes, self.size), dtype=np.float32)

    def sample(self, out: Mapping[str, np.ndarray], noise: Any, schedules: Mapping[str, float]) -> np.ndarray:
        action = out["policy"] + np.exp(out["log_std"]) * noise
        return action.reshape(-1, *self.shape)

    def mode(self, out: Mapping[str, np.ndarray]) -> np.ndarray:
        return out["policy"].reshape(-1, *self.shape)

    def logp(self, out: Mapping[str, np.ndarray], action: np.ndarray) -> np.ndarray:
        z = (action.reshape(len(action), -1) - out["policy"]) * np.exp(-out["log_std"])
        total: np.ndarray = -0.5 * np.square(z).sum(axis=1) - out["log_std"].sum() - 0.5 * LOG_2PI * self.size
        return total


class EpsilonGreedy:
    """The best of `n` action values, or with chance `epsilon ** exponent` (a number or `[B]`) a uniform choice."""

    def __init__(self, sizes: Sequence[int], output: str = "q", exponent: float | np.ndarray = 1.0) -> None:
        (self.size,) = sizes
        self.outputs: tuple[str, ...] = (output,)
        self.exponent = exponent

    def noise(self, rng: np.random.Generator, steps: int, lanes: int) -> Noise:
        chance, choice = rng.random((steps, lanes)), rng.integers(self.size, size=(steps, lanes))
        return list(zip(chance, choice, strict=True))

    def sample(self, out: Mapping[str, np.ndarray], noise: Any, schedules: Mapping[str, float]) -> np.ndarray:
        chance, choice = noise
        return np.where(chance < schedules["epsilon"] ** self.exponent, choice, self.mode(out))

    def mode(self, out: Mapping[str, np.ndarray]) -> np.ndarray:
        return out[self.outputs[0]].argmax(axis=1)

    def logp(self, out: Mapping[str, np.ndarray], action: np.ndarray) -> np.ndarray:
        raise UsageError("an epsilon-greedy policy records no log-probabilities")


Distribution = Categorical | MultiCategorical | Gaussian | EpsilonGreedy


def _log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(axis=1, keepdims=True)
    logs: np.ndarray = x - np.log(np.exp(x).sum(axis=1, keepdims=True))
    return logs


def policy_distribution(action: ActionSpec) -> Categorical | MultiCategorical | Gaussian:
    if action.kind == "discrete":
        return Categorical(action.sizes)
    if action.kind == "multidiscrete":
        return MultiCategorical(action.sizes, action.shape)
    return Gaussian(action.shape)


def head_size(action: ActionSpec) -> int:
    """Width of the `policy` output for an action space."""
    return math.prod(action.shape) if action.kind == "box" else sum(action.sizes)
