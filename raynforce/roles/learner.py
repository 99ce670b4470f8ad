"""The learner: network, optimiser, normalisers and an algorithm; fragments in, policy versions out."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from raynforce.algos.base import Arrays, Batch, LearningRound, Loss
from raynforce.algos.contract import blamed
from raynforce.config import Config
from raynforce.errors import CheckpointError, RaynforceError, UsageError
from raynforce.experience.advantages import running_returns
from raynforce.experience.counts import Counts, Record
from raynforce.experience.fragment import Fragment, lag_metrics
from raynforce.experience.sharding import joint_metrics, minibatches, split_errors
from raynforce.policies.acting import PolicyVersion
from raynforce.policies.groups import REST, is_rate, rate_of, stretches
from raynforce.policies.normalizer import ObservationNormalizer, RunningStats
from raynforce.policies.torch_net import Network, build, tensor
from raynforce.roles.adam import Adam
from raynforce.roles.gradients import Trained, averages, tensors, train
from raynforce.roles.keeper import Keeper, TorchStream
from raynforce.roles.learned import Contribution, Learned
from raynforce.spaces import EnvSpec
from raynforce.trees import Tree, load_rng, rng_state, without


class Learner:
    """Owns everything that training changes, on one device."""

    def __init__(self, config: Config, env: EnvSpec, gathers_gradients: bool = False) -> None:
        """`gathers_gradients` if samplers compute them, and have what the algorithm keeps."""
        threads = config.learner.threads
        torch.set_num_threads(threads)
        self._config = config
        self._device = _device(config.learner.device)
        self._keeper = Keeper(config, env, self._device, buffers=not (gathers_gradients or config.replay.shards))
        algo = self._algo = self._keeper.algo
        spec, own, device = algo.network(), config.network, self._device
        self._net = build(spec, own.factory, algo.heads(), env.obs, config.seed, device, own.factory_args, threads)
        self._groups = self._algo.groups()
        self._places = stretches(self._groups, self._net.parts)
        self._adam = Adam(self._net.flat, config.algorithm.adam_epsilon)
        self._normalizer = ObservationNormalizer(spec) if spec.normalizes else None
        if self._normalizer is not None:
            self._net.normalize_with(*self._normalizer.affine())
        self._return_stats = RunningStats(1)
        self._sequences: dict[int, int] = {}  # of each sampler's last fragment
        self._running_returns: dict[int, np.ndarray] = {}  # discounted return in flight, per sampler [B]
        self._rng = np.random.default_rng([config.seed, 2])
        self._torch_rng = TorchStream(config.seed, self._device)
        self._steps = self._number = 0
        self._is_agent = gathers_gradients
        self._counts = Counts()  # of all workers, if it is their agent
        self._refused = 0  # contributions whose gradients were too old to be applied
        self._buffers: dict[int, Mapping[str, float]] = {}  # what workers tell of theirs
        self._keeper.begin(self._net)

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
        self._keeper.begin(self._net)  # target networks start equal

    def learn(self, *received: Fragment) -> Learned:
        """Train on fragments; the next `publish` gives the policy version they led to."""
        return self.learn_some(None, *received)

    def learn_some(self, due: int | None, *received: Fragment) -> Learned:
        """Put fragments into replay, then make the updates that are due; None leaves their number to the algorithm."""
        began = time.perf_counter()
        algo, net, name = self._algo, self._net, self._config.algo
        fragments = sorted(received, key=lambda f: (f.sampler, f.sequence))  # statistics depend on the order
        lag = max((self._number - f.version for f in fragments), default=0)
        if algo.max_lag is not None and lag > algo.max_lag:
            raise RaynforceError(f"{name} learns from fragments at most {algo.max_lag} versions old, not {lag}")
        if algo.consumes == "data":  # nobody has acted with the statistics from before
            self._observe(fragments)
        with blamed(name, algo):
            scale = self._updated_reward_scale(fragments) if self._config.learner.scale_rewards else 1.0
            self._begin_round(reward_scale=scale, due=due)
            batch = tensors(algo, algo.prepare(net, fragments), "prepare", self._device)
            prepared = time.perf_counter()
            trained = train(self._keeper, net, algo.minibatches(batch, self._rng), self._torch_rng, self._step)
        if algo.consumes != "data":
            self._observe(fragments)
        if fragments:
            trained.metrics.update(lag_metrics(self._number, fragments))
        return self._end_round(trained, [f.record for f in fragments], began, prepared)

    def _observe(self, fragments: Sequence[Fragment]) -> None:
        """Take what was seen into the statistics that observations are normalised by."""
        if self._normalizer is not None and fragments:
            for fragment in fragments:
                self._normalizer.update(fragment.seen(self._normalizer.paths))
            self._net.normalize_with(*self._normalizer.affine())

    def learn_drawn(
        self, records: Sequence[Record], counts: np.ndarray, which: Sequence[int], *draws: Arrays | None
    ) -> tuple[list[tuple[np.ndarray, np.ndarray]], Learned]:
        """Make the updates that shards (`which`) have drawn transitions for, `counts[k, s]` of minibatch k from shard
        s; returns their errors, to be sent back. `records` are of fragments inserted meanwhile."""
        began = time.perf_counter()
        algo, spec = self._algo, self._algo.replay_spec(self._config)
        prioritized = spec is not None and spec.prioritized
        errors: list[tuple[np.ndarray, ...]] = []

        def step(batch: Batch, loss: Loss) -> Mapping[str, Tensor]:
            if prioritized and loss.per_sample is not None:
                errors.append(tuple(x.cpu().numpy() for x in (batch["shard"], batch["index"], loss.per_sample)))
            return self._step(batch, loss)

        given = dict(zip(which, draws, strict=True))
        by_shard = [given.get(shard) for shard in range(counts.shape[1])]
        with blamed(self._config.algo, algo):
            self._begin_round()
            drawn = minibatches(by_shard, counts, algo.scheduled.get("priority_beta", 1.0))
            trained = train(self._keeper, self._net, drawn, self._torch_rng, step)
        told = []
        if errors:
            shard, index, error = (np.concatenate(parts) for parts in zip(*errors, strict=True))
            told = split_errors(shard, index, error, self._config.replay.shards)
        return told, self._end_round(trained, records, began, began)

    def _begin_round(self, *, reward_scale: float = 1.0, due: int | None = None) -> None:
        algo = self._algo
        algo.round = LearningRound(self._number, algo.updates, algo.schedules(self._progress), reward_scale, due)

    def _step(self, _: Batch, loss: Loss) -> Mapping[str, Tensor]:
        norm = self.apply(self.gradients(loss), self._algo.scheduled["learning_rate"], loss.frozen)
        self._algo.round.updates += 1
        return {"grad_norm": norm}

    def _end_round(self, trained: Trained, records: Sequence[Record], began: float, prepared: float) -> Learned:
        self._steps += sum(record.steps for record in records)
        self._number += 1
        return self._told(trained, records, began, prepared)

    def _told(self, trained: Trained, records: Sequence[Record], began: float, prepared: float) -> Learned:
        metrics = trained.metrics | {f"charts/{k}": v for k, v in self._algo.scheduled.items() if is_rate(k)}
        seconds = {"prepare": prepared - began, "learn": time.perf_counter() - prepared}
        metrics |= self._algo.metrics()
        notes = self._keeper.new_notes()
        return Learned(self._number, self._schedules(), metrics, trained.updates, records, (), seconds, notes)

    def gradients(self, loss: Loss) -> Tensor:
        return flat_gradient(self._net, loss)

    def apply(self, gradient: Tensor, learning_rate: float, frozen: Collection[str] = ()) -> Tensor:
        """Take one optimiser step along a flat gradient, but for frozen groups; returns the gradient's length."""
        max_norm = self._config.algorithm.max_grad_norm
        with torch.no_grad():
            if not self._groups:
                return self._adam.step(gradient, learning_rate, max_norm)
            rates = self._algo.scheduled
            how = {n: (rates.get(rate_of(n), g.learning_rate), g.max_grad_norm) for n, g in self._groups.items()}
            how[REST] = learning_rate, max_norm
            groups = {n: (places, *how[n]) for n, places in self._places.items()}
            return self._adam.step_groups(gradient, groups, frozen)

    def publish(self) -> PolicyVersion:
        shift, scale = self._normalizer.affine() if self._normalizer else (None, None)
        params = self._net.flat.detach().cpu().numpy().copy()
        schedules = self._schedules()
        if self._is_agent:  # workers learn too
            schedules = self._algo.schedules(self._progress) | {"updates": float(self._algo.updates)}
        return PolicyVersion(self._number, params, shift, scale, schedules)

    def _schedules(self) -> dict[str, float]:
        """What acting needs of the algorithm's schedules."""
        return {k: v for k, v in self._algo.schedules(self._progress).items() if not is_rate(k)}

    @property
    def _progress(self) -> float:
        return min(1.0, self._steps / self._config.steps)

    def count_all(self, steps: int) -> None:
        """Environment steps of all policies, if it is the learner of one of several: progress goes by these."""
        self._steps = steps

    def _updated_reward_scale(self, fragments: Sequence[Fragment]) -> float:
        """One over the deviation of running discounted returns, these fragments included."""
        for f in fragments:
            running = self._running_returns.get(f.sampler, np.zeros(0))
            if f.sequence != self._sequences.get(f.sampler, f.sequence - 1) + 1:  # a gap: other episodes have begun
                running = np.zeros(0)
            self._sequences[f.sampler] = f.sequence
            returns, running = running_returns(f, f["reward"], f["first"], self._config.algorithm.gamma, running)
            self._return_stats.update(returns[f["valid"]][:, None])
            self._running_returns[f.sampler] = running
        deviation = float(np.sqrt(self._return_stats.variance[0]))
        return 1.0 / deviation if deviation > 1e-4 else 1.0  # returns that never vary have no scale

    def state(self, known: Sequence[str] = ()) -> Tree:
        """Everything, but the content of segments whose names are known to be saved already."""
        tree: Tree = {
            "params": self._net.flat.detach().cpu().numpy().copy(),
            "adam": self._adam.state(),
            **self._keeper.state(set(known)),
            "rng": rng_state(self._rng),
            "torch_rng": self._torch_rng.state(),
            "return_stats": self._return_stats.state(),
            "running_returns": {str(k): v for k, v in self._running_returns.items()},
            "sequences": {str(k): v for k, v in self._sequences.items()},
            "steps": self._steps,
            "number": self._number,
            "updates": self._algo.updates,
        }
        if self._normalizer is not None:
            tree["normalizer"] = self._normalizer.stats.state()
        if self._is_agent:
            tree["counters"] = self._counts.state() | {"refused": self._refused}
        return without(tree, set(known))

    def load(self, tree: Tree) -> list[str]:
        """Undo `state`; returns a sentence on what the algorithm has of its own and is not in it."""
        with torch.no_grad():
            self._net.flat.copy_(torch.tensor(tree["params"]))
            self._adam.load(tree["adam"])
        notes = self._keeper.load(tree)
        load_rng(self._rng, tree["rng"])
        self._torch_rng.load(tree["torch_rng"])
        self._return_stats.load(tree["return_stats"])
        returns = {int(k): np.array(v) for k, v in tree["running_returns"].items()}
        samplers = self._config.sampling.samplers
        self._running_returns = {k: v for k, v in returns.items() if k < samplers}  # the others begin at zero
        self._sequences = {int(k): v for k, v in tree.get("sequences", {}).items() if int(k) in self._running_returns}
        self._steps, self._number = tree["steps"], tree["number"]
        self._algo.round = LearningRound(self._number, tree.get("updates", tree["algo"].get("updates", 0)))
        if self._normalizer is not None:
            self._normalizer.stats.load(tree["normalizer"])
            self._net.normalize_with(*self._normalizer.affine())
        if self._is_agent:
            self._counts.load(tree["counters"])
            self._refused = tree["counters"]["refused"]
        return notes

    # -- as the agent that workers share ------------------------------------------------------------------

    def apply_contributions(self, *contributions: Contribution) -> Learned:
        """Apply gradients in this order, and count them; those older than the bound are refused, and their fragments
        dropped unless they are in a worker's replay buffer."""
        began = time.perf_counter()
        self._begin_round()
        norms: list[Mapping[str, Tensor]] = []
        records, dropped, lags = [], [], []
        for each in contributions:
            lags.append(self._number - each.version)
            self._buffers[each.record.sampler] = each.buffer
            if len(each.gradients) and lags[-1] > self._config.stream.max_lag:
                self._refused += 1
                if self._algo.consumes == "stream":
                    dropped.append(each.record)
                    continue
            else:
                norms += self._apply_all(each)
            self._counts.add(each.record)
            self._steps += each.record.steps
            records.append(each.record)
        buffers = joint_metrics([told for told in self._buffers.values() if told])
        metrics = means([each.metrics for each in contributions]) | buffers | averages(norms) | self._agent_metrics()
        if lags:
            metrics |= {"lag/mean": sum(lags) / len(lags), "lag/max": float(max(lags))}
        told = self._told(Trained(len(norms), metrics), records, began, began)
        return told._replace(dropped=dropped, notes=[note for each in contributions for note in each.notes])

    def _agent_metrics(self) -> dict[str, float]:
        counts = self._counts
        found = {"episodes": float(counts.episodes), "steps": float(counts.steps), "refused": float(self._refused)}
        if counts.best_return is not None and counts.return_mean is not None:
            found |= {"best_return": counts.best_return, "recent_return": counts.return_mean}
        return {f"agent/{name}": value for name, value in found.items()}

    def _apply_all(self, contribution: Contribution) -> list[dict[str, Tensor]]:
        """Take an optimiser step along each gradient of a contribution; returns their lengths."""
        self._begin_round()
        rate = self._algo.scheduled["learning_rate"]
        # The optimiser clips in place, and what was received is read-only: one copy of all.
        gradients = tensor(contribution.gradients, self._device)
        norms = [{"grad_norm": self.apply(gradient, rate)} for gradient in gradients]
        self._algo.round.updates += len(norms)
        self._number += 1
        if self._normalizer is not None and contribution.moments is not None:
            self._normalizer.stats.merge(contribution.moments)
            self._net.normalize_with(*self._normalizer.affine())
        return norms


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        found = torch.cuda.device_count()
        raise UsageError(f"learner.device = {name!r}, but torch sees {found} CUDA devices here: use auto or cpu")
    return device


def flat_gradient(net: Network, loss: Loss) -> Tensor:
    """The gradient `[P]` of a loss; the vector may be reused by the next call."""
    return net.gradient(loss.total) if loss.gradients is None else net.backward(loss.gradients)


def means(several: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric over those who report it."""
    names = dict.fromkeys(name for metrics in several for name in metrics)
    found = {name: [metrics[name] for metrics in several if name in metrics] for name in names}
    return {name: sum(values) / len(values) for name, values in found.items()}
