"""An engine in one file: random search over the weights of a linear policy. It has no roles, and keeps one vector."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np

from raynforce.algos import algorithm_class
from raynforce.algos.contract import declared
from raynforce.config import Config
from raynforce.engines.base import Engine, Round, Supervisor
from raynforce.envs.make import make
from raynforce.experience.counts import Record
from raynforce.policies.acting import PolicyVersion
from raynforce.roles.learned import Learned
from raynforce.runtimes.base import Pending
from raynforce.runtimes.inline import InlineRuntime
from raynforce.runtimes.pool import Pool
from raynforce.spaces import EnvSpec
from raynforce.trees import Tree, load_rng, rng_state


class RandomSearch(Engine):
    """Plays an episode with changed weights, and keeps the change if the return is no worse."""

    def __init__(self, config: Config, env: EnvSpec) -> None:
        super().__init__(config, env)
        self.acting = declared(config, env, algorithm_class(config.algo))
        self._rng = np.random.default_rng(config.seed)
        self._weights = np.zeros(sum(p.size for p in self.acting.network.params()), np.float32)
        self._best, self._number, self._steps = -np.inf, 0, 0
        self.closed = False

    def open(self, supervisor: Supervisor, say: Callable[[str], None]) -> None:
        self._runtime = InlineRuntime({}, say)
        self.pool = Pool(self._runtime, supervisor)

    def load(self, saved: Mapping[str, Tree]) -> list[str]:
        own = saved["search"]
        self._weights, self._best, self._number = own["weights"].copy(), own["best"], own["number"]
        load_rng(self._rng, own["rng"])
        return []

    def newest(self) -> tuple[Pending, int]:
        return self._runtime.share(self._version(self._weights)), self._number

    def _version(self, weights: np.ndarray) -> PolicyVersion:
        return PolicyVersion(self._number, weights, None, None, {})

    def rounds(self, waiting: Callable[[str], None]) -> Iterator[Round]:
        from raynforce.policy import Policy

        env: Any = make(self.config.env, self.config.env_args)
        while True:
            tried = self._weights + self._rng.normal(0, 0.5, len(self._weights)).astype(np.float32)
            policy = Policy(self.acting, self._version(tried))
            obs, _ = env.reset(seed=int(self._rng.integers(2**31)))
            total, length, over = 0.0, 0, False
            while not over:
                obs, reward, terminated, truncated, _ = env.step(policy.act(obs))
                total, length, over = total + float(reward), length + 1, terminated or truncated
            if total >= self._best:
                self._weights, self._best = tried, total
            record = Record(0, self._number, length, np.array([total], np.float32), np.array([length]))
            self._number += 1
            learned = Learned(self._number, {}, {"losses/best": self._best}, 1, [record])
            yield Round(learned, self.newest()[0], {"time/search": 0.0})

    def state(self, known: Callable[[str], Collection[str]]) -> dict[str, Tree]:
        own = {"weights": self._weights.copy(), "best": self._best, "number": self._number, "rng": rng_state(self._rng)}
        return {"search": own}

    def close(self, *, now: bool = False) -> None:
        self._runtime.close(now=now)
