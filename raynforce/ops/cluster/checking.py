"""`raynforce cluster check`: a file against its schema, then against mistakes that a schema does not know."""

from __future__ import annotations

from typing import Any, NamedTuple

from raynforce.errors import UsageError
from raynforce.ops.cluster import mistakes
from raynforce.ops.cluster.findings import Finding
from raynforce.ops.cluster.reading import (
    documents,
    read_text,
    require_kuberay_schema,
    require_operator_shape,
    require_ray_schema,
)

OTHER_KINDS = ("PersistentVolumeClaim", "Secret", "ConfigMap", "Namespace", "ServiceAccount", "Service")


class Checked(NamedTuple):
    file: str
    kind: str
    schema: str
    """What it was held against."""
    findings: list[Finding]

    @property
    def ok(self) -> bool:
        return not any(finding.level == "error" for finding in self.findings)


def check(file: str, *, crds: str | None = None) -> Checked:
    """Hold a cluster's file against its schema, which refuses it, and look for known mistakes, which are listed.

    `crds` is the folder with KubeRay's CRDs (RAYNFORCE_KUBERAY does as well); without it the names of keys are checked.
    """
    text = read_text(file)
    if text.startswith("#!") or "\n#SBATCH" in text:
        return Checked(file, "slurm", "nothing: it is a script", list(mistakes.of_script(text)))
    found = documents(file, text)
    if "cluster_name" in found[0] or "provider" in found[0]:
        if len(found) > 1:
            raise UsageError(f"{file} has {len(found)} documents: `ray up` reads one")
        require_ray_schema(file, found[0])
        return Checked(file, "ray up", "Ray's schema", list(mistakes.of_launcher(found[0])))
    if "featureGates" in found[0] and "apiVersion" not in found[0]:
        require_operator_shape(file, found[0])
        return Checked(file, "helm values", "nothing: values have no schema", list(mistakes.of_operator(found[0])))
    return _kubernetes(file, found, crds)


def _kubernetes(file: str, found: list[dict[str, Any]], crds: str | None) -> Checked:
    kinds: list[str] = []
    findings: list[Finding] = []
    by_crd = False
    for document in found:
        kind = str(document.get("kind"))
        if "apiVersion" not in document:
            known = "`ray up` (cluster_name, provider), KubeRay (apiVersion: ray.io/v1), Slurm (#SBATCH)"
            raise UsageError(f"{file} is no cluster's file that is known here: {known}")
        kinds.append(kind)
        if kind in OTHER_KINDS:
            findings += mistakes.of_object(document)
            continue
        by_crd |= require_kuberay_schema(file, document, crds)
        findings += mistakes.of_kuberay(document)
    how = "KubeRay's CRDs" if by_crd else "the names of KubeRay's keys"
    return Checked(file, ", ".join(kinds), how, findings)
