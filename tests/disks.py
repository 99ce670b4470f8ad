"""Disks that fill up, and those that can only be read."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def fail_to_write_config(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills up in the middle of config.yaml, whatever the name it is written under."""
    write_text = Path.write_text

    def full(self: Path, data: str, *args: Any, **kwargs: Any) -> int:
        if "config" not in self.name:
            return write_text(self, data, *args, **kwargs)
        write_text(self, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)


class Disk:
    """A small file system of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fill(self) -> None:
        with open(self.path / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"x" * 4096)
        assert os.statvfs(self.path).f_bavail == 0

    def free(self) -> None:
        (self.path / "filler").unlink()

    def remount(self, how: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{how}", str(self.path)], check=True)


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[Disk]:
    """A file system of one megabyte, mounted here."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting is not possible here")
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
