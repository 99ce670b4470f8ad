"""The learner: network, optimiser, normalisers and an algorithm; fragments in, policy versions out."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from raynforce.algos import algorithm_class
from raynforce.algos.base import Loss
from raynforce.config import Config
from raynforce.errors import CheckpointError, RaynforceError, UsageError
from raynforce.experience.fragment import Fragment
from raynforce.experience.gae import discounted
from raynforce.policies.acting import PolicyVersion
from raynforce.policies.normalizer import ObservationNormalizer, RunningStats
from raynforce.policies.torch_net import build, tensor
from raynforce.roles.adam import Adam
from raynforce.roles.learned import Learned
from raynforce.spaces import EnvSpec
from raynforce.trees import Tree, load_rng, rng_state, without


class Learner:
    """Owns everything that training changes, on one device."""

    def __init__(self, config: Config, env: EnvSpec) -> None:
        torch.set_num_threads(config.learner.threads)
        self._config = config
        self._device = _device(config.learner.device)
        self._algo = algorithm_class(config.algo)(config, env)
        spec = self._algo.network()
        heads = self._algo.heads()
        self._net = build(spec, config.network.factory, heads, env.obs, config.seed, self._device)
        self._adam = Adam(self._net.flat, config.algorithm.adam_epsilon)
        self._normalizer = ObservationNormalizer(spec) if spec.normalizes else None
        if self._normalizer is not None:
            self._net.normalize_with(*self._normalizer.affine())
        self._return_stats = RunningStats(1)
        self._sequences: dict[int, int] = {}  # of each sampler's last fragment
        self._running_returns: dict[int, np.ndarray] = {}  # discounted return in flight, per sampler [B]
        self._rng = np.random.default_rng([config.seed, 2])
        self._torch_rng = _TorchStream(config.seed, self._device)
        self._steps = 0
        self._number = 0
        self._algo.begin(self._net)

    def begin_from(self, version: PolicyVersion, seen: int) -> None:
        """Begin with another run's weights, and with its normaliser after `seen` steps; all else stays fresh."""
        params = tensor(version.params, self._device)
        if params.shape != self._net.flat.shape:
            found, expected = len(params), len(self._net.flat)
            raise CheckpointError(f"start_from has {found:,} parameters, and this network has {expected:,}")
        with torch.no_grad():
            self._net.flat.copy_(params)
        if self._normalizer is not None and version.shift is not None and version.scale is not None:
            self._normalizer.begin_from(version.shift, version.scale, seen)
            self._net.normalize_with(*self._normalizer.affine())
        self._algo.begin(self._net)  # target networks start equal

    def learn(self, *received: Fragment) -> Learned:
        """Train on fragments; the next `publish` gives the policy version they led to."""
        began = time.perf_counter()
        algo, net = self._algo, self._net
        fragments = sorted(received, key=lambda f: (f.sampler, f.sequence))  # statistics depend on the order
        lags = [self._number - f.version for f in fragments]
        if algo.max_lag is not None and max(lags) > algo.max_lag:
            raise RaynforceError(
                f"{self._config.algo} learns from fragments at most {algo.max_lag} versions old, not {max(lags)}"
            )
        algo.version = self._number
        algo.scheduled = algo.schedules(self._progress)
        if self._config.learner.scale_rewards:
            algo.reward_scale = self._updated_reward_scale(fragments)
        batch = self._tensors(algo.prepare(net, fragments))
        prepared = time.perf_counter()
        rate = algo.scheduled["learning_rate"]
        losses: list[Loss] = []
        norms: list[Tensor] = []
        with self._torch_rng.in_use():
            for minibatch in algo.minibatches(batch, self._rng):
                tensors = self._tensors(minibatch)
                loss = algo.loss(net, tensors)
                losses.append(loss)
                norms.append(self.apply(self.gradients(loss), rate))
                with torch.no_grad():
                    algo.after_update(net, tensors, loss)
        trained = [(f.sampler, f.sequence, f.steps) for f in fragments]
        steps = sum(count for _, _, count in trained)
        self._steps += steps
        if self._normalizer is not None:
            for fragment in fragments:
                keep = fragment["valid"]
                self._normalizer.update({k: v[:-1][keep] for k, v in fragment.obs().items()})
            net.normalize_with(*self._normalizer.affine())
        self._number += 1
        metrics = _averages(losses, norms) | {"charts/learning_rate": rate} | algo.metrics()
        metrics |= {"lag/mean": sum(lags) / len(lags), "lag/max": float(max(lags))}
        returns, lengths = (np.concatenate([f[f"episode/{k}"] for f in fragments]) for k in ("return", "length"))
        seconds = {"prepare": prepared - began, "learn": time.perf_counter() - prepared}
        schedules, count = self._schedules(), len(losses)
        return Learned(self._number, schedules, metrics, count, steps, returns, lengths, trained, seconds)

    def gradients(self, loss: Loss) -> Tensor:
        """The flat gradient of one minibatch's loss."""
        return self._net.gradient(loss.total) if loss.gradients is None else self._net.backward(loss.gradients)

    def apply(self, gradient: Tensor, learning_rate: float) -> Tensor:
        """Take one optimiser step along a flat gradient; returns the gradient's length."""
        with torch.no_grad():
            return self._adam.step(gradient, learning_rate, self._config.algorithm.max_grad_norm)

    def publish(self) -> PolicyVersion:
        """The current policy version."""
        shift, scale = self._normalizer.affine() if self._normalizer else (None, None)
        params = self._net.flat.detach().cpu().numpy().copy()
        return PolicyVersion(self._number, params, shift, scale, self._schedules())

    def _schedules(self) -> dict[str, float]:
        """What acting needs of the algorithm's schedules."""
        return {k: v for k, v in self._algo.schedules(self._progress).items() if k != "learning_rate"}

    @property
    def _progress(self) -> float:
        return min(1.0, self._steps / self._config.steps)

    def _tensors(self, arrays: Mapping[str, Any]) -> dict[str, Tensor]:
        return {k: v if isinstance(v, Tensor) else tensor(v, self._device) for k, v in arrays.items()}

    def _updated_reward_scale(self, fragments: Sequence[Fragment]) -> float:
        """One over the deviation of running discounted returns, these fragments included."""
        for f in fragments:
            carry = self._running_returns.get(f.sampler, np.zeros(f.lanes))
            if f.sequence != self._sequences.get(f.sampler, f.sequence - 1) + 1:  # a gap: other episodes have begun
                carry = np.zeros(f.lanes)
            self._sequences[f.sampler] = f.sequence
            done = f["terminated"] | f["truncated"]
            returns, self._running_returns[f.sampler] = discounted(
                f["reward"] * f["valid"], done, self._config.algorithm.gamma, carry
            )
            self._return_stats.update(returns[f["valid"]][:, None])
        deviation = float(np.sqrt(self._return_stats.variance[0]))
        return 1.0 / deviation if deviation > 1e-4 else 1.0  # returns that never vary have no scale

    def state(self, known: Sequence[str] = ()) -> Tree:
        """Everything, but the content of segments whose names are known to be saved already."""
        tree: Tree = {
            "params": self._net.flat.detach().cpu().numpy().copy(),
            "adam": self._adam.state(),
            "algo": self._algo.state(),
            "rng": rng_state(self._rng),
            "torch_rng": self._torch_rng.state(),
            "return_stats": self._return_stats.state(),
            "running_returns": {str(k): v for k, v in self._running_returns.items()},
            "sequences": {str(k): v for k, v in self._sequences.items()},
            "steps": self._steps,
            "number": self._number,
        }
        if self._normalizer is not None:
            tree["normalizer"] = self._normalizer.stats.state()
        return without(tree, set(known))

    def load(self, tree: Tree) -> None:
        with torch.no_grad():
            self._net.flat.copy_(torch.tensor(tree["params"]))
            self._adam.load(tree["adam"])
            self._algo.load(tree["algo"])
        load_rng(self._rng, tree["rng"])
        self._torch_rng.load(tree["torch_rng"])
        self._return_stats.load(tree["return_stats"])
        sampling = self._config.sampling
        returns = {int(k): v for k, v in tree["running_returns"].items() if len(v) == sampling.envs}
        self._running_returns = {k: v for k, v in returns.items() if k < sampling.samplers}  # the others begin at zero
        self._sequences = {int(k): v for k, v in tree.get("sequences", {}).items() if int(k) in self._running_returns}
        self._steps, self._number = tree["steps"], tree["number"]
        if self._normalizer is not None:
            self._normalizer.stats.load(tree["normalizer"])
            self._net.normalize_with(*self._normalizer.affine())


class _TorchStream:
    """The random stream of dropout and the like: the learner's own, whoever else draws from torch's global ones."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(self._devices):
            torch.manual_seed(seed)
            self._states = self._read()

    def _read(self) -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in self._devices)]

    @contextmanager
    def in_use(self) -> Iterator[None]:
        with torch.random.fork_rng(self._devices):
            torch.set_rng_state(self._states[0])
            for device, state in zip(self._devices, self._states[1:], strict=True):
                torch.cuda.set_rng_state(state, device)
            yield
            self._states = self._read()

    def state(self) -> Tree:
        return {str(i): s.cpu().numpy().copy() for i, s in enumerate(self._states)}

    def load(self, tree: Tree) -> None:
        self._states = [torch.from_numpy(tree[str(i)].copy()) for i in range(len(self._states))]


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        raise UsageError(f"learner.device = {name!r}, but torch sees {found} CUDA devices here: use auto or cpu")
    return device


def _averages(losses: Sequence[Loss], norms: Sequence[Tensor]) -> dict[str, float]:
    """Means over the round's minibatches, read from the device in one transfer."""
    if not losses:
        return {}
    names = list(losses[0].metrics)
    columns = [torch.stack([x.metrics[name].detach() for x in losses]) for name in names]
    means = torch.stack([*columns, torch.stack(list(norms))]).mean(1).tolist()
    if not np.isfinite(means).all():
        raise RaynforceError(
            f"training diverged: losses are {dict(zip(names, means, strict=False))}; lower algorithm.learning_rate, "
            "or set network.normalize_obs=true if observations are large"
        )
    return {f"losses/{n}": v for n, v in zip([*names, "grad_norm"], means, strict=True)}
