"""Mistakes in clusters' files that no schema knows: what is open, what is lost, what does not fit."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from raynforce.ops.cluster.findings import Finding
from raynforce.ops.cluster.options import python_version, ray_version

COMMANDS = [
    f"{who}{what}"
    for what in ("initialization_commands", "setup_commands", "start_ray_commands")
    for who in ("", "head_", "worker_")
]
EVERYWHERE = re.compile(r"--dashboard-host[= ]+['\"]?(0\.0\.0\.0|::|\*)")
TOKEN_ON = re.compile(r"RAY_AUTH_MODE['\"]?\s*[=:]\s*['\"]?token")
TOKEN_OFF = re.compile(r"RAY_AUTH_MODE['\"]?\s*[=:]\s*['\"]?disabled")
SECRETS = {
    "an access key": re.compile(r"\b(AKIA|ASIA|LTAI)[0-9A-Za-z]{12,}"),
    "a private key": re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY"),
    "Ray's token": re.compile(r"RAY_AUTH_TOKEN['\"]?\s*[=:]\s*['\"]?(?![$<'\"{])[\w-]{8,}"),
    "a password": re.compile(
        r"(?i)\b(password|passwd|secret_access_key|access_key_secret|api_key)['\"]?\s*[=:]\s*['\"]?(?![$<'\"{])[\w+/-]{8,}"
    ),
}
RAY_IMAGE = re.compile(r"rayproject/ray(?:-ml)?:(?P<ray>[\w.]+)(?:-py(?P<python>3\d+))?")
OWN_IMAGE = re.compile(r"raynforce:[\w.]+-ray(?P<ray>[\d.]+)-py(?P<python>3\d+)")
PIP_RAY = re.compile(r"\bray(?:\[[\w,]*\])?\s*==\s*(?P<ray>[\d.]+\d)")
SPOT_LABELS = ("spot", "SPOT", "preemptible")
SSH = (22, 22)
URL = re.compile(r"\b(s3|gs|gcs|az|abfss?|oss)://[\w.-]+")


# -- ray up -------------------------------------------------------------------------------------------------


def of_launcher(config: Mapping[str, Any]) -> Iterator[Finding]:
    provider = config["provider"]
    text = yaml.safe_dump(dict(config), width=10**6)
    commands = [command for key in COMMANDS for command in config.get(key) or ()]
    for kind in (config.get("available_node_types") or {}).values():
        commands += [command for key in COMMANDS for command in kind.get(key) or ()]
    if provider["type"] == "aliyun":
        fix = (
            "use type: external and raynforce.ops.cluster.aliyun_provider.AliyunProvider, as `cluster init aliyun` does"
        )
        yield Finding("error", "Ray's wheel lacks the defaults of type aliyun, and it puts the head on spot", fix)
    yield from _launcher_commands(config, commands)
    yield from _launcher_token(config, commands)
    yield from _secrets(text)
    yield from _versions(text, (config.get("metadata") or {}).get("raynforce") or {})
    yield from _node_types(config)
    yield from _open_ports(provider)
    yield from _docker(config.get("docker") or {})
    yield from _mounts(config.get("file_mounts") or {})
    storage = ((config.get("metadata") or {}).get("raynforce") or {}).get("storage")
    if not storage and not URL.search(text):
        what = "no storage is named: runs are on the head's disk, and go with it"
        yield Finding(
            "warning", what, "give every run --out s3://BUCKET/RUN, and name it under metadata.raynforce.storage"
        )


def _launcher_commands(config: Mapping[str, Any], commands: Sequence[str]) -> Iterator[Finding]:
    fix = "write --dashboard-host=127.0.0.1, and use `ray dashboard FILE` to see it"
    for command in commands:
        if EVERYWHERE.search(command):
            yield Finding("error", f"the dashboard listens on all interfaces: {_short(command)}", fix)
        if re.search(r"ray start(?=.*--head)(?=.*--ray-client-server-port)", command):
            yield Finding(
                "warning", "Ray Client has a port of its own", "drop --ray-client-server-port: nothing here uses it"
            )
    if config["provider"]["type"] not in ("local", "external") and not config.get("head_start_ray_commands"):
        what = "head_start_ray_commands is missing, and Ray's default has the dashboard on all interfaces"
        yield Finding("error", what, "name the command, with --dashboard-host=127.0.0.1")


def _launcher_token(config: Mapping[str, Any], commands: Sequence[str]) -> Iterator[Finding]:
    said = "\n".join([*commands, *_mounted_scripts(config.get("file_mounts") or {})])
    fix = "set RAY_AUTH_MODE=token before `ray start` on head and workers, and mount ~/.ray/auth_token"
    if TOKEN_OFF.search(said):
        yield Finding("error", "RAY_AUTH_MODE=disabled: whoever reaches a node can run code on it", fix)
    elif not TOKEN_ON.search(said):
        yield Finding("error", "no token: whoever reaches a node can run code on it", fix)


def _mounted_scripts(mounts: Mapping[str, str]) -> Iterator[str]:
    for local in mounts.values():
        path = Path(os.path.expanduser(local))
        files = path.glob("*.sh") if path.is_dir() else [path] if path.suffix == ".sh" else []
        for file in files:
            if file.is_file() and file.stat().st_size < 1 << 16:
                yield file.read_text(errors="replace")


def _node_types(config: Mapping[str, Any]) -> Iterator[Finding]:
    kinds = config.get("available_node_types") or {}
    for name, kind in kinds.items():
        least, most = kind.get("min_workers", 0), kind.get("max_workers", config.get("max_workers", 0))
        if least > most:
            what = f"node type {name!r} has min_workers {least} above max_workers {most}"
            yield Finding("error", what, "raise the second or lower the first")
    if config.get("min_workers", 0) > config.get("max_workers", config.get("min_workers", 0)):
        yield Finding("error", f"min_workers {config['min_workers']} is above max_workers", "raise the second")
    head = kinds.get(config.get("head_node_type"), {})
    node = head.get("node_config") or {}
    market = (node.get("InstanceMarketOptions") or {}).get("MarketType") == "spot"
    scheduling = node.get("scheduling") or []
    for plan in scheduling if isinstance(scheduling, list) else [scheduling]:
        market |= bool(plan.get("preemptible")) or plan.get("provisioningModel") == "SPOT"
    market |= (node.get("azure_arm_parameters") or {}).get("priority") == "Spot"
    market |= node.get("SpotStrategy", "NoSpot") != "NoSpot"
    if market:
        what = "the head is on spot: when it is taken away, so are the driver, the learner and the cluster"
        yield Finding("error", what, "put head_node_type on demand, and leave workers on spot")
    if head and head.get("max_workers", config.get("max_workers", 0)) > 0:
        yield Finding("warning", "workers may be of the head's type", "set max_workers: 0 for it")


def _open_ports(provider: Mapping[str, Any]) -> Iterator[Finding]:
    rules = []
    for rule in (provider.get("security_group") or {}).get("IpPermissions") or ():
        ranges = [r.get("CidrIp") for r in rule.get("IpRanges") or ()]
        ranges += [r.get("CidrIpv6") for r in rule.get("Ipv6Ranges") or ()]
        rules.append((rule.get("FromPort", 0), rule.get("ToPort", 65535), ranges))
    for rule in provider.get("security_group_rule") or ():
        low, _, high = str(rule.get("port_range", "1/65535")).partition("/")
        rules.append((int(low), int(high or low), [rule.get("source_cidr_ip")]))
    for low, high, ranges in rules:
        if not {"0.0.0.0/0", "::/0"} & set(ranges):
            continue
        if (low, high) == SSH:
            fix = "narrow it to the address that you come from"
            yield Finding("warning", "port 22 (SSH) is open to the world; keys alone protect it", fix)
        else:
            ports = str(low) if low == high else f"{low}–{high}"
            yield Finding(
                "error", f"port {ports} is open to the world", "drop the rule: `ray dashboard` and `ray exec` use SSH"
            )


def _docker(docker: Mapping[str, Any]) -> Iterator[Finding]:
    options = [o for key in ("run_options", "head_run_options", "worker_run_options") for o in docker.get(key) or ()]
    for option in options:
        if "--privileged" in option:
            yield Finding("error", "containers are privileged: code in them owns the machine", "drop --privileged")
        if re.search(r"(^|\s)(-p|--publish)\b", option):
            yield Finding("error", f"docker publishes ports: {option}", "drop it: Ray uses the host's network")


def _mounts(mounts: Mapping[str, str]) -> Iterator[Finding]:
    for remote, local in mounts.items():
        path = Path(os.path.expanduser(str(local)))
        if not path.exists():
            make = "ray get-auth-token --generate && chmod 600 ~/.ray/auth_token"
            fix = make if path.name == "auth_token" else "run `raynforce cluster init` again, or correct the path"
            yield Finding("error", f"{local}, which is to go to {remote}, is not there", fix)
        elif path.name == "auth_token" and path.stat().st_mode & 0o077:
            yield Finding("warning", f"others on this machine can read {local}", f"chmod 600 {local}")


# -- KubeRay ------------------------------------------------------------------------------------------------


def of_kuberay(document: Mapping[str, Any]) -> Iterator[Finding]:
    kind, spec = document["kind"], document["spec"]
    job = spec["jobTemplate"] if kind == "RayCronJob" else spec if kind == "RayJob" else None
    cluster = spec if kind == "RayCluster" else spec.get("rayClusterConfig") or (job or {}).get("rayClusterSpec")
    text = yaml.safe_dump(dict(document), width=10**6)
    yield from _secrets(text)
    if cluster is not None:
        yield from _cluster(cluster, text)
    if job is not None:
        yield from _job(job)
    if kind == "RayCronJob":
        yield Finding("note", "KubeRay's gate RayCronJob is off by default", "turn it on, as operator-values.yaml does")
    if kind == "RayService" and "serveConfigV2" in spec and "token" not in spec["serveConfigV2"].lower():
        what = "Ray's token does not protect what Serve serves"
        yield Finding("warning", what, "ask for a token in the deployment, as raynforce.ops.serving.on_ray:build does")


def _cluster(cluster: Mapping[str, Any], text: str) -> Iterator[Finding]:
    pods = [cluster["headGroupSpec"], *(cluster.get("workerGroupSpecs") or ())]
    by_hand = all(TOKEN_ON.search(yaml.safe_dump(_env(pod), width=10**6)) for pod in pods)
    if (cluster.get("authOptions") or {}).get("mode") != "token" and not by_hand:
        what = "no token: whoever reaches a pod can run code in it"
        yield Finding("error", what, "set authOptions: {mode: token, secretName: NAME}")
    head = cluster["headGroupSpec"]
    if not cluster.get("networkPolicy"):
        what = "no networkPolicy: every pod of every namespace reaches the dashboard"
        yield Finding(
            "warning", what, "set networkPolicy: {mode: DenyAllIngress}, and the gate RayClusterNetworkPolicy"
        )
        if (head.get("rayStartParams") or {}).get("dashboard-host") == "0.0.0.0":
            fix = "drop dashboard-host, and set networkPolicy"
            yield Finding("error", "the dashboard listens on all interfaces, and nothing keeps others away", fix)
    service = head.get("serviceType") or ((head.get("headService") or {}).get("spec") or {}).get("type")
    if service in ("LoadBalancer", "NodePort") or head.get("enableIngress"):
        what = f"the head is reached from outside ({service or 'ingress'})"
        yield Finding("error", what, "use ClusterIP, and `kubectl port-forward` where you need it")
    version = str(cluster.get("rayVersion", ray_version()))
    if version != ray_version():
        yield Finding("error", f"rayVersion is {version}, this installation has {ray_version()}", "make them equal")
    yield from _versions(text, {})
    for group in cluster.get("workerGroupSpecs") or ():
        least, most = group.get("minReplicas", 0), group.get("maxReplicas", 0)
        if least > most:
            what = f"group {group['groupName']!r} has minReplicas {least} above maxReplicas {most}"
            yield Finding("error", what, "raise the second or lower the first")
    yield from _pods(pods)
    claims = [v for v in (_pod(head).get("volumes") or ()) if "persistentVolumeClaim" in v]
    if not claims and not URL.search(text):
        what = "no storage is named: runs are in the head's pod, and go with it"
        yield Finding("warning", what, "mount a claim in the head, or give every run --out s3://BUCKET/RUN")


def _pod(group: Mapping[str, Any]) -> dict[str, Any]:
    return (group.get("template") or {}).get("spec") or {}


def _env(group: Mapping[str, Any]) -> dict[str, Any]:
    return {e["name"]: e.get("value") for c in _pod(group).get("containers") or () for e in c.get("env") or ()}


def _pods(groups: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    for group in groups:
        pod, name = _pod(group), group.get("groupName", "head")
        for variable, value in _env(group).items():
            if value and re.search(r"TOKEN$|SECRET|PASSWORD|ACCESS_KEY", variable):
                yield Finding("error", f"{variable} is in plain text in {name}", "take it from a Secret with valueFrom")
        if pod.get("hostNetwork"):
            yield Finding("error", f"{name} is in the host's network, where no NetworkPolicy holds", "drop hostNetwork")
        for container in pod.get("containers") or ():
            if (container.get("securityContext") or {}).get("privileged"):
                yield Finding("error", f"{name} is privileged: code in it owns the node", "drop privileged")
    head = _pod(groups[0])
    required = ((head.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    ) or {}
    wanted = [str(value) for value in (head.get("nodeSelector") or {}).items()]
    wanted += [
        f"{rule['key']} {rule.get('values')}"
        for term in required.get("nodeSelectorTerms") or ()
        for rule in term.get("matchExpressions") or ()
        if rule.get("operator") in ("In", "Exists")
    ]
    if any(label in rule for rule in wanted for label in SPOT_LABELS):
        what = "the head is on spot: when it is taken away, so are the driver, the learner and the cluster"
        yield Finding("error", what, "keep the head away from such nodes, and leave workers there")


def _job(job: Mapping[str, Any]) -> Iterator[Finding]:
    if "RAY_JOB_STOP_WAIT_TIME_S" not in str(job.get("runtimeEnvYAML", "")):
        what = "a job that is stopped has 3 seconds for its last checkpoint"
        yield Finding("warning", what, 'set env_vars: {RAY_JOB_STOP_WAIT_TIME_S: "60"} in runtimeEnvYAML')
    if not job.get("backoffLimit"):
        yield Finding("warning", "a job whose cluster is lost is not started again", "set backoffLimit: 2")


def of_object(document: Mapping[str, Any]) -> Iterator[Finding]:
    if document.get("kind") == "Secret" and (document.get("data") or document.get("stringData")):
        yield Finding(
            "error", "a Secret in a file is a secret in plain text", "make it with `kubectl create secret` instead"
        )


def of_operator(values: Mapping[str, Any]) -> Iterator[Finding]:
    gates = {gate.get("name"): gate.get("enabled") for gate in values["featureGates"] or ()}
    for gate in ("RayClusterNetworkPolicy", "RayCronJob"):
        if not gates.get(gate):
            yield Finding("warning", f"the gate {gate} is off, and the files here use it", "set enabled: true")


# -- Slurm, and all -----------------------------------------------------------------------------------------


def of_script(text: str) -> Iterator[Finding]:
    code = "\n".join(
        line for line in text.splitlines() if line.startswith("#SBATCH") or not line.lstrip().startswith("#")
    )
    if EVERYWHERE.search(code):
        yield Finding("error", "the dashboard listens on all interfaces", "write --dashboard-host=127.0.0.1")
    if "ray start" in code and not TOKEN_ON.search(code):
        what = "no token: every user of the nodes can run code as you"
        yield Finding("error", what, "export RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH before `ray start`")
    yield from _secrets(code)
    yield from _versions(code, {})
    if "ray start" in code and "--port=6379" in code:
        yield Finding("warning", "port 6379 is that of every job", "take one that follows from SLURM_JOB_ID")


def _secrets(text: str) -> Iterator[Finding]:
    for what, pattern in SECRETS.items():
        if pattern.search(text):
            yield Finding("error", f"{what} is in plain text", "keep it in a file or a Secret, and name that here")


def _versions(text: str, noted: Mapping[str, Any]) -> Iterator[Finding]:
    here = {"ray": ray_version(), "python": python_version()}
    found = [match.groupdict() for pattern in (RAY_IMAGE, OWN_IMAGE, PIP_RAY) for match in pattern.finditer(text)]
    found += [{name: str(noted[name]) for name in here if noted.get(name)}]
    told = set()
    for versions in found:
        python = versions.get("python") or ""
        versions["python"] = python if "." in python or not python else f"{python[0]}.{python[1:]}"
        for name, version in versions.items():
            if not version or version == here[name] or (name, version) in told:
                continue
            told.add((name, version))
            if not version[0].isdigit():
                what = f"the image's tag {version!r} moves: nodes that come later may not fit"
                yield Finding("warning", what, f"name it, such as {here[name]}")
            else:
                what = f"nodes have {name.capitalize()} {version}, this installation has {here[name]}"
                yield Finding("error", what, "make them equal: nodes of other versions do not understand each other")


def _short(command: str) -> str:
    return command if len(command) <= 60 else f"{command[:57]}…"
