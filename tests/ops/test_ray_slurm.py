"""The batch script for Slurm, with `srun` and `scontrol` that do what Slurm's do, on this machine alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from fake_cluster import end_all_of

import raynforce
from raynforce.ops import cluster

ROOT = Path(raynforce.__file__).parents[1]
SRUN = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift; done
echo "$1 $2 $3" >> "$CALLS"
exec "$@"
"""
SCONTROL = "#!/bin/sh\necho one; echo two\n"


@pytest.mark.slow
def test_the_batch_script_runs_a_cluster_for_one_run_and_goes_on_with_it() -> None:
    folder = Path(tempfile.mkdtemp(prefix="rns-", dir="/tmp"))
    job = str(70_000 + os.getpid() % 10_000)
    try:
        tools = folder / "bin"
        tools.mkdir()
        for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
            (tools / name).write_text(text)
            (tools / name).chmod(0o755)
        cluster.init("slurm", str(folder / "files"), storage=str(folder / "runs"), python=sys.executable, max_workers=1)
        script = str(folder / "files" / "raynforce.sbatch")
        variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        variables |= {"HOME": str(folder), "PATH": f"{tools}:{os.environ['PATH']}", "CALLS": str(folder / "calls")}
        variables |= {"SLURM_JOB_ID": job, "SLURM_JOB_NODELIST": "x", "SLURM_CPUS_PER_TASK": "2"}
        words = ["ppo", "CartPole-v1", "--steps", "2000"]
        outputs = []
        for arguments in (words, words):
            done = subprocess.run(
                ["bash", script, *arguments],
                cwd=folder,
                env=variables,
                capture_output=True,
                text=True,
                timeout=200,
                check=False,
            )
            outputs.append(done.stdout + done.stderr)
            assert not (folder / ".raynforce" / f"slurm-{job}").exists(), "the token goes with the job"
        assert "trained: " in outputs[0], outputs[0]
        assert "samplers: 3" in (folder / "runs" / "raynforce" / "config.yaml").read_text()
        calls = (folder / "calls").read_text().splitlines()
        assert calls.count("ray start --head") == 2, calls
        assert len([call for call in calls if call.startswith("ray start --block")]) == 2, calls
        assert "resume" in outputs[1], outputs[1]
    finally:
        end_all_of(Path(f"/tmp/ray-{job}"))
        shutil.rmtree(f"/tmp/ray-{job}", ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
