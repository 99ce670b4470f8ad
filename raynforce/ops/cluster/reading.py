"""Reading a cluster's file, and holding it against the schema of who will read it next."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import io
import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from raynforce.errors import UsageError, nearest
from raynforce.ops.cluster import shapes

CRDS = "RAYNFORCE_KUBERAY"  # the folder with KubeRay's CRDs
LARGEST = 4 << 20  # bytes
REQUIRED = {  # by Ray's providers, without which they fail in the middle of `ray up`
    "aws": ("region",),
    "gcp": ("region", "availability_zone", "project_id"),
    "azure": ("location", "resource_group"),
    "local": ("head_ip", "worker_ips"),
    "external": ("module",),
}
CLUSTER_KEYS = (
    "authOptions autoscalerOptions enableInTreeAutoscaling gcsFaultToleranceOptions headGroupSpec "
    "headServiceAnnotations historyServerOptions managedBy networkPolicy rayVersion suspend tlsOptions "
    "upgradeStrategy workerGroupSpecs"
)
HEAD_KEYS = "enableIngress headService ingressOptions labels rayStartParams resources serviceType template"
WORKER_KEYS = (
    "groupName idleTimeoutSeconds labels maxReplicas minReplicas numOfHosts priority rayStartParams replicas resources "
    "scaleStrategy suspend template"
)
JOB_KEYS = (
    "activeDeadlineSeconds backoffLimit clusterSelector deletionStrategy entrypoint entrypointNumCpus "
    "entrypointNumGpus entrypointResources jobId managedBy metadata preRunningDeadlineSeconds rayClusterSpec "
    "runtimeEnvYAML shutdownAfterJobFinishes submissionMode submitterConfig submitterPodTemplate suspend "
    "ttlSecondsAfterFinished"
)
SERVICE_KEYS = (
    "deploymentUnhealthySecondThreshold excludeHeadPodFromServeSvc managedBy rayClusterConfig "
    "rayClusterDeletionDelaySeconds serveConfigV2 serveService serviceUnhealthySecondThreshold suspend upgradeStrategy"
)
KINDS = {
    "RayCluster": (CLUSTER_KEYS, ("headGroupSpec",)),
    "RayJob": (JOB_KEYS, ()),
    "RayService": (SERVICE_KEYS, ("rayClusterConfig",)),
    "RayCronJob": ("jobTemplate schedule suspend timeZone", ("jobTemplate", "schedule")),
}


class _Loader(yaml.SafeLoader):
    """Refuses a key that is there twice, of which YAML would take the last."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        if key in seen:
            raise UsageError(f"line {key_node.start_mark.line + 1} has the key {key!r} a second time: drop one")
        seen.add(key)
    loader.flatten_mapping(node)
    return {loader.construct_object(k, deep=True): loader.construct_object(v, deep=True) for k, v in node.value}


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def read_text(file: str) -> str:
    try:
        if os.path.getsize(file) > LARGEST:
            raise UsageError(f"{file} has more than {LARGEST >> 20} MB: that is no cluster's file")
        return Path(file).read_text()
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "it is not text"
        raise UsageError(f"cannot read {file}: {why}; give a file of `raynforce cluster init`, or your own") from None


def documents(file: str, text: str) -> list[dict[str, Any]]:
    try:
        found = [document for document in yaml.load_all(text, _Loader) if document is not None]
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from None
    except (yaml.YAMLError, ValueError, TypeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark else ""
        raise UsageError(f"{file} is not YAML{where}: {getattr(error, 'problem', None) or error}") from None
    if not found or not all(isinstance(document, dict) for document in found):
        raise UsageError(f"{file} holds no mapping: give a file for `ray up`, for KubeRay, or a batch script of Slurm")
    return found


# -- ray up -------------------------------------------------------------------------------------------------


def require_ray_schema(file: str, config: Mapping[str, Any]) -> None:
    """Ray's own schema, then the way that `ray up` takes it, up to where it would ask the cloud."""
    jsonschema = importlib.import_module("jsonschema")  # comes with Ray
    folder = Path(importlib.import_module("ray.autoscaler").__file__ or "").parent
    schema = json.loads((folder / "ray-schema.json").read_text())
    kind = (config.get("provider") or {}).get("type") if isinstance(config.get("provider"), dict) else None
    raw = dict(config)
    if kind == "local":
        raw.pop("min_workers", None)  # which Ray takes here, and its schema does not know
    _require(file, jsonschema.Draft7Validator(schema).iter_errors(raw))
    provider = config["provider"]
    for name in REQUIRED.get(str(kind), ()):
        if provider.get(name) is None:
            raise UsageError(
                f"{file}: provider has no {name!r}{_meant(name, provider)}, which type {kind} needs: add it"
            )
    ours = str(provider.get("module")).endswith(".AliyunProvider")
    shape = shapes.of_launcher("aliyun" if ours else str(kind))
    _require(file, jsonschema.Draft7Validator(shape).iter_errors(config))
    if kind == "aliyun":
        return  # without its defaults Ray cannot even read it, which a finding says
    util = importlib.import_module("ray.autoscaler._private.util")
    said = io.StringIO()
    logger = logging.getLogger("ray.autoscaler._private.util")  # it tells of fields that Ray itself has put there
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            util.validate_config(util.prepare_config(copy.deepcopy(dict(config))))
    except Exception as error:
        lines = (
            str(getattr(error, "message", None) or error).strip().splitlines() or said.getvalue().strip().splitlines()
        )
        raise UsageError(f"{file}: `ray up` would refuse it: {lines[0] if lines else type(error).__name__}") from None
    finally:
        logger.setLevel(level)


def _meant(name: str, given: Mapping[str, Any]) -> str:
    for key in given:
        if nearest(str(key), [name]):
            return f" (is {key!r} meant to be it?)"
    return ""


# -- KubeRay ------------------------------------------------------------------------------------------------


def require_kuberay_schema(file: str, document: Mapping[str, Any], crds: str | None) -> bool:
    """KubeRay's CRD of this kind if there is one, else the names of its keys; whether it was the CRD."""
    kind, version = str(document.get("kind")), document.get("apiVersion")
    if kind not in KINDS or version != "ray.io/v1":
        known = f"ray.io/v1 with {', '.join(KINDS)}"
        raise UsageError(f"{file}: apiVersion {version!r} with kind {kind!r}{nearest(kind, KINDS)} is not {known}")
    folder = crds or os.environ.get(CRDS)
    jsonschema = importlib.import_module("jsonschema")
    if folder is None:
        _require_known_keys(file, kind, document)
        shape = {"properties": {"spec": shapes.KUBERAY[kind]}}
        _require(file, jsonschema.Draft7Validator(shape).iter_errors(document))
        return False
    _require(file, jsonschema.Draft7Validator(_crd(kind, folder)).iter_errors(document))
    return True


@functools.cache
def _crd(kind: str, folder: str) -> dict[str, Any]:
    path = Path(folder, f"ray.io_{kind.lower()}s.yaml")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        definition = yaml.load(path.read_text(), loader)
        versions = {version["name"]: version for version in definition["spec"]["versions"]}
        schema = versions["v1"]["schema"]["openAPIV3Schema"]
    except (OSError, KeyError, TypeError, yaml.YAMLError):
        problem = f"{folder} has no CRD of {kind} (looked for {path.name})"
        raise UsageError(f"{problem}: give ray-operator/config/crd/bases of KubeRay 1.7, or leave --crds out") from None
    return _closed(schema)


def _closed(schema: Any) -> Any:
    """Kubernetes drops keys that it does not know; here they are mistakes."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    is_open = "additionalProperties" in schema or schema.get("x-kubernetes-preserve-unknown-fields")
    if schema.get("type") == "object" and "properties" in schema and not is_open:
        closed["additionalProperties"] = False
    return closed


def require_operator_shape(file: str, values: Mapping[str, Any]) -> None:
    jsonschema = importlib.import_module("jsonschema")
    _require(file, jsonschema.Draft7Validator(shapes.OPERATOR).iter_errors(values))


def _require_known_keys(file: str, kind: str, document: Mapping[str, Any]) -> None:
    for where, value, keys, needed in _levels(kind, document.get("spec"), "spec"):
        if not isinstance(value, dict):
            raise UsageError(f"{file}: {where} is {value!r}: give a mapping")
        for key in value:
            if key not in keys:
                raise UsageError(
                    f"{file}: {where} has no key {key!r}{nearest(str(key), keys)}: known are {', '.join(keys)}"
                )
        for key in needed:
            if key not in value:
                raise UsageError(f"{file}: {where} has no {key!r}: add it")


def _levels(kind: str, spec: Any, where: str) -> Iterator[tuple[str, Any, list[str], tuple[str, ...]]]:
    keys, needed = KINDS[kind]
    yield where, spec, keys.split(), needed
    if kind == "RayCluster":
        yield f"{where}.headGroupSpec", spec["headGroupSpec"], HEAD_KEYS.split(), ("template",)
        groups = spec.get("workerGroupSpecs")
        for index, group in enumerate(groups if isinstance(groups, list) else ()):
            names = ("groupName", "template")
            yield f"{where}.workerGroupSpecs[{index}]", group, WORKER_KEYS.split(), names
        return
    inner = {"rayClusterSpec": "RayCluster", "rayClusterConfig": "RayCluster", "jobTemplate": "RayJob"}
    for key, of in inner.items():
        if spec.get(key) is not None:
            yield from _levels(of, spec[key], f"{where}.{key}")


def _require(file: str, errors: Any) -> None:
    """Refuse the first mistake in one line: where, what, what is allowed."""

    def order(error: Any) -> tuple[list[str], bool, str]:
        """A key that is not known first: it may be the one that is missing, misspelled."""
        return [*map(str, error.absolute_path)], error.validator != "additionalProperties", error.message

    found = sorted(errors, key=order)
    for error in found:
        where = ".".join(map(str, error.absolute_path)) or "the file"
        if error.validator == "additionalProperties":
            known = [*error.schema.get("properties", {})]
            wrong = next((key for key in error.instance if key not in known), "?")
            listed = f": known are {', '.join(known)}" if len(known) <= 30 else ""
            raise UsageError(f"{file}: {where} has no key {wrong!r}{nearest(str(wrong), known)}{listed}")
        raise UsageError(f"{file}: {where}: {error.message.splitlines()[0][:200]}")
