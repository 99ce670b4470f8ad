"""Checkpoints: a directory of safetensors and JSON under one manifest, written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from raynforce.errors import CheckpointError, RaynforceError, summary
from raynforce.runs.metrics import cannot_write
from raynforce.trees import Tree, join, split

FORMAT_VERSION = 1
MANIFEST = "manifest.json"


def save(path: Path, parts: Mapping[str, Tree], **facts: Any) -> None:
    """Write state trees as the checkpoint `path`; `facts` go into its manifest.

    Everything lands in a temporary directory beside it, is flushed to disk, and takes its name in one rename.
    """
    from safetensors.numpy import save_file

    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        files: dict[str, dict[str, Any]] = {}
        for name, tree in parts.items():
            arrays, rest = split(tree)
            save_file({k: np.asarray(v, order="C") for k, v in arrays.items()}, temporary / f"{name}.safetensors")
            (temporary / f"{name}.json").write_text(json.dumps(rest))
            mode = (temporary / f"{name}.json").stat().st_mode  # safetensors writes for the owner alone
            (temporary / f"{name}.safetensors").chmod(mode)
            for file in (f"{name}.safetensors", f"{name}.json"):
                files[file] = {"size": (temporary / file).stat().st_size, "sha256": _sha256(temporary / file)}
        manifest = {"format_version": FORMAT_VERSION, **facts, "files": files}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        for file in (*files, MANIFEST):
            _flush(temporary / file)
        _flush(temporary)
        temporary.rename(path)
        _flush(path.parent)
    except Exception as error:
        raise RaynforceError(
            f"cannot write checkpoint {path}: {_reason(error)}; older checkpoints are untouched"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # still there only if something went wrong


def load(path: Path, only: Iterable[str] | None = None) -> dict[str, Tree]:
    """Read a checkpoint's state trees, all or `only` those named, each file verified against the manifest."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    files = manifest(path)["files"]
    names = {file.rpartition(".")[0] for file in files} if only is None else set(only)
    parts: dict[str, Tree] = {}
    for name in sorted(names):
        for file in (f"{name}.safetensors", f"{name}.json"):
            if file not in files:
                raise CheckpointError(f"checkpoint {path} has no {file}: it holds {', '.join(sorted(files))}")
            _verify(path / file, files[file])
        try:
            arrays = load_file(path / f"{name}.safetensors")
            parts[name] = join(arrays, json.loads((path / f"{name}.json").read_text()))
        except (SafetensorError, OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"checkpoint {path}: {name} cannot be read ({summary(error)})") from None
    return parts


def manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, or one line that says why there is none."""
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint at {path}")
    try:
        data: dict[str, Any] = json.loads((path / MANIFEST).read_text())
        version = data["format_version"]
        whole = all(isinstance(f["size"], int) and isinstance(f["sha256"], str) for f in data["files"].values())
    except OSError as error:
        raise CheckpointError(f"checkpoint {path} is torn: its {MANIFEST} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise CheckpointError(f"checkpoint {path} is torn: its {MANIFEST} is not one") from None
    if version is True or version != FORMAT_VERSION:
        raise CheckpointError(f"checkpoint {path} has format {version!r}; this release reads {FORMAT_VERSION}")
    if not whole:
        raise CheckpointError(f"checkpoint {path} is torn: its {MANIFEST} is not one")
    return data


def point(link: Path, target: Path) -> None:
    """Let the symbolic link name another checkpoint, in one step."""
    temporary = link.with_name(f".{link.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(os.path.relpath(target, link.parent))
        if link.is_dir() and not link.is_symlink():  # a copy that followed the links
            link.rename(target.with_name(f".{link.name}.{os.getpid()}.tmp"))
        temporary.replace(link)
        _flush(link.parent)
    except OSError as error:
        raise cannot_write(link, error) from error


def _reason(error: Exception) -> str:
    """Why something could not be written; safetensors has an error of its own for a full disk."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    found = re.search(r"\(os error (\d+)\)", str(error))
    return os.strerror(int(found[1])) if found else summary(error)


def _verify(path: Path, stated: Mapping[str, Any]) -> None:
    try:
        size = path.stat().st_size
    except OSError:
        raise CheckpointError(f"checkpoint {path.parent} is torn: {path.name} is missing") from None
    try:
        same = size == stated["size"] and _sha256(path) == stated["sha256"]
    except OSError as error:
        raise CheckpointError(f"checkpoint {path.parent}: {path.name} cannot be read ({error.strerror})") from None
    if not same:
        raise CheckpointError(f"checkpoint {path.parent} is torn: {path.name} is not what its manifest says")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_same(found: Tree | None, expected: Tree, path: Path) -> None:
    """Refuse the policy of another environment, network or algorithm, naming the first difference."""
    expected = json.loads(json.dumps(expected))  # tuples become lists, as in what was read
    for name in ("env", "network", "heads", "factory"):
        old, new = found.get(name) if isinstance(found, dict) else None, expected[name]
        if old != new:
            where, was, now = _difference(old, new, name)
            raise CheckpointError(
                f"the checkpoint in {path} was made with another {name}: {where} was {was}, is now {now}"
            )


def _difference(old: Any, new: Any, path: str) -> tuple[str, str, str]:
    """The first place where two trees of plain data differ, and what is there."""
    if isinstance(old, dict) and isinstance(new, dict):
        key = next(k for k in [*new, *old] if old.get(k) != new.get(k))
        return _difference(old.get(key), new.get(key), f"{path}.{key}")
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        index = next(i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b)
        return _difference(old[index], new[index], f"{path}[{index}]")
    return path, repr(old)[:80], repr(new)[:80]
