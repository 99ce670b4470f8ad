"""Loops with a replay buffer whose roles are fakes that say what they were given, and what can be seen of them."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from pools import Witness
from stages import STEPS, FakeSampler, blank, role

from raynforce.experience.counts import Record
from raynforce.experience.fragment import Fragment
from raynforce.experience.ledger import Ledger
from raynforce.experience.limiter import Limiter
from raynforce.roles.learned import Learned
from raynforce.runtimes.base import Handle, Runtime
from raynforce.runtimes.member import Member, Rules
from raynforce.runtimes.pool import Pool
from raynforce.topologies.loop import LoopRound, Start
from raynforce.topologies.replay import Pace, ReplayLoop, Sharded

__all__ = ["FakeSampler"]
BATCH = 4


class FakeReplayLearner:
    """Takes its time for each update, and remembers fragments, updates and draws."""

    def __init__(self, seconds: float = 0.0, number: int = 0, least: int = 0) -> None:
        self.seconds, self.number, self.least = seconds, number, least
        self.seen: list[tuple[int, int]] = []
        self.jobs: list[int] = []  # updates of each
        self.draws: list[dict[int, int]] = []  # transitions by shard

    def learn_some(self, most: int, *fragments: Fragment) -> Learned:
        self.seen += [(f.sampler, f.sequence) for f in fragments]
        updates = most if len(self.seen) * STEPS >= self.least else 0
        return self._learned(updates, [f.record for f in fragments])

    def learn_drawn(
        self, records: Sequence[Record], counts: np.ndarray, which: Sequence[int], *draws: Any
    ) -> tuple[dict[int, int], Learned]:
        self.seen += [record.key for record in records]
        drawn = {index: len(draw) for index, draw in zip(which, draws, strict=True)}
        assert drawn == {index: int(counts[:, index].sum()) for index in which}
        self.draws.append(drawn)
        return drawn, self._learned(len(counts) if which else 0, records)

    def _learned(self, updates: int, records: Sequence[Record]) -> Learned:
        time.sleep(self.seconds * updates)
        self.number += 1
        self.jobs.append(updates)
        return Learned(self.number, {}, {}, updates, records)

    def publish(self) -> int:
        return self.number

    def told(self) -> tuple[Any, ...]:
        return list(self.seen), list(self.jobs), list(self.draws)

    def state(self) -> tuple[Any, ...]:
        return self.number, *self.told()

    def load(self, state: tuple[Any, ...]) -> None:
        self.number, self.seen, self.jobs, self.draws = state[0], *map(list, state[1:])


class FakeShard:
    """Remembers the fragments it was given, and the errors."""

    def __init__(self, index: int, seconds: float = 0.0, least: int = 0) -> None:
        self.index, self.seconds, self.least = index, seconds, least
        self.kept: list[tuple[int, int]] = []
        self.errors: list[dict[int, int]] = []
        self.drawn = 0

    def insert(self, fragment: Fragment) -> tuple[float, dict[str, float]]:
        self.kept.append((fragment.sampler, fragment.sequence))
        return self.told()

    def draw(self, counts: np.ndarray, mass: float) -> tuple[list[int], tuple[float, dict[str, float]]]:
        time.sleep(self.seconds)
        self.drawn += int(counts.sum())
        return [self.index] * int(counts.sum()), self.told()

    def update(self, errors: dict[int, int]) -> tuple[float, dict[str, float]]:
        self.errors.append(errors)
        return self.told()

    def told(self) -> tuple[float, dict[str, float]]:
        size = float(len(self.kept) * STEPS)
        return size * (size >= self.least), {"replay/size": size, "replay/capacity": 1e6}

    def start_fresh(self, attempt: int) -> None: ...

    def state(self) -> tuple[Any, ...]:
        return list(self.kept), list(self.errors), self.drawn

    def load(self, state: tuple[Any, ...]) -> None:
        self.kept, self.errors, self.drawn = list(state[0]), list(state[1]), state[2]


class ReplayStage:
    """A loop with fake roles."""

    def __init__(
        self,
        runtime: Runtime,
        samplers: Sequence[float] = (0.0, 0.0),
        learner: float = 0.0,
        *,
        shards: Sequence[float] = (),
        ratio: float = 2.0,
        starts: int = 0,
        least: int = 0,
        most: int = 4,
        held: Sequence[Fragment] = (),
    ) -> None:
        self.witness = Witness()
        self.pool = Pool(runtime, self.witness)

        def make(kind: str, name: str, *args: Any) -> Handle:
            return role(runtime, f"replay_stages:{kind}", name, *args)

        rules = Rules(work="learn_drawn" if shards else "learn_some")
        (self.learner,) = self.pool.add(
            "learner", lambda _: make("FakeReplayLearner", "learner", learner, 0, least), 1, rules
        )
        self.shards = self.pool.add(
            "shard", lambda i: make("FakeShard", f"shard {i}", i, shards[i], least), len(shards), Rules(work="insert")
        )
        self.samplers = self.pool.add(
            "sampler",
            lambda i: make("FakeSampler", f"sampler {i}", i, samplers[i]),
            len(samplers),
            Rules(work="produce"),
        )
        version = self.pool.submit(self.learner, "publish")
        self.pool.wait([version, *(self.pool.submit(s, "state") for s in self.samplers)])  # everybody has started
        self.limiter = Limiter(ratio, BATCH, starts, slack=2 * len(samplers) * STEPS * ratio)
        self.ledger = Ledger()
        known = [f.record for f in held]
        self.ledger.load({"produced": STEPS * len(held), "trained": 0, "dropped": 0, "lost": 0}, known)
        pace, sizes = Pace(self.limiter, most, STEPS, self.limiter.batch), dict[int, int]()
        start = Start(version, 0, self.ledger, held)
        self.loop: ReplayLoop = ReplayLoop(self, start, pace)
        if shards:
            self.loop = Sharded(self, start, pace, sizes=sizes, seed=0, prioritized=True)
        self._rounds = self.loop.rounds()

    def turn(self, count: int) -> list[LoopRound]:
        return list(itertools.islice(self._rounds, count))

    def ask(self, member: Member, method: str) -> Any:
        job = self.pool.submit(member, method)
        self.pool.wait([job])
        return job.result()

    @property
    def seen(self) -> list[tuple[int, int]]:
        """Sampler and sequence of the fragments that the learner, or the shards, were given."""
        if not self.shards:
            seen: list[tuple[int, int]] = self.ask(self.learner, "told")[0]
            return seen
        return [key for shard in self.shards for key in self.ask(shard, "state")[0]]

    def check_nothing_lost(self, unlearned: Sequence[Fragment] = ()) -> None:
        kept = self.seen + [(f.sampler, f.sequence) for f in unlearned]
        assert max(Counter(kept).values(), default=1) == 1, "twice"
        assert len(kept) == sum(self.ask(sampler, "state") for sampler in self.samplers)
        self.ledger.check([(f.sampler, f.sequence) for f in unlearned])
        assert sorted(self.ask(self.learner, "told")[0]) == sorted(self.seen)


def fragments(count: int) -> list[Fragment]:
    return [blank(0, sampler, -1) for sampler in range(count)]
