"""Engine rllib on a cluster of several nodes with a token: joined by a driver here, and as a job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from job_cluster import job_cluster

import raynforce

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(raynforce.__file__).parents[1]
POLES = """
import gymnasium, ray
from pathlib import Path


def make():
    if ray.is_initialized():
        Path(FOLDER, ray.get_runtime_context().get_node_id()).touch()
    return gymnasium.make("CartPole-v1")
"""
WORDS = ["train", "ppo", "my_poles:make", "--engine", "rllib", "--samplers", "3", "--steps", "3000"]
WORDS += ["--set", "eval.final_episodes=1", "--set", "eval.episodes=2", "--set", "sampling.fragment=64"]


def test_env_runners_are_on_every_node_and_find_my_module(
    no_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, code = tmp_path / "nodes", tmp_path / "code"
    nodes.mkdir()
    code.mkdir()
    (code / "my_poles.py").write_text(POLES.replace("FOLDER", repr(str(nodes))))
    monkeypatch.chdir(code)
    with job_cluster(2, 2) as cluster:
        for name, value in {**cluster.variables, "RAY_API_SERVER_ADDRESS": cluster.url}.items():
            monkeypatch.setenv(name, value)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "raynforce", *WORDS, "--runtime", "ray", "--address", cluster.address]
        joined = subprocess.run(
            [*command, "--out", str(tmp_path / "joined"), "--json"],
            env=environment, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert joined.returncode == 0, joined.stderr
        assert json.loads(joined.stdout.splitlines()[-1])["steps"] >= 3000
        assert len(list(nodes.iterdir())) == 2
        for found in nodes.iterdir():
            found.unlink()

        refused = subprocess.run(
            [*(word.replace("3", "50") if word == "3" else word for word in command), "--out", str(tmp_path / "many")],
            env=environment, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert refused.returncode == 2, refused.stderr
        assert len(refused.stderr.strip().splitlines()[-1:]) == 1
        assert not (tmp_path / "many").exists()
        wrong = subprocess.run(
            [*command, "--out", str(tmp_path / "wrong")],
            env={**environment, "RAY_AUTH_TOKEN": "beef" * 12}, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert wrong.returncode == 2, wrong.stderr
        assert "token" in wrong.stderr

        job = raynforce.submit([*WORDS, "--runtime", "ray"], runs=str(tmp_path / "runs"), id="mine")
        result = job.result(timeout=300)
        assert result["steps"] >= 3000
        assert len(list(nodes.iterdir())) == 2
    assert raynforce.load(tmp_path / "runs/mine").act([0.0, 0.0, 0.0, 0.0]) in (0, 1)
