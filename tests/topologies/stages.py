"""A stream whose roles are fakes that say what they were given, and what can be seen of it."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from pools import Witness

from raynforce.errors import EnvError
from raynforce.experience.fragment import Fragment
from raynforce.experience.ledger import Ledger
from raynforce.experience.record import Receipt
from raynforce.roles.learned import Learned
from raynforce.runtimes.base import Handle, Pending, Runtime
from raynforce.runtimes.member import Member, Rules
from raynforce.runtimes.pool import Pool
from raynforce.topologies.asynchronous import Async
from raynforce.topologies.loop import LoopRound, Start
from raynforce.topologies.overlap import Overlap
from raynforce.topologies.stream import Stream
from raynforce.topologies.sync import Sync

STEPS = 8  # in each fragment
PRESETS = ["sync", "overlap", "async"]


def blank(version: int, sampler: int, sequence: int) -> Fragment:
    """A fragment in which nothing happened."""
    columns = {"valid": np.ones((STEPS // 2, 2), bool), "reward": np.zeros((STEPS // 2, 2), np.float32)}
    columns |= {"episode/return": np.zeros(0, np.float32), "episode/length": np.zeros(0, np.int64)}
    return Fragment(columns, version, sampler, sequence)


class FakeSampler:
    """Samples in the time it is told to; the sequence number is its state."""

    def __init__(self, index: int, seconds: float = 0.0, fails_at: int = -1) -> None:
        self.index, self.seconds, self.sequence, self.fails_at = index, seconds, 0, fails_at

    def produce(self, version: int) -> tuple[Fragment, Receipt]:
        began = time.monotonic()
        time.sleep(self.seconds)
        if self.sequence == self.fails_at:
            raise EnvError("reward is NaN")
        fragment = blank(version, self.index, self.sequence)
        self.sequence += 1
        return fragment, Receipt(fragment.record, {"env": time.monotonic() - began})

    def state(self) -> int:
        return self.sequence

    def load(self, sequence: int) -> None:
        self.sequence = sequence


class FakeLearner:
    """Remembers what it has learned from: (sampler, sequence, version) of each fragment, batch by batch."""

    def __init__(self, seconds: float = 0.0, number: int = 0) -> None:
        self.number, self.seconds = number, seconds
        self.batches: list[list[tuple[int, int, int]]] = []
        self.lags: list[list[int]] = []

    def learn(self, *fragments: Fragment) -> Learned:
        time.sleep(self.seconds)
        self.batches.append([(f.sampler, f.sequence, f.version) for f in fragments])
        self.lags.append([self.number - f.version for f in fragments])
        self.number += 1
        return Learned(self.number, {}, {}, 1, [f.record for f in fragments])

    def publish(self) -> int:
        return self.number

    def seen(self) -> tuple[list[list[tuple[int, int, int]]], list[list[int]]]:
        return self.batches, self.lags

    def state(self) -> tuple[Any, ...]:
        return self.number, list(self.batches), list(self.lags)

    def load(self, state: tuple[Any, ...]) -> None:
        self.number, self.batches, self.lags = state[0], list(state[1]), list(state[2])


class Watched(Handle):
    """A role whose outstanding calls are counted."""

    def __init__(self, handle: Handle, stage: Stage) -> None:
        self.name, self._handle, self._stage = handle.name, handle, stage
        self.last: Pending | None = None

    def call_parts(self, method: str, args: Sequence[Any], parts: int) -> list[Pending]:
        if method == "produce":
            asked = self.last is not None and self._stage.runtime.wait([self.last], timeout=0)[1]
            assert not asked or self._stage.pool.restarts, "asked twice at once"  # what is redone is asked in a row
        pendings = self._handle.call_parts(method, args, parts)
        if method == "produce":
            self.last = pendings[0]
        return pendings

    def end(self) -> None:
        self._handle.end()


class Stage:
    """A stream with fake roles, and what can be seen of it."""

    def __init__(
        self,
        runtime: Runtime,
        samplers: Sequence[float] = (0.0, 0.0),
        learner: float = 0.0,
        *,
        number: int = 0,
        fails_at: int = -1,
        held: Sequence[Fragment] = (),
        rules: Rules | None = None,
        batch: int | None = None,
        max_lag: int = 0,
    ) -> None:
        self.runtime = runtime
        self.witness = Witness()
        self.pool = Pool(runtime, self.witness)
        self.handles: dict[int, Watched] = {}
        seconds = samplers

        def make_learner(_: int) -> Handle:
            return role(runtime, "stages:FakeLearner", "learner", learner, number)

        def make_sampler(index: int) -> Handle:
            what = (index, seconds[index], fails_at if index == 0 else -1)
            self.handles[index] = Watched(role(runtime, "stages:FakeSampler", f"sampler {index}", *what), self)
            return self.handles[index]

        (self.learner,) = self.pool.add("learner", make_learner, 1, Rules(work="learn"))
        self.shards: list[Member] = []
        self.samplers = self.pool.add("sampler", make_sampler, len(samplers), rules or Rules(work="produce"))
        version = self.pool.submit(self.learner, "publish")
        self.pool.wait([version, *(self.pool.submit(s, "state") for s in self.samplers)])  # everybody has started
        self.said: list[str] = []
        self.ledger = Ledger()
        known = [f.record for f in held]
        books = {"produced": sum(record.steps for record in known), "trained": 0, "dropped": 0, "lost": 0}
        self.ledger.load(books, known)
        start = Start(version, number, self.ledger, held, max_lag, self.said.append)
        self.loops = {"sync": Sync(self, start), "overlap": Overlap(self, start), "async": Async(self, start, batch)}
        self.stream: Stream = self.loops["sync"]  # the one that was turned last
        self.rounds = {name: loop.rounds() for name, loop in self.loops.items()}

    def turn(self, preset: str, count: int) -> list[LoopRound]:
        self.stream = self.loops[preset]
        return list(itertools.islice(self.rounds[preset], count))

    @property
    def dropped(self) -> int:
        """Fragments that were dropped."""
        return self.ledger.dropped // STEPS

    def ask(self, member: Member, method: str) -> Any:
        job = self.pool.submit(member, method)
        self.pool.wait([job])
        return job.result()

    @property
    def batches(self) -> list[list[tuple[int, int, int]]]:
        return self.ask(self.learner, "seen")[0]

    @property
    def lags(self) -> list[list[int]]:
        return self.ask(self.learner, "seen")[1]

    @property
    def borders(self) -> list[int]:
        return [self.ask(sampler, "state") for sampler in self.samplers]

    def check_nothing_lost(self, unlearned: Sequence[Fragment] = ()) -> None:
        """Every fragment that was sampled was learned from once, or is held, or was counted as dropped."""
        learned = [(s, q) for batch in self.batches for s, q, _ in batch]
        kept = learned + [(f.sampler, f.sequence) for f in unlearned]
        assert max(Counter(kept).values(), default=1) == 1, "twice"
        assert sum(self.borders) == len(kept) + self.dropped
        self.ledger.check([(f.sampler, f.sequence) for f in unlearned])
        assert self.ledger.produced == sum(self.borders) * STEPS


_cast: dict[Runtime, dict[str, Handle]] = {}


def role(runtime: Runtime, kind: str, name: str, *args: Any) -> Handle:
    """A role as if it had just been built; its process is kept for the next test, as starting one takes long."""
    cast = _cast.setdefault(runtime, {})
    if name not in cast or not getattr(cast[name], "alive", True):
        cast[name] = runtime.spawn(kind, *args, name=name)
    cast[name].call("__init__", *args)
    return cast[name]
