"""Simulators through `--engine rllib`: batched by our side of the protocol in RLlib's own env runners."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from running import events

import raynforce

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
