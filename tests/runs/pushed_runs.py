"""Runs to push and fetch: checkpoints as a run directory makes them, and what is found of them where they went."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from raynforce.runs.checkpoint import point
from raynforce.runs.remote import Remote

DOWN = OSError("the network\nis down")


def facts(data: bytes) -> dict[str, Any]:
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def save(local: Path, step: int, keep: int = 2, link: str = "last", text: str = "weights") -> str:
    """A checkpoint with one segment of its own and one of the step before, as the run directory makes and prunes it."""
    checkpoints = local / "checkpoints"
    name = f"{'step' if link == 'last' else 'best'}_{step:012d}"
    files = {"policy.json": f"{text} {step}".encode(), "policy.safetensors": bytes(range(step % 200 + 1))}
    segments = {f"learner.{i}.safetensors": f"{text} rows {i}".encode() * 9 for i in (step - 1000, step)}
    for file, data in segments.items():
        path = checkpoints / "segments" / file
        if path.exists():
            segments[file] = path.read_bytes()
        else:
            path.write_bytes(data)
    (checkpoints / name).mkdir()
    for file, data in files.items():
        (checkpoints / name / file).write_bytes(data)
    manifest = {"format_version": 2, "step": step, "files": {k: facts(v) for k, v in files.items()}}
    manifest["segments"] = {k: facts(v) for k, v in segments.items()}
    (checkpoints / name / "manifest.json").write_text(json.dumps(manifest))
    point(local / link, checkpoints / name)
    for old in sorted(checkpoints.glob("step_*" if link == "last" else "best_*"))[:-keep]:
        shutil.rmtree(old)
    used = {k for path in checkpoints.glob("*_*/manifest.json") for k in json.loads(path.read_text())["segments"]}
    for path in (checkpoints / "segments").iterdir():
        if path.name not in used:
            path.unlink()
    with (local / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": {step}}}\n')
    return name


def verified(local: Path, link: str = "last") -> int:
    """The step of a checkpoint, every byte of which is what its manifest says."""
    manifest = json.loads((local / link / "manifest.json").read_text())
    for file, stated in manifest["files"].items():
        assert facts((local / link / file).read_bytes()) == stated
    for file, stated in manifest["segments"].items():
        assert facts((local / "checkpoints" / "segments" / file).read_bytes()) == stated
    return int(manifest["step"])


def tree(local: Path) -> dict[str, bytes | str]:
    """All of a run but what is the machine's own."""
    found: dict[str, bytes | str] = {}
    for path in sorted(local.rglob("*")):
        name = path.relative_to(local).as_posix()
        if path.is_symlink():
            found[name] = path.resolve().name
        elif path.is_file() and name not in (".remote.json", "run.lock") and path.parent.resolve() == path.parent:
            found[name] = path.read_bytes()
    return found


def stored(there: Remote) -> set[str]:
    there.store.fs.invalidate_cache()
    return {path.removeprefix(there.store.root + "/") for path in there.store.fs.find(there.store.root)}
