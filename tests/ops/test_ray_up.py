"""`ray up` for real, with the files of `cluster init ssh`: over SSH to three hosts, a driver, a job, `ray down`."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pytest
from ssh_hosts import Hosts, missing

LAPTOP = 100
SAMPLERS = 3 * (os.cpu_count() or 1) - 1  # with the learner they fill all hosts, each of which counts our CPUs as its
DRIVER = """
import ray, socket, time
ray.init("auto", log_to_driver=False)
deadline = time.time() + 40
while sum(node["Alive"] for node in ray.nodes()) < 3 and time.time() < deadline:
    time.sleep(0.5)

@ray.remote(num_cpus=1)
class Where:
    def name(self):
        return socket.gethostname()

actors = [Where.options(scheduling_strategy="SPREAD").remote() for _ in range(6)]
print(sorted(set(ray.get([actor.name.remote() for actor in actors], timeout=20))))
print(ray.cluster_resources().get("learner"))
"""


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing() or "-")
def test_ray_up_from_our_files_then_a_driver_a_job_with_samplers_on_each_host_and_down() -> None:
    folder = Path(tempfile.mkdtemp(prefix="rup-", dir="/var/tmp"))
    try:
        with Hosts(folder, 3) as hosts:
            began = time.monotonic()
            made = hosts.on(
                LAPTOP,
                f"set -ex; mkdir -p ~/.ssh; cp {folder}/id_ed25519* ~/.ssh/; cd /tmp; {sys.executable} -m raynforce"
                f" cluster init ssh files --hosts {','.join(hosts.addresses)} --user root --python {sys.executable}"
                " --storage /tmp/shared; ray get-auth-token --generate >/dev/null && chmod 600 ~/.ray/auth_token;"
                f" {sys.executable} -m raynforce cluster check files/cluster.yaml",
            )
            assert made.returncode == 0, made.stdout
            assert "is fine" in made.stdout
            up = hosts.on(LAPTOP, "cd /tmp && ray up -y files/cluster.yaml", 180)
            assert up.returncode == 0, up.stdout
            driver = hosts.on(
                1, f". ~/.raynforce/node/env.sh; cat > /tmp/d.py <<'X'\n{DRIVER}\nX\npython /tmp/d.py", 180
            )
            logs = "grep -hv Adding /tmp/ray/session_latest/logs/monitor.log | cut -c1-400 | head -150"
            assert driver.returncode == 0, driver.stdout + hosts.on(1, logs).stdout
            lines = driver.stdout.splitlines()
            assert "['host1', 'host2', 'host3']" in lines, driver.stdout
            assert "100.0" in lines, "room for learners is on the head"

            asked = hosts.on(1, ". ~/.raynforce/node/env.sh; cd /tmp; python -m raynforce cluster status --json")
            assert asked.returncode == 0, asked.stdout
            status = json.loads(asked.stdout.splitlines()[-1])
            assert (status["token"], status["autoscaler"], status["dashboard"]) == (True, True, "127.0.0.1:8265")
            assert [node["hostname"] for node in status["nodes"]] == ["host1", "host2", "host3"]
            assert all(node["reach_ms"] < 1000 for node in status["nodes"])

            job = hosts.on(
                1,
                f". ~/.raynforce/node/env.sh; cd /tmp; python -m raynforce submit --runs /tmp/shared --id mine"
                f" --python {sys.executable} --json train ppo CartPole-v1 --runtime ray --address auto"
                f" --samplers {SAMPLERS} --steps 20000 --set ray.learner_resources.learner=1",
                300,
            )
            assert job.returncode == 0, job.stdout
            told = json.loads(job.stdout.splitlines()[-1])
            assert (told["status"], told["result"]["run"]) == ("succeeded", "/tmp/shared/mine")
            assert told["result"]["steps"] >= 20_000
            roles = json.loads((folder / "shared/mine/live.json").read_text())["roles"]
            found = {kind: {role["node"] for role in roles if role["kind"] == kind} for kind in ("learner", "sampler")}
            assert found == {"learner": {"host1"}, "sampler": {"host1", "host2", "host3"}}, roles

            wrong = f"RAY_AUTH_TOKEN=wrong RAY_AUTH_MODE=token {sys.executable} -m raynforce cluster status"
            refused = hosts.on(LAPTOP, f"cd /tmp; {wrong} --address {hosts.addresses[0]}:6379")
            assert (refused.returncode, refused.stdout.count("\n")) == (2, 1), refused.stdout
            assert "the token here is not the cluster's" in refused.stdout

            down = hosts.on(LAPTOP, "cd /tmp && ray down -y files/cluster.yaml", 180)
            assert down.returncode == 0, down.stdout
            left = hosts.on(1, "pgrep -c raylet; pgrep -c gcs_server; true")
            assert left.stdout.split() == ["0", "0"], left.stdout
            print(f"all of it: {time.monotonic() - began:.0f} s")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
