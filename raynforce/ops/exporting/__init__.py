"""Policies as folders that act without us."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raynforce.errors import UsageError, nearest
from raynforce.ops.exporting import formats, verifying
from raynforce.ops.exporting.formats import FORMATS
from raynforce.ops.exporting.graph import ACTION, lower
from raynforce.policy import read_policy
from raynforce.runs import checkpoint, disk
from raynforce.runs.directory import find_policy
from raynforce.runs.mirrored import local_path
from raynforce.spaces import MASK

__all__ = ["FORMATS", "Exported", "export"]


@dataclass(frozen=True)
class Exported:
    """A folder that acts."""

    path: Path
    to: str
    source: Path
    """The checkpoint that it was made of."""
    sha256: str
    """Of that checkpoint's manifest."""
    observations: int
    """How many it was verified on."""
    error: float
    """The largest difference to `load(…).act` on them."""

    @property
    def files(self) -> list[str]:
        return sorted(str(path.relative_to(self.path)) for path in self.path.rglob("*") if path.is_file())

    def to_json(self) -> dict[str, Any]:
        facts = {"path": str(self.path), "to": self.to, "checkpoint": str(self.source), "sha256": self.sha256}
        return {**facts, "files": self.files, "observations": self.observations, "largest_difference": self.error}


def export(
    run: str | Path, to: str, out: str | Path, *, which: str = "best", observations: int | None = None
) -> Exported:
    """Write a run's policy as a new folder `out` that acts without us.

    `to` is `onnx`, `numpy`, `torchscript` or `cpp`; `run` all that `load` takes. The folder is held against
    `load(run).act` on random observations, as many as `observations` says, and is not written where they differ by
    more than 1e-5.
    """
    if to not in FORMATS:
        raise UsageError(f"--to {to!r} is not one of: {', '.join(FORMATS)}{nearest(to, FORMATS)}")
    target = Path(out).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} is there already: give a new folder")
    found = find_policy(local_path(run), which)
    spec, version = read_policy(found)
    formats.require(to, spec)
    if not np.isfinite(version.params).all():
        raise UsageError(f"the policy of {found} has weights that are not finite: export another checkpoint")
    graph = lower(spec, version)
    sha256 = str(checkpoint.manifest(found)["sha256"])
    leaves: list[dict[str, Any]]
    leaves = [{"path": x.path, "shape": list(x.shape), "dtype": x.dtype} for x in spec.env.obs]
    for leaf in leaves:
        if leaf["path"] == MASK:  # where the flags of each element of an action begin
            leaf["starts"] = np.cumsum((0, *spec.env.action.sizes[:-1])).tolist()
    facts = {"env": spec.env.env, "version": version.number, "sha256": sha256, "obs": leaves}
    facts["outputs"] = [ACTION, graph.scores]
    obs = verifying.random_observations(spec, version, observations)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        verified = formats.write(to, temporary, spec, version, graph, obs, facts)
        (temporary / "README.md").write_text(formats.readme(to, spec, graph.scores, str(run), verified))
        for path in temporary.rglob("*"):
            disk.flush(path)
        temporary.rename(target)
        disk.flush(target.parent)
    except OSError as error:
        raise UsageError(f"cannot write to {target}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Exported(target, to, found, sha256, verified.observations, verified.error)
