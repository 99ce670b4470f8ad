"""The way back: RLlib's own files out of a run, for RLlib without us."""

from __future__ import annotations

from pathlib import Path

from raynforce.engines.rllib.files import unpack
from raynforce.errors import CheckpointError, UsageError
from raynforce.runs import checkpoint
from raynforce.runs.directory import find_policy
from raynforce.runs.mirrored import local_path


def export_rllib(run: str | Path, folder: str | Path) -> Path:
    """Write the files that RLlib saved of a run with `--engine rllib` into a new folder, which it reads:
    `Algorithm.from_checkpoint(folder)`, `RLModule.from_checkpoint(…)`. `run` may be one of its checkpoints."""
    found, out = find_policy(local_path(run), "last"), Path(folder).expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} is there already: give a new folder")
    if "rllib.json" not in checkpoint.manifest(found)["files"]:
        raise CheckpointError(
            f"{found} has no files of RLlib: its run was trained by another engine, or imported alone"
        )
    unpack(checkpoint.load(found, only=["rllib"])["rllib"], out)
    return out
