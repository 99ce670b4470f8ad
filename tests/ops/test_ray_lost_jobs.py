"""Jobs that were lost with their cluster come back: the same run, from its storage, to the same result."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from job_cluster import JobCluster, free_ports, job_cluster

import raynforce
from raynforce.cli import main
from raynforce.errors import RaynforceError
from raynforce.ops.dashboard import Dashboard

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
ROOT = Path(raynforce.__file__).parents[1]
S3FS = find_spec("s3fs")
PACKAGES = [str(Path(S3FS.origin).parents[1])] if S3FS is not None and S3FS.origin else []
STEPS = 240_000  # some ten seconds, inline on a quiet machine
WORDS = ["train", "ppo", "CartPole-v1", "--steps", str(STEPS), "--samplers", "2", "--topology", "sync"]
WORDS += ["--set", "checkpoint.every=4000", "--set", "eval.final_episodes=1", "--set", "eval.episodes=2"]


@pytest.fixture
def surroundings(no_ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *PACKAGES]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache-here"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def use(cluster: JobCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**cluster.variables, "RAY_API_SERVER_ADDRESS": cluster.url}.items():
        monkeypatch.setenv(name, value)


def until_checkpoint(job: raynforce.Job, steps: int) -> None:
    """Wait until the run is so far."""
    deadline = time.monotonic() + 120
    while True:
        seen = [line for line in job.logs() if line.startswith("steps ")]
        if seen and int(seen[-1].split("/")[0].split()[1].replace(",", "")) >= steps:
            return
        assert job.status() in ("pending", "running"), list(job.logs())
        assert time.monotonic() < deadline, list(job.logs())
        time.sleep(0.3)


def undisturbed(folder: Path) -> str:
    settings = {"checkpoint.every": 4000, "eval.final_episodes": 1, "eval.episodes": 2, "sampling.samplers": 2}
    run = raynforce.train(
        "CartPole-v1", steps=STEPS, out=folder / "undisturbed", runtime="process", topology="sync", settings=settings
    )
    return run.result.weights_sha256


def test_the_head_of_three_nodes_is_killed_and_the_job_submitted_again_to_a_new_cluster(
    surroundings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*WORDS, "--runtime", "ray"]
    with job_cluster(2, 2, 2) as cluster:
        use(cluster, monkeypatch)
        job = raynforce.submit(words, runs=str(surroundings / "runs"), id="mine")
        until_checkpoint(job, 12_000)
        cluster.kill(0)
        monkeypatch.setattr("raynforce.ops.jobs.LOST", 3.0)
        with pytest.raises(RaynforceError, match="submit it again to go on"):
            job.wait()
        with pytest.raises(RaynforceError, match="submit it again to go on"):
            list(job.logs(follow=True))
        cluster.kill()
        for _ in range(3):
            cluster.start(cpus=2)
        use(cluster, monkeypatch)
        again = raynforce.submit(words, runs=str(surroundings / "runs"), id="mine")
        assert again.submission == "mine"  # this cluster knows nothing of the other's
        result = again.result(timeout=300)
        assert any(line.startswith("resuming") for line in again.logs())
    assert result["weights_sha256"] == undisturbed(surroundings)


def test_the_driver_is_killed_and_its_node_is_drained(surroundings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with job_cluster(0, 2, 2, shared=True) as cluster:
        use(cluster, monkeypatch)
        words = [*WORDS, "--runtime", "inline"]
        how: dict[str, Any] = {"runs": str(surroundings / "runs"), "id": "mine", "cpus": 2}
        job = raynforce.submit(words, **how)
        until_checkpoint(job, 8_000)
        os.kill(driver_of("runs/mine"), signal.SIGKILL)
        assert job.wait(60) == "failed"
        assert job.exit_code == 137

        second = raynforce.submit(words, **how)
        assert second.submission == "mine~2"
        until_checkpoint(second, 16_000)
        node = str(second.details["driver_node_id"] or raynforce.Job("mine").details["driver_node_id"])
        drain = [
            "drain-node",
            f"--address={cluster.address}",
            f"--node-id={node}",
            "--reason=DRAIN_NODE_REASON_PREEMPTION",
        ]
        drain += ["--reason-message=spot", "--deadline-remaining-seconds=60"]
        subprocess.run([sys.executable, "-m", "ray.scripts.scripts", *drain], check=True, timeout=60)
        assert second.wait(60) == "failed"
        assert second.exit_code == 143
        stopped = [json.loads(line) for line in (surroundings / "runs/mine/events.jsonl").read_text().splitlines()]
        assert any("SIGTERM" in json.dumps(event) for event in stopped)

        result = raynforce.submit(words, **how).result(timeout=300)  # on the node that is left
    assert result["weights_sha256"] == undisturbed(surroundings)


def test_the_entrypoint_of_a_rayjob_comes_back_as_its_backoff_limit_wants(
    surroundings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As KubeRay tries again: the same entrypoint under another id, on a cluster that knows nothing of the first."""
    runs = surroundings / "runs"
    init = ["cluster", "init", "kubernetes", "files", "--cpus", "1", "--max-workers", "2"]
    assert main(init) == 0
    spec = yaml.safe_load(Path("files/rayjob.yaml").read_text())["spec"]
    assert spec["backoffLimit"] >= 1
    small = " --topology sync --set checkpoint.every=4000 --set eval.final_episodes=1 --set eval.episodes=2 --json"
    entrypoint = spec["entrypoint"].replace("--target 475", f"--steps {STEPS}").replace(" /runs/", f" {runs}/") + small
    run = next(word for word in entrypoint.split() if word.startswith(str(runs)))
    with job_cluster(3) as cluster:
        use(cluster, monkeypatch)
        first = by_rest("first-try", entrypoint, spec)
        until_checkpoint(first, 12_000)
        cluster.kill()
        cluster.start(cpus=3)
        use(cluster, monkeypatch)
        second = by_rest("second-try", entrypoint, spec)
        result = second.result(timeout=300)
        assert any(line.startswith("resuming") for line in second.logs())
    assert result["run"] == run
    assert result["weights_sha256"] == undisturbed(surroundings)


def by_rest(id: str, entrypoint: str, spec: Mapping[str, Any]) -> raynforce.Job:
    environment = yaml.safe_load(spec["runtimeEnvYAML"])
    environment["env_vars"]["PYTHONPATH"] = os.environ["PYTHONPATH"]
    Dashboard().submit({"entrypoint": entrypoint, "submission_id": id, "runtime_env": environment})
    return raynforce.Job(id)


def until_saved(job: raynforce.Job, runs: Sequence[Path], steps: int) -> None:
    """Wait until each of these runs has a checkpoint of so many steps."""
    deadline = time.monotonic() + 180
    while not all(saved_step(run) >= steps for run in runs):
        assert job.status() in ("pending", "running"), list(job.logs())
        assert time.monotonic() < deadline, list(job.logs())
        time.sleep(0.2)


def saved_step(run: Path) -> int:
    try:
        return int(json.loads((run / "last/manifest.json").read_text())["step"])
    except (OSError, ValueError):
        return -1


def test_seeds_and_a_search_that_were_lost_with_their_cluster_go_on(
    surroundings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = surroundings / "runs"
    words = [*WORDS, "--runtime", "inline", "--seeds", "2"]
    search = ["tune", "ppo", "CartPole-v1", "--steps", "60k", "--trials", "2", "--seeds", "1", "--scheduler", "random"]
    search += ["--search", "algorithm.learning_rate=log(1e-4,1e-2)", "--set", "eval.episodes=2", "--cpus", "1"]
    with job_cluster(4) as cluster:
        use(cluster, monkeypatch)
        job = raynforce.submit(words, runs=str(runs), id="both")
        until_saved(job, [runs / "both/seed0", runs / "both/seed1"], 12_000)
        tuning = raynforce.submit(search, runs=str(runs), id="search")
        until_saved(tuning, [runs / "search/trial_000/seed0", runs / "search/trial_001/seed0"], 6_000)
        cluster.kill()
        cluster.start(cpus=4)
        use(cluster, monkeypatch)
        result = raynforce.submit(words, runs=str(runs), id="both").result(timeout=300)
        again = raynforce.submit(search, runs=str(runs), id="search")
        found = again.result(timeout=300)
        assert raynforce.submit(search, runs=str(runs), id="search").submission == again.submission
    for run in result["runs"]:
        assert (runs / "both" / f"seed{run['seed']}/events.jsonl").read_text().count('"started"') == 2
        settings = {"checkpoint.every": 4000, "eval.final_episodes": 1, "eval.episodes": 2, "sampling.samplers": 2}
        how: dict[str, Any] = {"steps": STEPS, "runtime": "inline", "topology": "sync", "settings": settings}
        alone = raynforce.train("CartPole-v1", seed=run["seed"], out=surroundings / f"alone{run['seed']}", **how)
        assert run["weights_sha256"] == alone.result.weights_sha256
    assert [trial["status"] for trial in found["trials"]] == ["done"] * 2
    assert all(trial["steps"] >= 60_000 for trial in found["trials"])
    assert sorted(path.name for path in (runs / "search").glob("trial_*")) == ["trial_000", "trial_001"]


def driver_of(run: str) -> int:
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = place.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"raynforce" in words and any(word.endswith(run.encode()) for word in words):
            return int(place.parent.name)
    raise AssertionError(f"no driver of {run}")


@pytest.fixture
def s3(surroundings: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket on a server of moto's."""
    if S3FS is None or find_spec("moto") is None:
        pytest.skip("needs s3fs and moto: pip install s3fs 'moto[server]'")
    (port,) = free_ports(1)
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    endpoint = f"http://127.0.0.1:{port}"
    secrets = {"AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "hush-hush", "AWS_ENDPOINT_URL": endpoint}
    for name, value in {**secrets, "AWS_DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    try:
        import s3fs  # type: ignore[import-not-found]

        deadline = time.monotonic() + 60
        while True:
            try:
                s3fs.S3FileSystem(skip_instance_cache=True).mkdir("bucket")
                break
            except Exception:
                assert time.monotonic() < deadline
                time.sleep(0.5)
        yield "s3://bucket/runs"
    finally:
        server.terminate()
        server.wait(timeout=30)


@pytest.mark.parametrize("store", ["file", "s3"])
def test_a_run_at_a_url_is_killed_resumed_and_evaluated_from_elsewhere(
    store: str, request: pytest.FixtureRequest, surroundings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    runs = f"file://{surroundings}/store"
    if store == "s3":
        runs = request.getfixturevalue("s3")
        names = ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION"]
        names.append("PYTHONPATH")  # the packages need not be installed
    with job_cluster(2) as cluster:
        use(cluster, monkeypatch)
        job = raynforce.submit([*WORDS, "--runtime", "inline"], runs=runs, id="mine", env=names)
        until_checkpoint(job, 12_000)
        cluster.kill()
        monkeypatch.setenv("XDG_CACHE_HOME", str(surroundings / "cache-of-another-machine"))
        cluster.start(cpus=2)
        use(cluster, monkeypatch)
        again = raynforce.submit([*WORDS, "--runtime", "inline"], runs=runs, id="mine", env=names)
        result = again.result(timeout=300)
        assert any(line.startswith("resuming") for line in again.logs())
        assert "hush" not in json.dumps(again.details)
        evaluated = raynforce.submit(["eval", f"{runs}/mine", "--episodes", "3"], env=names).result(timeout=120)
        assert evaluated["episodes"] == 3
    returns, _ = raynforce.evaluate(f"{runs}/mine", episodes=3)  # from here, without the cluster
    assert len(returns) == 3
    assert result["weights_sha256"] == undisturbed(surroundings)
