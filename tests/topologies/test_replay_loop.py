"""Topology replay: the ratio of samples to inserts, whatever the speeds; fragments arrive once; shards; losses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pools import kill
from replay_stages import BATCH, ReplayStage, fragments
from stages import STEPS

from raynforce.runtimes.base import Runtime
from raynforce.runtimes.inline import InlineRuntime
from raynforce.runtimes.process import ProcessRuntime

SHARDS = [(), (0.0, 0.0)]


@pytest.fixture(scope="module")
def processes() -> Iterator[Runtime]:
    with ProcessRuntime({}, print) as opened:
        yield opened


@pytest.fixture(params=["inline", "process"])
def runtime(request: pytest.FixtureRequest) -> Runtime:
    return InlineRuntime({}) if request.param == "inline" else request.getfixturevalue("processes")


def ratio(stage: ReplayStage) -> float:
    """As the learner saw it."""
    _, jobs, _ = stage.ask(stage.learner, "told")
    return sum(jobs) * BATCH / (stage.ledger.trained - stage.limiter.starts)


@pytest.mark.parametrize("shards", SHARDS)
@pytest.mark.parametrize("speeds", [((0.0, 0.0), 0.0), ((0.004, 0.02), 0.0), ((0.0, 0.0), 0.002)])
@pytest.mark.parametrize("wanted", [0.25, 2.0])
def test_the_ratio_is_held_whoever_is_slow(
    processes: Runtime, speeds: tuple[Any, float], wanted: float, shards: Any
) -> None:
    stage = ReplayStage(processes, *speeds, ratio=wanted, starts=4 * STEPS, shards=shards)
    while stage.ledger.trained < 60 * STEPS:
        stage.turn(1)
    assert 0.75 * wanted < ratio(stage) <= wanted, "a few fragments are ahead of the learner"
    stage.check_nothing_lost(stage.loop.settle())


@pytest.mark.parametrize("shards", SHARDS)
def test_equal_runs_inline(shards: Any) -> None:
    stages = [ReplayStage(InlineRuntime({}), (0.0,) * 3, ratio=1.3, shards=shards) for _ in range(2)]
    for stage in stages:
        stage.turn(30)
    assert stages[0].seen == stages[1].seen
    assert stages[0].ask(stages[0].learner, "told") == stages[1].ask(stages[1].learner, "told")


@pytest.mark.parametrize("shards", SHARDS)
def test_nothing_is_learned_before_it_starts(runtime: Runtime, shards: Any) -> None:
    stage = ReplayStage(runtime, starts=10 * STEPS, shards=shards)
    while stage.ledger.trained <= 10 * STEPS:
        (round_,) = stage.turn(1)
        assert not round_.learned.updates or stage.ledger.trained > 10 * STEPS


@pytest.mark.parametrize("shards", SHARDS)
def test_it_goes_on_sampling_while_there_is_too_little_to_draw_from(runtime: Runtime, shards: Any) -> None:
    stage = ReplayStage(runtime, ratio=1000.0, least=20 * STEPS, shards=shards)
    rounds = stage.turn(60)
    assert any(round_.learned.updates for round_ in rounds)


def test_a_slow_sampler_holds_up_nobody(processes: Runtime) -> None:
    stage = ReplayStage(processes, (0.0, 0.3), ratio=0.5)
    stage.turn(20)
    assert sum(sampler == 0 for sampler, _ in stage.seen) >= 18


@pytest.mark.parametrize("shards", SHARDS)
def test_what_was_held_comes_first(runtime: Runtime, shards: Any) -> None:
    stage = ReplayStage(runtime, held=fragments(2), shards=shards)
    (round_,) = stage.turn(1)
    assert {record.key for record in round_.learned.trained} == {(0, -1), (1, -1)}


def test_fragments_of_a_sampler_stay_together(runtime: Runtime) -> None:
    stage = ReplayStage(runtime, (0.0,) * 3, shards=(0.0, 0.0))
    stage.turn(40)
    for index, shard in enumerate(stage.shards):
        kept = stage.ask(shard, "state")[0]
        assert {sampler % 2 for sampler, _ in kept} == {index}
        assert all(kept.index((s, q)) < kept.index((s, q + 1)) for s, q in kept if (s, q + 1) in kept)


def test_errors_go_back_to_every_shard(runtime: Runtime) -> None:
    stage = ReplayStage(runtime, shards=(0.0, 0.0))
    rounds = stage.turn(12)
    told = [stage.ask(shard, "state") for shard in stage.shards]
    updated = sum(round_.learned.updates > 0 for round_ in rounds)
    assert [len(errors) for _, errors, _ in told] == [updated] * 2
    draws = stage.ask(stage.learner, "told")[2]
    assert draws
    assert all(errors in draws for errors in told[0][1])


def test_what_was_drawn_ahead_is_not_counted_after_a_border(runtime: Runtime) -> None:
    stage = ReplayStage(runtime, shards=(0.0, 0.0))
    stage.turn(10)
    stage.loop.settle()
    _, jobs, _ = stage.ask(stage.learner, "told")
    assert stage.limiter.sampled == sum(jobs) * BATCH
    stage.turn(10)
    assert 1.5 < ratio(stage) <= 2.0


@pytest.mark.parametrize(
    ("who", "shards"),
    [("learner", ()), ("sampler", ()), ("shard", (0.0, 0.0)), ("learner", (0.0, 0.0)), ("sampler", (0.0, 0.0))],
)
def test_killing_somebody_loses_nothing(processes: Runtime, who: str, shards: Any) -> None:
    stage = ReplayStage(processes, (0.002, 0.002), 0.001, shards=shards)
    stage.turn(5)
    kill(next(member for member in stage.pool.members if member.kind == who))
    stage.turn(40)
    assert stage.pool.restarts == 1
    stage.check_nothing_lost(stage.loop.settle())
    assert 1.5 < ratio(stage) <= 2.0
