"""The worker of a shared agent: a sampler that computes gradients, with its copy of the network, for the agent."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from raynforce.algos import algorithm_class
from raynforce.algos.base import Batch, LearningRound, Loss
from raynforce.algos.contract import blamed
from raynforce.config import Config
from raynforce.envs.vector import EnvArgs
from raynforce.experience.counts import Receipt
from raynforce.experience.fragment import Fragment
from raynforce.policies.acting import ActingSpec, PolicyVersion
from raynforce.policies.normalizer import ObservationNormalizer
from raynforce.policies.torch_net import build, tensor
from raynforce.roles.gradients import tensors, train
from raynforce.roles.keeper import Keeper, TorchStream
from raynforce.roles.learned import Contribution
from raynforce.roles.learner import flat_gradient
from raynforce.roles.sampler import Sampler
from raynforce.trees import Tree, load_rng, rng_state, without

CPU = torch.device("cpu")
OWN = "worker"  # the part of its state that a sampler does not have


class GradientWorker:
    def __init__(self, config: Config, acting: ActingSpec, envs: EnvArgs, index: int) -> None:
        torch.set_num_threads(config.learner.threads)
        self._sampler = Sampler(acting, envs, config.sampling.fragment, index, config.sampling.samplers)
        own_config = algorithm_class(config.algo).per_worker_config(config)
        self._keeper = Keeper(own_config, acting.env, CPU)
        self._algo = self._keeper.algo
        self._spec, heads, leaves = self._algo.network(), self._algo.heads(), acting.env.obs
        own, threads = config.network, config.learner.threads
        self._net = build(self._spec, own.factory, heads, leaves, config.seed, CPU, own.factory_args, threads)
        self._seed, self._index = config.seed, index
        self._begun = False
        self._draw_from(0)

    def _draw_from(self, attempt: int) -> None:
        self._attempt = attempt
        seeds = np.random.SeedSequence([self._seed, self._index, 2, attempt])
        self._rng = np.random.default_rng(seeds)
        self._torch_rng = TorchStream(int(seeds.generate_state(1)[0]), CPU)

    def note(self) -> str:
        return self._sampler.note()

    def work(self, version: PolicyVersion) -> tuple[Contribution, Receipt]:
        """Sample one fragment with this policy version, and compute gradients at its weights."""
        fragment, receipt = self._sampler.produce(version)
        began = time.perf_counter()
        self._load(version)
        with blamed(self._algo.config.algo, self._algo):
            gradients, losses = self._gradients(replace(fragment, sampler=0))  # of its own buffer, the only one
        own, buffer = self._metrics()
        told = losses | own, buffer, self._moments(fragment), self._keeper.new_notes()
        contribution = Contribution(gradients, version.number, receipt.record, *told)
        seconds = {**receipt.seconds, "gradients": time.perf_counter() - began}
        return contribution, receipt._replace(seconds=seconds, size=gradients.nbytes, kept=self._kept)

    def _load(self, version: PolicyVersion) -> None:
        net = self._net
        with torch.no_grad():
            net.flat.copy_(tensor(version.params, CPU))
        if version.shift is not None and version.scale is not None:
            net.normalize_with(version.shift, version.scale)
        updates = int(version.schedules["updates"])  # of all workers: target networks follow these
        self._algo.round = LearningRound(version.number, updates, version.schedules)
        self._begin()

    def _begin(self) -> None:
        """Make what the algorithm keeps, once there are weights for target networks to begin with."""
        if self._begun:
            return
        self._keeper.begin(self._net)
        self._begun = True
        if self._attempt:
            self._algo.start_fresh(self._attempt)

    def _gradients(self, fragment: Fragment) -> tuple[np.ndarray, dict[str, float]]:
        """The flat gradient of each minibatch, `[K, P]`, and the means of what was measured."""
        algo, net = self._algo, self._net
        found: list[np.ndarray] = []

        def collect(_: Batch, loss: Loss) -> Mapping[str, Tensor]:
            found.append(flat_gradient(net, loss).numpy().copy())
            return {}

        batch = tensors(algo, algo.prepare(net, [fragment]), "prepare", CPU)
        trained = train(self._keeper, net, algo.minibatches(batch, self._rng), self._torch_rng, collect)
        gradients = np.stack(found) if found else np.zeros((0, len(net.flat)), np.float32)
        gradients.flags.writeable = False  # as where it is received from another process
        return gradients, trained.metrics

    def _metrics(self) -> tuple[dict[str, float], dict[str, float]]:
        """What there is to report of the algorithm, and of its replay buffer."""
        told, limiter = self._algo.metrics(), self._algo.limiter
        buffer = {name: value for name, value in told.items() if name.startswith("replay/")}
        own = {name: value for name, value in told.items() if name not in buffer}
        if limiter is not None and limiter.measured is not None:
            own["replay/samples_per_insert"] = limiter.measured
        return own, buffer

    def _moments(self, fragment: Fragment) -> Tree | None:
        if not self._spec.normalizes:
            return None
        seen = ObservationNormalizer(self._spec)
        seen.update(fragment.seen(seen.paths))
        return seen.stats.state()

    @property
    def _kept(self) -> int:
        return self._algo.stored() if self._begun else 0

    def state(self, known: Sequence[str] = ()) -> Tree:
        own: Tree = {"attempt": self._attempt, "kept": self._kept}
        own |= {"rng": rng_state(self._rng), "torch_rng": self._torch_rng.state()}
        if self._begun:
            own |= self._keeper.state(set(known))
        return without({**self._sampler.state(), OWN: own}, set(known))

    def load(self, tree: Tree) -> list[str]:
        own = tree[OWN]
        self._attempt = own["attempt"]
        load_rng(self._rng, own["rng"])
        self._torch_rng.load(own["torch_rng"])
        if "algo" not in own:
            return self._sampler.load(tree)
        self._begin()
        return [*self._keeper.load(own), *self._sampler.load(tree)]

    def start_fresh(self, sequence: int, attempt: int) -> None:
        """Go on at fragment `sequence` without a state: other episodes and random streams, an empty buffer."""
        self._sampler.start_fresh(sequence, attempt)
        self._draw_from(attempt)

    def close(self) -> None:
        self._sampler.close()
