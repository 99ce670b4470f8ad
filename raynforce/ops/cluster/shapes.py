"""What a file has to look like where Ray's schema and the names of KubeRay's keys leave it open, as JSON schemas.

What is refused here would fail in the middle of `ray up`, or be dropped without a word: a key that no cloud knows, a
list where a mapping belongs.
"""

from __future__ import annotations

import functools
import importlib
import json
from pathlib import Path
from typing import Any

PROVIDER_KEYS = {  # of each type, beside those that Ray's schema names; as its providers read them
    "aws": "aws_credentials key_pair",
    "gcp": "",
    "azure": "msi msi_name msi_resource_group nsg subnet subnet_mask unique_id use_external_head_ip",
    "aliyun": "access_key access_key_secret cidr_block key_name security_group_id security_group_rule v_switch_id"
    " vpc_id zone_id",
    "local": "coordinator_address external_head_ip",
}
ALL_PROVIDERS = "disable_launch_config_check foreground_node_launch worker_liveness_check worker_rpc_drain"
AWS_KEYS = (  # of EC2's RunInstances
    "AdditionalInfo BlockDeviceMappings CapacityReservationSpecification ClientToken CpuOptions CreditSpecification"
    " DisableApiStop DisableApiTermination DryRun EbsOptimized ElasticGpuSpecification ElasticInferenceAccelerators"
    " EnablePrimaryIpv6 EnclaveOptions HibernationOptions IamInstanceProfile ImageId InstanceInitiatedShutdownBehavior"
    " InstanceMarketOptions InstanceType Ipv6AddressCount Ipv6Addresses KernelId KeyName LaunchTemplate"
    " LicenseSpecifications MaintenanceOptions MaxCount MetadataOptions MinCount Monitoring NetworkInterfaces"
    " NetworkPerformanceOptions Operator Placement PrivateDnsNameOptions PrivateIpAddress RamdiskId SecondaryInterfaces"
    " SecurityGroupIds SecurityGroups SubnetId SubnetIds TagSpecifications UserData"
)
GCP_KEYS = (  # of an instance of Compute Engine (compute v1), and of a TPU (tpu v2), as Google's Python client has them
    "acceleratorConfig acceleratorType advancedMachineFeatures autocheckpointEnabled bootDiskConfig canIpForward"
    " cidrBlock confidentialInstanceConfig dataDisks deletionProtection description disks displayDevice"
    " fingerprint health labelFingerprint localSsdEncryptionMode shieldedInstanceIntegrityPolicy"
    " guestAccelerators hostname instanceEncryptionKey keyRevocationActionType labels machineType metadata"
    " minCpuPlatform name networkConfig networkConfigs networkInterfaces networkPerformanceConfig params"
    " partnerMetadata privateIpv6GoogleAccess reservationAffinity resourcePolicies runtimeVersion scheduling"
    " schedulingConfig serviceAccount serviceAccounts shieldedInstanceConfig sourceInstanceTemplate sourceMachineImage"
    " sourceMachineImageEncryptionKey startRestricted tags workloadIdentityConfig"
)
ALIYUN_KEYS = "ImageId InstanceType SpotStrategy"  # all that the provider of `cluster init` reads


def _object(properties: dict[str, Any] | None = None, *needed: str, closed: bool = False) -> dict[str, Any]:
    """A mapping, or nothing."""
    schema: dict[str, Any] = {"type": ["object", "null"], "properties": properties or {}, "required": list(needed)}
    return {**schema, "additionalProperties": False} if closed else schema


def _closed(keys: str, **properties: Any) -> dict[str, Any]:
    return _object({key: {} for key in keys.split()} | properties, closed=True)


def _array(items: dict[str, Any]) -> dict[str, Any]:
    """A list, or nothing; its items are not nothing."""
    kind = "object" if "properties" in items else items["type"]
    return {"type": ["array", "null"], "items": {**items, "type": kind}}


TEXT = {"type": "string"}
TEXTS = _array(TEXT)
COUNT = {"type": "integer", "minimum": 0}
PORT = {"type": "integer", "minimum": -1, "maximum": 65535}

# -- ray up -------------------------------------------------------------------------------------------------


@functools.cache
def of_launcher(kind: str) -> dict[str, Any]:
    """Of a file for `ray up` whose provider is of this type."""
    version = {"type": ["string", "number"]}
    noted = _closed("", storage=TEXT, ray=version, python=version)
    ranges = _array(_object({"CidrIp": TEXT, "CidrIpv6": TEXT}))
    permission = _object({"FromPort": PORT, "ToPort": PORT, "IpRanges": ranges, "Ipv6Ranges": ranges})
    rule = _object({"port_range": {"type": "string", "pattern": r"^\d+(/\d+)?$"}, "source_cidr_ip": TEXT})
    provider = _object({"security_group": _object({"IpPermissions": _array(permission)})})
    provider["properties"]["security_group_rule"] = _array(rule)
    if kind in PROVIDER_KEYS:
        known = [*_ray_schema()["properties"]["provider"]["properties"], *PROVIDER_KEYS[kind].split()]
        provider["properties"] = {key: {} for key in [*known, *ALL_PROVIDERS.split()]} | provider["properties"]
        provider["additionalProperties"] = False
    options = dict.fromkeys(("run_options", "head_run_options", "worker_run_options"), TEXTS)
    node_type = _object({"node_config": _node(kind)})
    return _object(
        {
            "metadata": _object({"raynforce": noted}),
            "provider": provider,
            "docker": _object(options),
            "available_node_types": {"type": ["object", "null"], "additionalProperties": node_type},
        }
    )


def _node(kind: str) -> dict[str, Any]:
    """What a cloud is asked for, in its own words."""
    if kind == "aws":
        schema = _closed(AWS_KEYS, InstanceType=TEXT, InstanceMarketOptions=_object())
        return schema | _needs("InstanceType", unless=["LaunchTemplate"])
    if kind == "gcp":
        schema = _closed(GCP_KEYS, machineType=TEXT, scheduling=_one_or_more(_object()))
        return schema | _needs("machineType", unless=["acceleratorType", "acceleratorConfig", "sourceInstanceTemplate"])
    if kind == "azure":
        known = " ".join([*_azure_template()["parameters"], "availability_zone"])
        parameters = _closed(known, vmSize=TEXT) | {"required": ["vmSize"]}
        return _object({"azure_arm_parameters": parameters}, "azure_arm_parameters")
    if kind == "aliyun":
        return _closed(ALIYUN_KEYS, InstanceType=TEXT, ImageId=TEXT) | {"required": ["InstanceType", "ImageId"]}
    return _object()


def _needs(key: str, unless: list[str]) -> dict[str, Any]:
    others = [{"required": [other]} for other in unless]
    return {"if": {"not": {"anyOf": others}}, "then": {"required": [key]}}


def _one_or_more(schema: dict[str, Any]) -> dict[str, Any]:
    return {**schema, "type": ["object", "array", "null"], "items": schema}


def _folder() -> Path:
    return Path(importlib.import_module("ray.autoscaler").__file__ or "").parent


def _ray_schema() -> dict[str, Any]:
    schema: dict[str, Any] = json.loads((_folder() / "ray-schema.json").read_text())
    return schema


def _azure_template() -> dict[str, Any]:
    template: dict[str, Any] = json.loads((_folder() / "_private" / "_azure" / "azure-vm-template.json").read_text())
    return template


# -- Kubernetes ---------------------------------------------------------------------------------------------

_RULE = _object({"key": TEXT, "operator": TEXT, "values": TEXTS}, "key", "operator")
_TERMS = _object({"nodeSelectorTerms": _array(_object({"matchExpressions": _array(_RULE)}))})
_AFFINITY = _object({"nodeAffinity": _object({"requiredDuringSchedulingIgnoredDuringExecution": _TERMS})})
_VARIABLE = _object({"name": TEXT, "value": TEXT}, "name")
_CONTAINER = _object({"name": TEXT, "image": TEXT, "env": _array(_VARIABLE), "securityContext": _object()}, "name")
_POD = _object(
    {
        "affinity": _AFFINITY,
        "nodeSelector": _object(),
        "containers": _array(_CONTAINER),
        "volumes": _array(_object({"name": TEXT}, "name")),
    },
    "containers",
)
_GROUP = {
    "template": _object({"spec": _POD}, "spec"),
    "rayStartParams": {"type": ["object", "null"], "additionalProperties": TEXT},
}
_CLUSTER = _object(
    {
        "rayVersion": TEXT,
        "authOptions": _object({"mode": TEXT, "secretName": TEXT}),
        "networkPolicy": _object(),
        "headGroupSpec": _object({**_GROUP, "headService": _object({"spec": _object()})}),
        "workerGroupSpecs": _array(_object({**_GROUP, "minReplicas": COUNT, "maxReplicas": COUNT})),
    }
)
_JOB = _object({"rayClusterSpec": _CLUSTER, "runtimeEnvYAML": TEXT, "entrypoint": TEXT, "backoffLimit": COUNT})
KUBERAY = {
    "RayCluster": _CLUSTER,
    "RayJob": _JOB,
    "RayCronJob": _object({"jobTemplate": _JOB}),
    "RayService": _object({"rayClusterConfig": _CLUSTER, "serveConfigV2": TEXT}),
}
"""The spec of each kind, as far as known mistakes are looked for in it; KubeRay's CRDs say all."""
OPERATOR = _object({"featureGates": _array(_object({"name": TEXT, "enabled": {"type": "boolean"}}, "name"))})
