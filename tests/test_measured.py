"""What `auto` goes by is remembered: near a threshold, too, it decides the same way each time."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raynforce import auto, measured
from raynforce.algos import algorithm_class
from raynforce.auto import COSTLY, SHARED, SLOW, WAITS, settle
from raynforce.cli import main
from raynforce.config import Config, SamplingConfig
from raynforce.envs.cost import TRIAL_SECONDS, Cost
from raynforce.measured import MOST, cost_of_acting, cost_of_env
from raynforce.policies.cost import PolicyCost

ENV = "CartPole-v1"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(auto, "cores", lambda: 4)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return tmp_path / "raynforce" / "measured"


def even(seconds: float, computing: float | None = 1.0) -> Cost:
    return Cost(seconds, seconds, (seconds, seconds), computing, 75)


def trials(monkeypatch: pytest.MonkeyPatch, costs: Iterator[Cost] | list[Cost]) -> None:
    """Let these be what the next trials find."""
    found = iter(costs)
    monkeypatch.setattr(measured, "try_out", lambda made: (made.close(), next(found))[1])


def noisy(cost: Cost, seed: int) -> Iterator[Cost]:
    """Trials of one environment on a machine that others use: slow for a while, with odd steps, and never too fast.

    One in ten had but a part of a core; that is how trials were distributed with four busy programs on two cores.
    """
    random = np.random.default_rng(seed)
    while True:
        factor = math.exp(abs(random.normal(0, 0.1))) * (random.uniform(1, 2.2) if random.random() < 0.1 else 1)
        seconds = (cost.seconds or 0.0) * factor
        spread = (cost.spread[0] * factor, cost.spread[1] * factor * random.uniform(1, 1.3))
        computing = min(1.0, max(0.0, (cost.computing or 0.0) + random.normal(0, 0.05)))
        yield Cost(seconds, seconds, spread, computing, 75)


NEAR = [
    *((even(threshold * factor), samplers) for threshold, samplers in ((SHARED, 4), (COSTLY, 1), (SLOW, 1), (SLOW, 2))
      for factor in (0.8, 0.95, 1.05)),
    (even(20e-3, WAITS), 1),
    (Cost(20e-3, 20e-3, (10e-3, 14.8e-3), 1.0, 12), 1),  # about as uneven as counts
    (even(5e-3, 0.16), 1),  # on the border of one and two hosts
]  # fmt: skip


@pytest.mark.parametrize(("cost", "samplers"), NEAR)
def test_100_of_100_decisions_are_the_same(cost: Cost, samplers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    trials(monkeypatch, noisy(cost, seed=7))
    config = Config(env=ENV, sampling=SamplingConfig(samplers=samplers))
    config = replace(config, algorithm=algorithm_class("ppo").Settings())
    decisions = [settle(config) for _ in range(100)]
    assert len({(c.runtime, c.topology, c.sampling, line) for c, _, line in decisions}) == 1


def test_doctor_and_train_agree(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trials(monkeypatch, [even(86e-6), even(132e-6)] * 2)
    assert main(["doctor", ENV, "--steps", "200", "--json"]) == 0
    rows = dict(line.split(maxsplit=1) for line in json.loads(capsys.readouterr().out)["how_to_run"])
    assert rows["chosen"] == f"inline and sync, because a step of {ENV} takes 86 µs"
    words = [
        "--steps",
        "16",
        "--out",
        str(tmp_path / "run"),
        "--set",
        "sampling.fragment=2",
        "--set",
        "eval.episodes=1",
    ]
    assert main(["train", "ppo", ENV, *words, "--set", "eval.final_episodes=1", "--json"]) == 0
    out = capsys.readouterr()
    assert f"auto: {rows['chosen']}" in out.err
    assert json.loads(out.out.splitlines()[-1])["topology"] == "sync"


def test_what_differs_by_far_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(*costs: Cost) -> Cost:
        trials(monkeypatch, list(costs))
        return cost_of_env(ENV)[1]

    assert found(even(100e-6)) == even(100e-6)
    assert found(even(199e-6)) == even(100e-6)
    assert found(even(51e-6)) == even(100e-6)
    assert found(even(250e-6), even(110e-6)) == even(100e-6), "it was held up, and is tried again"
    assert found(even(300e-6), even(250e-6)) == even(250e-6), "it is slower indeed"
    assert found(even(260e-6, 0.1)) == even(260e-6, 0.1), "it waits now"
    assert found(even(20e-6)) == even(20e-6), "nothing makes a step faster than it is"
    broken = Cost(None)
    assert found(broken) == broken
    assert found(even(20e-6)) == even(20e-6)


def test_one_that_is_hardly_through_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, slower = even(0.9 * TRIAL_SECONDS, 0.0), Cost(math.inf, math.inf, (math.inf, math.inf), 0.0)
    trials(monkeypatch, [slow, slower, slow])
    assert [cost_of_env(ENV)[1] for _ in range(3)] == [slow] * 3
    trials(monkeypatch, [slower, slow])
    assert [cost_of_env(ENV, {"max_episode_steps": 5})[1] for _ in range(2)] == [slower] * 2


def test_other_arguments_and_other_code_are_another_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def found(seconds: float, env: str, **args: Any) -> float | None:
        trials(monkeypatch, [even(seconds)])
        return cost_of_env(env, args)[1].seconds

    assert found(100e-6, ENV) == 100e-6
    assert found(120e-6, ENV, max_episode_steps=9) == 120e-6
    assert found(120e-6, ENV) == 100e-6
    code = tmp_path / "measured_env.py"
    code.write_text("from gymnasium.envs.classic_control import CartPoleEnv\n\n\nclass Mine(CartPoleEnv):\n    pass\n")
    factory = tmp_path / "measured_factory.py"
    factory.write_text("def make():\n    from measured_env import Mine\n\n    return Mine()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert found(100e-6, "measured_factory:make") == 100e-6
        assert found(120e-6, "measured_factory:make") == 100e-6
        code.write_text(code.read_text() + "    speed = 2\n")
        assert found(120e-6, "measured_factory:make") == 120e-6
        factory.write_text(factory.read_text() + "\n")
        assert found(130e-6, "measured_factory:make") == 130e-6
    finally:
        for name in ("measured_env", "measured_factory"):
            sys.modules.pop(name, None)


def test_of_several_at_once_one_is_the_first(monkeypatch: pytest.MonkeyPatch, files: Path) -> None:
    seconds = iter(np.linspace(90e-6, 110e-6, 8).tolist())
    barrier = threading.Barrier(8)

    def try_out(made: Any) -> Cost:
        barrier.wait()  # all have looked, and nobody has found anything yet
        return even(next(seconds))

    monkeypatch.setattr(measured, "try_out", try_out)
    found: list[float | None] = []
    threads = [threading.Thread(target=lambda: found.append(cost_of_env(ENV)[1].seconds)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert len(os.listdir(files)) == 1, "nothing else is left"


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"\xff\xfe", b"[]", b"null", b'{"found": {"seconds": "fast"}}', b'{"found": 3}', b"[" * 100_000,
     b'{"found": {"seconds": NaN, "mean": 1, "spread": [1, 1], "computing": 1, "steps": 3}}',
     b'{"found": {"seconds": -1, "mean": 1, "spread": [1, 1], "computing": 1, "steps": 3}}'],
)  # fmt: skip
def test_what_is_damaged_is_measured_again(damage: bytes, monkeypatch: pytest.MonkeyPatch, files: Path) -> None:
    trials(monkeypatch, [even(1e-4), even(1.1e-4), even(1.2e-4)])
    cost_of_env(ENV)
    (file,) = files.iterdir()
    file.write_bytes(damage)
    assert cost_of_env(ENV)[1] == even(1.1e-4)
    assert cost_of_env(ENV)[1] == even(1.1e-4), "and remembered"


@pytest.mark.parametrize("where", ["file", "read-only", "nowhere"])
def test_without_a_place_nothing_is_remembered(where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trials(monkeypatch, [even(1e-4), even(1.1e-4)])
    if where == "file":
        (tmp_path / "raynforce").write_text("")
    elif where == "read-only":
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc")
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", "")
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert [cost_of_env(ENV)[1] for _ in range(2)] == [even(1e-4), even(1.1e-4)]


def test_it_is_bounded(monkeypatch: pytest.MonkeyPatch, files: Path) -> None:
    trials(monkeypatch, [even(1e-4)] * 3)
    cost_of_env(ENV)
    (used,) = files.iterdir()
    for i in range(MOST + 20):
        other = files / f"{i}.json"
        other.write_text("{}")
        os.utime(other, (i, i))
    os.utime(used, (1, 1))
    cost_of_env(ENV)
    cost_of_env(ENV, {"max_episode_steps": 7})
    left = {path.name for path in files.iterdir()}
    assert len(left) == MOST
    assert used.name in left, "what was used last stays"
    assert "0.json" not in left


def test_policies_are_remembered_too(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(Config(env=ENV), algorithm=algorithm_class("ppo").Settings())
    acting = algorithm_class("ppo")(config, settle(config)[1]).acting()
    found = iter([5e-3, 6e-3, 40e-3, 6e-3, 40e-3, 30e-3])
    monkeypatch.setattr(measured, "policy_cost", lambda spec, envs: PolicyCost(1e-3, next(found), envs))
    costs = [cost_of_acting(acting, 8) for _ in range(4)]
    assert [cost and cost.all for cost in costs] == [5e-3, 5e-3, 5e-3, 30e-3]
    other = replace(acting, env=replace(acting.env, env="Other-v0", args={"n": 3}))
    monkeypatch.setattr(measured, "policy_cost", lambda spec, envs: PolicyCost(1e-3, 29e-3, envs))
    assert cost_of_acting(other, 8) == costs[-1], "whatever the environment is called"
    monkeypatch.setattr(measured, "policy_cost", lambda spec, envs: None)
    assert cost_of_acting(acting, 8) is None
