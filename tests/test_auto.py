"""`auto`: what it chooses, from which facts, how soon, and where it says so."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import yaml
from gymnasium import spaces

import raynforce
from raynforce import auto
from raynforce.algos.ppo import PPO
from raynforce.auto import COSTLY, SHARED, SLOW, Facts, choose, settle
from raynforce.cli import main
from raynforce.config import Config, RayConfig, SamplingConfig
from raynforce.envs.cost import probe_cost
from raynforce.envs.vector import probe
from raynforce.errors import UsageError

CHEAP = 14e-6
SMALL = {"sampling.envs": 2, "sampling.fragment": 8, "eval.episodes": 1, "eval.final_episodes": 1, "eval.every": 0}


class Timed(gymnasium.Env[np.ndarray, int]):
    """Five steps that sleep; `waiting` is set by the test that lets it go on."""

    observation_space, action_space = spaces.Box(0, 10, (1,)), spaces.Discrete(2)
    waiting = threading.Event()
    closed: list[str] = []  # noqa: RUF012  (by which thread)
    resets = 0

    def __init__(self, step: float = 0.0, reset: float = 0.0, fault: str = "") -> None:
        self.seconds, self.reset_seconds, self.fault = step, reset, fault

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
        time.sleep(self.seconds) if self.seconds else None
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
    Timed.closed.clear()
    Timed.resets = 0
    Timed.waiting.clear()
    yield
    Timed.waiting.set()


# -- the choice -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (Facts(CHEAP), ("inline", "sync")),
        (Facts(None), ("inline", "sync")),
        (Facts(COSTLY * 0.99), ("inline", "sync")),
        (Facts(COSTLY), ("process", "overlap")),
        (Facts(SLOW * 0.99), ("process", "overlap")),
        (Facts(SLOW), ("process", "sync")),
        (Facts(SLOW, samplers=2), ("process", "overlap")),
        (Facts(math.inf, samplers=16), ("process", "sync")),
        (Facts(COSTLY, obstacle="one core"), ("inline", "overlap")),
        (Facts(SLOW, obstacle="one core"), ("inline", "sync")),
        (Facts(COSTLY, tolerates_lag=False), ("process", "sync")),
        (Facts(CHEAP, samplers=4), ("inline", "sync")),
        (Facts(SHARED), ("inline", "sync")),
        (Facts(SHARED, samplers=4), ("process", "sync")),
        (Facts(SHARED, samplers=4, obstacle="one core"), ("inline", "sync")),
        (Facts(CHEAP, wants_ray=True), ("ray", "sync")),
        (Facts(COSTLY, wants_ray=True, obstacle="one core"), ("ray", "overlap")),
    ],
)
def test_both_are_chosen(facts: Facts, expected: tuple[str, str]) -> None:
    assert choose("auto", "auto", facts) == expected


@pytest.mark.parametrize(
    ("runtime", "topology", "facts", "expected"),
    [
        ("auto", "sync", Facts(CHEAP), ("inline", "sync")),
        ("auto", "sync", Facts(COSTLY), ("process", "sync")),
        ("auto", "sync", Facts(COSTLY, samplers=2), ("process", "sync")),
        ("auto", "overlap", Facts(CHEAP), ("process", "overlap")),
        ("auto", "async", Facts(CHEAP), ("process", "async")),
        ("auto", "async", Facts(CHEAP, obstacle="one core"), ("inline", "async")),
        ("inline", "auto", Facts(COSTLY), ("inline", "overlap")),
        ("ray", "auto", Facts(CHEAP), ("ray", "sync")),
        ("process", "auto", Facts(CHEAP), ("process", "sync")),
        ("inline", "async", Facts(COSTLY, wants_ray=True), ("inline", "async")),
    ],
)
def test_what_is_given_stays(runtime: Any, topology: Any, facts: Facts, expected: tuple[str, str]) -> None:
    assert choose(runtime, topology, facts) == expected


# -- the facts --------------------------------------------------------------------------------------------


def test_the_cost_of_a_step() -> None:
    spec, cheap = probe_cost("CartPole-v1")
    assert spec == probe("CartPole-v1")
    assert cheap is not None
    assert 1e-6 < cheap < COSTLY
    spec, costly = probe_cost("test_auto:Timed", {"step": 2e-3})
    assert spec == probe("test_auto:Timed", {"step": 2e-3})
    assert costly is not None
    assert 2e-3 < costly < 50e-3


def test_resets_have_their_share() -> None:
    _, seconds = probe_cost("test_auto:Timed", {"reset": 2e-3})
    assert seconds is not None
    assert 0.2e-3 < seconds < 20e-3, "one reset in five steps"


@pytest.mark.parametrize("fault", ["raises", "exits", "old"])
def test_an_environment_that_breaks_has_no_cost(fault: str) -> None:
    spec, seconds = probe_cost("test_auto:Timed", {"fault": fault})
    assert seconds is None
    assert spec.args == {"fault": fault}
    assert Timed.closed == ["MainThread"]


@pytest.mark.parametrize("fault", ["hangs", "hangs in reset"])
def test_an_environment_that_hangs_is_left_to_itself(fault: str) -> None:
    began = time.monotonic()
    _, seconds = probe_cost("test_auto:Timed", {"fault": fault})
    assert 0.09 < time.monotonic() - began < 5
    assert seconds == math.inf
    assert Timed.closed == []
    Timed.waiting.set()
    until = time.monotonic() + 5
    while not Timed.closed and time.monotonic() < until:
        time.sleep(0.01)
    assert Timed.closed == ["environment trial"], "it closes its environment when it can"


def test_a_probe_is_short() -> None:
    began = time.monotonic()
    for _ in range(10):
        probe_cost("CartPole-v1")
    assert (time.monotonic() - began) / 10 < 0.05
    assert Timed.closed == []


def test_spaces_that_are_refused_close_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Timed, "action_space", spaces.Text(3))
    with pytest.raises(UsageError):
        probe_cost("test_auto:Timed")
    assert Timed.closed == ["MainThread"]


# -- the config -------------------------------------------------------------------------------------------


def chosen(**settings: Any) -> tuple[str, str, str]:
    config, _, line = settle(Config(**({"env": "test_auto:Timed"} | settings)))
    return config.runtime, config.topology, line


def test_what_was_chosen_is_said() -> None:
    runtime, topology, line = chosen(env="CartPole-v1")
    assert (runtime, topology) == ("inline", "sync")
    assert line.startswith("auto: inline and sync, because a step of CartPole-v1 takes ")
    assert line.endswith(" µs")
    runtime, topology, line = chosen(env_args={"step": 5e-3})
    assert (runtime, topology) == ("process", "sync")
    assert line.startswith("auto: process and sync, because a step of test_auto:Timed takes ")
    assert line.endswith(" ms")


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"topology": "async"}, "auto: process, because async samples while it learns"),
        ({"env_args": {"fault": "raises"}}, "auto: inline and sync, because test_auto:Timed could not be timed"),
        (
            {"env_args": {"fault": "hangs"}},
            "auto: process and sync, because test_auto:Timed was not through its first step in 100 ms",
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
            0.5e-3,
            {"algo": "test_auto:NewestOnly"},
            "process and sync, because test_auto:NewestOnly learns from the newest policy version alone and a step of "
            "test_auto:Timed takes 500 µs",
        ),
    ],
)
def test_the_whole_line(seconds: float, settings: dict[str, Any], line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "probe_cost", lambda env, args: (probe(env, args), seconds))
    assert chosen(**settings)[2] == f"auto: {line}"


def test_one_core_keeps_the_topology(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "probe_cost", lambda env, args: (probe(env, args), 0.5e-3))
    monkeypatch.setattr(auto, "cores", lambda: 1)
    expected = "auto: inline and overlap, because a step of test_auto:Timed takes 500 µs and there is one core"
    assert chosen() == ("inline", "overlap", expected)


def test_only_what_depends_on_it_tries_the_environment() -> None:
    chosen(runtime="inline", topology="sync")
    chosen(topology="overlap")
    chosen(algo="test_auto:NewestOnly", runtime="inline")
    assert Timed.resets == 0
    chosen(runtime="inline")
    assert Timed.resets > 0


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
