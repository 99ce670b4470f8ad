"""The store that a run at a URL is in: any file system that fsspec knows; what fails there is one line."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from raynforce.errors import CheckpointError, RaynforceError, UsageError, summary

_PLAIN = re.compile(r"(?!\.\.?$)[^/\\\x00-\x1f]+")
_MOST_BYTES = 64 << 20  # of a small file
_DEEPEST = 8

T = TypeVar("T")


class Missing(CheckpointError):
    """The store has no such file, or no longer."""


def is_url(path: str) -> bool:
    """Whether a path names a store (`s3://bucket/run`) and not a local directory."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", path) is not None


def is_plain(name: str) -> bool:
    """Whether it is the name of a file that leads nowhere else."""
    return _PLAIN.fullmatch(name) is not None


def is_hidden(name: str) -> bool:
    return name.startswith(".") or name.endswith(".tmp")


class Store:
    """A directory in a file system; paths are those of files in it."""

    def __init__(self, url: str, fs: Any, root: str) -> None:
        self.fs, self.root = fs, root.rstrip("/")
        self.given = url.rstrip("/")
        self.url = _shown(self.given)  # without a password

    @staticmethod
    def open(url: str) -> Store:
        try:
            from fsspec.core import url_to_fs  # type: ignore[import-untyped]

            fs, root = url_to_fs(url)
        except Exception as error:
            raise UsageError(f"cannot use {_shown(url)}: {_lacks(url.partition('://')[0], error)}") from error
        if not root.strip("/"):
            raise UsageError(f"{url} names no directory: add one, such as {url.rstrip('/')}/run")
        return Store(url, fs, root)

    def full(self, path: str) -> str:
        return f"{self.root}/{path}".rstrip("/")

    def do(self, what: str, path: str, call: Callable[..., T], **options: Any) -> T:
        """Let the file system do something; whatever goes wrong becomes one line."""
        try:
            return call(self.full(path), **options)
        except FileNotFoundError as error:
            raise Missing(f"cannot {what} {self.url}/{path}: it is not there") from error
        except Exception as error:
            raise RaynforceError(f"cannot {what} {self.url}/{path}: {summary(error)}") from error

    def has(self, path: str) -> bool:
        self.fs.invalidate_cache()
        with contextlib.suppress(Missing):
            self.do("look at", path, self.fs.info)  # fs.exists() takes an outage for a no
            return True
        return False

    def list(self, *, later: str = "") -> dict[str, int]:
        """Path and size of every file that is not hidden; the folder `later` is listed after those beside it."""
        self.fs.invalidate_cache()
        files: dict[str, int] = {}
        folders = [""]
        for folder in folders:
            inner: list[str] = []
            for name, info in self.entries(folder).items():
                if info["type"] == "directory":
                    inner.append(f"{folder}{name}/")
                elif info["type"] == "file":
                    files[f"{folder}{name}"] = int(info["size"] or 0)
            folders += sorted(inner, key=lambda path: path == later)
        return files

    def entries(self, folder: str = "") -> dict[str, Any]:
        """What fsspec tells of all in a folder that is not hidden, by name."""
        found: dict[str, Any] = {}
        with contextlib.suppress(Missing):
            for info in self.do("list", folder, self.fs.ls, detail=True):  # fs.find() leaves out what fails
                full = str(info["name"]).rstrip("/")
                name = full.removeprefix(f"{self.full(folder)}/")
                if full == self.full(folder):  # the mark of an empty directory
                    continue
                if not is_plain(name) or folder.count("/") > _DEEPEST:
                    raise RaynforceError(f"cannot use {self.url}: it lists {full!r}, which is no file of a run")
                if not is_hidden(name):
                    found[name] = info
        return found

    def read(self, path: str) -> bytes:
        def read(full: str) -> bytes:
            with self.fs.open(full, "rb") as file:
                return bytes(file.read(_MOST_BYTES))

        return self.do("read", path, read)

    def write(self, path: str, source: Path | bytes) -> None:
        """Replace a file in one step, as object stores do it by themselves."""
        from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

        def write(full: str) -> None:
            folder, _, name = full.rpartition("/")
            target = f"{folder}/.{name}.tmp" if isinstance(self.fs, LocalFileSystem) else full
            in_bytes = isinstance(source, bytes)
            put, args = (self.fs.pipe_file, (target, source)) if in_bytes else (self.fs.put_file, (str(source), target))
            try:
                put(*args)
            except FileNotFoundError:
                self.fs.makedirs(folder, exist_ok=True)
                put(*args)
            if target != full:
                os.replace(target, full)

        self.do("write", path, write)

    def download(self, path: str, target: Path) -> None:
        """Bring a file here, whole or not at all."""
        temporary = target.with_name(f".{target.name}.fetch.tmp")
        target.parent.mkdir(parents=True, exist_ok=True)
        self.do("read", path, lambda full: self.fs.get_file(full, str(temporary)))
        temporary.replace(target)

    def delete(self, path: str, *, folder: bool = False) -> None:
        with contextlib.suppress(Missing):
            if folder:
                self.do("delete", path, self.fs.rm, recursive=True)
            else:
                self.do("delete", path, self.fs.rm_file)


def _shown(url: str) -> str:
    return re.sub(r"://[^/@]*@", "://", url)


def _lacks(protocol: str, error: Exception) -> str:
    """What to install for a protocol, if that is what is wrong."""
    with contextlib.suppress(ImportError, KeyError):
        package = importlib.import_module("fsspec.registry").known_implementations[protocol]["class"].split(".")[0]
        if isinstance(error, ImportError) and package != "fsspec":
            return f"{protocol}:// needs a package that is not installed: pip install {package}"
    return summary(error)
