"""`raynforce cluster init`: the files of a cluster, in a new folder."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple

from raynforce.errors import UsageError
from raynforce.ops.cluster import kubernetes, launcher, slurm
from raynforce.ops.cluster.options import CLOUDS, Options, checked, own_image

TOKEN = "ray get-auth-token --generate >/dev/null && chmod 600 ~/.ray/auth_token"
SDK_MODULES = {"aws": "boto3", "gcp": "googleapiclient", "azure": "azure.identity", "aliyun": "aliyunsdkcore"}


class Written(NamedTuple):
    folder: str
    files: list[str]
    next: list[str]
    """What to type, in this order."""
    notes: list[str]


def init(target: str, folder: str | None = None, **options: Any) -> Written:
    """Write the files of a cluster on `target` into a folder that is new or empty; the options are those of `Options`.

    `target` is aws, gcp, azure, aliyun, kubernetes, slurm or ssh; the folder is called `cluster-TARGET` by default.
    """
    chosen = checked(target, options)
    path = Path(folder or f"cluster-{target}")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UsageError(f"{path} is there already: give a new folder, as raynforce cluster init {target} DIR")
    files = _files(target, chosen, path)
    for name, text in files.items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return Written(str(path), sorted(files), _next(target, chosen, path), list(_notes(target, chosen)))


def _files(target: str, options: Options, folder: Path) -> dict[str, str]:
    if target == "kubernetes":
        return kubernetes.files(options)
    if target == "slurm":
        return slurm.files(options, folder)
    return launcher.files(target, options, folder)


def _next(target: str, options: Options, folder: Path) -> list[str]:
    at = quote(str(folder))
    if target == "slurm":
        return [f"sbatch {at}/{options.name}.sbatch"]
    if target == "kubernetes":
        image = options.image or own_image()
        return [
            kubernetes.build(options, at),
            f"docker push {image}",
            "helm repo add kuberay https://ray-project.github.io/kuberay-helm/",
            f"helm install kuberay-operator kuberay/kuberay-operator --version {kubernetes.KUBERAY}"
            f" -f {at}/operator-values.yaml",
            TOKEN,
            f"kubectl create secret generic {kubernetes.secret(options)} --from-file=auth_token=$HOME/.ray/auth_token",
            *([f"kubectl apply -f {at}/storage.yaml"] if options.storage is None else []),
            f"kubectl apply -f {at}/raycluster.yaml",
        ]
    sdk = launcher.SDK[target] if target in CLOUDS and not _installed(SDK_MODULES[target]) else ""
    return [*([f"pip install {sdk}"] if sdk else []), TOKEN, f"ray up -y {at}/cluster.yaml"]


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # nor its parent
        return False


def _notes(target: str, options: Options) -> list[str]:
    notes = []
    if options.storage is None and target in (*CLOUDS, "ssh"):
        kind = {"aws": "s3", "gcp": "gs", "azure": "az", "aliyun": "oss"}.get(target)
        example = f"{kind}://BUCKET/runs" if kind else "/a/shared/folder"
        notes.append(f"without --storage {example}, runs are on the head's disk and go with it")
    if target == "kubernetes" and "/" not in (options.image or ""):
        notes.append("without --image REGISTRY/NAME:TAG, the image is only where it was built")
    return notes
