"""`raynforce` commands with all that they start, of which nothing may be left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import raynforce

ROOT = Path(raynforce.__file__).parents[1]
DEADLINE = 60.0
Start = Callable[..., "Command"]


class Command:
    """One `raynforce` command with everything that it starts, known by a mark in the environment."""

    def __init__(self, where: Path, *words: str, terminal: bool = False) -> None:
        self.mark = f"RNF_TEST_MARK={uuid.uuid4().hex}"
        name, value = self.mark.split("=")
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", name: value}
        environ.pop("PYTHONUNBUFFERED", None)
        self.memory = shared_memory()
        self.output = where / f"output-{value}"
        self.master: int | None = None
        command = [sys.executable, "-m", "raynforce", *words]
        if terminal:
            self.master, slave = pty.openpty()
            self.process = subprocess.Popen(
                command,
                cwd=where,
                env=environ,
                stdin=slave,
                stdout=slave,
                stderr=slave,
                start_new_session=True,
                preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            )
            os.close(slave)
            os.set_blocking(self.master, False)
        else:
            with self.output.open("w") as file:
                self.process = subprocess.Popen(command, cwd=where, env=environ, stdout=file, stderr=file)

    def read(self) -> None:
        """Keep the terminal from filling up."""
        if self.master is not None:
            with contextlib.suppress(OSError), self.output.open("ab") as file:
                file.write(os.read(self.master, 1 << 16))

    @property
    def said(self) -> str:
        self.read()
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def send(self, how: str) -> None:
        if how == "terminal":
            assert self.master is not None
            os.write(self.master, b"\x03")
        else:
            self.process.send_signal(getattr(signal, how))

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < deadline, self.said
            assert self.process.poll() is None, self.said
            self.read()
            time.sleep(0.01)

    def ended(self) -> int:
        deadline = time.monotonic() + DEADLINE
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.said
            self.read()
            time.sleep(0.01)
        return self.process.returncode

    def alive(self) -> list[int]:
        """All processes that carry the mark, zombies left out: they have no environment any more."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if self.mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
        return found

    def nothing_left(self, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while (left := self.alive()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert [(pid, Path(f"/proc/{pid}/cmdline").read_bytes()) for pid in left] == []
        while (new := shared_memory() - self.memory) and time.monotonic() < deadline:  # of other tests, for a moment
            time.sleep(0.02)
        assert new == set()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for _ in range(50):
            for pid in self.alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not self.alive():
                break
            time.sleep(0.02)
        if self.master is not None:
            os.close(self.master)


def shared_memory() -> set[str]:
    """Names that a run could have left; others may be at work on this machine."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("psm_", "sem.", "raynforce", "torch_"))}


@contextlib.contextmanager
def starting(where: Path) -> Iterator[Start]:
    """Starts commands in a directory; whatever of them still runs at the end is killed."""
    commands: list[Command] = []

    def start(*words: str, terminal: bool = False) -> Command:
        commands.append(Command(where, *words, terminal=terminal))
        return commands[-1]

    try:
        yield start
    finally:
        for command in commands:
            command.kill()
