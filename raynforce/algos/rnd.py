"""Random network distillation (Burda et al. 2018, arXiv 1810.12894): a bonus for observations that are new.

A predictor learns what a fixed random network says of observations; where it errs, they have not been seen often.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from raynforce.config import Config
from raynforce.experience.advantages import running_returns
from raynforce.experience.fragment import Fragment
from raynforce.lazy import LazyModule
from raynforce.policies.images import with_images
from raynforce.policies.normalizer import ObservationNormalizer, RunningStats
from raynforce.policies.spec import Linear, NetworkSpec, Tower, mlp
from raynforce.spaces import ObsLeaf
from raynforce.trees import Tree

if TYPE_CHECKING:
    import torch

    from raynforce.policies import torch_net
else:
    torch, torch_net = LazyModule("torch"), LazyModule("raynforce.policies.torch_net")

FEATURES = 64  # that the fixed network has of an observation
ROWS = 256  # of one step of the predictor
GAMMA = 0.99  # of its discounted sums at most, the paper's: with 1 they, and their deviation, grow with the run
RATE, BETAS, EPSILON = 1e-3, (0.9, 0.999), 1e-8  # Adam's
SEED = 11


class Novelty:
    """Both networks, the predictor's optimiser, and what normalises observations and bonuses."""

    def __init__(self, obs: Sequence[ObsLeaf], config: Config, device: torch.device) -> None:
        tower = Tower("novelty", (*mlp(config.network.hidden, "relu"), Linear(FEATURES)))
        inputs, towers = with_images(obs, (tower,), None)
        spec = NetworkSpec(inputs, towers, normalize=True)
        seeds = np.random.SeedSequence([config.seed, SEED]).generate_state(2)
        self._fixed, self._net = (torch_net.build(spec, None, {}, (), int(s), device) for s in seeds)
        self._normalizer = ObservationNormalizer(spec) if spec.normalizes else None
        self._gamma = min(GAMMA, config.algorithm.gamma)
        self._returns = RunningStats(1)
        self._running: dict[int, np.ndarray] = {}  # discounted bonus in flight, per sampler [B]
        self._moments = [torch.zeros_like(self._net.flat), torch.zeros_like(self._net.flat)]
        self._steps = 0
        self.bonus = 0.0  # the mean of the last round's

    def rewarded(self, fragments: Sequence[Fragment], weight: float) -> list[Fragment]:
        """The fragments with `weight` times the bonus of what each step led to in their rewards; then learn them."""
        if self._normalizer is not None:
            if not self._normalizer.stats.count:  # before anything is judged
                self._take_in(fragments)
            for net in (self._fixed, self._net):
                net.normalize_with(*self._normalizer.affine())
        errors = [self._errors(fragment) for fragment in fragments]  # [T, B] each
        for fragment, error in zip(fragments, errors, strict=True):
            running = self._running.get(fragment.sampler, np.zeros(0))
            never = np.zeros(error.shape, np.bool_)  # as in the paper, these sums go on beyond episodes
            returns, running = running_returns(fragment, error, never, self._gamma, running)
            self._returns.update(returns[fragment["valid"]][:, None])
            self._running[fragment.sampler] = running
        scale = weight / max(1e-8, float(np.sqrt(self._returns.variance[0])))
        self.bonus = float(np.mean([error.mean() for error in errors])) * scale if errors else 0.0
        self._learn(fragments)
        self._take_in(fragments)
        return [_with(f, f["reward"] + np.float32(scale) * e) for f, e in zip(fragments, errors, strict=True)]

    def _take_in(self, fragments: Sequence[Fragment]) -> None:
        if self._normalizer is not None:
            for fragment in fragments:
                self._normalizer.update(fragment.seen(self._normalizer.paths))

    def _errors(self, fragment: Fragment) -> np.ndarray:
        """`[T, B]` of the observation that each step led to, the true last one of an episode included."""
        steps = fragment.length * fragment.lanes
        after = {path: x[1:].reshape(steps, *x.shape[2:]) for path, x in fragment.obs().items()}
        error = self._error(after)
        ends = fragment["final/index"]
        if len(ends):
            error[ends] = self._error(fragment.final_obs())
        shaped: np.ndarray = error.reshape(fragment.length, fragment.lanes) * fragment["valid"]
        return shaped

    def _error(self, obs: dict[str, np.ndarray]) -> np.ndarray:
        apart = self._net.predict(obs)["novelty"] - self._fixed.predict(obs)["novelty"]
        found: np.ndarray = np.square(apart).mean(axis=1)
        return found

    def _learn(self, fragments: Sequence[Fragment]) -> None:
        """One pass over what was seen, in Adam's steps of some rows."""
        for fragment in fragments:
            seen = fragment.seen(list(fragment.obs()))
            rows = len(next(iter(seen.values())))
            for start in range(0, rows, ROWS):
                some = {path: torch_net.tensor(x[start : start + ROWS], self._net.device) for path, x in seen.items()}
                self._step(some)

    def _step(self, obs: dict[str, Any]) -> None:
        with torch.no_grad():
            goal = self._fixed(obs)["novelty"]
        apart = self._net.record(obs)["novelty"] - goal
        gradient = self._net.backward({"novelty": apart * (2 / apart.numel())})
        self._steps += 1
        first, second = self._moments
        first.lerp_(gradient, 1 - BETAS[0])
        second.lerp_(gradient.square(), 1 - BETAS[1])
        rate = RATE * (1 - BETAS[1] ** self._steps) ** 0.5 / (1 - BETAS[0] ** self._steps)
        with torch.no_grad():
            self._net.flat.sub_(rate * first / (second.sqrt() + EPSILON))

    def _vectors(self) -> dict[str, torch.Tensor]:
        first, second = self._moments
        return {"fixed": self._fixed.flat, "params": self._net.flat, "first": first, "second": second}

    def state(self) -> Tree:
        tree: Tree = {name: flat.detach().cpu().numpy().copy() for name, flat in self._vectors().items()}
        tree |= {"steps": self._steps, "returns": self._returns.state()}
        tree["running"] = {str(sampler): running for sampler, running in self._running.items()}
        return tree if self._normalizer is None else tree | {"normalizer": self._normalizer.stats.state()}

    def load(self, tree: Tree) -> None:
        with torch.no_grad():
            for name, flat in self._vectors().items():
                flat.copy_(torch.tensor(tree[name]))
        self._steps = tree["steps"]
        self._returns.load(tree["returns"])
        self._running = {int(sampler): running for sampler, running in tree["running"].items()}
        if self._normalizer is not None:
            self._normalizer.stats.load(tree["normalizer"])


def _with(fragment: Fragment, reward: np.ndarray) -> Fragment:
    return replace(fragment, columns={**fragment.columns, "reward": reward.astype(np.float32)})
