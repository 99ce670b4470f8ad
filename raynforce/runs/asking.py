"""What others ask of a run, and what it tells them, through small files in its directory.

`asked.stop` and `asked.checkpoint` are there until the driver has seen them. `live.json` is what it tells about once a
second: its roles and their states, and what bounds it. `notes.txt` is the user's own.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Literal, get_args

Request = Literal["stop", "checkpoint"]
REQUESTS: tuple[Request, ...] = get_args(Request)
LIVE, NOTES = "live.json", "notes.txt"
LONGEST_NOTES = 65_536  # bytes


def ask(run: Path, what: Request) -> None:
    """Let the driver of a run stop after this round, or write a checkpoint."""
    descriptor = os.open(run / f"asked.{what}", os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    os.close(descriptor)


def asked(run: Path) -> set[Request]:
    """What was asked since the last look."""
    found: set[Request] = set()
    for what in REQUESTS:
        with contextlib.suppress(OSError):
            os.unlink(run / f"asked.{what}")
            found.add(what)
    return found


def replace(path: Path, text: str) -> None:
    """Write a file in one step."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
