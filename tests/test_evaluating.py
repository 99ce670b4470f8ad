"""Evaluations: pinned versions, played beside training where roles have processes of their own, else in between."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from marks import slow, slowly
from pools import Witness, kill
from running import metrics

import raynforce
from raynforce.config import EvalConfig
from raynforce.driver.evaluating import FINAL, Evaluations, Pinned, Schedule
from raynforce.errors import EnvError
from raynforce.roles.evaluator import Evaluation
from raynforce.runs.checkpoint import load as load_checkpoint
from raynforce.runs.faults import each_event, summarise
from raynforce.runtimes.base import Handle, RoleDied, Runtime
from raynforce.runtimes.inline import InlineRuntime
from raynforce.runtimes.member import Rules
from raynforce.runtimes.pool import Pool
from raynforce.runtimes.process import ProcessRuntime

DEADLINE = 20.0


class FakeLearner:
    """Its policy versions are numbers."""

    def __init__(self) -> None:
        self.number = 0

    def learn(self) -> int:
        self.number += 1
        return self.number

    def publish(self) -> int:
        return self.number

    def state(self) -> int:
        return self.number

    def load(self, number: int) -> None:
        self.number = number


class FakeEvaluator:
    """Plays one episode a call, whose return is the version; as slowly as it is told. It may die on the way."""

    def __init__(self, seconds: float = 0.0, dies_after: int | None = None) -> None:
        self.seconds = seconds
        self.dies_after = dies_after
        self.playing: tuple[int, int] | None = None
        self.returns: list[float] = []

    def play(self, version: int, episodes: int, max_length: int, purpose: int, seconds: float) -> Evaluation:
        if self.playing != (version, purpose):
            self.playing, self.returns = (version, purpose), []
        time.sleep(self.seconds)
        if len(self.returns) == self.dies_after:
            os.kill(os.getpid(), signal.SIGKILL)
        self.returns.append(version + 100.0 * purpose)
        over = len(self.returns) == episodes
        self.playing = None if over else self.playing
        return Evaluation(over, np.array(self.returns), [{"cause": "broke"}] if over else [], steps=10)


class Scene:
    """A learner, and evaluations of its versions."""

    def __init__(
        self,
        runtime: Runtime,
        seconds: float = 0.0,
        episodes: int = 2,
        dies_after: int | None = None,
    ) -> None:
        self.witness = Witness()
        self.pool = Pool(runtime, self.witness)
        self.shown: list[str] = []
        self.broken: list[Mapping[str, Any]] = []
        self.stopped = False
        self.spawned = 0

        def evaluator(_: int) -> Handle:
            self.spawned += 1
            return runtime.spawn("test_evaluating:FakeEvaluator", seconds, dies_after, name="evaluator")

        def learner(_: int) -> Handle:
            return runtime.spawn("test_evaluating:FakeLearner", name="learner")

        ours: dict[str, Any] = {"quorum": 0, "shows_progress": lambda played: played.over}
        rules = Rules(work="play", has_state=False, restartable=(RoleDied, EnvError), backoff=0.0, **ours)
        self.given_up: list[tuple[int, EnvError]] = []
        self.evaluations = Evaluations(
            self.pool,
            evaluator,
            rules,
            EvalConfig(episodes=episodes),
            Schedule(EvalConfig(episodes=episodes), 1000),
            longest=30.0,
            show=lambda note, left: self.shown.append(note),
            stopped=lambda: self.stopped,
            broken=self.broken.append,
            gave_up=lambda steps, failure: self.given_up.append((steps, failure)),
        )
        (self.learner,) = self.pool.add("learner", learner, 1, Rules(work="learn"))

    def learn(self) -> Pinned:
        """One more round; the version it led to."""
        learned, version = self.pool.submit(self.learner, "learn"), self.pool.submit(self.learner, "publish")
        assert self.pool.wait([learned], DEADLINE)
        return Pinned(version, learned.result(), 10 * learned.result())

    def until(self, done: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + DEADLINE
        while not (found := done()):
            assert time.monotonic() < deadline
            self.pool.next([], 0.02)
        return found


@pytest.fixture
def process() -> Iterator[Runtime]:
    with ProcessRuntime({}, lambda text: None) as runtime:
        yield runtime


@pytest.fixture
def inline() -> Iterator[Runtime]:
    with InlineRuntime({}) as runtime:
        yield runtime


# -- beside training ----------------------------------------------------------------------------------------


def test_the_version_is_pinned_and_training_goes_on(process: Runtime) -> None:
    scene = Scene(process, seconds=0.8, episodes=3)
    pinned = scene.learn()
    assert scene.evaluations.begin(pinned) is None
    began, rounds, found = time.monotonic(), 0, None
    while found is None:
        assert time.monotonic() < began + DEADLINE
        scene.learn()
        found = scene.evaluations.finished()
        rounds += 1
    assert time.monotonic() - began > 2.4
    assert rounds > 20, "no round waits for it: three would have"
    assert found[0] == pinned
    assert found[1].tolist() == [1.0] * 3, "of the version as it was"
    assert scene.evaluations.waited == 0
    assert scene.broken == [{"cause": "broke"}]
    assert scene.evaluations.unfinished == []


def test_the_newest_that_is_due_is_next(process: Runtime) -> None:
    scene = Scene(process, seconds=0.3, episodes=1)
    versions = [scene.learn() for _ in range(4)]
    for pinned in versions:
        assert scene.evaluations.begin(pinned) is None
    assert scene.evaluations.unfinished == [versions[0], versions[3]]
    found = [scene.until(scene.evaluations.finished) for _ in range(2)]
    assert [(pinned.number, returns.tolist()) for pinned, returns in found] == [(1, [1.0]), (4, [4.0])]
    assert scene.evaluations.skipped == 2
    assert scene.evaluations.finished() is None


def test_at_the_end_what_is_being_played_is_waited_for(process: Runtime) -> None:
    scene = Scene(process, seconds=0.1, episodes=3)
    first, second = scene.learn(), scene.learn()
    scene.evaluations.begin(first)
    scene.evaluations.begin(second)
    scene.evaluations.drop_due()
    found = scene.evaluations.wait()
    assert found is not None
    assert (found[0], found[1].tolist()) == (first, [1.0] * 3)
    assert scene.shown
    assert scene.evaluations.wait() is None


def test_stopping_gives_up_what_is_being_played_at_once(process: Runtime) -> None:
    scene = Scene(process, seconds=100)
    scene.evaluations.begin(scene.learn())
    scene.pool.next([], 0.5)
    scene.stopped = True
    began = time.monotonic()
    assert scene.evaluations.wait() is None
    assert time.monotonic() - began < 10
    scene.pool.states([scene.learner])
    scene.pool.next([], 0.3)
    assert (scene.witness.faults, scene.pool.restarts, scene.spawned) == ([], 0, 1), "which is no fault"
    assert scene.evaluations.unfinished == []


def test_after_a_stop_another_can_be_played(process: Runtime) -> None:
    scene = Scene(process, seconds=0.2, episodes=1)
    scene.evaluations.begin(scene.learn())
    scene.evaluations.stop()
    found = scene.evaluations.play(scene.learn(), 2, "evaluating", FINAL)
    assert found is not None
    assert found.returns.tolist() == [102.0] * 2
    assert scene.witness.faults == []


def test_a_killed_evaluator_plays_again(process: Runtime) -> None:
    scene = Scene(process, seconds=0.2, episodes=3)
    pinned = scene.learn()
    scene.evaluations.begin(pinned)
    scene.pool.next([], 0.3)
    (evaluator,) = [member for member in scene.pool.members if member.kind == "evaluator"]
    kill(evaluator)
    found = scene.until(scene.evaluations.finished)
    assert (found[0], found[1].tolist()) == (pinned, [1.0] * 3)
    assert [(fault.role, fault.kind, fault.action) for fault in scene.witness.faults] == [
        ("evaluator", "died", "restarted")
    ]
    assert scene.spawned == 2


def test_a_killed_learner_does_not_take_a_pinned_version_along(process: Runtime) -> None:
    scene = Scene(process, seconds=0.2, episodes=2)
    pinned = scene.learn()
    kill(scene.learner)
    scene.evaluations.begin(pinned)
    found = scene.until(scene.evaluations.finished)
    assert found[1].tolist() == [1.0] * 2
    assert scene.learn().number == 2


def test_training_can_wait_before_another_is_due(process: Runtime) -> None:
    scene = Scene(process, seconds=0.2, episodes=3)
    first, second = scene.learn(), scene.learn()
    assert scene.evaluations.wait() is None, "nothing is played yet"
    scene.evaluations.begin(first)
    found = scene.evaluations.wait()
    assert found is not None
    assert (found.pinned, found.returns.tolist()) == (first, [1.0] * 3)
    assert scene.evaluations.waited > 0.3
    scene.evaluations.begin(second)
    assert scene.evaluations.unfinished == [second]
    assert scene.evaluations.skipped == 0


def test_one_that_always_dies_at_the_same_place_is_given_up(process: Runtime) -> None:
    """Though it answers in between: a restart begins the evaluation again."""
    scene = Scene(process, episodes=3, dies_after=2)
    assert scene.evaluations.play(scene.learn(), 3, "evaluating") is None
    assert [fault.action for fault in scene.witness.faults] == ["restarted"] * 5 + ["given up"]
    assert scene.evaluations.skipped == 1
    assert scene.learn().number == 2, "training goes on"


# -- when they are due --------------------------------------------------------------------------------------


def due(schedule: Schedule, steps: int, round_: int, length: float, played: Evaluation) -> list[int]:
    found = []
    for after in range(round_, steps + 1, round_):
        if schedule.is_due(after - round_, after, length):
            found.append(after)
            schedule.add(played)
    return found


def test_by_default_there_are_twenty_in_a_run() -> None:
    cheap = Evaluation(True, np.zeros(20), steps=20)
    assert due(Schedule(EvalConfig(), 10_000), 10_000, 10, 1.0, cheap) == list(range(500, 10_001, 500))
    assert due(Schedule(EvalConfig(), 10_000, True), 10_000, 10, 1.0, cheap) == list(range(250, 10_001, 250))


@pytest.mark.parametrize("to_target", [False, True])
@pytest.mark.parametrize(("steps", "length"), [(1_000_000, 500), (1_000_000, 40), (200_000, 250), (150_000, 100)])
def test_by_default_they_take_a_tenth_of_the_steps(steps: int, length: int, to_target: bool) -> None:
    schedule = Schedule(EvalConfig(), steps, to_target)
    dear = Evaluation(True, np.zeros(20), steps=20 * length)
    found = due(schedule, steps, 1000, length, dear)
    assert schedule.spent == 20 * length * (len(found) - to_target), "the first one to a target is free"
    assert schedule.spent + length * schedule.final_episodes(steps) <= steps / 10
    assert schedule.spent > steps / 20 or len(found) >= 20, "no fewer than that needs"


def test_a_target_is_tested_at_once_and_once_more() -> None:
    """An evaluation of 10,000 steps is a tenth of the run: there is room for the last one alone."""
    dear = Evaluation(True, np.zeros(20), steps=10_000)
    assert due(Schedule(EvalConfig(), 100_000), 100_000, 1000, 500.0, dear) == []
    assert due(Schedule(EvalConfig(), 100_000, True), 100_000, 1000, 500.0, dear) == [3_000, 95_000]


def test_of_a_run_that_is_to_meet_a_target_early_ones_are_played() -> None:
    """20 episodes of 500 steps each: 10,000 for each of the 20 evaluations would be a fifth of a million."""
    schedule, dear = Schedule(EvalConfig(), 1_000_000), Evaluation(True, np.zeros(20), steps=10_000)
    assert due(schedule, 200_000, 1000, 500.0, dear)[:2] == [50_000, 100_000]
    assert schedule.final_episodes(200_000) == 20


def test_once_episodes_are_shorter_evaluations_cost_less() -> None:
    """A lander that hovers needs 1,000 steps for an episode, one that lands 300."""
    schedule = Schedule(EvalConfig(), 200_000)
    hovering = Evaluation(True, np.zeros(20), steps=8_000)
    assert due(schedule, 100_000, 1000, 400.0, hovering) == [50_000]
    assert not schedule.is_due(109_000, 110_000, 400.0)
    assert schedule.is_due(109_000, 110_000, 100.0)


def test_steps_of_an_own_vector_implementation_cost_less() -> None:
    schedule = Schedule(EvalConfig(), 1_000_000)
    assert len(due(schedule, 1_000_000, 1000, 500.0, Evaluation(True, np.zeros(20), steps=10_000, lockstep=True))) == 20
    assert schedule.final_episodes(1_000_000) == 100


def test_what_is_set_is_kept() -> None:
    schedule = Schedule(EvalConfig(every=100, final_episodes=7), 1000)
    dear = Evaluation(True, np.zeros(20), steps=10_000)
    assert due(schedule, 1000, 10, 500.0, dear) == list(range(100, 1001, 100))
    assert schedule.final_episodes(1000) == 7
    never = Schedule(EvalConfig(every=0), 1000)
    assert due(never, 1000, 10, 5.0, dear) == []


def test_a_schedule_goes_on_where_it_was() -> None:
    one, dear = Schedule(EvalConfig(), 1_000_000), Evaluation(True, np.zeros(20), steps=9_000)
    due(one, 500_000, 1000, 450.0, dear)
    other = Schedule(EvalConfig(), 1_000_000)
    other.load(one.state())
    rest = [[s for s in range(501_000, 1_000_001, 1000) if x.is_due(s - 1000, s, 450.0)] for x in (one, other)]
    assert rest[0] == rest[1]


# -- between two rounds -------------------------------------------------------------------------------------


def test_inline_it_is_played_at_once(inline: Runtime) -> None:
    scene = Scene(inline, seconds=0.01, episodes=3)
    pinned = scene.learn()
    found = scene.evaluations.begin(pinned)
    assert found is not None
    assert (found[0], found[1].tolist()) == (pinned, [1.0] * 3)
    assert scene.evaluations.waited > 0.03
    assert scene.shown == ["evaluating: 1 of 3 episodes", "evaluating: 2 of 3 episodes"]
    assert (scene.evaluations.unfinished, scene.evaluations.finished(), scene.evaluations.wait()) == ([], None, None)


def test_inline_it_can_be_stopped(inline: Runtime) -> None:
    scene = Scene(inline, episodes=1000)
    scene.stopped = True
    assert scene.evaluations.begin(scene.learn()) is None
    assert scene.evaluations.unfinished == []


# -- whole runs ---------------------------------------------------------------------------------------------


class Slow(gymnasium.Env[np.ndarray, Any]):
    """Ten steps, each of them slow in the evaluator alone."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    last = 10

    def __init__(self, seconds: float = 0.05) -> None:
        import sys

        frames, frame = [], sys._getframe()
        while frame is not None:
            frames.append(frame.f_globals.get("__name__"))
            frame = frame.f_back  # type: ignore[assignment]
        self.seconds = seconds if "raynforce.roles.evaluator" in frames else 0.0

    def reset(self, **_: Any) -> tuple[np.ndarray, dict[str, Any]]:
        self.count = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        time.sleep(self.seconds)
        self.count += 1
        return np.zeros(2, np.float32), 1.0, self.count == self.last, False, {}


class Elsewhere(Slow):
    """Rewards are 2 in another thread than the main one."""

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        obs, reward, *rest = super().step(action)
        return obs, reward + (threading.current_thread() is not threading.main_thread()), *rest


def settings(**more: Any) -> dict[str, Any]:
    small = {"sampling.samplers": 1, "sampling.envs": 2, "sampling.fragment": 16, "algorithm.minibatch_size": 32}
    small |= {"algorithm.epochs": 1, "log_every": 32, "eval.every": 64, "eval.episodes": 2, "eval.envs": 1}
    return small | {"eval.final_episodes": 0, "checkpoint.every": 0} | more


def start(run: Path, runtime: str, steps: int, env: str = "Slow", **more: Any) -> raynforce.Run:
    changes = settings(**more)
    where = {"runtime": runtime, "topology": "sync", "progress": "quiet", "out": run}
    return raynforce.train(f"test_evaluating:{env}", "ppo", steps=steps, settings=changes, **where)


def evaluated(run: Path) -> list[tuple[int, float]]:
    lines = metrics(run)
    return [(line["step"], line["eval/return"]) for line in lines if "eval/return" in line]


def test_training_is_not_held_up(tmp_path: Path) -> None:
    """An evaluation takes a second, and twenty rounds much less: versions are skipped, the last one is not."""
    start(tmp_path / "run", "process", 640)
    found = evaluated(tmp_path / "run")
    assert found[0] == (64, 10.0)
    assert found[-1] == (640, 10.0)
    assert len(found) < 8


def test_evaluation_steps_as_sampling_does(tmp_path: Path) -> None:
    own = {"sampling.parallel": "threads", "env_args": {"seconds": 0.0}}
    run = start(tmp_path / "run", "inline", 64, env="Elsewhere", **own)
    assert run.result.return_mean == 20.0
    assert evaluated(tmp_path / "run") == [(64, 20.0)]


def test_inline_every_version_that_is_due_is_evaluated(tmp_path: Path) -> None:
    first = start(tmp_path / "one", "inline", 256, env_args={"seconds": 0.0})
    second = start(tmp_path / "two", "inline", 256, env_args={"seconds": 0.01})
    assert evaluated(tmp_path / "one") == [(steps, 10.0) for steps in (64, 128, 192, 256)]
    assert evaluated(tmp_path / "two") == evaluated(tmp_path / "one"), "whatever time it takes"
    assert first.result.weights_sha256 == second.result.weights_sha256


@slow
def test_a_stopped_evaluation_is_played_after_a_resume(tmp_path: Path) -> None:
    """The version that was being played is in the checkpoint, and is evaluated for the step it belongs to."""

    def fail(status: raynforce.Status) -> None:
        if status.steps >= 96:
            raise RuntimeError("a callback of the user's")

    run = tmp_path / "run"
    how = {"runtime": "process", "topology": "sync", "progress": "quiet"}
    with pytest.raises(RuntimeError, match="of the user's"):
        raynforce.train("test_evaluating:Slow", settings=settings(), steps=640, out=run, callbacks=[fail], **how)
    assert evaluated(run) == []
    saved = load_checkpoint(run / "last")
    assert saved["evaluating_0"]["steps"] == 64
    assert saved["evaluating_0"]["version"]["number"] == 2
    raynforce.resume(run, steps=128, progress="quiet")
    assert evaluated(run)[0] == (64, 10.0)
    assert evaluated(run)[-1][0] == 128


def test_an_evaluation_that_a_signal_has_cut_short_is_played_after_a_resume(tmp_path: Path) -> None:
    def press(status: raynforce.Status) -> None:
        if status.steps == 96:
            signal.raise_signal(signal.SIGINT)

    run = tmp_path / "run"
    how = {"runtime": "process", "topology": "sync", "progress": "quiet"}
    with pytest.raises(raynforce.Interrupted):
        raynforce.train("test_evaluating:Slow", settings=settings(), steps=640, out=run, callbacks=[press], **how)
    assert evaluated(run) == []
    assert load_checkpoint(run / "last")["evaluating_0"]["steps"] == 64
    raynforce.resume(run, steps=128, progress="quiet")
    assert evaluated(run)[0] == (64, 10.0)


class RaisesAtTheEnd(Slow):
    """Thirty steps; the last one raises, in training and in evaluation."""

    last = 30

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        found = super().step(action)
        if found[2]:
            raise RuntimeError(f"no episode ends well ({time.monotonic_ns()})")
        return found


@pytest.mark.parametrize("runtime", ["inline", *slowly("process")])
def test_an_env_that_breaks_whenever_an_episode_ends_ends_the_run(runtime: str, tmp_path: Path) -> None:
    own = {"env_args": {"seconds": 0.0}, "eval.episodes": 2, "eval.final_episodes": 10, "faults.restarts": 2}
    run = start(tmp_path / "run", runtime, 6400, env="RaisesAtTheEnd", **own)
    assert run.result.steps >= 6400
    assert run.result.stopped == "steps done"
    assert run.result.eval_return is None
    assert run.result.evaluations == 0
    assert run.result.skipped_evaluations > 0
    history = summarise(each_event(tmp_path / "run" / "events.jsonl"))
    assert history.outcome == "stopped"
    broke = {group.role: group.count for group in history.groups if "environment restarted" in group.actions}
    assert sum(broke.values()) == run.result.env_restarts
    assert broke["sampler"] > 100
    in_vain = [group for group in history.groups if "evaluation given up" in group.actions]
    (given_up,) = [group.count for group in in_vain]
    assert 1 <= given_up <= run.result.skipped_evaluations  # beside training, others were due in the meantime
    assert given_up == run.result.skipped_evaluations or runtime == "process"
    assert "no episode ends well" in in_vain[0].cause
    assert "broke in 3 evaluation episodes in a row" in in_vain[0].cause
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    assert len(lines) < 150, "equal faults are counted, not repeated"
