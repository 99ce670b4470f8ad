"""Files for KubeRay 1.7: a cluster, a job, a job by the clock, a service, and what they need."""

from __future__ import annotations

from typing import Any

from raynforce.ops.cluster.commented import Note, text
from raynforce.ops.cluster.options import (
    CLAIM,
    PACKAGE,
    Options,
    memory_gib,
    own_image,
    python_version,
    ray_image,
    ray_version,
    requirements,
)

KUBERAY = "1.7.0"
RUNS = "/runs"  # where the volume is
GRACE = 90  # seconds for the last checkpoint when a pod has to go
SPOT = {  # how clouds and Karpenter mark such nodes
    "cloud.google.com/gke-spot": "true",
    "eks.amazonaws.com/capacityType": "SPOT",
    "kubernetes.azure.com/scalesetpriority": "spot",
    "karpenter.sh/capacity-type": "spot",
}
TRAINING = "ppo CartPole-v1 --target 475"


def files(options: Options) -> dict[str, str]:
    written = {
        "operator-values.yaml": text(_operator(), above=ABOVE["operator"]),
        "raycluster.yaml": text(
            _object("RayCluster", options.name, options, _cluster(options)), above=ABOVE["cluster"]
        ),
        "rayjob.yaml": text(
            _object("RayJob", f"{options.name}-job", options, _job(options, "job")), above=ABOVE["job"]
        ),
        "raycronjob.yaml": text(
            _object("RayCronJob", f"{options.name}-nightly", options, _cron(options)), above=ABOVE["cron"]
        ),
        "rayservice.yaml": text(
            _object("RayService", f"{options.name}-policy", options, _service(options)), above=ABOVE["service"]
        ),
        "Dockerfile": _dockerfile(options),
        "requirements.txt": requirements(options),
    }
    if options.storage is None:
        written["storage.yaml"] = text(_claim(options), above=ABOVE["storage"])
    return written


ABOVE = {
    "operator": f"Values for the Helm chart of KubeRay's operator, {KUBERAY}.",
    "cluster": "A cluster that stays, for jobs and for work by hand. docs/cluster.md and docs/security.md explain it.",
    "job": "One run with a cluster of its own, which goes when the run is done.",
    "cron": "The same run every night: it goes on from the last one's checkpoint while there are steps left.",
    "service": "The best policy of a run. Ray's token does not protect it: clients send another (docs/serving.md).",
    "storage": "Where runs are kept, if not in a bucket. Only heads write there: a disk for one node is enough.",
}


def runs(options: Options) -> str:
    """Where runs are: a URL, or a folder of the volume."""
    return options.storage if options.storage and "://" in options.storage else RUNS


def secret(options: Options) -> str:
    return f"{options.name}-token"


def clients(options: Options) -> str:
    """The token of those who ask for actions, which is not the cluster's: that one lets its holder run code."""
    return f"{options.name}-clients"


def _object(kind: str, name: str, options: Options, spec: dict[Any, Any]) -> dict[Any, Any]:
    about = {"name": name, "annotations": {"raynforce/storage": runs(options)}}
    return {"apiVersion": "ray.io/v1", "kind": kind, "metadata": about, "spec": spec}


def _operator() -> dict[Any, Any]:
    gates = {
        "RayClusterStatusConditions": True,
        "RayJobDeletionPolicy": True,
        "RayMultiHostIndexing": True,
        "RayServiceIncrementalUpgrade": True,
        "RayCronJob": True,
        "RayClusterMTLS": False,
        "RayClusterNetworkPolicy": True,
        "RayClusterHistoryServer": False,
    }
    return {
        "image": {"repository": "quay.io/kuberay/operator", "tag": f"v{KUBERAY}", "pullPolicy": "IfNotPresent"},
        Note("A list replaces the chart's own: all gates are named. Two that are used here are off by default."): None,
        "featureGates": [{"name": name, "enabled": on} for name, on in gates.items()],
        Note("It looks after this namespace alone."): None,
        "singleNamespaceInstall": True,
        "resources": {"limits": {"cpu": "500m", "memory": "512Mi"}},
    }


def _cluster(options: Options) -> dict[Any, Any]:
    return {
        "rayVersion": ray_version(),
        Note("All of Ray asks for the token in this Secret, which is made from ~/.ray/auth_token."): None,
        "authOptions": {"mode": "token", "secretName": secret(options)},
        Note(
            "In a pod the dashboard has to listen on the pod's address, for the operator. So pods take connections "
            "from each other and from the operator only. The network plugin has to know NetworkPolicy."
        ): None,
        "networkPolicy": {"mode": "DenyAllIngress", "head": {"ingressRules": [_from_operator()]}},
        Note("Workers come when samplers wait for room, and go when they have been idle."): None,
        "enableInTreeAutoscaling": True,
        "autoscalerOptions": {"version": "v2", "idleTimeoutSeconds": 300, "upscalingMode": "Default"},
        "headGroupSpec": _head(options),
        "workerGroupSpecs": [_workers(options)],
    }


def _from_operator() -> dict[str, Any]:
    operator = {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}}
    return {"from": [{"namespaceSelector": {}, "podSelector": operator}], "ports": [{"protocol": "TCP", "port": 8265}]}


def _head(options: Options) -> dict[Any, Any]:
    cpus = options.cpus or 4
    container = _container("ray-head", options, cpus, options.gpus)
    mounts = [{"name": "runs", "mountPath": RUNS}] if runs(options) == RUNS else []
    claim = (options.storage or "").removeprefix(CLAIM) or f"{options.name}-runs"
    volumes = [{"name": "runs", "persistentVolumeClaim": {"claimName": claim}}] if mounts else []
    if mounts:
        container["volumeMounts"] = mounts
    pod = {
        Note("The driver and the learner live here: on a node that is not taken away."): None,
        "affinity": _stays(),
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000},
        "containers": [container],
        **({"volumes": volumes} if volumes else {}),
    }
    offers = '"{\\"learner\\": 100}"'
    return {"rayStartParams": {"resources": offers}, "template": {"spec": pod}}


def _workers(options: Options) -> dict[Any, Any]:
    pod: dict[Any, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE,
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000},
        "containers": [_container("ray-worker", options, options.cpus or 4, 0)],
    }
    if options.on_demand:
        pod["affinity"] = _stays()
    else:
        preferred = [
            {"weight": 100, "preference": {"matchExpressions": [{"key": key, "operator": "In", "values": [value]}]}}
            for key, value in SPOT.items()
        ]
        pod[Note("Samplers: on spot where there is some.")] = None
        pod["affinity"] = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}
        pod["tolerations"] = [
            {"key": key, "operator": "Equal", "value": value, "effect": "NoSchedule"} for key, value in SPOT.items()
        ]
    return {
        "groupName": "samplers",
        "replicas": options.min_workers,
        "minReplicas": options.min_workers,
        "maxReplicas": options.max_workers,
        "rayStartParams": {},
        "template": {"spec": pod},
    }


def _stays() -> dict[str, Any]:
    terms = [{"key": key, "operator": "NotIn", "values": [value]} for key, value in SPOT.items()]
    required = {"nodeSelectorTerms": [{"matchExpressions": terms}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}


def _container(name: str, options: Options, cpus: int, gpus: int) -> dict[str, Any]:
    size = {"cpu": str(cpus), "memory": f"{memory_gib(cpus)}Gi", **({"nvidia.com/gpu": str(gpus)} if gpus else {})}
    return {
        "name": name,
        "image": options.image or own_image(),
        "imagePullPolicy": "IfNotPresent",
        "resources": {"requests": size, "limits": size},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "env": [{"name": "RAY_USAGE_STATS_ENABLED", "value": "0"}],
    }


def _job(options: Options, run: str) -> dict[Any, Any]:
    out = f"{runs(options)}/{options.name}-{run}"
    where = f"--runtime ray --address auto --samplers {_samplers(options)}"
    return {
        Note("Begins the run, or goes on with it where a pod or the whole cluster was lost."): None,
        "entrypoint": f"exec raynforce train {TRAINING} {where} --out {out} --resume",
        Note("Seconds for the last checkpoint when the job is stopped; Ray's own default is 3."): None,
        "runtimeEnvYAML": text({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(GRACE - 30)}}),
        Note("From within the head's pod: nothing has to reach the dashboard from elsewhere."): None,
        "submissionMode": "SidecarMode",
        Note("A new cluster, twice at most, if this one fails."): None,
        "backoffLimit": 2,
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": 300,
        "rayClusterSpec": _cluster(options),
    }


def _samplers(options: Options) -> int:
    return max(1, (options.cpus or 4) * (1 + options.max_workers) - 1)


def _cron(options: Options) -> dict[Any, Any]:
    return {"schedule": "0 3 * * *", "timeZone": "Etc/UTC", "jobTemplate": _job(options, "nightly")}


def _service(options: Options) -> dict[Any, Any]:
    keeper: dict[str, Any] = {"num_cpus": 0}
    if runs(options) == RUNS:  # the volume is with the head, and so is who reads the policy
        keeper["resources"] = {"learner": 0.01}
    application = {
        "name": "policy",
        "import_path": "raynforce.ops.serving.on_ray:build",
        "args": {"run": f"{runs(options)}/{options.name}-job", "follow": True},
        "route_prefix": "/",
        "runtime_env": {"env_vars": {"RAYNFORCE_SERVE_TOKEN_FILE": "/token/token"}},
        "deployments": [
            {"name": "PolicyKeeper", "ray_actor_options": keeper},
            {"name": "PolicyService", "num_replicas": 1, "ray_actor_options": {"num_cpus": 1}},
        ],
    }
    cluster = _cluster(options)
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        pod["containers"][0].setdefault("volumeMounts", []).append(
            {"name": "token", "mountPath": "/token", "readOnly": True}
        )
        volume = {"name": "token", "secret": {"secretName": clients(options), "defaultMode": 0o440}}
        pod.setdefault("volumes", []).append(volume)
    return {"serveConfigV2": text({"applications": [application]}), "rayClusterConfig": cluster}


def _claim(options: Options) -> dict[str, Any]:
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "50Gi"}}}
    name = {"name": f"{options.name}-runs"}
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": name, "spec": spec}


def _dockerfile(options: Options) -> str:
    return f"""\
# Ray {ray_version()} on Python {python_version()}, with Raynforce and what it needs. Add your simulators here.
FROM {ray_image(gpus=bool(options.gpus))}
COPY requirements.txt /tmp/requirements.txt
RUN pip install --no-cache-dir -r /tmp/requirements.txt
COPY --from=raynforce . /opt/raynforce/raynforce
ENV PYTHONPATH=/opt/raynforce
USER root
RUN printf '#!/bin/sh\\nexec python -m raynforce "$@"\\n' >/usr/local/bin/raynforce \\
 && chmod 755 /usr/local/bin/raynforce
USER 1000
"""


def build(options: Options, folder: str) -> str:
    """What makes the image: this package is a second build context."""
    return f"docker build --build-context raynforce={PACKAGE} -t {options.image or own_image()} {folder}"
