"""What `cluster check` refuses, and the mistakes it finds: each with the fix, in one line."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import raynforce
from raynforce.cli import main
from raynforce.errors import UsageError
from raynforce.ops import cluster

ROOT = Path(raynforce.__file__).parents[1]
CRDS = Path(os.environ.get("RAYNFORCE_KUBERAY") or ROOT.parent / "shared" / "kuberay")
Change = Callable[[Any], Any]


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAYNFORCE_KUBERAY", raising=False)
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("c0ffee")
    token.chmod(0o600)


def changed(tmp_path: Path, target: str, name: str, change: Change, **options: Any) -> str:
    """A file of a target that is fine, with one thing changed."""
    needed: dict[str, Any] = {} if target in ("kubernetes", "slurm") else {"storage": "s3://bucket/runs"}
    needed |= {"project": "mine"} if target == "gcp" else {}
    cluster.init(target, str(tmp_path / "files"), **needed, **options)
    file = tmp_path / "files" / name
    document = yaml.safe_load(file.read_text())
    before = copy.deepcopy(document)
    change(document)
    assert document != before, "the change changes nothing"
    file.write_text(yaml.safe_dump(document, sort_keys=False))
    return str(file)


def put(path: str, value: Any) -> Change:
    def change(document: Any) -> None:
        *parents, last = path.split("/")
        for key in parents:
            document = document[int(key) if key.isdigit() else key]
        document[int(last) if last.isdigit() else last] = value

    return change


def drop(path: str) -> Change:
    def change(document: Any) -> None:
        *parents, last = path.split("/")
        for key in parents:
            document = document[int(key) if key.isdigit() else key]
        del document[last]

    return change


def said_instead(old: str, new: str) -> Change:
    """In all commands that start Ray."""

    def change(document: Any) -> None:
        for key in ("head_start_ray_commands", "worker_start_ray_commands"):
            document[key] = [command.replace(old, new) for command in document[key]]

    return change


SPOT = {"InstanceMarketOptions": {"MarketType": "spot"}, "InstanceType": "m6i.large"}
ALL = [{"FromPort": 8265, "ToPort": 8265, "IpProtocol": "tcp", "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}]
AWS: dict[str, Change] = {
    "the dashboard listens on all interfaces": said_instead("127.0.0.1", "0.0.0.0"),
    "head_start_ray_commands is missing, and Ray's default": drop("head_start_ray_commands"),
    "the head is on spot": put("available_node_types/head/node_config", SPOT),
    "workers may be of the head's type": put("available_node_types/head/max_workers", 2),
    "port 8265 is open to the world": put("provider/security_group/IpPermissions", ALL),
    "nodes have Ray 2.9.0, this installation has": put("docker/image", "rayproject/ray:2.9.0-py311"),
    "nodes have Python 3.9, this installation has": put("docker/image", "rayproject/ray:2.60.0-py39"),
    "the image's tag 'latest' moves": put("docker/image", "rayproject/ray:latest"),
    "containers are privileged": put("docker/run_options", ["--privileged"]),
    "docker publishes ports": put("docker/run_options", ["-p 8265:8265"]),
    "no storage is named": put("metadata/raynforce/storage", ""),
    "an access key is in plain text": put("setup_commands", ["export AWS_ACCESS_KEY_ID=AKIAIOSFODNN7EXAMPLE"]),
    "Ray's token is in plain text": put("setup_commands", ["export RAY_AUTH_TOKEN=0123456789abcdef"]),
    "a password is in plain text": put("setup_commands", ["mysql --password=hunter22222"]),
    "RAY_AUTH_MODE=disabled": put("setup_commands", ["export RAY_AUTH_MODE=disabled"]),
    "no token: whoever reaches a node": put("file_mounts", {}),
    "/nowhere, which is to go to ~/x, is not there": lambda document: document["file_mounts"].update(
        {"~/x": "/nowhere"}
    ),
    "Ray Client has a port of its own": said_instead("--port=6379", "--port=6379 --ray-client-server-port=10001"),
}


@pytest.mark.parametrize("what", AWS)
def test_mistakes_in_files_for_ray_up(what: str, tmp_path: Path) -> None:
    found = cluster.check(changed(tmp_path, "aws", "cluster.yaml", AWS[what]))
    assert [finding for finding in found.findings if finding.what.startswith(what)], found.findings
    assert all("\n" not in finding.line and finding.fix for finding in found.findings)


HEAD = "spec/headGroupSpec/template/spec"
TOKEN = [{"name": "RAY_AUTH_TOKEN", "value": "secret"}]
SELECT = {"cloud.google.com/gke-spot": "true"}
KUBERNETES: dict[str, Change] = {
    "no token: whoever reaches a pod": drop("spec/authOptions"),
    "no networkPolicy": drop("spec/networkPolicy"),
    "the head is reached from outside": put("spec/headGroupSpec/serviceType", "LoadBalancer"),
    "rayVersion is 2.9.0": put("spec/rayVersion", "2.9.0"),
    "group 'samplers' has minReplicas 9 above": put("spec/workerGroupSpecs/0/minReplicas", 9),
    "RAY_AUTH_TOKEN is in plain text": put(f"{HEAD}/containers/0/env", TOKEN),
    "head is in the host's network": put(f"{HEAD}/hostNetwork", True),
    "head is privileged": put(f"{HEAD}/containers/0/securityContext", {"privileged": True}),
    "the head is on spot": put(f"{HEAD}/nodeSelector", SELECT),
    "no storage is named": lambda document: (
        document["metadata"].pop("annotations"),
        drop(f"{HEAD}/volumes")(document),
    ),
    "nodes have Ray 2.9.0": put(f"{HEAD}/containers/0/image", "raynforce:1-ray2.9.0-py311"),
}


@pytest.mark.parametrize("what", KUBERNETES)
def test_mistakes_in_files_for_kuberay(what: str, tmp_path: Path) -> None:
    found = cluster.check(changed(tmp_path, "kubernetes", "raycluster.yaml", KUBERNETES[what]))
    assert [finding for finding in found.findings if finding.what.startswith(what)], found.findings


JOB: dict[str, Change] = {
    "a job that is stopped has 3 seconds": drop("spec/runtimeEnvYAML"),
    "a job whose cluster is lost is not started again": drop("spec/backoffLimit"),
}


@pytest.mark.parametrize("what", JOB)
def test_mistakes_in_jobs(what: str, tmp_path: Path) -> None:
    found = cluster.check(changed(tmp_path, "kubernetes", "rayjob.yaml", JOB[what]))
    assert [finding for finding in found.findings if finding.what.startswith(what)], found.findings


def test_mistakes_in_scripts(tmp_path: Path) -> None:
    cluster.init("slurm", str(tmp_path / "files"))
    file = tmp_path / "files" / "raynforce.sbatch"
    text = file.read_text().replace("RAY_AUTH_MODE=token ", "").replace("127.0.0.1", "0.0.0.0")
    file.write_text(text)
    whats = [finding.what for finding in cluster.check(str(file)).findings]
    assert whats == ["the dashboard listens on all interfaces", "no token: every user of the nodes can run code as you"]


def test_the_token_is_for_its_owner_alone(tmp_path: Path) -> None:
    cluster.init("aws", str(tmp_path / "files"), storage="s3://bucket/runs")
    file, token = str(tmp_path / "files" / "cluster.yaml"), tmp_path / ".ray" / "auth_token"
    token.chmod(0o644)
    assert [f.fix for f in cluster.check(file).findings] == ["chmod 600 ~/.ray/auth_token"]
    token.unlink()
    (missing,) = cluster.check(file).findings
    assert missing.level == "error"
    assert "ray get-auth-token --generate" in missing.fix


def test_rays_own_aliyun_is_told_of(tmp_path: Path) -> None:
    file = changed(tmp_path, "aliyun", "cluster.yaml", put("provider/type", "aliyun"))
    assert [f for f in cluster.check(file).findings if "Ray's wheel lacks the defaults of type aliyun" in f.what]


REFUSED: dict[str, tuple[str, str, Change]] = {
    "the file has no key 'max_wrokers' (did you mean 'max_workers'?)": ("aws", "cluster.yaml", put("max_wrokers", 1)),
    "available_node_types.head has no key 'node_confg'": (
        "aws",
        "cluster.yaml",
        put("available_node_types/head/node_confg", 1),
    ),
    "max_workers: 'many' is not of type 'integer'": ("aws", "cluster.yaml", put("max_workers", "many")),
    "provider has no 'region' (is 'regoin' meant to be it?)": (
        "aws",
        "cluster.yaml",
        put("provider", {"type": "aws", "regoin": "x"}),
    ),
    "node_config has no key 'InstanceTyp' (did you mean 'InstanceType'?)": (
        "aws",
        "cluster.yaml",
        put("available_node_types/worker/node_config/InstanceTyp", "m6i.large"),
    ),
    "node_config: 'machineType' is a required property": (
        "gcp",
        "cluster.yaml",
        drop("available_node_types/head/node_config/machineType"),
    ),
    "azure_arm_parameters has no key 'vmSise' (did you mean 'vmSize'?)": (
        "azure",
        "cluster.yaml",
        put("available_node_types/head/node_config/azure_arm_parameters/vmSise", "x"),
    ),
    "provider has no key 'cache_stoped_nodes' (did you mean 'cache_stopped_nodes'?)": (
        "aws",
        "cluster.yaml",
        put("provider/cache_stoped_nodes", True),
    ),
    "docker.run_options.0: 7 is not of type 'string'": ("aws", "cluster.yaml", put("docker/run_options", [7])),
    "metadata.raynforce: ['x'] is not of type": ("aws", "cluster.yaml", put("metadata/raynforce", ["x"])),
    "port_range: 'all' does not match": (
        "aliyun",
        "cluster.yaml",
        put("provider/security_group_rule/0/port_range", "all"),
    ),
    "workerGroupSpecs.0.minReplicas: 'two' is not of type": (
        "kubernetes",
        "raycluster.yaml",
        put("spec/workerGroupSpecs/0/minReplicas", "two"),
    ),
    "containers.0.env: {'A': 'b'} is not of type": (
        "kubernetes",
        "rayjob.yaml",
        put("spec/rayClusterSpec/headGroupSpec/template/spec/containers/0/env", {"A": "b"}),
    ),
    "workerGroupSpecs: 1 is not of type": ("kubernetes", "raycluster.yaml", put("spec/workerGroupSpecs", 1)),
    "featureGates.0: 'RayCronJob' is not of type 'object'": (
        "kubernetes",
        "operator-values.yaml",
        put("featureGates", ["RayCronJob"]),
    ),
    "`ray up` would refuse it: The specified global `max_workers`": (
        "aws",
        "cluster.yaml",
        put("available_node_types/worker/min_workers", 9),
    ),
    "spec has no key 'headGroup'": ("kubernetes", "raycluster.yaml", put("spec/headGroup", {})),
    "spec has no 'headGroupSpec'": ("kubernetes", "raycluster.yaml", drop("spec/headGroupSpec")),
    "kind 'RayClstr' (did you mean 'RayCluster'?)": ("kubernetes", "raycluster.yaml", put("kind", "RayClstr")),
    "spec.rayClusterSpec.workerGroupSpecs[0] has no key 'maxReplica'": (
        "kubernetes",
        "rayjob.yaml",
        put("spec/rayClusterSpec/workerGroupSpecs/0/maxReplica", 1),
    ),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_no_schema_takes_is_one_line_and_exit_code_2(
    said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, name, change = REFUSED[said]
    file = changed(tmp_path, target, name, change)
    assert main(["cluster", "check", file]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert said in err


@pytest.mark.skipif(not CRDS.is_dir(), reason=f"KubeRay's CRDs: no {CRDS}")
def test_with_crds_a_key_deep_inside_is_found(tmp_path: Path) -> None:
    change = put("spec/rayClusterSpec/headGroupSpec/template/spec/containers/0/imagePullPolic", "Always")
    file = changed(tmp_path, "kubernetes", "rayjob.yaml", change)
    cluster.check(file)  # the names of KubeRay's keys do not go so deep
    with pytest.raises(UsageError, match=r"containers\.0 has no key 'imagePullPolic' \(did you mean 'imagePullPolicy'"):
        cluster.check(file, crds=str(CRDS))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [", "is not YAML in line 1"),
        ("a: 1\na: 2\n", "line 2 has the key 'a' a second time"),
        ("just text", "holds no mapping"),
        ("a: 1", "is no cluster's file that is known here"),
        ("\x00", "is not YAML"),
    ],
)
def test_other_files_are_refused(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "other.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=re.escape(said)):
        cluster.check(str(file))


def test_a_file_that_is_not_there_and_crds_that_are_not(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read nowhere\.yaml: No such file"):
        cluster.check("nowhere.yaml")
    cluster.init("kubernetes", str(tmp_path / "files"))
    with pytest.raises(UsageError, match="has no CRD of RayCluster"):
        cluster.check(str(tmp_path / "files" / "raycluster.yaml"), crds=str(tmp_path))


def test_the_commands_answer_with_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "files")
    assert main(["cluster", "init", "--max-workers", "7", "aws", "--on-demand", "--json", folder]) == 0
    made = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert made["files"] == ["cluster.yaml", "node/env.sh", "node/requirements.txt"]
    assert made["next"][-1] == f"ray up -y {folder}/cluster.yaml"
    assert main(["cluster", "check", f"{folder}/cluster.yaml", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["ok"], found["kind"], [f["level"] for f in found["findings"]]) == (True, "ray up", ["warning"])


WRONG = {
    "unknown action 'innit' (did you mean 'init'?)": ["innit"],
    "which cluster?": ["init"],
    "which file?": ["check"],
    "--name is for cluster init": ["status", "--name", "x"],
    "--crds is for cluster check": ["init", "aws", "--crds", "x"],
    "--address is for cluster status": ["check", "x", "--address", "y"],
    "one argument too many": ["check", "x", "y"],
    "give --address 10.0.0.1:6379": ["status", "10.0.0.1:6379"],
    "unknown option '--max-wrkers' (did you mean '--max-workers'?)": ["init", "aws", "--max-wrkers", "1"],
}


@pytest.mark.parametrize("said", WRONG)
def test_wrong_words_are_one_line(said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", *WRONG[said]]) == 2
    assert said in capsys.readouterr().err


def test_the_command_line_reads_no_ray_until_it_is_asked(tmp_path: Path) -> None:
    import subprocess
    import sys

    program = "import sys; from raynforce.cli import main; main(['cluster', 'init', 'aws', sys.argv[1]])"
    program += "; print('ray' in sys.modules)"
    command = [sys.executable, "-c", program, str(tmp_path / "files")]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "False"
