"""Simulators through `--engine rllib`: batched by our side of the protocol in RLlib's own env runners."""

from __future__ import annotations

import ast
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from ray.rllib.env.env_context import EnvContext
from running import events

import raynforce
from raynforce import given
from raynforce.engines.rllib.building import build
from raynforce.engines.rllib.code import program
from raynforce.engines.rllib.runner import RunnerSimulators, context, image_space
from raynforce.engines.rllib.translation import translate
from raynforce.envs.vector import probe
from raynforce.experiment import resolve

SETTINGS = {
    "engine": "rllib",
    "preset": "none",
    "sampling.envs": 8,
    "sampling.fragment": 64,
    "algorithm.learning_rate": 2e-3,
    "algorithm.gamma": 0.98,
    "algorithm.minibatch_size": 256,
    "network.normalize_obs": False,
    "log_every": 500,
}


def train(cartpole: str, out: Path, steps: int, **more: Any) -> raynforce.Run:
    return raynforce.train(cartpole, "ppo", steps=steps, out=out, settings=SETTINGS, progress="quiet", **more)


def kill_in_runners(cartpole: str) -> int:
    """The simulators that env runners have started."""
    found = 0
    for process in psutil.process_iter(["cmdline", "ppid"]):
        words = process.info["cmdline"] or [""]
        if words[0] != os.path.abspath(cartpole):
            continue
        parents = " ".join(psutil.Process(process.info["ppid"]).cmdline())
        if "SingleAgentEnvRunner" in parents:
            os.kill(process.pid, signal.SIGKILL)
            found += 1
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("shared_ray")
def test_a_simulator_is_solved_though_it_is_killed_in_the_middle(cartpole: str, tmp_path: Path) -> None:
    killed: list[int] = []

    def kill(status: raynforce.Status) -> None:
        if status.steps >= 5_000 * (len(killed) + 1) and len(killed) < 3:
            killed.append(kill_in_runners(cartpole))

    run = train(cartpole, tmp_path / "run", 150_000, target=450.0, callbacks=[kill])
    assert killed == [1, 1, 1]
    told = [line for line in events(run.path, "fault") if line["role"] == "env runner 1"]
    assert len(told) == 3
    assert all("SIGKILL" in line["cause"] for line in told)
    assert run.result.solved_steps is not None


@pytest.mark.usefixtures("shared_ray")
def test_a_simulator_trains(cartpole: str, tmp_path: Path) -> None:
    run = train(cartpole, tmp_path / "run", 1_000)
    assert run.result.steps >= 1_000
    assert run.result.episodes > 10
    assert run.result.env_restarts == 0
    assert run.policy("last").act([0.0, 0.0, 0.1, 0.0]) in (0, 1)


def test_images_of_a_simulator_are_read_by_the_printed_script_as_by_the_engine(compiled: Callable[[str], str]) -> None:
    """From 0 to 1, with their channels last; the engine and RLlib's networks agree on the shape."""
    env = compiled("examples/cpp/pixels.cpp") + " --size 20"
    how = {"engine": "rllib", "topology": "sync", "sampling": {"envs": 3}}
    config, _ = resolve({"algo": "ppo", "env": env, **how})
    packed = given.pack(())
    found = translate(config, probe(env, {}))
    before, _, _ = program(found, config).partition('if __name__ == "__main__":')
    names: dict[str, Any] = {}
    exec(compile(ast.parse(before), "printed", "exec"), names)
    made = EnvContext({**context(config, packed, images=True), "num_envs": 3}, worker_index=1)
    ours, theirs = RunnerSimulators(made), names["images"]({"num_envs": 3})
    try:
        assert ours.single_observation_space == theirs.single_observation_space == image_space(found.image)
        assert ours.observation_space == theirs.observation_space
        for one in (ours, theirs):
            seen = [one.reset(seed=3)[0], one.step(np.zeros(3, np.int64))[0]]
            assert all(each in one.observation_space for each in seen)
            assert 0.0 < seen[0].max() <= 1.0
    finally:
        ours.close()
        theirs.close()
    assert not build(found, config, probe(env, {}), packed).conversion.kept
