"""`auto`: what it chooses, from which facts, how soon, and where it says so."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import yaml
from gymnasium import spaces

import raynforce
from raynforce import auto, settings
from raynforce.algos import algorithm_class
from raynforce.algos.ppo import PPO
from raynforce.auto import COSTLY, HANDLING, SHARED, SLOW, Choice, Facts, choose, duration, settle, side_by_side
from raynforce.cli import main
from raynforce.config import Config, RayConfig, SamplingConfig
from raynforce.envs import make
from raynforce.envs.cost import Cost, try_out
from raynforce.envs.make import make_described
from raynforce.envs.vector import probe
from raynforce.errors import UsageError
from raynforce.experiment import resolve
from raynforce.policies.cost import PolicyCost
from raynforce.spaces import EnvSpec

CHEAP = 14e-6
SMALL = {"sampling.envs": 2, "sampling.fragment": 8, "eval.episodes": 1, "eval.final_episodes": 1, "eval.every": 0}


class Timed(gymnasium.Env[np.ndarray, int]):
    """Five steps that sleep; `waiting` is set by the test that lets it go on."""

    observation_space, action_space = spaces.Box(0, 10, (1,)), spaces.Discrete(2)
    waiting = threading.Event()
    closed: list[str] = []  # noqa: RUF012  (by which thread)
    resets = 0

    def __init__(self, step: float = 0.0, reset: float = 0.0, fault: str = "", uneven: float = 0.0) -> None:
        self.seconds, self.reset_seconds, self.fault, self.uneven = step, reset, fault, uneven

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        type(self).resets += 1
        if self.fault == "hangs in reset":
            self.waiting.wait(20)
        if self.fault == "exits":
            sys.exit(3)
        time.sleep(self.reset_seconds)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> Any:
        self.t += 1
        seconds = self.seconds + (self.uneven if self.t % 2 else 0.0)
        if self.fault == "computes":
            until = time.thread_time() + seconds
            while time.thread_time() < until:
                pass
        elif seconds:
            time.sleep(seconds)
        if self.fault == "raises":
            raise RuntimeError("no licence")
        if self.fault == "hangs":
            self.waiting.wait(20)
        return (np.zeros(1, np.float32), 1.0, self.t >= 5, False, {})[: 4 if self.fault == "old" else 5]

    def close(self) -> None:
        self.closed.append(threading.current_thread().name)


class NewestOnly(PPO):
    """Learns from the newest policy version alone."""

    max_lag = 0


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(auto, "cores", lambda: 4)
    monkeypatch.setattr(make, "LOOK", 0.2)
    Timed.closed.clear()
    Timed.resets = 0
    Timed.waiting.clear()
    yield
    Timed.waiting.set()


# -- the choice -------------------------------------------------------------------------------------------


def taking(seconds: float | None, **more: Any) -> Facts:
    """Even steps that compute, and what else there is to know."""
    cost = {"computing": 1.0, "spread": (seconds or 0.0,) * 2} | {k: more.pop(k) for k in COST & set(more)}
    return Facts(Cost(seconds, **cost), **more)


COST = {"computing", "spread"}
LATER = PolicyCost(one=1e-3, all=10e-3, envs=8)


@pytest.mark.parametrize(
    ("facts", "samplers", "expected"),
    [
        (taking(CHEAP), 1, ("inline", "sync")),
        (taking(None, computing=None), 1, ("inline", "sync")),
        (taking(COSTLY * 0.99), 1, ("inline", "sync")),
        (taking(COSTLY), 1, ("process", "overlap")),
        (taking(SLOW * 0.99), 1, ("process", "overlap")),
        (taking(SLOW), 1, ("process", "sync")),
        (taking(SLOW), 2, ("process", "overlap")),
        (taking(math.inf, computing=None), 16, ("process", "sync")),
        (taking(COSTLY, obstacle="one core"), 1, ("inline", "overlap")),
        (taking(SLOW, obstacle="one core"), 1, ("inline", "sync")),
        (taking(COSTLY, tolerates_lag=False), 1, ("process", "sync")),
        (taking(CHEAP), 4, ("inline", "sync")),
        (taking(SHARED), 1, ("inline", "sync")),
        (taking(SHARED), 4, ("process", "sync")),
        (taking(SHARED, obstacle="one core"), 4, ("inline", "sync")),
        (taking(CHEAP, wants_ray=True), 1, ("ray", "sync")),
        (taking(COSTLY, wants_ray=True, obstacle="one core"), 1, ("ray", "overlap")),
    ],
)
def test_both_are_chosen(facts: Facts, samplers: int, expected: tuple[str, str]) -> None:
    assert choose(Choice(samplers=samplers), facts) == Choice(*expected, "no", samplers)


@pytest.mark.parametrize(
    ("runtime", "topology", "facts", "expected"),
    [
        ("auto", "sync", taking(CHEAP), ("inline", "sync", "no")),
        ("auto", "sync", taking(COSTLY), ("process", "sync", "no")),
        ("auto", "sync", taking(1.0, computing=0.0), ("process", "sync", "no")),
        ("auto", "overlap", taking(CHEAP), ("process", "overlap", "no")),
        ("auto", "async", taking(CHEAP), ("process", "async", "no")),
        ("auto", "async", taking(CHEAP, obstacle="one core"), ("inline", "async", "no")),
        ("inline", "auto", taking(COSTLY), ("inline", "overlap", "no")),
        ("inline", "auto", taking(1.0, computing=0.0), ("inline", "central", "threads")),
        ("ray", "auto", taking(CHEAP), ("ray", "sync", "no")),
        ("process", "auto", taking(CHEAP), ("process", "sync", "no")),
        ("inline", "async", taking(COSTLY, wants_ray=True), ("inline", "async", "no")),
        ("auto", "central", taking(CHEAP), ("process", "central", "processes")),
        ("auto", "central", taking(CHEAP, computing=0.49), ("process", "central", "threads")),
        ("auto", "central", taking(None, computing=None), ("process", "central", "threads")),
        ("auto", "central", taking(1.0, obstacle="one core"), ("inline", "central", "threads")),
    ],
)
def test_what_is_given_stays(runtime: Any, topology: Any, facts: Facts, expected: tuple[str, str, str]) -> None:
    assert choose(Choice(runtime, topology), facts) == Choice(*expected)


UNEVEN = (10e-3, 50e-3)


@pytest.mark.parametrize(
    ("asked", "facts", "expected"),
    [
        # slow, and waits: threads, whether even or not
        (Choice(), taking(30e-3, computing=0.01, spread=UNEVEN), ("process", "central", "threads")),
        (Choice(), taking(30e-3, computing=0.0), ("process", "central", "threads")),
        (Choice(), taking(SLOW, computing=0.0), ("process", "central", "threads")),
        (Choice(), taking(SLOW * 0.99, computing=0.0), ("process", "overlap", "no")),
        (Choice(), taking(math.inf, computing=0.0), ("process", "central", "threads")),
        (Choice(), taking(30e-3, computing=0.0, obstacle="one core"), ("inline", "central", "threads")),
        (Choice(), taking(30e-3, computing=0.0, wants_ray=True), ("ray", "central", "threads")),
        (Choice(samplers=4, envs=1), taking(30e-3, computing=0.0), ("process", "central", "threads")),
        # slow, and computes: processes, where they are uneven and there are cores for them
        (Choice(), taking(30e-3, computing=0.5, spread=UNEVEN), ("process", "central", "processes")),
        (Choice(), taking(30e-3, spread=(20e-3, 30e-3)), ("process", "sync", "no")),
        (Choice(), taking(30e-3, spread=UNEVEN, obstacle="one core"), ("inline", "sync", "no")),
        (Choice(), taking(CHEAP, spread=(1e-6, 1.0)), ("inline", "sync", "no")),
        # nobody to share a policy with; an algorithm that could not learn from it; but environments that wait
        (Choice(envs=1), taking(30e-3, computing=0.0), ("process", "sync", "no")),
        (Choice(), taking(30e-3, computing=0.0, streams=False), ("process", "sync", "threads")),
        (Choice(envs=16), taking(30e-3, computing=0.0, streams=False), ("process", "overlap", "threads")),
        (Choice(), taking(30e-3, computing=0.0, tolerates_lag=False), ("process", "sync", "threads")),
        (Choice(), taking(30e-3, spread=UNEVEN, tolerates_lag=False), ("process", "sync", "no")),
        # a policy that takes longer for all of them than they for a step
        (Choice(), taking(11e-3, computing=0.0, policy=LATER), ("process", "central", "threads")),
        (Choice(), taking(10e-3, computing=0.0, policy=LATER), ("process", "overlap", "threads")),
        (Choice(samplers=3), taking(30e-3, computing=0.0, policy=LATER), ("process", "overlap", "threads")),
        (Choice(envs=1000), taking(999 * HANDLING, computing=0.0), ("process", "overlap", "threads")),
        # how they are stepped is given
        (Choice(parallel="no"), taking(30e-3, computing=0.0), ("process", "sync", "no")),
        (Choice(parallel="processes"), taking(30e-3, computing=0.0), ("process", "central", "processes")),
        (Choice(parallel="threads"), taking(CHEAP), ("inline", "sync", "threads")),
    ],
)
def test_where_inference_happens(asked: Choice, facts: Facts, expected: tuple[str, str, str]) -> None:
    assert choose(asked, facts) == Choice(*expected, asked.samplers, asked.envs)


@pytest.mark.parametrize(
    ("asked", "computing", "hosts"),
    [
        (Choice(envs=128), 0.0, (1, 128)),
        (Choice(envs=256), 0.0, (2, 128)),
        (Choice(envs=512), 0.0, (4, 128)),
        (Choice(envs=1024), 0.0, (4, 256)),  # cores
        (Choice(envs=8), 0.2, (2, 4)),  # threads of one process compute one at a time
        (Choice(envs=6), 0.4, (3, 2)),
        (Choice(envs=7), 0.4, (1, 7)),  # as many as were asked for
        (Choice(samplers=2, envs=256), 0.0, (2, 256)),  # as it was asked for
        (Choice("ray", envs=256), 0.0, (1, 256)),
        (Choice(topology="central", envs=256), 0.0, (1, 256)),
    ],
)
def test_environments_of_a_single_host_are_divided(asked: Choice, computing: float, hosts: tuple[int, int]) -> None:
    chosen = choose(asked, taking(1.0, computing=computing, cores=4))
    assert (chosen.topology, chosen.parallel) == ("central", "threads")
    assert (chosen.samplers, chosen.envs) == hosts


@pytest.mark.parametrize(("seconds", "hosts"), [(0.03, 1), (0.01, 2), (0.004, 4)])
def test_faster_environments_need_more_hosts(seconds: float, hosts: int) -> None:
    chosen = choose(Choice(envs=64, topology="auto"), taking(seconds, computing=0.0, cores=4))
    assert (chosen.topology, chosen.samplers, chosen.envs) == ("central", hosts, 64 // hosts)


# -- the facts --------------------------------------------------------------------------------------------


def probe_cost(env: str, args: dict[str, Any] | None = None) -> tuple[EnvSpec, Cost]:
    made, spec = make_described(env, args)
    return spec, try_out(made)


def test_the_cost_of_a_step() -> None:
    spec, cheap = probe_cost("CartPole-v1")
    assert spec == probe("CartPole-v1")
    assert cheap.seconds is not None
    assert 1e-6 < cheap.seconds < COSTLY
    spec, costly = probe_cost("test_auto:Timed", {"step": 2e-3})
    assert spec == probe("test_auto:Timed", {"step": 2e-3})
    assert costly.seconds is not None
    assert 2e-3 < costly.seconds < 50e-3


def test_resets_have_their_share() -> None:
    _, cost = probe_cost("test_auto:Timed", {"reset": 2e-3})
    assert cost.seconds is not None
    assert 0.2e-3 < cost.seconds < 20e-3, "one reset in five steps"


def test_a_step_that_waits() -> None:
    began = time.monotonic()
    _, cost = probe_cost("test_auto:Timed", {"step": 10e-3, "uneven": 30e-3})
    assert time.monotonic() - began < 2
    assert cost.seconds is not None
    assert 10e-3 < cost.seconds < 60e-3
    low, high = cost.spread
    assert 10e-3 < low < 20e-3
    assert 40e-3 < high < 60e-3
    assert cost.uneven
    assert cost.steps >= 5
    assert cost.computing is not None
    assert cost.computing < 0.3


def test_a_step_that_computes() -> None:
    _, cost = probe_cost("test_auto:Timed", {"step": 3e-3, "fault": "computes"})
    assert cost.computing is not None
    assert cost.computing > 0.7, "however busy the machine is"
    assert cost.steps >= 5
    _, uneven = probe_cost("test_auto:Timed", {"step": 2e-3, "uneven": 6e-3, "fault": "computes"})
    assert uneven.uneven


def test_one_step_that_was_held_up_changes_little() -> None:
    cost = Cost.of([1.0] * 49 + [1000.0], [0.5] * 50, [7.0], ends=0)
    assert (cost.seconds, cost.spread, cost.uneven, cost.steps) == (1.0, (1.0, 1.0), False, 50)
    cost = Cost.of([1.0, 2.0, 3.0, 4.0], [0.1, 0.2, 0.3, 0.4], [9.0, 2.0, 4.0], ends=2)
    assert cost.seconds == 2.5 + 2 * 2.0 / 4
    assert cost.mean == (10 + 6) / 4
    assert cost.computing == pytest.approx(0.1)


def test_of_steps_that_are_played_again_the_fastest_time_counts() -> None:
    even, uneven = [1.0] * 5, [1.0, 1.0, 8.0, 8.0, 8.0]
    held_up = [2.0] * 5  # a whole pass that had half a core
    cost = Cost.of([*held_up, *even, *held_up], [1.0] * 15, [1.0], ends=0, length=5)
    assert (cost.seconds, cost.spread, cost.uneven, cost.steps) == (1.0, (1.0, 1.0), False, 15)
    cost = Cost.of([*uneven, *[2 * x for x in uneven], *uneven[:2]], [1.0] * 12, [1.0], ends=0, length=5)
    assert (cost.seconds, cost.spread, cost.uneven) == (8.0, (1.0, 8.0), True), "real differences stay"


def test_a_trial_plays_the_same_steps_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raynforce.envs.cost.ENOUGH", 60.0)
    monkeypatch.setattr("raynforce.envs.cost.TRIAL_SECONDS", 60.0)
    _, cost = probe_cost("test_auto:Timed")
    assert cost.steps == 75, "three times 25"
    assert Timed.resets == 15, "episodes of five steps"


@pytest.mark.parametrize("fault", ["raises", "exits", "old"])
def test_an_environment_that_breaks_has_no_cost(fault: str) -> None:
    spec, cost = probe_cost("test_auto:Timed", {"fault": fault})
    assert cost == Cost(None)
    assert spec.args == {"fault": fault}
    assert Timed.closed == ["MainThread"]


@pytest.mark.parametrize(("fault", "known"), [("hangs", True), ("hangs in reset", False)])
def test_an_environment_that_hangs_is_left_to_itself(fault: str, known: bool) -> None:
    began = time.monotonic()
    _, cost = probe_cost("test_auto:Timed", {"fault": fault})
    assert 0.09 < time.monotonic() - began < 5
    assert cost.seconds == math.inf
    assert (cost.computing is not None and cost.computing < 0.3) == known, "whether it was the step that took so long"
    assert Timed.closed == []
    Timed.waiting.set()
    until = time.monotonic() + 5
    while not Timed.closed and time.monotonic() < until:
        time.sleep(0.01)
    assert Timed.closed == ["environment trial"], "it closes its environment when it can"


def test_a_probe_is_short() -> None:
    began = time.process_time()
    for _ in range(10):
        probe_cost("CartPole-v1")
    assert (time.process_time() - began) / 10 < 0.05
    assert Timed.closed == []


def test_spaces_that_are_refused_close_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Timed, "action_space", spaces.Text(3))
    with pytest.raises(UsageError):
        probe_cost("test_auto:Timed")
    assert Timed.closed == ["MainThread"]


# -- the config -------------------------------------------------------------------------------------------


def chosen(**settings: Any) -> tuple[str, str, str]:
    config = Config(**({"env": "test_auto:Timed"} | settings))
    config, _, line = settle(replace(config, algorithm=algorithm_class(config.algo).Settings()))
    return config.runtime, config.topology, line


def test_what_was_chosen_is_said() -> None:
    runtime, topology, line = chosen(env="CartPole-v1")
    assert (runtime, topology) == ("inline", "sync")
    assert line.startswith("auto: inline and sync, because a step of CartPole-v1 takes ")
    assert line.endswith(" µs")
    runtime, topology, line = chosen(env_args={"step": 5e-3})
    assert (runtime, topology) == ("process", "central")
    assert line.startswith("auto: process and central with threads, because a step of test_auto:Timed takes ")
    assert line.endswith("%")
    runtime, topology, line = chosen(env_args={"step": 2e-3, "uneven": 6e-3, "fault": "computes"})
    assert (runtime, topology) == ("process", "central")
    assert line.startswith("auto: process and central with processes, because a step of test_auto:Timed takes ")


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"topology": "async"}, "auto: process, because async samples while it learns"),
        ({"env_args": {"fault": "raises"}}, "auto: inline and sync, because test_auto:Timed could not be timed"),
        (
            {"env_args": {"fault": "hangs in reset"}},
            "auto: process and sync, because test_auto:Timed was not through its first step in 500 ms",
        ),
        (
            {"algo": "test_auto:NewestOnly", "runtime": "inline"},
            "auto: sync, because test_auto:NewestOnly learns from the newest policy version alone",
        ),
        (
            {"ray": RayConfig(sampler_cpus=2), "topology": "sync"},
            "auto: ray, because settings for ray are given",
        ),
        ({"runtime": "process", "topology": "sync"}, ""),
    ],
)
def test_the_reason_fits(settings: dict[str, Any], line: str) -> None:
    assert chosen(**settings)[2] == line


@pytest.mark.parametrize(
    ("seconds", "settings", "line"),
    [
        (14e-6, {}, "inline and sync, because a step of test_auto:Timed takes 14 µs"),
        (14e-6, {"topology": "sync"}, "inline, because a step of test_auto:Timed takes 14 µs"),
        (14e-6, {"runtime": "ray"}, "sync, because a step of test_auto:Timed takes 14 µs"),
        (0.5e-3, {}, "process and overlap, because a step of test_auto:Timed takes 500 µs"),
        (1.25e-3, {"topology": "sync"}, "process, because a step of test_auto:Timed takes 1.2 ms"),
        (14e-6, {"sampling": SamplingConfig(3)}, "inline and sync, because a step of test_auto:Timed takes 14 µs"),
        (
            50e-6,
            {"sampling": SamplingConfig(3)},
            "process and sync, because a step of test_auto:Timed takes 50 µs and there are 3 samplers",
        ),
        (
            Cost(31e-3, spread=(10e-3, 50e-3), computing=0.012),
            {},
            "process and central with threads, because a step of test_auto:Timed takes 31 ms (10–50 ms), of which it "
            "computes 1%",
        ),
        (
            Cost(31e-3, spread=(30.9e-3, 31.1e-3), computing=0.0),
            {"sampling": SamplingConfig(envs=256)},
            "process and central with threads in 2 hosts of 128 environments, because a step of test_auto:Timed takes "
            "31 ms, of which it computes 0%",
        ),
        (
            Cost(3e-3, spread=(0.9e-3, 1.2), computing=1.0),
            {"topology": "central", "runtime": "process"},
            "processes, because a step of test_auto:Timed takes 3 ms (900 µs–1.2 s), of which it computes 100%",
        ),
        (
            Cost(3e-3, spread=(3e-3, 3e-3), computing=0.0),
            {"sampling": SamplingConfig(envs=100), "runtime": "process"},
            "overlap with threads, because a step of test_auto:Timed takes 3 ms, of which it computes 0% and one "
            "policy would take 5 ms to choose for all 100 environments",
        ),
        (
            Cost(31e-3, spread=(31e-3, 31e-3), computing=0.0),
            {"algo": "test_auto:NewestOnly"},
            "process and sync with threads, because test_auto:NewestOnly learns from the newest policy version alone "
            "and a step of test_auto:Timed takes 31 ms, of which it computes 0%",
        ),
        (
            0.5e-3,
            {"algo": "test_auto:NewestOnly"},
            "process and sync, because test_auto:NewestOnly learns from the newest policy version alone and a step of "
            "test_auto:Timed takes 500 µs",
        ),
    ],
)
def test_the_whole_line(
    seconds: float | Cost, settings: dict[str, Any], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cost = seconds if isinstance(seconds, Cost) else Cost(seconds)
    monkeypatch.setattr(auto, "cost_of_env", lambda env, args: (probe(env, args), cost))
    monkeypatch.setattr(auto, "cost_of_acting", lambda spec, envs: PolicyCost(0.0, 0.0, envs))
    assert chosen(**settings)[2] == f"auto: {line}"


def test_durations() -> None:
    seconds = (14e-6, 1.25e-3, 2e-3, 9.4e-3, 31.4e-3, 0.177, 2.0, 120.0)
    expected = ["14 µs", "1.2 ms", "2 ms", "9.4 ms", "31 ms", "177 ms", "2 s", "120 s"]
    assert [duration(s) for s in seconds] == expected


@pytest.mark.parametrize(("env", "runs"), [("CartPole-v1", 20), ("Pendulum-v1", 5)])
def test_cheap_environments_are_never_central(env: str, runs: int) -> None:
    assert {chosen(env=env)[1] for _ in range(runs)} <= {"sync", "overlap"}


def test_one_core_keeps_the_topology(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "cost_of_env", lambda env, args: (probe(env, args), Cost(0.5e-3)))
    monkeypatch.setattr(auto, "cores", lambda: 1)
    expected = "auto: inline and overlap, because a step of test_auto:Timed takes 500 µs and there is one core"
    assert chosen() == ("inline", "overlap", expected)


@pytest.mark.parametrize(
    ("how", "computing", "options"),
    [
        ({}, 0.0, "--runtime process --topology central"),
        ({"runtime": "process", "topology": "overlap"}, 0.0, "--topology central"),
        ({"algo": "dqn"}, 0.0, "--runtime process --topology overlap --set sampling.parallel=threads"),
        (
            {"sampling.samplers": 2, "sampling.envs": 4},
            0.0,
            "--runtime process --topology central --samplers 1 --envs 8",
        ),
        ({"sampling.parallel": "threads"}, 0.0, ""),
        ({}, 1.0, ""),
    ],
)
def test_advice_after_a_run_is_what_auto_would_do(
    how: dict[str, Any], computing: float, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cost = Cost(5e-3, 5e-3, (5e-3, 5e-3), computing)
    monkeypatch.setattr(auto, "cost_of_env", lambda env, args: (probe(env, args), cost))
    monkeypatch.setattr(auto, "cores", lambda: 2)
    given = {"env": "test_auto:Timed", "runtime": "inline", "topology": "sync", "sampling.parallel": "no", **how}
    config, _ = resolve(settings.nested(given))
    assert side_by_side(config, 5e-3) == options
    assert side_by_side(config, 1e-3) == "", "too quick to be worth a trial"


def test_only_what_depends_on_it_tries_the_environment() -> None:
    chosen(runtime="inline", topology="sync")
    chosen(topology="overlap")
    chosen(algo="test_auto:NewestOnly", runtime="inline", sampling=SamplingConfig(parallel="no"))
    chosen(runtime="inline", topology="central", sampling=SamplingConfig(parallel="threads"))
    assert Timed.resets == 4, "one look at what comes with an observation each"
    chosen(runtime="inline", topology="central")
    assert Timed.resets > 5
    Timed.resets = 0
    chosen(runtime="inline")
    assert Timed.resets > 1


def test_an_id_that_only_this_process_knows_stays_in_it() -> None:
    gymnasium.register("HereOnly-v0", entry_point="test_auto:Timed")
    try:
        runtime, _, line = chosen(env="HereOnly-v0", topology="overlap")
        assert runtime == "inline"
        assert line == "auto: inline, because HereOnly-v0 is registered in this process alone"
        assert chosen(env="test_auto:HereOnly-v0", topology="overlap")[0] == "process"
    finally:
        del gymnasium.registry["HereOnly-v0"]


def test_an_id_that_has_a_vector_implementation_alone_is_refused() -> None:
    gymnasium.register("VectorOnly-v0", vector_entry_point="gymnasium.envs.classic_control.cartpole:CartPoleVectorEnv")
    try:
        with pytest.raises(UsageError, match="'VectorOnly-v0' could not be made"):
            chosen(env="VectorOnly-v0")
    finally:
        del gymnasium.registry["VectorOnly-v0"]


# -- the run ----------------------------------------------------------------------------------------------


def test_a_run_keeps_what_was_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = raynforce.train("CartPole-v1", steps=16, settings=SMALL, out=tmp_path / "run", progress="plain")
    assert sum(line.startswith("auto: inline and sync, because") for line in capsys.readouterr().out.splitlines()) == 1
    saved = yaml.safe_load((run.path / "config.yaml").read_text())
    for where in (saved["runtime"], run.config.runtime, run.result.runtime):
        assert where == "inline"
    for how in (saved["topology"], run.config.topology, run.result.topology):
        assert how == "sync"
    again = raynforce.resume(run.path, steps=32, progress="plain")
    assert again.config.runtime == "inline"
    assert "auto:" not in capsys.readouterr().out


def test_a_resumed_run_may_choose_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = SMALL | {"env_args.step": 0.5e-3}
    how: dict[str, Any] = {"out": tmp_path / "run", "progress": "quiet"}
    raynforce.train("test_auto:Timed", steps=16, runtime="inline", topology="sync", settings=settings, **how)
    run = raynforce.resume(tmp_path / "run", steps=32, runtime="auto", topology="auto", progress="plain")
    assert (run.result.runtime, run.result.topology) == ("process", "overlap")
    assert "auto: process and overlap, because" in capsys.readouterr().out


@pytest.mark.slow
def test_the_defaults_give_equal_weights_wherever_it_runs(tmp_path: Path) -> None:
    settings = SMALL | {"env_args.step": 0.5e-3}
    runs = [
        raynforce.train(
            "test_auto:Timed", steps=32, runtime=runtime, settings=settings, out=tmp_path / runtime, progress="quiet"
        ).result
        for runtime in ("auto", "inline")
    ]
    assert [(r.runtime, r.topology) for r in runs] == [("process", "overlap"), ("inline", "overlap")]
    assert runs[0].weights_sha256 == runs[1].weights_sha256


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", "ppo", "CartPole-v1", "--print-config"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert (printed["runtime"], printed["topology"]) == ("auto", "auto")
    assert main(["train", "ppo", "CartPole-v1", "--learner-gpus", "0", "--print-config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["runtime"] == "ray"
    assert main(["train", "ppo", "CartPole-v1", "--runtime", "outside"]) == 2
    assert "runtime = 'outside' is not one of: auto, inline, process, ray" in capsys.readouterr().err
    words = ["train", "ppo", "CartPole-v1", "--steps", "16", "--quiet", "--json", "--out", "run"]
    for name, value in SMALL.items():
        words += ["--set", f"{name}={value}"]
    assert main(words) == 0
    answer = capsys.readouterr()
    assert "auto:" not in answer.out + answer.err, "quiet"


def test_one_policy_for_all_is_not_chosen_for_several() -> None:
    layers = {"env": "raynforce.envs.tiny_agents:Together", "preset": "none"}
    slow = Cost(10 * SLOW, computing=0.0)
    found = []
    for policies in ({}, {"a": {"agents": ["*"]}}):
        config = resolve(layers, {"policies": policies}, {})[0]
        facts = replace(auto.facts_of(config, slow), obstacle="", cores=4)
        found.append(choose(Choice.of(config), facts).topology)
    assert found == ["central", "sync"]
