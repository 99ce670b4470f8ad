"""What can be chosen of a cluster's files, what is allowed where, and what is pinned."""

from __future__ import annotations

import math
import platform
import re
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any

from raynforce import __version__
from raynforce.errors import UsageError, nearest

CLOUDS = ("aws", "gcp", "azure", "aliyun")
TARGETS = (*CLOUDS, "kubernetes", "slurm", "ssh")
PACKAGE = Path(__file__).parents[2]
STORES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs", "oss": "ossfs"}
"""The package that runs at a URL of this kind need."""
CLAIM = "pvc:"
WORD = re.compile(r"[\w.:/@+-]+", re.ASCII)  # of instance types, images, regions: nothing that a shell or YAML reads
NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
HOST = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9.:]{0,252}[A-Za-z0-9])?")
PATH = re.compile(r"[\w./~+-]+", re.ASCII)


@dataclass(frozen=True)
class Options:
    """What people change first. Fields that are None follow from the target."""

    name: str = "raynforce"
    instance: str | None = None
    head_instance: str | None = None
    cpus: int | None = None
    min_workers: int = 0
    max_workers: int = 4
    gpus: int = 0
    image: str | None = None
    machine_image: str | None = None
    region: str | None = None
    project: str | None = None
    storage: str | None = None
    hosts: tuple[str, ...] = ()
    user: str | None = None
    ssh_key: str = "~/.ssh/id_ed25519"
    python: str | None = None
    on_demand: bool = False


CLOUD_OPTIONS = "name instance head_instance cpus min_workers max_workers gpus image machine_image region storage"
TAKES = {
    "aws": f"{CLOUD_OPTIONS} on_demand",
    "gcp": f"{CLOUD_OPTIONS} project on_demand",
    "azure": f"{CLOUD_OPTIONS} on_demand",
    "aliyun": f"{CLOUD_OPTIONS} on_demand",
    "kubernetes": "name cpus min_workers max_workers gpus image storage on_demand",
    "slurm": "name cpus max_workers gpus storage python",
    "ssh": "name hosts user ssh_key python image storage",
}
FORMS = {
    "instance": (WORD, "an instance type, such as m6i.2xlarge"),
    "head_instance": (WORD, "an instance type, such as m6i.2xlarge"),
    "image": (WORD, "a container image, such as registry.example.com/mine:1"),
    "machine_image": (WORD, "a machine image, such as ami-0123456789abcdef0"),
    "region": (WORD, "a region, such as eu-central-1"),
    "project": (WORD, "the id of a project"),
    "user": (WORD, "a user name"),
    "ssh_key": (PATH, "the path of a private key, such as ~/.ssh/id_ed25519"),
    "python": (PATH, "the path of a Python on the nodes, such as /opt/env/bin/python"),
}


def checked(target: str, given: dict[str, Any]) -> Options:
    """The options of a target, from values as they were typed; the first that is wrong is refused."""
    if target not in TARGETS:
        raise UsageError(f"unknown target {target!r}{nearest(target, TARGETS)}: known are {', '.join(TARGETS)}")
    known = [field.name for field in fields(Options)]
    for name in given:
        if name not in known:
            raise UsageError(f"unknown option {name!r}{nearest(name, known)}: known are {', '.join(known)}")
        if name not in TAKES[target].split():
            takes = ", ".join(f"--{other.replace('_', '-')}" for other in TAKES[target].split())
            raise UsageError(f"--{name.replace('_', '-')} is not for {target}, which takes {takes}: leave it out")
    values = {name: _value(name, value) for name, value in given.items()}
    options = Options(**values)
    if options.min_workers > options.max_workers:
        raise UsageError(
            f"--min-workers {options.min_workers} is more than --max-workers {options.max_workers}: raise the second"
        )
    if target == "ssh" and not options.hosts:
        raise UsageError("ssh needs the addresses of your machines, the head first: --hosts 10.0.0.1,10.0.0.2")
    if target == "gcp" and not options.project:
        raise UsageError("gcp needs the project that pays: --project ID (`gcloud config get project` shows it)")
    _require_storage(target, options.storage)
    return options


def _value(name: str, value: Any) -> Any:
    flag = f"--{name.replace('_', '-')}"
    if name in ("cpus", "min_workers", "max_workers", "gpus"):
        least, most = (0 if name in ("min_workers", "gpus") else 1), 10_000
        number = int(value) if isinstance(value, int) or re.fullmatch(r"[0-9]{1,6}", str(value)) else -1
        if not least <= number <= most:
            raise UsageError(f"{flag} {value} is not a number from {least} to {most:,}")
        return number
    if name == "on_demand":
        return bool(value)
    if name == "hosts":
        hosts = tuple(value.split(",")) if isinstance(value, str) else tuple(value)
        for host in hosts:
            if not HOST.fullmatch(host):
                raise UsageError(f"{flag}: {host!r} is not an address: give them as 10.0.0.1,10.0.0.2, the head first")
        if len(set(hosts)) < len(hosts):
            raise UsageError(f"{flag} {','.join(hosts)} names a machine twice: give each once")
        return hosts
    if name == "name" and not NAME.fullmatch(str(value)):
        raise UsageError(f"{flag} {value!r} is not a name: at most 40 of a-z, 0-9 and -, a letter first")
    if name in FORMS and not FORMS[name][0].fullmatch(str(value)):
        raise UsageError(f"{flag} {value!r} is not {FORMS[name][1]}")
    return str(value)


def _require_storage(target: str, storage: str | None) -> None:
    """A URL, a claim or a folder, as the target knows them."""
    if storage is None:
        return
    scheme, separator, path = storage.partition("://")
    if separator and scheme in STORES and re.fullmatch(r"[\w.-][\w./-]*", path, re.ASCII):
        return
    folder = target in ("slurm", "ssh") and storage.startswith("/") and PATH.fullmatch(storage)
    claim = target == "kubernetes" and storage.startswith(CLAIM) and NAME.fullmatch(storage.removeprefix(CLAIM))
    if not (folder or claim):
        kinds = ["a URL such as s3://bucket/runs (" + ", ".join(STORES) + ")"]
        kinds += ["/a/shared/folder"] if target in ("slurm", "ssh") else []
        kinds += ["pvc:CLAIM"] if target == "kubernetes" else []
        raise UsageError(f"--storage {storage!r} is not one of: {', '.join(kinds)}")


def ray_version() -> str:
    return metadata.version("ray")


def python_version() -> str:
    """Without the patch: nodes with the same minor version understand each other."""
    return ".".join(platform.python_version_tuple()[:2])


def ray_image(gpus: bool) -> str:
    return f"rayproject/ray:{ray_version()}-py{python_version().replace('.', '')}-{'gpu' if gpus else 'cpu'}"


def own_image() -> str:
    return f"raynforce:{__version__}-ray{ray_version()}-py{python_version().replace('.', '')}"


def store_package(storage: str | None) -> str | None:
    return STORES.get((storage or "").partition("://")[0]) if "://" in (storage or "") else None


def requirements(options: Options) -> str:
    """What nodes install: Raynforce's dependencies, as they are installed here."""
    lines = [f"# What Raynforce {__version__} runs with, in the versions of the installation that wrote this."]
    if not options.gpus:
        lines.append("--extra-index-url https://download.pytorch.org/whl/cpu")
    try:
        needed = metadata.requires("raynforce") or []
    except metadata.PackageNotFoundError:
        problem = "Raynforce is not installed, so its dependencies are not known"
        raise UsageError(f"{problem}: pip install --editable . in its folder") from None
    names = [match[0] for line in needed if "extra ==" not in line and (match := re.match(r"[\w.-]+(\[\w+\])?", line))]
    lines += [_pinned(name) for name in names]
    if package := store_package(options.storage):
        lines.append(_pinned(package))
    return "\n".join(lines) + "\n"


def _pinned(name: str) -> str:
    try:
        version = metadata.version(name.partition("[")[0])
    except metadata.PackageNotFoundError:
        return name
    return f"{name}=={version.partition('+')[0]}"


def cpus_of(target: str, instance: str) -> int | None:
    """How many CPUs an instance type has, by its name."""
    if target in ("aws", "aliyun"):
        size = instance.rpartition(".")[2]
        found = re.fullmatch(r"(\d*)xlarge", size)
        return {"medium": 1, "large": 2}.get(size) or (4 * int(found[1] or 1) if found else None)
    found = re.search(r"-(\d+)$" if target == "gcp" else r"Standard_[A-Z]+(\d+)", instance)
    return int(found[1]) if found else None


def memory_gib(cpus: int) -> int:
    return 2 ** math.ceil(math.log2(4 * cpus))
