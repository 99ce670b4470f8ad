"""A search on a cluster of two nodes: trials on both, and a directory that one of them does not see."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from job_cluster import JobCluster, job_cluster

import raynforce

pytest.importorskip("pyarrow", reason="Ray Tune needs it")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(raynforce.__file__).parents[1]
POLES = """
import gymnasium, ray
from pathlib import Path


def make():
    if ray.is_initialized():
        Path(FOLDER, ray.get_runtime_context().get_node_id()).touch()
    return gymnasium.make("CartPole-v1")
"""
WORDS = ["tune", "ppo", "my_poles:make", "--trials", "4", "--seeds", "1", "--steps", "2k", "--scheduler", "random"]
WORDS += ["--search", "algorithm.learning_rate=log(1e-4,1e-2)", "--cpus", "1"]
WORDS += ["--set", "eval.episodes=2", "--set", "eval.final_episodes=2"]


def tune(cluster: JobCluster, out: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **cluster.variables, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "raynforce", *WORDS, "--address", cluster.address, "--out", str(out), "--json"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)


def test_trials_are_on_both_nodes_and_a_path_that_one_does_not_see_is_refused(
    no_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, code, hidden = (tmp_path / name for name in ("nodes", "code", "hidden"))
    for folder in (nodes, code, hidden):
        folder.mkdir()
    (code / "my_poles.py").write_text(POLES.replace("FOLDER", repr(str(nodes))))
    monkeypatch.chdir(code)
    apart = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs none {hidden} && exec "$@"', "sh"]
    if subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("mounting is not possible here")
    with job_cluster(1) as cluster:
        cluster.start(cpus=1, within=apart)
        refused = tune(cluster, hidden / "search")
        assert refused.returncode == 2, refused.stderr
        (line,) = [line for line in refused.stderr.splitlines() if line.startswith("raynforce: ")]
        assert "is not seen by node" in line
        assert not (hidden / "search").exists()

        done = tune(cluster, tmp_path / "shared")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        assert [trial["status"] for trial in found["trials"]] == ["done"] * 4
        assert len(list(nodes.iterdir())) == 2
        assert all((tmp_path / "shared" / run / "result.json").is_file() for t in found["trials"] for run in t["runs"])
