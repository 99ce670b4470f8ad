"""Jobs on a cluster with dashboard and token: submitted, followed, stopped, listed, awaited; with curl alone too."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from job_cluster import TOKEN, JobCluster, job_cluster

import raynforce
from raynforce.cli import main
from raynforce.errors import RaynforceError, UsageError
from raynforce.ops.dashboard import Dashboard, Taken

ROOT = Path(raynforce.__file__).parents[1]
SMALL = ["--runtime", "inline", "--topology", "sync", "--set", "eval.final_episodes=1", "--set", "eval.episodes=2"]
TINY = ["train", "ppo", "my_poles:make", "--steps", "512", *SMALL]
SECONDS_LONG = ["train", "ppo", "my_poles:make", "--steps", "12000", "--set", "checkpoint.every=2000", *SMALL]
POLES = """
import os, time
import gymnasium

print(sorted(name for name in os.environ if name.startswith(("AWS_SECRET", "POLE_"))))


class Slow(gymnasium.Wrapper):
    def step(self, action):
        time.sleep(2e-3 if os.path.exists("HOLD") else 1e-4)
        return super().step(action)


def make():
    return Slow(gymnasium.make("CartPole-v1"))
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[JobCluster]:
    with job_cluster() as found:
        yield found


@dataclass
class Answer:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return found

    def refused(self, *words: str) -> None:
        assert self.code == 2, self
        assert len(self.err.strip().splitlines()) == 1, self.err
        for word in words:
            assert word in self.err


@pytest.fixture
def here(no_ray: None, cluster: JobCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with a module of their own; the token is known."""
    for name, value in cluster.variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", cluster.url)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "my_poles.py").write_text(POLES.replace("HOLD", str(tmp_path / "hold")))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


@pytest.fixture
def cli(here: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    def call(*words: str) -> Answer:
        capsys.readouterr()
        code = main(words)
        return Answer(code, *capsys.readouterr())

    return call


Cli = Callable[..., Answer]


def test_submit_gives_what_a_local_run_gives_and_twice_is_one_run(
    cli: Cli, here: Path, cluster: JobCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush")
    monkeypatch.setenv("POLE_WEIGHT", "heavy")
    local = raynforce.train("my_poles:make", steps=512, out=here / "local", runtime="inline", topology="sync")
    runs = str(here / "runs")
    done = cli("submit", "--runs", runs, "--json", "--env", "POLE_WEIGHT", "--grace", "7", *TINY)
    assert done.code == 0, done.err
    assert "/512 100%" in done.err
    assert "finished: all steps are done" in done.err
    told = done.json
    assert told["result"]["weights_sha256"] == local.result.weights_sha256
    assert (told["status"], told["exit_code"]) == ("succeeded", 0)
    assert told["run"] == told["result"]["run"] == f"{runs}/{told['job']}"

    assert "\n['POLE_WEIGHT']\n" in done.err  # variables travel only if they are named
    details = json.loads(curl(cluster, f"/api/jobs/{told['submission']}")[0])
    assert set(details["metadata"]) == {"tool", "command", "run"}
    assert details["runtime_env"]["env_vars"] == {"POLE_WEIGHT": "heavy", "RAY_JOB_STOP_WAIT_TIME_S": "7"}
    assert "hush" not in json.dumps(details)

    again = cli("submit", "--runs", runs, "--json", *TINY).json
    assert (again["submission"], again["result"]) == (told["submission"], told["result"])
    other = [word.replace("512", "600") for word in TINY]
    cli("submit", "--runs", runs, "--id", told["job"], *other).refused("taken by another command", "--id")

    listed = cli("jobs", "--json").json["jobs"]
    assert [job["submission"] for job in listed].count(told["job"]) == 1
    assert told["job"] in cli("jobs").out
    assert cli("jobs", "status", told["job"], "--json").json["result"] == told["result"]
    assert "finished: all steps are done" in cli("jobs", "logs", told["job"]).out
    assert cli("jobs", "wait", told["job"]).code == 0
    assert cli("jobs", "stop", told["job"]).out.strip().endswith("was succeeded already")
    cli("jobs", "status", told["job"][:-1]).refused("there is no job", "did you mean")


def test_ctrl_c_detaches_stop_saves_and_submitting_again_goes_on(cli: Cli, here: Path) -> None:
    (here / "hold").touch()  # it shall not be through before it is stopped
    words = ["submit", "--runs", str(here / "runs"), "--id", "mine", *SECONDS_LONG]
    follower = subprocess.Popen(
        [sys.executable, "-m", "raynforce", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert follower.stdout is not None
    seen = ""
    for line in follower.stdout:
        seen += line
        if line.startswith("steps "):
            break
    follower.send_signal(signal.SIGINT)
    seen += follower.stdout.read()
    follower.stdout.close()
    assert follower.wait(timeout=120) == 130, seen
    assert "detached: job mine goes on" in seen
    assert "jobs logs mine --follow" in seen

    running = cli("jobs", "status", "mine", "--json").json
    assert (running["status"], running["exit_code"], running["result"]) == ("running", None, None)
    cli("submit", "--runs", str(here / "runs"), "--id", "mine", *TINY).refused("running with another command")
    with pytest.raises(RaynforceError, match=r"has not ended within 0\.1 s"):
        raynforce.Job("mine").wait(timeout=0.1)
    stopped = cli("jobs", "stop", "mine", "--json").json
    assert (stopped["status"], stopped["exit_code"]) == ("stopped", 143)
    assert stopped["result"]["stopped"] == "SIGTERM"
    assert stopped["result"]["steps"] < 12000
    assert (here / "runs/mine/last").exists()
    assert cli("jobs", "wait", "mine").code == 143

    (here / "hold").unlink()
    job = raynforce.submit(SECONDS_LONG, runs=str(here / "runs"), id="mine")
    assert (job.id, job.submission) == ("mine", "mine~2")
    result = job.result(timeout=180)
    local = raynforce.train(
        "my_poles:make",
        steps=12000,
        out=here / "local",
        runtime="inline",
        topology="sync",
        settings={"eval.final_episodes": 1, "eval.episodes": 2, "checkpoint.every": 2000},
    )
    assert result["weights_sha256"] == local.result.weights_sha256
    assert any("resuming" in line for line in job.logs())


@pytest.mark.slow
def test_two_that_submit_at_the_same_moment_have_one_job(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both, send, taken = threading.Barrier(2, timeout=60), Dashboard.submit, []

    def together(self: Dashboard, request: Mapping[str, Any]) -> str:
        both.wait()  # neither has seen a job of the other
        try:
            return send(self, request)
        except Taken:
            taken.append(request["submission_id"])
            raise

    monkeypatch.setattr(Dashboard, "submit", together)
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(raynforce.submit, TINY, runs=str(here / "runs"), id="both") for _ in range(2)]
        first, second = (call.result(timeout=180) for call in calls)
    assert taken == ["both"]
    assert first.submission == second.submission == "both"
    assert first.result(timeout=180) == second.result(timeout=180)
    assert [job.id for job in raynforce.jobs()].count("both") == 1


@pytest.mark.slow
def test_two_jobs_of_one_run_are_kept_apart_by_its_lock(cli: Cli, here: Path, cluster: JobCluster) -> None:
    (here / "hold").touch()
    job = raynforce.submit(SECONDS_LONG, runs=str(here / "runs"), id="held")
    until = time.monotonic() + 180
    while not any(line.startswith("steps ") for line in job.logs()):
        assert time.monotonic() < until
        time.sleep(0.1)
    entrypoint = f"exec python -m raynforce {shlex.join(SECONDS_LONG)} --out {here / 'runs/held'} --resume --json"
    environment = {"env_vars": {"PYTHONPATH": f"{ROOT}:{Path.cwd()}"}}
    body = json.dumps({"entrypoint": entrypoint, "submission_id": "intruder", "runtime_env": environment})
    post = ["-X", "POST", "-H", "Content-Type: application/json", "-d", body]
    assert curl(cluster, "/api/jobs/", *post)[1] == 200
    intruder = raynforce.Job("intruder")
    assert intruder.wait(120) == "failed"
    assert intruder.exit_code == 2
    with pytest.raises(UsageError, match="in use by process"):
        intruder.result()
    assert job.status() == "running"
    (here / "hold").unlink()
    assert job.result(timeout=120)["steps"] >= 12000


def test_what_the_cluster_cannot_import_is_one_line_and_leaves_no_run(cli: Cli, here: Path) -> None:
    words = ["submit", "--runs", str(here / "runs"), "train", "ppo", "not_there:make", *SMALL]
    cli(*words).refused("no module named 'not_there'")
    assert not (here / "runs").exists()
    with pytest.raises(UsageError, match="not_there"):
        raynforce.jobs()[0].result(timeout=180)
    python = cli("submit", "--runs", str(here / "runs"), "--python", "no-such-python", *TINY)
    python.refused("could not start", "--python")


def curl(cluster: JobCluster, path: str, *words: str, token: str | None = TOKEN) -> tuple[str, int]:
    """Body and status of a request, made by curl."""
    auth = [] if token is None else ["-H", f"Authorization: Bearer {token}"]
    command = ["curl", "-sS", "-w", "\n%{http_code}", *auth, *words, f"{cluster.url}{path}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    body, _, code = done.stdout.rpartition("\n")
    return body, int(code)


def test_curl_alone_does_the_same(here: Path, cluster: JobCluster) -> None:
    out = here / "runs/by-curl"
    entrypoint = f"exec python -m raynforce {shlex.join(TINY)} --out {out} --resume --json"
    environment = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "300", "PYTHONPATH": f"{ROOT}:{Path.cwd()}"}}
    body = json.dumps({"entrypoint": entrypoint, "submission_id": "by-curl", "runtime_env": environment})
    post = ["-X", "POST", "-H", "Content-Type: application/json", "-d", body]
    assert curl(cluster, "/api/jobs/", *post, token=None)[1] == 401
    assert curl(cluster, "/api/jobs/", *post, token="wrong")[1] == 403
    answer, code = curl(cluster, "/api/jobs/", *post)
    assert (json.loads(answer)["submission_id"], code) == ("by-curl", 200)
    assert curl(cluster, "/api/jobs/", *post)[1] == 500  # it is there already
    deadline = time.monotonic() + 180
    while (details := json.loads(curl(cluster, "/api/jobs/by-curl")[0]))["status"] in ("PENDING", "RUNNING"):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert (details["status"], details["driver_exit_code"]) == ("SUCCEEDED", 0)
    log = json.loads(curl(cluster, "/api/jobs/by-curl/logs")[0])["logs"]
    result = json.loads(log.strip().splitlines()[-1])
    assert result["run"] == str(out)
    assert result == raynforce.Job("by-curl").result()  # our own commands know it too
    assert json.loads(curl(cluster, "/api/jobs/by-curl/stop", "-X", "POST")[0]) == {"stopped": False}
    assert "by-curl" in [job["submission_id"] for job in json.loads(curl(cluster, "/api/jobs/")[0])]
    assert curl(cluster, "/api/jobs/no-such-job")[1] == 404


def test_a_token_that_is_wrong_missing_or_expired(cli: Cli, monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    words = ["submit", "--runs", str(here / "runs"), *TINY]
    before = len(raynforce.jobs())
    monkeypatch.setenv("RAY_AUTH_TOKEN", "beef" * 12)
    for command in (words, ["jobs"], ["jobs", "status", "x"]):
        cli(*command).refused("refused the token", "wrong, or has expired", "RAY_AUTH_TOKEN_PATH")
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    cli(*words).refused("wants a token", "there is none here")
    monkeypatch.delenv("RAY_AUTH_MODE")
    cli(*words).refused("wants a token", "there is none here")
    file = here / "token"
    file.write_text(f"{TOKEN}\n")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(file))
    assert len(raynforce.jobs()) == before  # it is found there, and nothing was submitted
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(here / "nowhere"))
    cli(*words).refused("RAY_AUTH_TOKEN_PATH", "cannot be read")


def test_a_folder_too_large_is_named_before_anything_is_sent(
    cli: Cli, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raynforce.runtimes.ray import shipping

    monkeypatch.setattr(shipping, "LARGEST", 3 << 20)
    Path("data").mkdir()
    Path("data/maps.bin").write_bytes(bytes(4 << 20))
    before = len(raynforce.jobs())
    words = ["submit", "--runs", str(here / "runs")]
    cli(*words, *SECONDS_LONG).refused("more than 3 MB", "data", "4 MB")
    Path(".gitignore").write_text("*.log\n")
    cli(*words, "--working-dir", ".", *TINY).refused("more than 3 MB", "data", "4 MB")
    assert len(raynforce.jobs()) == before


@pytest.mark.slow
def test_a_pipeline_is_a_job_and_its_steps_are_done_once(cli: Cli, here: Path) -> None:
    train = {"algo": "ppo", "env": "my_poles:make", "steps": 256, "runtime": "inline", "topology": "sync"}
    train |= {"settings": {"eval.episodes": 2, "eval.final_episodes": 1}}
    steps = {
        "train": train,
        "evaluate": {"needs": "train", "episodes": 3},
        "promote": {"needs": "evaluate", "to": str(here / "registry")},
        "export": {"needs": "promote", "to": "numpy", "out": str(here / "exported")},
    }
    Path("mine.yaml").write_text(json.dumps({"steps": steps}))
    done = cli("submit", "--runs", str(here / "runs"), "--json", "pipeline", "mine.yaml")
    assert done.code == 0, done.err
    assert [step["status"] for step in done.json["result"]["steps"]] == ["ran"] * 4
    assert done.json["run"] == str(here / "runs" / "pipeline-mine")
    assert (here / "exported" / "predict.py").is_file()
    assert [entry.number for entry in raynforce.registry(here / "registry").entries] == [1]
    again = cli("submit", "--runs", str(here / "runs"), "--json", "pipeline", "mine.yaml", "--from", "export")
    assert [step["status"] for step in again.json["result"]["steps"]] == ["done", "done", "done", "ran"]
