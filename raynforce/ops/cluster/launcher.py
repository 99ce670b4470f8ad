"""Files for `ray up`: four clouds, and machines over SSH. Every key that Ray would fill in is there."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raynforce.errors import UsageError
from raynforce.ops.cluster.commented import Note, text
from raynforce.ops.cluster.options import (
    PACKAGE,
    Options,
    cpus_of,
    python_version,
    ray_image,
    ray_version,
    requirements,
)

HOME = "~/.raynforce"  # of all that is put on a node
ENV = f"{HOME}/node/env.sh"
PORTS = "--object-manager-port=8076 --node-manager-port=8077 --min-worker-port=10002 --max-worker-port=10999"
LEARNERS = 100  # as many may live on the head: what counts is that workers offer no room for one
DEFAULTS = {  # region, worker, head, head with a GPU
    "aws": ("us-west-2", "m6i.2xlarge", "m6i.2xlarge", "g5.2xlarge"),
    "gcp": ("us-central1", "n2-standard-8", "n2-standard-8", "n1-standard-8"),
    "azure": ("westus2", "Standard_D8s_v5", "Standard_D8s_v5", "Standard_NC8as_T4_v3"),
    "aliyun": ("cn-hangzhou", "ecs.c7.2xlarge", "ecs.c7.2xlarge", "ecs.gn6i-c8g1.2xlarge"),
}
UBUNTU = {
    "gcp": "projects/ubuntu-os-cloud/global/images/family/ubuntu-2204-lts",
    "azure": "Canonical:0001-com-ubuntu-server-jammy:22_04-lts-gen2:latest",
    "aliyun": "ubuntu_22_04_x64_20G_alibase_20240508.vhd",
}
WITH_DRIVER = {"azure": "microsoft-dsvm:ubuntu-hpc:2204:latest"}
DOCKER = [
    "command -v docker >/dev/null || { sudo apt-get update -qq && sudo apt-get install -y -qq docker.io; }",
    "sudo usermod -aG docker $USER && touch ~/.sudo_as_admin_successful",
    "sleep 15",  # until the next connection, which is in the group
]
SDK = {
    "aws": "boto3",
    "gcp": "google-api-python-client google-auth",
    "azure": "azure-identity azure-mgmt-compute azure-mgmt-network azure-mgmt-resource azure-common msrestazure",
    "aliyun": "aliyun-python-sdk-core aliyun-python-sdk-ecs",
}
"""What the provider needs, here and on the head, from which it starts workers."""


def files(target: str, options: Options, folder: Path) -> dict[str, str]:
    parts = _ssh(options) if target == "ssh" else _cloud(target, options)
    return {
        "cluster.yaml": text(_document(target, options, folder.resolve(), parts), above=_above(target)),
        "node/env.sh": _environment(options, container=target != "ssh" or options.image is not None),
        "node/requirements.txt": requirements(options),
    }


def _above(target: str) -> str:
    where = "machines that are reached over SSH" if target == "ssh" else target
    return f"A Ray cluster on {where}, for `ray up`. docs/cluster.md and docs/security.md explain it."


def _environment(options: Options, *, container: bool) -> str:
    lines = [
        "# Sourced by every shell and every command of Ray on a node.",
        "export RAY_AUTH_MODE=token",
        'export RAY_AUTH_TOKEN_PATH="$HOME/.raynforce/auth_token"',
        "export RAY_USAGE_STATS_ENABLED=0",
        'export PYTHONPATH="$HOME/.raynforce/code${PYTHONPATH:+:$PYTHONPATH}"',
    ]
    if not container:
        path = str(Path(options.python).parent) if options.python else "$HOME/.raynforce/env/bin"
        lines.append(f'export PATH="{path}:$PATH"')
    return "\n".join(lines) + "\n"


def _document(target: str, options: Options, folder: Path, parts: Mapping[str, Any]) -> dict[Any, Any]:
    container = target != "ssh" or options.image is not None
    install = [f"pip install --quiet -r {HOME}/node/requirements.txt"]
    if not container:
        env = f"{HOME}/env"
        make = f"test -x {env}/bin/python || python{python_version()} -m venv {env}"
        install = [] if options.python else [make, f"{env}/bin/{install[0]}"]
    head_ip = f" --node-ip-address={options.hosts[0]}" if options.hosts and _is_ip(options.hosts[0]) else ""
    first = "RAY_enable_autoscaler_v2=0 " if target == "ssh" else ""  # the second never starts a second worker there
    offers = f""" --resources='{{"learner": {LEARNERS}}}'""" if target == "ssh" else ""
    return {
        "cluster_name": options.name,
        Note("Which runs belong to this cluster: Ray does not read it, `raynforce cluster check` does."): None,
        "metadata": {"raynforce": {"storage": options.storage or "", "ray": ray_version(), "python": python_version()}},
        **parts["size"],
        Note("How much faster than one by one, and after how long idle workers go."): None,
        "upscaling_speed": 10.0,
        "idle_timeout_minutes": 5,
        **parts["nodes"],
        Note("Ray and Python as in the installation that wrote this; others do not understand it."): None,
        "docker": _docker(options, target) if container else {},
        Note("The token, the code, what nodes install. Whoever has the token can run code on the cluster."): None,
        "file_mounts": {
            f"{HOME}/auth_token": "~/.ray/auth_token",
            f"{HOME}/node": str(folder / "node"),
            f"{HOME}/code/raynforce": str(PACKAGE),
        },
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        Note("In a source tree sdk is a link, which leads nowhere on a node, and Ray gives up on such."): None,
        "rsync_exclude": ["/sdk", "**/__pycache__", "**/.git", "**/*.pem", "**/*.key"],
        "rsync_filter": [],
        "initialization_commands": parts.get("initialization", []),
        "setup_commands": [
            f"chmod 600 {HOME}/auth_token",
            f"grep -qs raynforce/node/env.sh ~/.bashrc || echo '. {ENV}' >> ~/.bashrc",
            *install,
        ],
        "head_setup_commands": [f"pip install --quiet {SDK[target]}"] if target in SDK else [],
        "worker_setup_commands": [],
        Note(
            "The dashboard, and with it the jobs API, listens on the head's loopback: `ray dashboard cluster.yaml` "
            "brings it to your machine. No command starts Ray without the token: the first part of each sees to it."
        ): None,
        "head_start_ray_commands": [
            f". {ENV} && ray stop",
            f". {ENV} && {{ ulimit -n 65536 || true; }} && {first}ray start --head --port=6379{head_ip} {PORTS}"
            " --dashboard-host=127.0.0.1 --dashboard-port=8265"
            f" --autoscaling-config=~/ray_bootstrap_config.yaml{offers}",
        ],
        "worker_start_ray_commands": [
            f". {ENV} && ray stop",
            f". {ENV} && {{ ulimit -n 65536 || true; }} && ray start --address=$RAY_HEAD_IP:6379 {PORTS}",
        ],
    }


def _docker(options: Options, target: str) -> dict[str, Any]:
    gpus = bool(options.gpus)
    image = options.image or ray_image(gpus=False)
    head = {"head_image": ray_image(gpus=True)} if gpus and not options.image else {}
    limits = ["--ulimit nofile=65536:65536"]
    return {"image": image, **head, "container_name": "raynforce", "pull_before_run": True, "run_options": limits}


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


# -- machines over SSH --------------------------------------------------------------------------------------


def _ssh(options: Options) -> dict[str, Any]:
    head, *workers = options.hosts
    provider = {"type": "local", "head_ip": head, "worker_ips": workers}
    note = "The head reaches the workers with this key, a copy of which it gets: use one that opens nothing else."
    auth = {"ssh_user": options.user or "ubuntu", Note(note): None, "ssh_private_key": options.ssh_key}
    return {
        "size": {"min_workers": len(workers), "max_workers": len(workers)},
        "nodes": {"provider": provider, "auth": auth},
    }


# -- clouds -------------------------------------------------------------------------------------------------


def _cloud(target: str, options: Options) -> dict[str, Any]:
    region, worker, head, gpu_head = DEFAULTS[target]
    region = options.region or region
    worker = options.instance or worker
    head = options.head_instance or (gpu_head if options.gpus else options.instance or head)
    image = options.machine_image or UBUNTU.get(target)
    head_image = options.machine_image or (WITH_DRIVER.get(target) if options.gpus else image)
    if options.gpus and head_image is None and target != "aws":
        problem = f"{target} with --gpus needs a machine image with NVIDIA's driver and docker"
        raise UsageError(f"{problem}: give one with --machine-image")
    make = {"aws": _aws, "gcp": _gcp, "azure": _azure, "aliyun": _aliyun}[target]
    head_node = make(head, head_image, spot=False, gpus=options.gpus, name=options.name)
    worker_node = make(worker, image, spot=not options.on_demand, gpus=0, name=options.name)
    head_cpus = _cpus(target, head, None)
    offers = {"CPU": head_cpus, **({"GPU": options.gpus} if options.gpus else {}), "learner": LEARNERS}
    kinds = {
        Note("Stays: the head, with the driver and the learner."): None,
        "head": {"resources": offers, "min_workers": 0, "max_workers": 0, "node_config": head_node},
        Note("Come and go with the samplers that a run asks for" + ("." if options.on_demand else "; on spot.")): None,
        "worker": {
            "resources": {"CPU": _cpus(target, worker, options.cpus)},
            "min_workers": options.min_workers,
            "max_workers": options.max_workers,
            "node_config": worker_node,
        },
    }
    return {
        "size": {"max_workers": options.max_workers},
        "nodes": {
            "provider": _provider(target, options, region),
            "auth": {"ssh_user": "root" if target == "aliyun" else "ubuntu"},
            "available_node_types": kinds,
            "head_node_type": "head",
        },
        "initialization": [] if target == "aws" else DOCKER,
    }


def _cpus(target: str, instance: str, given: int | None) -> int:
    known = given or cpus_of(target, instance)
    if known is None:
        problem = f"how many CPUs {instance} has does not follow from its name"
        raise UsageError(f"{problem}: name a type whose size does, or edit `resources` in the file afterwards")
    return known


def _provider(target: str, options: Options, region: str) -> dict[Any, Any]:
    if target == "aws":
        ssh = "Ray makes this group if there is none: everything between nodes, SSH from anywhere. "
        ssh += "Make it beforehand to narrow SSH."
        return {
            "type": "aws",
            "region": region,
            "cache_stopped_nodes": False,
            Note(ssh): None,
            "security_group": {"GroupName": f"{options.name}-nodes"},
        }
    if target == "gcp":
        zone = f"{region}-b"
        return {"type": "gcp", "region": region, "availability_zone": zone, "project_id": options.project}
    if target == "azure":
        return {"type": "azure", "location": region, "resource_group": options.name, "cache_stopped_nodes": False}
    zone = f"{region}a" if region[-1].isdigit() else f"{region}-h"
    note = (
        "Ray's own type aliyun needs a file that its wheel lacks, and has every node on spot, the head too. "
        "Credentials are not here: ALIBABA_CLOUD_ACCESS_KEY_ID and ALIBABA_CLOUD_ACCESS_KEY_SECRET in your shell, "
        "and a RAM role on the head (ALIBABA_CLOUD_ECS_METADATA)."
    )
    return {
        Note(note): None,
        "type": "external",
        "module": "raynforce.ops.cluster.aliyun_provider.AliyunProvider",
        "region": region,
        "zone_id": zone,
        "cidr_block": "172.16.0.0/16",
        "key_name": f"{options.name}-key",
        "cache_stopped_nodes": False,
        Note("Between nodes everything; SSH from where you are: narrow it to your own address."): None,
        "security_group_rule": [
            {"port_range": "1/65535", "source_cidr_ip": "172.16.0.0/16", "ip_protocol": "tcp"},
            {"port_range": "22/22", "source_cidr_ip": "0.0.0.0/0", "ip_protocol": "tcp"},
        ],
    }


def _aws(instance: str, image: str | None, *, spot: bool, gpus: int, name: str) -> dict[str, Any]:
    disk = {"DeviceName": "/dev/sda1", "Ebs": {"VolumeSize": 128, "VolumeType": "gp3", "Encrypted": True}}
    return {
        "InstanceType": instance,
        **({"ImageId": image} if image else {}),  # else Ray's Deep Learning image for the region
        "BlockDeviceMappings": [disk],
        "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 2},
        **({"InstanceMarketOptions": {"MarketType": "spot"}} if spot else {}),
    }


def _gcp(instance: str, image: str | None, *, spot: bool, gpus: int, name: str) -> dict[str, Any]:
    size = {"diskSizeGb": 128, "sourceImage": image}
    node: dict[str, Any] = {
        "machineType": instance,
        "disks": [{"boot": True, "autoDelete": True, "type": "PERSISTENT", "initializeParams": size}],
    }
    if gpus:
        node["guestAccelerators"] = [{"acceleratorType": "nvidia-tesla-t4", "acceleratorCount": gpus}]
        node["metadata"] = {"items": [{"key": "install-nvidia-driver", "value": "True"}]}
        node["scheduling"] = [{"onHostMaintenance": "TERMINATE"}]
    if spot:
        node["scheduling"] = [{"preemptible": True}]
    return node


def _azure(instance: str, image: str | None, *, spot: bool, gpus: int, name: str) -> dict[str, Any]:
    parts = (image or "").split(":")
    if len(parts) != 4:
        raise UsageError(f"--machine-image {image!r} is not PUBLISHER:OFFER:SKU:VERSION: `az vm image list` shows them")
    keys = ("imagePublisher", "imageOffer", "imageSku", "imageVersion")
    market = {"priority": "Spot", "billingProfile": {"maxPrice": -1}} if spot else {}
    return {"azure_arm_parameters": {"vmSize": instance, **dict(zip(keys, parts, strict=True)), **market}}


def _aliyun(instance: str, image: str | None, *, spot: bool, gpus: int, name: str) -> dict[str, Any]:
    return {"InstanceType": instance, "ImageId": image, "SpotStrategy": "SpotAsPriceGo" if spot else "NoSpot"}
