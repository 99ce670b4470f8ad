"""What workers print, line by line, and their last lines."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from raynforce.runtimes.ray.state import began
from raynforce.runtimes.role_host import LastLines

LATE = 0.5  # seconds that the last lines of a process may take from its node to here
LOG = re.compile(r"(?P<kind>worker|python-core-worker)-.*[-_](?P<pid>\d+)\.(out|err|log)")


class Voices:
    """What roles print: passed on line by line, and the last lines of each are kept."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said: dict[str, LastLines] = {}
        self.catch_up: Callable[[str], None] = self._wait_for_more

    def hear(self, name: str, line: str) -> None:
        if self._said.setdefault(name, LastLines()).append(line):
            self._say(f"{name}: {line}")

    def last(self, name: str) -> list[str]:
        self.catch_up(name)
        return list(self._said.get(name, ()))

    def begin(self, name: str) -> None:
        self._said.pop(name, None)

    def _wait_for_more(self, name: str) -> None:
        """Lines from other nodes come when they come: all is here if there was a pause after the last one."""
        until, seen = time.monotonic() + LATE, list(self._said.get(name, ()))
        while time.monotonic() < until:
            time.sleep(LATE / 3)
            now = list(self._said.get(name, ()))
            if now and now == seen:
                return
            seen = now


class Tail:
    """What workers of our own Ray print, which has no log monitor: follows the files that they write into."""

    def __init__(self, folder: Path, voices: Voices) -> None:
        self._folder = folder / "r/session_latest/logs"
        self._hear = voices.hear
        self._lock = threading.Lock()
        self._names: dict[str, str] = {}  # of roles, by file
        self._positions: dict[str, int] = {}
        voices.catch_up = self._read_to_the_end

    def read(self) -> None:
        """Take what has been written since; a file whose process is gone is read to its end and removed."""
        with self._lock, suppress(OSError):
            for entry in os.scandir(self._folder):
                found = LOG.fullmatch(entry.name)
                if found is None:
                    continue
                gone = not began(int(found["pid"]))
                with suppress(OSError):
                    if found["kind"] == "worker":
                        self._read(entry, over=gone)
                    if gone:
                        os.unlink(entry.path)

    def _read_to_the_end(self, name: str) -> None:
        """Of a role whose death Ray has told of, perhaps a moment before its process is gone."""
        until = time.monotonic() + LATE
        self.read()
        while name in self._names.values() and time.monotonic() < until:
            time.sleep(0.01)
            self.read()

    def _read(self, entry: os.DirEntry[str], *, over: bool) -> None:
        path, position = entry.path, self._positions.get(entry.path, 0)
        if entry.stat().st_size > position:
            with open(path, "rb") as file:
                file.seek(position)
                text = file.read()
            whole = text if over else text[: text.rfind(b"\n") + 1]  # the rest of a line comes next time
            self._positions[path] = position + len(whole)
            for line in whole.decode(errors="replace").splitlines():
                if line.startswith(":actor_name:"):
                    self._names[path] = line.removeprefix(":actor_name:")
                elif path in self._names and not line.startswith((":job_id:", ":task_name:")):
                    self._hear(self._names[path], line)
        if over:
            self._positions.pop(path, None)
            self._names.pop(path, None)

    def follow(self, stack: ExitStack) -> None:
        stop = threading.Event()

        def run() -> None:
            while not stop.wait(0.25):
                self.read()
            self.read()

        thread = threading.Thread(target=run, name="raynforce-worker-output", daemon=True)
        thread.start()
        stack.callback(thread.join)
        stack.callback(stop.set)
