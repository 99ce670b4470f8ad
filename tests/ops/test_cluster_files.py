"""What `cluster init` writes is valid for who reads it next, safe, and has what was asked for."""

from __future__ import annotations

import importlib
import os
import platform
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

import raynforce
from raynforce.errors import UsageError
from raynforce.imports import load_object
from raynforce.ops import cluster
from raynforce.ops.cluster import commented
from raynforce.ops.cluster.options import TAKES, cpus_of

ROOT = Path(raynforce.__file__).parents[1]
FOLDER = Path(os.environ.get("RAYNFORCE_KUBERAY") or ROOT.parent / "shared" / "kuberay")
CRDS = pytest.param(str(FOLDER), marks=pytest.mark.skipif(not FOLDER.is_dir(), reason=f"KubeRay's CRDs: no {FOLDER}"))
NEEDED: dict[str, dict[str, Any]] = {"gcp": {"project": "mine"}, "ssh": {"hosts": "10.0.0.1,10.0.0.2,node3"}}
TYPES = {"aws": "c6i.4xlarge", "gcp": "c2-standard-16", "azure": "Standard_F16s_v2", "aliyun": "ecs.g7.4xlarge"}
SAMPLE: dict[str, Any] = {
    "name": "mine-2",
    "cpus": 16,
    "min_workers": 2,
    "max_workers": 9,
    "gpus": 1,
    "image": "registry.example.com/a/b:1",
    "machine_image": "img-1",
    "region": "eu-central-1",
    "project": "other",
    "hosts": "10.1.0.1",
    "user": "me",
    "ssh_key": "~/.ssh/other",
    "python": "/opt/env/bin/python",
    "on_demand": True,
}


def value(target: str, option: str) -> Any:
    if option in ("instance", "head_instance"):
        return TYPES[target]
    if option == "storage":
        return {"slurm": "/shared/runs", "kubernetes": "pvc:mine"}.get(target, "s3://bucket/runs")
    if option == "machine_image" and target == "azure":
        return "A:b:c:latest"
    return SAMPLE[option]


def cases() -> Iterator[tuple[str, str]]:
    for target, options in TAKES.items():
        yield target, ""
        for option in options.split():
            yield target, option
        yield target, "all"


def given(target: str, option: str) -> dict[str, Any]:
    chosen = {"": [], "all": TAKES[target].split()}.get(option, [option])
    values = NEEDED.get(target, {}) | {name: value(target, name) for name in chosen}
    if "gpus" in values and target in ("gcp", "aliyun"):
        values["machine_image"] = value(target, "machine_image")
    return values


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home with a token, and no CRDs but those that a test asks for."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAYNFORCE_KUBERAY", raising=False)
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("c0ffee")
    token.chmod(0o600)


def written(target: str, option: str, folder: Path) -> dict[str, str]:
    made = cluster.init(target, str(folder), **given(target, option))
    return {name: (folder / name).read_text() for name in made.files}


@pytest.mark.parametrize(("target", "option"), list(cases()))
def test_every_option_of_every_target_is_valid_and_has_no_mistake(target: str, option: str, tmp_path: Path) -> None:
    files = written(target, option, tmp_path / "new")
    for name in files:
        if name.endswith((".yaml", ".sbatch")):
            found = cluster.check(str(tmp_path / "new" / name))
            levels = {finding.what: finding.level for finding in found.findings}
            allowed = {"port 22 (SSH) is open to the world; keys alone protect it"} if target == "aliyun" else set()
            allowed |= {what for what in levels if "no storage is named" in what and option not in ("storage", "all")}
            assert {what for what, level in levels.items() if level != "note"} <= allowed, found.findings
    text = "\n".join(files.values())
    if option not in ("", "all", "on_demand", "gpus", "cpus", "min_workers", "max_workers", "hosts"):
        for part in str(given(target, option)[option]).removeprefix("pvc:").removesuffix("/bin/python").split(":"):
            assert part in text, f"{option} is nowhere in the files"
    assert "--dashboard-host=0.0.0.0" not in text
    assert not re.search(r"[0-9a-f]{32}", text), "a secret"


@pytest.mark.parametrize("folder", [CRDS])
@pytest.mark.parametrize("option", ["", *TAKES["kubernetes"].split(), "all"])
def test_kubernetes_files_are_valid_for_kuberay(option: str, folder: str, tmp_path: Path) -> None:
    made = cluster.init("kubernetes", str(tmp_path / "new"), **given("kubernetes", option))
    kinds = []
    for name in made.files:
        if name.startswith("ray"):
            found = cluster.check(str(tmp_path / "new" / name), crds=folder)
            assert found.schema == "KubeRay's CRDs"
            kinds.append(found.kind)
    assert sorted(kinds) == ["RayCluster", "RayCronJob", "RayJob", "RayService"]


@pytest.mark.parametrize("folder", [CRDS])
def test_operator_values_are_values_of_the_chart(folder: str, tmp_path: Path) -> None:
    written("kubernetes", "", tmp_path / "new")
    ours = yaml.safe_load((tmp_path / "new" / "operator-values.yaml").read_text())
    chart = yaml.safe_load(Path(folder, "operator-values.yaml").read_text())
    assert set(ours) <= set(chart)
    assert {gate["name"] for gate in ours["featureGates"]} == {gate["name"] for gate in chart["featureGates"]}


@pytest.mark.parametrize("option", ["", "gpus", "storage", "on_demand"])
def test_pods_and_claims_are_valid_for_kubernetes(option: str, tmp_path: Path) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    version = validate.latest_version()
    files = written("kubernetes", option, tmp_path / "new")
    pods = 0
    for name, text in files.items():
        for document in yaml.safe_load_all(text) if name.endswith(".yaml") else ():
            if document.get("kind") == "PersistentVolumeClaim":
                validate.validate(document, version, strict=True)
            for pod in _pods(document):
                about = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod}
                validate.validate(about, version, strict=True)
                pods += 1
    assert pods == 8


def _pods(document: Any) -> Iterator[Any]:
    if isinstance(document, dict):
        if isinstance(document.get("template"), dict):
            yield document["template"]["spec"]
            return
        for inner in document.values():
            yield from _pods(inner)
    elif isinstance(document, list):
        for inner in document:
            yield from _pods(inner)


@pytest.mark.parametrize("target", ["aws", "gcp", "azure", "aliyun"])
def test_clouds_need_no_defaults_of_ray_and_keep_the_head(target: str, tmp_path: Path) -> None:
    from ray.autoscaler._private.providers import MINIMAL_EXTERNAL_CONFIG, _get_default_config

    config = yaml.safe_load(written(target, "", tmp_path / "new")["cluster.yaml"])
    defaults = MINIMAL_EXTERNAL_CONFIG if target == "aliyun" else _get_default_config(config["provider"])
    assert set(defaults) - {"head_node", "worker_nodes"} <= set(config), "Ray would fill these in"
    head, worker = (config["available_node_types"][name]["node_config"] for name in ("head", "worker"))
    spot = re.compile("spot|preemptible", re.IGNORECASE)
    assert spot.search(str(worker))
    assert not spot.search(str(head).replace("'SpotStrategy': 'NoSpot'", ""))
    assert "learner" in config["available_node_types"]["head"]["resources"]
    assert "learner" not in config["available_node_types"]["worker"]["resources"]


def test_versions_are_those_of_this_installation(tmp_path: Path) -> None:
    ray, python = metadata.version("ray"), "".join(platform.python_version_tuple()[:2])
    aws = written("aws", "", tmp_path / "aws")
    assert yaml.safe_load(aws["cluster.yaml"])["docker"]["image"] == f"rayproject/ray:{ray}-py{python}-cpu"
    assert f"ray[default]=={ray}" in aws["node/requirements.txt"]
    kubernetes = written("kubernetes", "", tmp_path / "kubernetes")
    assert yaml.safe_load(kubernetes["raycluster.yaml"])["spec"]["rayVersion"] == ray
    assert f"FROM rayproject/ray:{ray}-py{python}-cpu" in kubernetes["Dockerfile"]
    assert (
        f'"{ray} {platform.python_version().rpartition(".")[0]}"'
        in written("slurm", "", tmp_path / "s")["raynforce.sbatch"]
    )


def test_the_last_of_the_next_commands_is_of_who_makes_the_cluster(tmp_path: Path) -> None:
    for target, start in {"aws": "ray up", "ssh": "ray up", "kubernetes": "kubectl apply", "slurm": "sbatch"}.items():
        made = cluster.init(target, str(tmp_path / target), **NEEDED.get(target, {}))
        assert made.next[-1].startswith(start)


@pytest.mark.parametrize("target", ["slurm", "ssh", "aws"])
def test_scripts_are_shell(target: str, tmp_path: Path) -> None:
    files = written(target, "all" if target == "slurm" else "", tmp_path / "new")
    scripts = [text for name, text in files.items() if name.endswith((".sh", ".sbatch"))]
    if "cluster.yaml" in files:
        config = yaml.safe_load(files["cluster.yaml"])
        scripts += [command for key, commands in config.items() if key.endswith("_commands") for command in commands]
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


WRONG = {
    "unknown target 'awz' (did you mean 'aws'?): known are aws": ("awz", {}),
    "--min-workers 5 is more than --max-workers 4": ("aws", {"min_workers": "5"}),
    "--max-workers many is not a number from 1 to 10,000": ("aws", {"max_workers": "many"}),
    "--hosts is not for aws": ("aws", {"hosts": "10.0.0.1"}),
    "ssh needs the addresses of your machines": ("ssh", {}),
    "gcp needs the project": ("gcp", {}),
    "--name 'A b' is not a name": ("aws", {"name": "A b"}),
    "--image 'a; rm -rf /' is not a container image": ("aws", {"image": "a; rm -rf /"}),
    "--storage '$(id)' is not one of": ("slurm", {"storage": "$(id)"}),
    "--storage '/folder' is not one of: a URL": ("aws", {"storage": "/folder"}),
    "how many CPUs odd has does not follow": ("aws", {"instance": "odd"}),
    "'10.0.0.1;id' is not an address": ("ssh", {"hosts": "10.0.0.1;id"}),
    "names a machine twice": ("ssh", {"hosts": "10.0.0.1,10.0.0.1"}),
    "gcp with --gpus needs a machine image": ("gcp", {"project": "p", "gpus": 1}),
    "is not PUBLISHER:OFFER:SKU:VERSION": ("azure", {"machine_image": "x"}),
    "unknown option 'regio' (did you mean 'region'?)": ("aws", {"regio": "x"}),
}


@pytest.mark.parametrize("said", WRONG)
def test_wrong_options_are_one_line_and_write_nothing(said: str, tmp_path: Path) -> None:
    target, options = WRONG[said]
    with pytest.raises(UsageError, match=re.escape(said)) as raised:
        cluster.init(target, str(tmp_path / "new"), **options)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "new").exists()


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "mine").touch()
    with pytest.raises(UsageError, match="is there already"):
        cluster.init("aws", str(tmp_path / "new"))
    assert os.listdir(tmp_path / "new") == ["mine"]


def test_cpus_follow_from_the_names_of_instances() -> None:
    known = {
        "aws": {"m6i.large": 2, "c7g.xlarge": 4, "m6i.24xlarge": 96},
        "gcp": {"n2-standard-8": 8, "e2-highcpu-16": 16},
    }
    known |= {"azure": {"Standard_D8s_v5": 8, "Standard_NC24ads_A100_v4": 24}, "aliyun": {"ecs.c7.2xlarge": 8}}
    assert {t: {i: cpus_of(t, i) for i in instances} for t, instances in known.items()} == known


def test_yaml_survives_every_value() -> None:
    odd: dict[Any, Any] = {
        "a": "yes",
        "b": "1e3",
        "c": "- x: #",
        "d": "a\nb\n",
        "e": " a\n b\n",
        "f": [],
        "g": [{}, [1]],
    }
    odd |= {
        commented.Note("said\nabove"): None,
        "h": [{"x": 1, commented.Note("inner"): None, "y": "'\"\\"}],
        "i": None,
    }
    odd |= {"0123": "é…", "j": "a\n\nb\n", "k": "\t", "l": "a\nb", "m": {"n": {"o": "p: q"}}, "on": "~"}
    text = commented.text(odd, above="two\nlines")
    assert yaml.safe_load(text) == commented.plain(odd)
    assert "# inner" in text


def test_the_service_names_an_application_that_is_there(tmp_path: Path) -> None:
    """Its builder takes the arguments of the file, and has the deployments that the file sets."""
    pytest.importorskip("ray.serve")
    found = yaml.safe_load(written("kubernetes", "", tmp_path / "new")["rayservice.yaml"])
    (application,) = yaml.safe_load(found["spec"]["serveConfigV2"])["applications"]
    made = load_object(application["import_path"])(application["args"])
    service, (keeper, *_) = made._bound_deployment, made._bound_deployment.init_args
    assert {d["name"] for d in application["deployments"]} == {service.name, keeper._bound_deployment.name}
    assert "RAYNFORCE_SERVE_TOKEN_FILE" in application["runtime_env"]["env_vars"]


def test_the_commands_of_the_docs_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`cluster init` is done; of the others the words are read."""
    from raynforce.cli import main
    from raynforce.cli.parser import parse

    monkeypatch.chdir(tmp_path)
    done = []
    for name in ("docs/cluster.md", "docs/security.md", "README.md"):
        for block in re.findall(r"```sh\n(.*?)```", (ROOT / name).read_text(), flags=re.DOTALL):
            for line in block.splitlines():
                words = shlex.split(line, comments=True)
                if words[:2] == ["raynforce", "cluster"]:
                    done.append(words[2])
                    assert parse(words[1:]).action == words[2]
                    if words[2] == "init":
                        assert main([*words[1:], f"new-{len(done)}"] if words[4][:1] == "-" else words[1:]) == 0
                elif words[:2] == ["raynforce", "train"] and name == "docs/cluster.md":
                    assert parse(words[1:]).command == "train"
    assert set(done) == {"init", "check", "status"}


def test_our_aliyun_puts_each_node_type_on_its_own_market(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    class Client:
        def run_instances(self, **how: Any) -> None:
            asked.append(how)

    class Provider:
        """As Ray's, as far as it matters here."""

        def __init__(self) -> None:
            self.acs = Client()

        def create_node(self, node_config: dict[str, Any], tags: dict[str, str], count: int) -> None:
            self.acs.run_instances(instance_type=node_config["InstanceType"], amount=count)

    theirs = types.ModuleType("theirs")
    theirs.AliyunNodeProvider = Provider  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray.autoscaler._private.aliyun.node_provider", theirs)
    monkeypatch.delitem(sys.modules, "raynforce.ops.cluster.aliyun_provider", raising=False)
    module = importlib.import_module("raynforce.ops.cluster.aliyun_provider")
    monkeypatch.delitem(sys.modules, "raynforce.ops.cluster.aliyun_provider")
    ours = module.AliyunProvider()
    for node in ({"SpotStrategy": "SpotAsPriceGo"}, {"SpotStrategy": "NoSpot"}, {}):
        ours.create_node({"InstanceType": "x", **node}, {}, 1)
    assert [how["spot_strategy"] for how in asked] == ["SpotAsPriceGo", "NoSpot", "NoSpot"]
