"""Disks that fill up."""

from __future__ import annotations

import errno
import os
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
