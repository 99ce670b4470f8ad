"""Simulator processes: the command that a user typed as an environment, started, and ended with its last words."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path

from raynforce.envs.addresses import CONNECT, LISTEN, addresses, is_remote
from raynforce.errors import UsageError

PREFIX = "sim:"
_PATHS = ("./", "../", "/", "~/")
LAST_LINES = 20
"""Of a simulator's stderr that an error tells."""
GRACE = 3.0
"""Seconds that a simulator has to end once its connection is closed."""


def is_simulator(env: str) -> bool:
    """Whether `env` is no gymnasium id: a command (`./my_sim --track oval`), or where simulators are (`listen:…`)."""
    return env.startswith((PREFIX, LISTEN, CONNECT, *_PATHS))


def command(env: str) -> list[str]:
    """The words of the command that `env` is, none if it is an address; a `UsageError` if it cannot be started."""
    if is_remote(env):
        addresses(env)
        return []
    try:
        words = shlex.split(env.removeprefix(PREFIX))
    except ValueError as error:
        raise UsageError(f"env {env!r} is no command: {error}") from error
    if not words:
        raise UsageError(f"env {env!r} names no simulator: give its command, such as ./my_sim")
    program = os.path.expanduser(words[0])
    if os.sep in program:
        path = Path(program)
        if not path.exists():
            raise UsageError(f"env {env!r}: there is no file {program}; build the simulator, or correct the path")
        if path.is_dir() or not os.access(path, os.X_OK):
            raise UsageError(f"env {env!r}: {program} cannot be executed; give a program (chmod +x)")
        program = str(path.absolute())  # not resolved: a link tells a Python its virtual environment
    elif shutil.which(program) is None:
        raise UsageError(f"env {env!r}: there is no program {program} on the PATH")
    return [program, *words[1:]]


def short_name(env: str) -> str:
    """What to call a simulator: its program, or the script that an interpreter runs; of others their address."""
    if is_remote(env):
        return env.replace("://", "-").replace(":", "-").replace(",", "-")
    words = [Path(word).name for word in shlex.split(env.removeprefix(PREFIX))] or [env]
    return words[1] if words[0].startswith("python") and len(words) > 1 else words[0]


class Launched:
    """A simulator process that is to connect to an address, and what it says on stderr."""

    def __init__(self, env: str, address: str, token: bytes, launch: str, envs: int, *, echo: bool = True) -> None:
        """With `echo` its lines are shown here, with its name."""
        self.env, self._echo = env, echo
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        told = {"CONNECT": address, "TOKEN": token.hex(), "LAUNCH": launch, "ENVS": str(envs)}
        try:
            self._process = subprocess.Popen(
                command(env),
                stdin=subprocess.DEVNULL,
                stdout=2,  # this process's stdout may be a result that is read by a program
                stderr=subprocess.PIPE,
                env=os.environ | {f"RAYNFORCE_{name}": value for name, value in told.items()},
            )
        except OSError as error:
            raise UsageError(f"env {env!r} could not be started: {error.strerror}") from error
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read_stderr, daemon=True, name=f"stderr of {env}")
        self._reader.start()

    def ended(self) -> bool:
        return self._process.poll() is not None

    def wait(self, seconds: float) -> int | None:
        """Its exit code; None if it goes on for so long."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.poll()

    def ending(self) -> str:
        """How the process ended, and what it said last; waits a moment for it."""
        code = self.wait(GRACE)
        self._reader.join(0.5)
        if code is None:
            how = "has closed its connection"
        elif code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        else:
            how = f"has exited with code {code}"
        return how + self.words()

    def words(self) -> str:
        """What it said last, to follow a sentence."""
        lines = [line for line in self._last if line]
        return f"; it said: {' | '.join(lines)[-2000:]}" if lines else "; it said nothing on stderr"

    def hush(self) -> None:
        """Show no more of its lines."""
        self._echo = False

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def close(self) -> None:
        """Let it end, which it does once its connection is closed; kill it if it does not."""
        if self.wait(GRACE) is None:
            self.kill()
            self._process.wait()
        self._reader.join(0.5)

    def _read_stderr(self) -> None:
        assert self._process.stderr is not None
        name = short_name(self.env)
        for line in self._process.stderr:
            text = line.decode(errors="replace").rstrip()
            self._last.append(text)
            if self._echo:
                print(f"{name}: {text}", file=sys.stderr)
        self._process.stderr.close()
