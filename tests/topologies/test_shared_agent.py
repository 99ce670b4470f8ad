"""Who waits for whom around a shared agent: fakes that count, inline and in processes, some of which are killed."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from pools import Witness, kill
from stages import role

from raynforce.experience.ledger import Ledger
from raynforce.experience.record import Receipt, Record
from raynforce.roles.learned import Contribution, Learned
from raynforce.runtimes.base import Runtime
from raynforce.runtimes.inline import InlineRuntime
from raynforce.runtimes.member import Member, Rules
from raynforce.runtimes.pool import Pool
from raynforce.runtimes.process import ProcessRuntime
from raynforce.topologies.loop import Held, LoopRound, Start
from raynforce.topologies.shared_agent import SharedAgent

STEPS = 8
NONE = (np.zeros(0, np.float32), np.zeros(0, np.int64))


class FakeWorker:
    """Its gradient is its index and sequence number; the sequence number is its state."""

    def __init__(self, index: int, seconds: float) -> None:
        self.index, self.seconds, self.sequence = index, seconds, 0

    def work(self, version: int) -> tuple[Contribution, Receipt]:
        time.sleep(self.seconds)
        gradients = np.array([[self.index, self.sequence]], np.float32)
        record = Record(self.index, self.sequence, STEPS)
        self.sequence += 1
        return Contribution(gradients, version, record, {}, {}), Receipt(record, {}, size=gradients.nbytes)

    def state(self) -> int:
        return self.sequence

    def load(self, sequence: int) -> None:
        self.sequence = sequence


class FakeAgent:
    """Remembers what it has taken, `(worker, sequence, version, lag)`; refuses what is too old."""

    def __init__(self, seconds: float, max_lag: int) -> None:
        self.seconds, self.max_lag, self.number = seconds, max_lag, 0
        self.taken: list[tuple[int, ...]] = []
        self.refused: list[tuple[int, ...]] = []

    def apply_contributions(self, *contributions: Contribution) -> Learned:
        time.sleep(self.seconds)
        trained, dropped = [], []
        for c in contributions:
            lag = self.number - c.version
            what = (*c.gradients[0].astype(int).tolist(), c.version, lag)
            late = lag > self.max_lag
            (self.refused if late else self.taken).append(what)
            (dropped if late else trained).append(c.record)
            self.number += not late
        return Learned(self.number, {}, {}, len(trained), trained, dropped)

    def publish(self) -> int:
        return self.number

    def seen(self) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        return self.taken, self.refused

    def state(self) -> tuple[Any, ...]:
        return self.number, list(self.taken), list(self.refused)

    def load(self, state: tuple[Any, ...]) -> None:
        self.number, self.taken, self.refused = state[0], list(state[1]), list(state[2])


class Stage:
    """A shared agent with fake roles, and what can be seen of it."""

    def __init__(
        self,
        runtime: Runtime,
        workers: Sequence[float],
        agent: float = 0.0,
        *,
        max_lag: int = 100,
        held: Sequence[Held] = (),
        rules: Rules | None = None,
    ) -> None:
        self.witness = Witness()
        self.pool = Pool(runtime, self.witness)
        here = f"{__name__}:"
        (self.agent,) = self.pool.add(
            "learner",
            lambda _: role(runtime, here + "FakeAgent", "learner", agent, max_lag),
            1,
            Rules(work="apply_contributions"),
        )
        self.workers = self.pool.add(
            "sampler",
            lambda i: role(runtime, here + "FakeWorker", f"sampler {i}", i, workers[i]),
            len(workers),
            rules or Rules(work="work"),
        )
        version = self.pool.submit(self.agent, "publish")
        self.pool.wait([version, *(self.pool.submit(w, "state") for w in self.workers)])  # everybody has started
        self.ledger = Ledger()
        known = [f.record for f in held]
        self.ledger.load({"produced": STEPS * len(known), "trained": 0, "dropped": 0, "lost": 0}, known)
        self.samplers, self.learner, self.shards = self.workers, self.agent, ()
        self.loop = SharedAgent(self, Start(version, 0, self.ledger, held))
        self.rounds = self.loop.rounds()

    def turn(self, count: int) -> list[LoopRound]:
        return list(itertools.islice(self.rounds, count))

    def ask(self, member: Member, method: str) -> Any:
        job = self.pool.submit(member, method)
        self.pool.wait([job])
        return job.result()

    @property
    def taken(self) -> list[tuple[int, ...]]:
        return self.ask(self.agent, "seen")[0]

    @property
    def refused(self) -> list[tuple[int, ...]]:
        return self.ask(self.agent, "seen")[1]

    def check_each_once(self, held: Sequence[Held]) -> None:
        """Every contribution was taken once, refused once, or is held; each worker's in their order."""
        seen = [what[:2] for what in (*self.taken, *self.refused)]
        seen += [c.record.key for c in held]
        assert max(Counter(seen).values(), default=1) == 1, "twice"
        made = {worker.index: self.ask(worker, "state") for worker in self.workers if not worker.gone}
        expected = [(index, k) for index, count in made.items() for k in range(count)]
        assert sorted(what for what in seen if what[0] in made) == expected
        for index in made:
            sequence = [what[1] for what in self.taken if what[0] == index]
            assert sequence == sorted(sequence)
        self.ledger.check([c.record.key for c in held])
        assert self.ledger.dropped == STEPS * len(self.refused)
        assert self.ledger.trained == STEPS * len(self.taken)


@pytest.fixture(params=["inline", "process"])
def runtime(request: pytest.FixtureRequest) -> Runtime:
    return InlineRuntime({}) if request.param == "inline" else request.getfixturevalue("processes")


@pytest.fixture(scope="module")
def processes() -> Iterator[Runtime]:
    with ProcessRuntime({}, print) as opened:
        yield opened


def test_one_worker_is_never_late(runtime: Runtime) -> None:
    stage = Stage(runtime, (0.0,))
    rounds = stage.turn(5)
    assert stage.taken == [(0, k, k, 0) for k in range(5)], "with the version its own contribution led to"
    assert [r.learned.number for r in rounds] == [1, 2, 3, 4, 5]
    assert [r.version.result() for r in rounds] == [1, 2, 3, 4, 5]
    held = stage.loop.settle()
    stage.check_each_once(held)


def test_inline_takes_one_of_each_in_turn() -> None:
    with InlineRuntime({}) as inline:
        stage = Stage(inline, (0.0,) * 3)
        stage.turn(4)
        assert stage.taken == [(w, k, 3 * k, w) for k in range(4) for w in range(3)]
        assert stage.loop.settle() == [], "between two rounds nothing is under way"
        stage.check_each_once([])


def test_nobody_waits_for_others(processes: Runtime) -> None:
    """Three fast workers, and one that takes as long as a hundred of their turns."""
    stage = Stage(processes, (0.0, 0.0, 0.0, 0.5), max_lag=10_000)
    deadline = time.monotonic() + 20
    while not any(what[0] == 3 for what in stage.taken) and time.monotonic() < deadline:
        stage.turn(20)
    (slow,) = [what for what in stage.taken if what[0] == 3]
    fast = Counter(what[0] for what in stage.taken)
    assert slow[3] > 30, "many were taken meanwhile, and it was taken all the same"
    assert min(fast[0], fast[1], fast[2]) > 10
    stage.check_each_once(stage.loop.settle())


def test_what_comes_while_the_agent_is_at_work_is_taken_together_in_order(processes: Runtime) -> None:
    stage = Stage(processes, (0.05, 0.1, 0.15, 0.2), agent=0.2)
    rounds = stage.turn(4)
    assert max(r.learned.updates for r in rounds) > 1
    assert [what[0] for what in stage.taken[:4]] == [0, 1, 2, 3], "in the order in which they came"
    stage.check_each_once(stage.loop.settle())


def test_what_is_too_old_is_dropped_in_the_books(processes: Runtime) -> None:
    stage = Stage(processes, (0.0, 0.2), max_lag=5)
    deadline = time.monotonic() + 20
    while not stage.refused and time.monotonic() < deadline:
        stage.turn(20)
    assert all(what[0] == 1 and what[3] > 5 for what in stage.refused)
    assert stage.refused
    stage.check_each_once(stage.loop.settle())


def test_what_is_held_at_a_checkpoint_is_taken_first(runtime: Runtime) -> None:
    before = Stage(runtime, (0.01, 0.01, 0.2))
    before.turn(3)
    held = before.loop.settle()
    assert before.loop.coming == 0
    before.check_each_once(held)
    with InlineRuntime({}) as inline:
        stage = Stage(inline, (0.0,) * 3, held=held)
        for worker in stage.workers:
            sequence = max((c.record.sequence + 1 for c in held if c.record.sampler == worker.index), default=0)
            stage.pool.wait([stage.pool.submit(worker, "load", sequence)])
        stage.turn(1 if held else 0)
        first = stage.taken[: len(held)]
        assert [what[:2] for what in first] == [c.record.key for c in held]
        stage.turn(2)
        assert max(Counter(what[:2] for what in stage.taken).values()) == 1


@pytest.mark.parametrize("who", ["worker", "agent"])
def test_killing_loses_and_doubles_nothing(who: str, processes: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raynforce.runtimes.pool.RECOVERY_SECONDS", 0.02)
    stage = Stage(processes, (0.001, 0.002, 0.003), agent=0.001, max_lag=10_000)
    for count in range(4):
        kill(stage.workers[1] if who == "worker" else stage.agent)
        stage.turn(10)
        while len(stage.witness.seconds) <= count:  # until it is back
            stage.turn(1)
    held = stage.loop.settle()
    assert len(stage.witness.faults) == 4
    assert stage.pool.restarts == 4
    stage.check_each_once(held)
    if who == "agent":
        assert stage.witness.redos
    assert stage.ledger.lost == 0


def test_the_others_go_on_without_one_that_is_gone(processes: Runtime) -> None:
    stage = Stage(processes, (0.0, 0.0), rules=Rules(work="work", restarts=0))
    stage.turn(5)
    kill(stage.workers[1])
    stage.turn(20)
    assert stage.workers[1].gone
    assert {what[0] for what in stage.taken[-5:]} == {0}
    stage.check_each_once(stage.loop.settle())
