"""Checkpoints: a directory of safetensors and JSON under one manifest, written whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from raynforce import trees
from raynforce.errors import CheckpointError, RaynforceError, summary
from raynforce.runs import disk, files
from raynforce.runs.files import Stated, Unavailable, Unreadable
from raynforce.runs.metrics import cannot_write
from raynforce.trees import SEGMENTS, Tree, join, split

FORMAT_VERSION = 2
MANIFEST = "manifest.json"
_WORD = "[A-Za-z0-9_-]{1,100}"
_FILE = re.compile(rf"{_WORD}\.(json|safetensors)")
SEGMENT = re.compile(rf"({_WORD})\.({_WORD})\.([0-9a-f]{{16}})\.safetensors")
"""The name of a segment's file: part, name, hash. A run that went back may give the same name to something else."""


# -- writing ----------------------------------------------------------------------------------------------


def save(path: Path, parts: Mapping[str, Tree], *, known: Mapping[str, Stated] | None = None, **facts: Any) -> int:
    """Write state trees as the checkpoint `path`; `facts` go into its manifest. Returns how many bytes were written.

    Everything lands in a temporary directory beside it, is flushed to disk, read again, and takes its name in one
    rename. Segments (see `trees.SEGMENTS`) go to the folder `segments` beside it, those in `known` (by the names of
    their files) being there already.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    pool = _Segments(path.parent / SEGMENTS, known or {})
    try:
        shutil.rmtree(temporary, ignore_errors=True)  # of a process that was killed and had this one's number
        temporary.mkdir(parents=True)
        written: dict[str, Stated] = {}
        for name, tree in parts.items():
            if not _FILE.fullmatch(f"{name}.json"):
                raise ValueError(f"{name!r} is not a name for a part")
            segments = trees.segments(tree)
            for segment, content in segments.items():
                pool.add(name, segment, content)
            arrays, rest = split(trees.without(tree, segments))
            written[f"{name}.safetensors"] = files.write(temporary / f"{name}.safetensors", files.pack(arrays))
            written[f"{name}.json"] = files.write(temporary / f"{name}.json", [files.to_json(rest)])
        manifest = {**facts, "format_version": FORMAT_VERSION}
        for kind, several in (("files", written), (SEGMENTS, pool.used)):
            manifest[kind] = {name: stated._asdict() for name, stated in several.items()}
        text = json.dumps(sealed(manifest), indent=2).encode() + b"\n"
        written[MANIFEST] = files.write(temporary / MANIFEST, [text])
        disk.flush(temporary)
        pool.finish()
        for name, stated in written.items():
            files.verify(temporary / name, stated)
        temporary.rename(path)
        pool.made.clear()  # from here on they are this checkpoint's
        disk.flush(path.parent)
        return sum(stated.size for stated in written.values()) + pool.written
    except Exception as error:
        reason = getattr(error, "strerror", None) or summary(error)
        if isinstance(error, Unreadable):
            reason = f"a file {error} after it was written"
        raise RaynforceError(f"cannot write checkpoint {path}: {reason}; older checkpoints are untouched") from error
    finally:  # still there only if something went wrong
        shutil.rmtree(temporary, ignore_errors=True)
        for file in pool.made:
            with contextlib.suppress(OSError):
                file.unlink()


class _Segments:
    """The segments of a checkpoint that is being written, each a file of its own that never changes."""

    def __init__(self, folder: Path, known: Mapping[str, Stated]) -> None:
        self._folder = folder
        self._known = {name.rsplit(".", 2)[0]: (name, stated) for name, stated in known.items()}
        self._new: dict[Path, Stated] = {}
        self.used: dict[str, Stated] = {}
        self.made: list[Path] = []  # to be removed again if the checkpoint does not come to be
        self.written = 0

    def add(self, part: str, name: str, content: Tree) -> None:
        """Write a segment, unless it is there already."""
        arrays, _ = split(content)
        file, stated = self._known.get(f"{part}.{name}", ("", None))
        there = stated is not None and present(self._folder / file, stated)
        if stated is not None and there and (not content or files.state(files.pack(arrays)) == stated):
            self.used[file] = stated
            return
        if not content:
            raise ValueError(f"segment {name!r} of {part} is not on disk any more")
        self._folder.mkdir(parents=True, exist_ok=True)
        temporary = self._folder / f".{part}.{name}.{os.getpid()}.tmp"
        temporary.unlink(missing_ok=True)
        self.made.append(temporary)
        stated = files.write(temporary, files.pack(arrays))
        file = f"{part}.{name}.{stated.sha256[:16]}.safetensors"
        if not SEGMENT.fullmatch(file):
            raise ValueError(f"{name!r} is not a name for a segment")
        path = self._folder / file
        if not path.exists():
            self.made.append(path)
        temporary.replace(path)
        self.used[file] = self._new[path] = stated
        self.written += stated.size

    def finish(self) -> None:
        """All of them are on disk, as they should be."""
        if self._new:
            disk.flush(self._folder)
            disk.flush(self._folder.parent)
        for path, stated in self._new.items():
            files.verify(path, stated)


def present(path: Path, stated: Stated) -> bool:
    """Whether a file of the stated size is there; its hash was seen when it was written."""
    with contextlib.suppress(OSError):
        return path.stat(follow_symlinks=False).st_size == stated.size
    return False


def sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """A manifest with the hash of all else in it."""
    rest = {name: value for name, value in manifest.items() if name != "sha256"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return {**rest, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def point(link: Path, target: Path) -> None:
    """Let the symbolic link name another checkpoint, in one step."""
    temporary = link.with_name(f".{link.name}.{os.getpid()}.tmp")
    aside = target.with_name(temporary.name)
    try:
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(os.path.relpath(target, link.parent))
        if link.is_dir() and not link.is_symlink():  # a copy that followed the links
            shutil.rmtree(aside, ignore_errors=True)
            link.rename(aside)
        temporary.replace(link)
        disk.flush(link.parent)
    except OSError as error:
        if aside.is_dir() and not link.exists():
            with contextlib.suppress(OSError):
                aside.rename(link)
        raise cannot_write(link, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    shutil.rmtree(aside, ignore_errors=True)


# -- reading ----------------------------------------------------------------------------------------------


def load(path: Path, only: Iterable[str] | None = None, *, damaged: dict[str, str] | None = None) -> dict[str, Tree]:
    """Read a checkpoint's state trees, all or `only` those named, each file verified against the manifest.

    With `damaged`, segments that cannot be read are left out and told in it (by file, why), instead of an error.
    """
    found = manifest(path)
    stated = stated_in(found, "files")
    names = {file.rpartition(".")[0] for file in stated} if only is None else set(only)
    parts: dict[str, Tree] = {}
    for name in sorted(names):
        for file in (f"{name}.safetensors", f"{name}.json"):
            if file not in stated:
                raise CheckpointError(f"checkpoint {path} has no {file}: it holds {', '.join(sorted(stated))[:200]}")
        file = f"{name}.json"
        try:
            rest = files.read_json(path / file, stated[file])
            file = f"{name}.safetensors"
            tree = join(files.read_arrays(path / file, stated[file]), rest)
            parts[name] = _with_segments(path, found, name, tree, damaged)
        except Unreadable as error:
            raise CheckpointError(f"checkpoint {path} is torn: {file} {error}") from None
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"checkpoint {path}: {name} cannot be read ({summary(error)[:200]})") from None
    return parts


def _with_segments(path: Path, found: Mapping[str, Any], part: str, tree: Tree, damaged: dict[str, str] | None) -> Tree:
    wanted = trees.segments(tree)
    if not wanted:
        return tree
    stated = stated_in(found, SEGMENTS)
    names = {file.rsplit(".", 2)[0]: file for file in stated}
    folder = segments_of(path)
    segments: dict[str, Tree] = {}
    for name in wanted:
        file = names.get(f"{part}.{name}")
        if file is None:
            raise ValueError(f"its manifest has no segment {name[:100]!r}")
        try:
            segments[name] = join(files.read_arrays(folder / file, stated[file]), {})
        except Unreadable as error:
            if damaged is None:
                raise CheckpointError(f"checkpoint {path} is torn: {SEGMENTS}/{file} {error}") from None
            damaged[file] = str(error)
    return trees.with_segments(tree, segments)


def segments_of(path: Path) -> Path:
    """The folder of a checkpoint's segments: beside it, or where it was copied from by what follows links."""
    beside = path.resolve().parent
    copied = beside / "checkpoints" / SEGMENTS
    return copied if copied.is_dir() and not (beside / SEGMENTS).is_dir() else beside / SEGMENTS


def manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, or one line that says why there is none."""
    try:
        data = files.read_json(path / MANIFEST, None)
        version = data["format_version"]
    except Unreadable as error:
        if not isinstance(error, Unavailable) and not path.is_dir():
            raise CheckpointError(f"there is no checkpoint at {path}") from None
        raise CheckpointError(f"checkpoint {path} is torn: its {MANIFEST} {error}") from error
    except KeyError:
        raise CheckpointError(f"checkpoint {path} is torn: its {MANIFEST} is not one") from None
    if type(version) is not int or version != FORMAT_VERSION:  # True is no version
        raise CheckpointError(f"checkpoint {path} has format {str(version)[:80]}; this release reads {FORMAT_VERSION}")
    try:
        segments = [(SEGMENT.fullmatch(name), stated) for name, stated in stated_in(data, SEGMENTS).items()]
        whole = (
            all(_FILE.fullmatch(name) for name in stated_in(data, "files"))
            and all(match and stated.sha256.startswith(match[3]) for match, stated in segments)
            and all(type(data.get(name, 0)) is int for name in ("step", "number"))
            and data["sha256"] == sealed(data)["sha256"]
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise CheckpointError(f"checkpoint {path} is torn: its {MANIFEST} is not one, or was changed")
    return data


def stated_in(manifest: Mapping[str, Any], kind: str) -> dict[str, Stated]:
    """What a manifest says of its `files` or its `segments`, by name."""
    found = {}
    for name, entry in manifest[kind].items():
        size, sha256 = entry["size"], entry["sha256"]
        if type(size) is not int or type(sha256) is not str or size < 0:
            raise ValueError(f"{name} has no size or hash")
        found[name] = Stated(size, sha256)
    return found
