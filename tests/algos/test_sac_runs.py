"""Whole runs of SAC and TD3: equal on every runtime and topology, killed, resumed, on images, from other weights."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rays
from critic_nets import train
from failing import is_sound
from marks import slowly
from running import metrics, solve

import raynforce

SHARDS = {"replay.shards": 2}
PRIORITISED = {"algorithm.prioritized": True, "algorithm.n_step": 3}
CELLS: dict[str, tuple[str, dict[str, Any]]] = {
    "sync": ("sync", {}),
    "replay": ("replay", {}),
    "shards": ("replay", SHARDS),
    "prioritised shards": ("replay", SHARDS | PRIORITISED),
    "overlap": ("overlap", {}),
}
DISCRETE = {"algorithm.discrete": True}
ALGOS = {
    "sac": ("sac", "Pendulum-v1", {}),
    "td3": ("td3", "Pendulum-v1", {}),
    "discrete": ("sac", "CartPole-v1", DISCRETE),
}
CI = [("sac", "prioritised shards"), ("td3", "sync")]
ALL = [(algo, cell) for algo in ALGOS for cell in CELLS if (algo, cell) not in CI]


@pytest.mark.parametrize(("algo", "cell"), [*CI, *slowly(*ALL)])
def test_equal_seeds_are_equal_runs_and_so_is_a_killed_and_resumed_one(algo: str, cell: str, tmp_path: Path) -> None:
    name, env, own = ALGOS[algo]
    topology, settings = CELLS[cell]
    given: Any = (own | settings, env)
    whole, again = (train(name, tmp_path / out, *given, topology=topology) for out in ("whole", "again"))
    assert whole.result.weights_sha256 == again.result.weights_sha256
    assert whole.result.updates == pytest.approx((whole.result.steps - 100) * 4 / 16, rel=0.15)
    killed = tmp_path / "killed"
    pid = os.fork()
    if pid == 0:
        kill = [lambda status: status.steps < 350 or os.kill(os.getpid(), signal.SIGKILL)]
        train(name, killed, *given, topology=topology, callbacks=kill)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    resumed = raynforce.resume(killed, progress="quiet")
    assert resumed.result.weights_sha256 == whole.result.weights_sha256
    assert resumed.result.updates == whole.result.updates


@pytest.mark.parametrize(
    ("algo", "runtime"),
    [("sac", "process"), *slowly(("td3", "process"), ("discrete", "process"), *((a, "ray") for a in ALGOS))],
)
def test_every_runtime_gives_the_same_weights(
    algo: str, runtime: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    rays.needs(runtime, request)
    name, env, settings = ALGOS[algo]
    here, there = (train(name, tmp_path / r, settings, env, runtime=r) for r in ("inline", runtime))
    assert here.result.weights_sha256 == there.result.weights_sha256
    is_sound(there)


@pytest.mark.parametrize(("algo", "runtime"), slowly(*((a, r) for a in ALGOS for r in ("process", "ray"))))
def test_replay_holds_its_ratio_beside_other_processes(
    algo: str, runtime: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    rays.needs(runtime, request)
    name, env, settings = ALGOS[algo]
    run = train(name, tmp_path / "run", settings | SHARDS, env, runtime=runtime, topology="replay", steps=3000)
    is_sound(run)
    ratios = [line["replay/samples_per_insert"] for line in metrics(run.path) if "replay/samples_per_insert" in line]
    assert 3.4 <= ratios[-1] <= 4.0


QUICK = {
    "eval.every": 500,
    "eval.episodes": 20,
    "eval.final_episodes": 0,
    "algorithm.learning_starts": 200,
    "algorithm.learning_rate": 2e-3,
    "algorithm.batch_size": 32,
    "algorithm.samples_per_insert": 16,
    "algorithm.buffer_size": 10_000,
    "algorithm.gamma": 0.5,
    "network.hidden": [32],
}


@pytest.mark.parametrize("algo", ["sac", *slowly("td3")])
def test_images_are_learned_from(algo: str, tmp_path: Path) -> None:
    solve("critic_envs:Bright", algo, tmp_path / "run", steps=10_000, target=-1.2, settings=QUICK)


@pytest.mark.parametrize("algo", ["sac", "td3"])
def test_another_run_begins_with_its_weights(algo: str, tmp_path: Path) -> None:
    old = train(algo, tmp_path / "old", {}, steps=200)
    new = train(algo, tmp_path / "new", {"checkpoint.keep": 99}, steps=200, start_from=old.path / "last", seed=7)
    first = raynforce.load(new.path / "checkpoints" / "step_000000000000").version
    np.testing.assert_array_equal(first.params, raynforce.load(old.path, "last").version.params)


@pytest.mark.parametrize("algo", ["sac", "td3"])
def test_actions_stay_within_their_bounds_and_greedy_ones_repeat(algo: str, tmp_path: Path) -> None:
    policy = raynforce.load(train(algo, tmp_path / "run", {}, steps=200).path, "last")
    obs = np.array([1.0, 0.0, 3.0], np.float32)
    action = policy.act(obs)
    assert action.shape == (1,)
    assert -2 <= action[0] <= 2
    assert action == policy.act(obs)


@pytest.mark.parametrize("algo", ["sac", "td3"])
def test_a_module_of_your_own(algo: str, tmp_path: Path) -> None:
    settings = {"network.factory": "critic_envs:own_network", "algorithm.max_grad_norm": 1.0}
    one, two = (train(algo, tmp_path / out, settings, steps=300) for out in ("one", "two"))
    assert one.result.updates > 0
    assert one.result.weights_sha256 == two.result.weights_sha256


def test_samplers_of_the_actor_need_no_torch() -> None:
    from critic_nets import made

    assert made("sac")[0].acting().acts_with == made("td3")[0].acting().acts_with == "numpy"
