"""Who waits for whom: fake roles that say what they were given, in all three presets, inline and in processes."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from pools import kill
from stages import PRESETS, STEPS, Stage, blank

from raynforce.errors import EnvError, RaynforceError
from raynforce.experience.fragment import Fragment
from raynforce.runtimes.base import Pending, RoleDied, Runtime
from raynforce.runtimes.inline import InlineRuntime
from raynforce.runtimes.member import Job, Member, Rules
from raynforce.runtimes.process import ProcessRuntime
from raynforce.topologies import loop as loop_module
from raynforce.topologies.loop import LoopRound


@pytest.fixture(scope="module")
def processes() -> Iterator[Runtime]:
    with ProcessRuntime({}, print) as opened:
        yield opened


@pytest.fixture(params=["inline", "process"])
def runtime(request: pytest.FixtureRequest) -> Runtime:
    return InlineRuntime({}) if request.param == "inline" else request.getfixturevalue("processes")


# -- sync and overlap ---------------------------------------------------------------------------------------


def test_sync_learns_from_the_newest_version_alone(runtime: Runtime) -> None:
    stage = Stage(runtime, (0.02, 0.0, 0.0))
    rounds = stage.turn("sync", 4)
    assert stage.batches == [[(s, k, k) for s in range(3)] for k in range(4)]
    assert stage.lags == [[0, 0, 0]] * 4
    assert [r.learned.number for r in rounds] == [1, 2, 3, 4]
    assert [r.version.result() for r in rounds] == [1, 2, 3, 4]
    assert [r.learned.steps for r in rounds] == [3 * STEPS] * 4
    assert stage.stream.settle() == []
    stage.check_nothing_lost()


def test_overlap_is_one_version_behind(runtime: Runtime) -> None:
    stage = Stage(runtime, (0.02, 0.0, 0.0))
    stage.turn("overlap", 4)
    assert stage.batches == [[(s, k, max(0, k - 1)) for s in range(3)] for k in range(4)], "each once, in order"
    assert stage.lags == [[0] * 3, *[[1] * 3] * 3]
    held = stage.stream.settle()
    assert [(f.sampler, f.sequence, f.version) for f in held] == [(s, 4, 3) for s in range(3)]
    stage.check_nothing_lost(held)


def test_overlap_overlaps(processes: Runtime) -> None:
    stage = Stage(processes, (1.0, 1.0), learner=1.0)
    stage.turn("overlap", 1)
    began = time.monotonic()
    stage.turn("overlap", 4)
    assert time.monotonic() - began < 7.8, "one after the other takes 8 seconds"


def test_sync_times_are_told_apart(runtime: Runtime) -> None:
    (samples,) = Stage(runtime, (0.7,)).turn("sync", 1)
    (learns,) = Stage(runtime, (0.0,), learner=0.7).turn("sync", 1)
    for round_ in (samples, learns):
        assert round_.sample_seconds + round_.learn_seconds > 0.65
    if isinstance(runtime, ProcessRuntime):
        assert samples.sample_seconds > max(0.65, samples.learn_seconds)
        assert learns.learn_seconds > max(0.65, learns.sample_seconds)


# -- async --------------------------------------------------------------------------------------------------


def test_async_inline_is_deterministic_and_loses_nothing(runtime: Runtime) -> None:
    if isinstance(runtime, ProcessRuntime):
        pytest.skip("who comes first is up to the machine")
    found = []
    for _ in range(2):
        stage = Stage(runtime, (0.0,) * 3, max_lag=8)
        stage.turn("async", 6)
        stage.check_nothing_lost(stage.stream.settle())
        assert stage.dropped == 0
        found.append(stage.batches)
    assert found[0] == found[1]


@pytest.mark.parametrize("learner", [0.0, 0.06])
def test_async_learns_each_fragment_once(processes: Runtime, learner: float) -> None:
    stage = Stage(processes, (0.0, 0.01, 0.05), learner=learner, max_lag=100)
    rounds = stage.turn("async", 12)
    assert [r.learned.number for r in rounds] == list(range(1, 13)), "versions in order"
    assert all(len(batch) == 3 for batch in stage.batches)
    held = stage.stream.settle()
    stage.check_nothing_lost(held)
    assert all(f.version <= 12 for f in held)
    for sampler in range(3):
        sequence = [q for batch in stage.batches for s, q, _ in batch if s == sampler]
        assert sequence == sorted(sequence), "the fragments of one sampler in order"


def test_async_keeps_late_fragments(processes: Runtime) -> None:
    stage = Stage(processes, (0.0, 0.0, 0.25), batch=2, max_lag=10_000)
    stage.turn("async", 20)
    until_late(stage)
    late = [(lag, fragment) for lags, batch in zip(stage.lags, stage.batches, strict=True)
            for lag, fragment in zip(lags, batch, strict=True) if fragment[0] == 2]  # fmt: skip
    assert max(lag for lag, _ in late) > 2, "it was learned from with the version it was sampled with"
    stage.check_nothing_lost(stage.stream.settle())


def until_late(stage: Stage, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not any(s == 2 for batch in stage.batches for s, _, _ in batch):
        assert time.monotonic() < deadline
        stage.turn("async", 5)


def test_async_drops_and_counts_what_is_too_old(processes: Runtime) -> None:
    stage = Stage(processes, (0.0, 0.0, 0.2), batch=2, max_lag=3)
    deadline = time.monotonic() + 60
    while stage.dropped < 2:
        assert time.monotonic() < deadline
        stage.turn("async", 5)
    assert max(itertools.chain(*stage.lags)) <= 3
    stage.check_nothing_lost(stage.stream.settle())


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_a_slow_sampler_does_not_hold_the_others(processes: Runtime, batch: int) -> None:
    stage = Stage(processes, (6.0, 0.0, 0.0, 0.0), batch=batch, max_lag=1000)
    began = time.monotonic()
    stage.turn("async", 10)
    assert time.monotonic() - began < 5.9
    assert {s for b in stage.batches for s, _, _ in b} == {1, 2, 3}


@pytest.mark.parametrize("batch", [1, 2])
def test_two_slow_samplers_do_not_hold_the_others(processes: Runtime, batch: int) -> None:
    stage = Stage(processes, (6.0, 6.0, 0.0, 0.0), batch=batch, max_lag=1000)
    began = time.monotonic()
    stage.turn("async", 8)
    assert time.monotonic() - began < 5.9


@pytest.mark.parametrize("batch", [1, 3])
def test_every_sampler_is_kept_busy(processes: Runtime, batch: int) -> None:
    """Three that take the same time, and a quick learner: three times the fragments of one."""
    stage = Stage(processes, (0.3, 0.3, 0.3), batch=batch, max_lag=1000)
    began = time.monotonic()
    stage.turn("async", 15 // batch)
    assert time.monotonic() - began < 4.4  # at best 1.5, and 4.5 one after the other
    shares = Counter(s for b in stage.batches for s, _, _ in b)
    assert min(shares.values()) >= 2


@pytest.mark.parametrize(("samplers", "batch"), [(3, None), (2, 4), (4, 2)])
def test_a_slow_learner_does_not_fill_the_memory(processes: Runtime, samplers: int, batch: int | None) -> None:
    """One batch is being learned from, one waits (or one fragment of each sampler), and no more are sampled."""
    size = batch or samplers
    stage = Stage(processes, (0.0,) * samplers, learner=0.15, batch=batch, max_lag=1000)
    for _ in range(4):
        stage.turn("async", 1)
        # Seen between rounds: a batch has just been learned from, and is not alive any more.
        learned = sum(len(b) for b in stage.batches)
        assert sum(stage.borders) - learned <= max(size, samplers)
    assert max(itertools.chain(*stage.lags)) <= 1 + max(size, samplers) // size


def test_a_slow_learner_gets_recent_fragments_inline() -> None:
    with InlineRuntime({}) as runtime:
        stage = Stage(runtime, (0.0,) * 3, max_lag=1000)
        stage.turn("async", 5)
        assert max(itertools.chain(*stage.lags)) <= 1


# -- borders ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_settle_brings_everyone_to_a_border_and_nothing_is_lost(runtime: Runtime, preset: str) -> None:
    stage = Stage(runtime, (0.0, 0.03), learner=0.01, max_lag=1000)
    for _ in range(3):
        stage.turn(preset, 3)
        held = stage.stream.settle()
        for handle in stage.handles.values():
            assert handle.last is None or runtime.wait([handle.last], timeout=0)[1] == []
        borders = stage.borders
        stage.check_nothing_lost(held)
        again = stage.stream.settle()
        assert [(f.sampler, f.sequence) for f in again] == [(f.sampler, f.sequence) for f in held]
        assert stage.borders == borders


@pytest.mark.parametrize("preset", PRESETS)
def test_held_fragments_that_are_too_old_are_dropped_and_counted(runtime: Runtime, preset: str) -> None:
    """As after an async run with a very slow sampler, resumed with whatever topology."""
    held = [blank(1, 0, 40), blank(6, 1, 41)]
    stage = Stage(runtime, (0.0, 0.0), number=7, held=held, max_lag=3)
    stage.turn(preset, 2)
    assert stage.ledger.dropped == 8
    assert (1, 41, 6) in stage.batches[0]
    assert all(fragment[:2] != (0, 40) for batch in stage.batches for fragment in batch)


@pytest.mark.parametrize("preset", PRESETS)
def test_held_fragments_that_are_all_too_old_leave_no_empty_batch(runtime: Runtime, preset: str) -> None:
    stage = Stage(runtime, (0.0, 0.0), number=7, held=[blank(1, 0, 40)], max_lag=3)
    stage.turn(preset, 2)
    assert stage.ledger.dropped == 8
    assert [len(batch) for batch in stage.batches] == [2, 2]


@pytest.mark.parametrize("preset", PRESETS)
def test_held_fragments_are_learned_first(runtime: Runtime, preset: str) -> None:
    """As after a resume: two of sampler 1, made with version 6, when the learner stands at 7."""
    held = [blank(6, 1, 40), blank(6, 1, 41)]
    stage = Stage(runtime, (0.0, 0.0), number=7, held=held, max_lag=1000)
    assert [(f.sampler, f.sequence) for f in stage.stream.settle()] == [(1, 40), (1, 41)]
    stage.turn(preset, 2)
    assert stage.batches[0] == [(1, 40, 6), (1, 41, 6)]
    assert stage.lags[0] == [1, 1]
    # One of two in processes may be so quick that its second fragment, of version 8, comes before the other's first.
    assert min(version for _, _, version in stage.batches[1]) == (8 if preset == "sync" else 7)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_stop_after_any_round_can_be_resumed(runtime: Runtime, preset: str) -> None:
    """The rest of the run begins with exactly what was held, a batch at a time."""
    stage = Stage(runtime, (0.0, 0.0), max_lag=1000)
    stage.turn(preset, 3)
    held = stage.stream.settle()
    assert (preset == "sync") == (held == [])
    second = Stage(runtime, (0.0, 0.0), number=3, held=held, max_lag=1000)
    second.turn(preset, 2)
    learned = [(s, q) for batch in second.batches for s, q, _ in batch]
    assert learned[: len(held)] == [(f.sampler, f.sequence) for f in held]


@pytest.mark.parametrize("preset", PRESETS)
def test_what_is_abandoned_after_a_failure_is_counted_once(runtime: Runtime, preset: str) -> None:
    """An update that was under way when the last sampler failed is part of the learner, so of the books too."""
    rules = Rules(work="produce", restarts=0, quorum=2, restartable=(EnvError,))
    stage = Stage(runtime, (0.0, 0.0), learner=0.05, fails_at=2, rules=rules, max_lag=1000)
    rounds: list[LoopRound] = []
    with pytest.raises(RaynforceError, match="reward is NaN"):
        rounds.extend(stage.rounds[preset])
    stage.stream = stage.loops[preset]
    unfinished = stage.stream.abandon()
    if preset != "async":
        assert (unfinished is None) == (preset == "sync")
    rounds += [] if unfinished is None else [unfinished]
    assert [round_.learned.number for round_ in rounds] == list(range(1, len(stage.batches) + 1))
    learned = [(s, q) for batch in stage.batches for s, q, _ in batch]
    assert stage.ledger.trained == len(learned) * STEPS == sum(round_.learned.steps for round_ in rounds)
    assert stage.stream.abandon() is None
    stage.ledger.check(stage.stream.held)


# -- waiting and failing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_a_failing_sampler_ends_the_round_with_its_error(runtime: Runtime, preset: str) -> None:
    stage = Stage(runtime, (0.0, 0.0), fails_at=2, max_lag=1000)
    with pytest.raises(EnvError, match="reward is NaN"):
        stage.turn(preset, 30)
    assert [fault.action for fault in stage.witness.faults] == ["stopped"]
    assert stage.learner.handle is not None
    batches = stage.learner.handle.call("seen").result()[0]  # not through the pool, which has nothing more to say
    learned = [(s, q) for batch in batches for s, q, _ in batch]
    assert (0, 2) not in learned
    assert len(set(learned)) == len(learned)


@pytest.mark.parametrize("preset", PRESETS)
def test_who_is_waited_for_is_said(processes: Runtime, preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "TELL_AFTER", 0.1)
    stage = Stage(processes, (0.35,))
    stage.turn(preset, 1)
    assert stage.said[0] == "sampler 0"


def test_fragments_do_not_pass_through_the_driver(processes: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    from raynforce.runtimes.messages import Packed

    stage = Stage(processes, max_lag=1000)
    opened: list[object] = []
    value = Packed.value

    def see(packed: Packed) -> Any:
        opened.append(found := value(packed))
        return found

    monkeypatch.setattr(Packed, "value", see)
    for preset in PRESETS:
        stage.turn(preset, 2)
    assert opened
    assert not [one for one in opened if isinstance(one, Fragment)]


# -- roles that fail ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_killed_roles_change_nothing(processes: Runtime, preset: str) -> None:
    """The learner and a sampler, a few rounds apart."""
    stage = Stage(processes, (0.01, 0.01), learner=0.01, max_lag=1000)
    rounds = stage.turn(preset, 2)
    for victim in (stage.samplers[0], stage.learner, stage.samplers[1]):
        kill(victim)
        rounds += stage.turn(preset, 2)
    assert [fault.kind for fault in stage.witness.faults] == ["died"] * 3
    assert [r.learned.number for r in rounds] == list(range(1, 9)), "versions never go back"
    if preset != "async":
        lag = int(preset == "overlap")
        assert stage.batches == [[(s, k, max(0, k - lag)) for s in range(2)] for k in range(8)]
    stage.check_nothing_lost(stage.stream.settle())


@pytest.mark.parametrize("preset", PRESETS)
def test_a_sampler_that_is_given_up_is_left_out(processes: Runtime, preset: str) -> None:
    rules = Rules(work="produce", restarts=0, restartable=(EnvError,))
    stage = Stage(processes, (0.01, 0.01), fails_at=2, rules=rules, max_lag=1000)
    stage.turn(preset, 8)
    assert [fault.action for fault in stage.witness.faults] == ["given up"]
    learned = [(s, q) for batch in stage.batches for s, q, _ in batch]
    assert [q for s, q in learned if s == 0] == [0, 1]
    assert [q for s, q in learned if s == 1] == list(range(len(learned) - 2))
    stage.ledger.check([(f.sampler, f.sequence) for f in stage.stream.settle()])


@pytest.mark.parametrize("preset", PRESETS)
def test_if_all_that_are_left_are_away_they_are_waited_for(runtime: Runtime, preset: str) -> None:
    """Without turning in a circle."""
    stage = Stage(runtime, (0.0, 0.0), max_lag=1000)
    stage.turn(preset, 2)
    stage.stream.settle()
    first, second = stage.samplers
    stage.pool.remove(first)
    second.absent = True  # its process is there again
    stage.turn(preset, 3)
    assert not second.absent


@pytest.mark.parametrize("preset", PRESETS)
def test_lost_fragments_are_counted_and_replaced(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the node that held the only copy of them were gone."""
    with InlineRuntime({}) as runtime:
        stage = Stage(runtime, (0.0, 0.0), max_lag=1000)
        stage.turn(preset, 2)
        first = list(stage.batches)
        lost: list[Pending] = []
        submit = stage.pool.submit

        def losing(member: Member, method: str, *args: Any, **how: Any) -> Job:
            if method == "learn" and not lost:
                for arg in args:
                    lost.append(arg.value)
                    arg.value._error = RoleDied("an answer was lost with the node that held it")
            return submit(member, method, *args, **how)

        monkeypatch.setattr(stage.pool, "submit", losing)
        stage.turn(preset, 2)
        assert len(lost) == 2
        assert stage.ledger.lost == 2 * STEPS
        held = [(f.sampler, f.sequence) for f in stage.stream.settle()]
        stage.ledger.check(held)
        assert [len(batch) for batch in stage.batches] == [2] * 4
        assert stage.batches[:2] == first
