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
LOG_2 = math.log(2)
SDE_EPSILON = 1e-6  # in a variance that depends on features, which may all be 0
FORBIDDEN = -1e30  # as a logit its probability is exactly 0, as their product is: that of infinity would be NaN
INSIDE = 1 - 1e-6  # how far squashed actions go: what rounding has put on the bounds has no logarithm


class Categorical:
    """One choice of n: Gumbel-max sampling of `policy` logits.

    Noise is drawn for a whole fragment, so that a step is only arithmetic and random streams end at fragment borders.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.size = sum(sizes)
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


class MultiCategorical(Categorical):
    """Several independent choices: `policy` holds their logits side by side."""

    def __init__(self, sizes: Sequence[int], shape: Sequence[int]) -> None:
        super().__init__(sizes)
        self.cuts, self.shape = np.cumsum(sizes)[:-1], tuple(shape)

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
        return (out["policy"] + np.exp(out["log_std"]) * noise).reshape(-1, *self.shape)

    def mode(self, out: Mapping[str, np.ndarray]) -> np.ndarray:
        return out["policy"].reshape(-1, *self.shape)

    def logp(self, out: Mapping[str, np.ndarray], action: np.ndarray) -> np.ndarray:
        z = (action.reshape(len(action), -1) - out["policy"]) * np.exp(-out["log_std"])
        total: np.ndarray = -0.5 * np.square(z).sum(axis=1) - out["log_std"].sum() - 0.5 * LOG_2PI * self.size
        return total


class WideGaussian(Gaussian):
    """Independent normals of which `policy` holds all: means, then log standard deviations, clipped to a range."""

    def __init__(self, shape: Sequence[int], log_std_range: tuple[float, float]) -> None:
        super().__init__(shape)
        self.outputs = ("policy",)
        self.range = log_std_range

    def _halves(self, out: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Means and log standard deviations, `[N, n]` each."""
        return out["policy"][:, : self.size], np.clip(out["policy"][:, self.size :], *self.range)

    def sample(self, out: Mapping[str, np.ndarray], noise: Any, schedules: Mapping[str, float]) -> np.ndarray:
        mean, log_std = self._halves(out)
        return (mean + np.exp(log_std) * noise).reshape(-1, *self.shape)

    def mode(self, out: Mapping[str, np.ndarray]) -> np.ndarray:
        return out["policy"][:, : self.size].reshape(-1, *self.shape)

    def logp(self, out: Mapping[str, np.ndarray], action: np.ndarray) -> np.ndarray:
        mean, log_std = self._halves(out)
        z = (action.reshape(len(action), -1) - mean) * np.exp(-log_std)
        total: np.ndarray = -(0.5 * np.square(z) + log_std).sum(axis=1) - 0.5 * LOG_2PI * self.size
        return total


class SquashedGaussian(WideGaussian):
    """Tanh of such normals, between -1 and 1, which are the bounds of a bounded box (Haarnoja et al. 2018)."""

    def sample(self, out: Mapping[str, np.ndarray], noise: Any, schedules: Mapping[str, float]) -> np.ndarray:
        return np.tanh(super().sample(out, noise, schedules))

    def mode(self, out: Mapping[str, np.ndarray]) -> np.ndarray:
        return np.tanh(super().mode(out))

    def logp(self, out: Mapping[str, np.ndarray], action: np.ndarray) -> np.ndarray:
        raw = np.arctanh(np.clip(action, -INSIDE, INSIDE).reshape(len(action), -1))
        total: np.ndarray = super().logp(out, raw) - _log_slope(raw).sum(axis=1)
        return total


class StateDependent(Gaussian):
    """Normals whose noise is a linear function of the features `latent` (gSDE, Raffin et al. 2020, arXiv 2005.05719).

    A matrix of noise is drawn for each lane and kept for `every` steps, so that what is tried is smooth: while it is
    kept, equal features give equal noise. `log_std` `[features * n]` are the log deviations of its elements. What is
    drawn is standard normal; newer deviations count as soon as they are there.
    """

    def __init__(self, shape: Sequence[int], features: int, every: int, *, squashed: bool) -> None:
        super().__init__(shape)
        self.outputs = ("policy", "latent", "log_std")
        self.features, self.every, self.squashed = features, every, squashed
        self.forget()

    def forget(self) -> None:
        self._matrices, self._left = np.zeros((0, self.features, self.size), np.float32), 0  # [B, features, n]

    def noise(self, rng: np.random.Generator, steps: int, lanes: int) -> Noise:
        found = []
        for _ in range(steps):
            if not self._left or len(self._matrices) != lanes:
                self._matrices = rng.standard_normal((lanes, self.features, self.size), dtype=np.float32)
                self._left = self.every
            self._left -= 1
            found.append(self._matrices)
        return found

    def sample(self, out: Mapping[str, np.ndarray], noise: Any, schedules: Mapping[str, float]) -> np.ndarray:
        matrices = np.exp(out["log_std"]).reshape(self.features, self.size) * noise
        raw = out["policy"] + np.matmul(out["latent"][:, None], matrices)[:, 0]
        return (np.tanh(raw) if self.squashed else raw).reshape(-1, *self.shape)

    def mode(self, out: Mapping[str, np.ndarray]) -> np.ndarray:
        mean = super().mode(out)
        return np.tanh(mean) if self.squashed else mean

    def logp(self, out: Mapping[str, np.ndarray], action: np.ndarray) -> np.ndarray:
        raw = action.reshape(len(action), -1)
        if self.squashed:
            raw = np.arctanh(np.clip(raw, -INSIDE, INSIDE))
        deviations = np.exp(2 * out["log_std"]).reshape(self.features, self.size)
        variance = np.square(out["latent"]) @ deviations + SDE_EPSILON  # [N, n]
        total: np.ndarray = -0.5 * (np.square(raw - out["policy"]) / variance + np.log(variance) + LOG_2PI).sum(axis=1)
        return total - _log_slope(raw).sum(axis=1) if self.squashed else total

    def state(self) -> dict[str, Any]:
        """What the next step depends on beside the random stream."""
        return {"matrices": self._matrices.copy(), "left": self._left}

    def load(self, tree: Mapping[str, Any]) -> None:
        self._matrices, self._left = tree["matrices"].copy(), int(tree["left"])


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


class MaskedEpsilonGreedy(EpsilonGreedy):
    """The same among allowed actions: those whose values are not minus infinity."""

    def noise(self, rng: np.random.Generator, steps: int, lanes: int) -> Noise:
        return rng.random((steps, 2, lanes))

    def sample(self, out: Mapping[str, np.ndarray], noise: Any, schedules: Mapping[str, float]) -> np.ndarray:
        chance, share = noise
        allowed = out[self.outputs[0]] != -np.inf
        number = (share * allowed.sum(axis=1)).astype(np.int64)  # which of the allowed ones, from 0 on
        choice = (allowed.cumsum(axis=1) > number[:, None]).argmax(axis=1)
        return np.where(chance < schedules["epsilon"] ** self.exponent, choice, self.mode(out))


Distribution = (
    Categorical | MultiCategorical | Gaussian | WideGaussian | SquashedGaussian | StateDependent | EpsilonGreedy
)


def _log_slope(raw: np.ndarray) -> np.ndarray:
    """The log of tanh's derivative, without its rounding to 0."""
    slope: np.ndarray = 2 * (LOG_2 - raw - np.logaddexp(0, -2 * raw))
    return slope


def masked(logits: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Logits or action values `[N, n]`, minus infinity where `mask` `[N, n]` is 0: never sampled, and no best."""
    return np.where(mask, logits, np.float32(-np.inf))


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
