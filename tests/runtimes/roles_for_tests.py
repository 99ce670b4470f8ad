"""Roles that do one odd thing each, on request: they fail, die, print, or show what their process looks like."""

from __future__ import annotations

import ctypes
import importlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from raynforce.errors import EnvError, RaynforceError, UsageError


class Notebook:
    """Remembers what it was called with, in order."""

    def __init__(self, *begin: Any) -> None:
        self.entries = list(begin)

    def note(self, entry: Any) -> int:
        self.entries.append(entry)
        return len(self.entries)

    def note_slowly(self, entry: Any, seconds: float) -> int:
        time.sleep(seconds)
        return self.note(entry)

    def read(self) -> list[Any]:
        return self.entries

    def echo(self, value: Any) -> Any:
        return value

    def add(self, *values: Any) -> Any:
        return sum(values[1:], start=values[0])

    def array(self, size: int, fill: float = 1.0) -> np.ndarray:
        return np.full(size, fill)

    def total(self, *arrays: np.ndarray) -> float:
        return float(sum(a.sum() for a in arrays))

    def scribble(self, array: np.ndarray) -> None:
        array[0] = 7.0

    def sealed(self, pid: int) -> Sealed:
        return Sealed(pid)

    def unseal(self, value: Sealed) -> str:
        return value.word

    def pid(self) -> int:
        return os.getpid()

    def sleep(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds


class Sealed:
    """A value that one process cannot open: the driver, if it should try."""

    word = "opened"

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def __reduce__(self) -> Any:
        return _unseal, (self.pid,)


def _unseal(pid: int) -> Sealed:
    if os.getpid() == pid:
        raise AssertionError("the driver opened what was only passing through")
    return Sealed(pid)


class OddError(RaynforceError):
    """An error of the user's own that is not made from one text."""

    def __init__(self, code: int, word: str) -> None:
        super().__init__(f"{word} {code}")
        self.code = code


class ElsewhereError(UsageError):
    """An error whose class the driver cannot import: its module exists in the role's process alone."""


class Failing:
    """Fails in the way it is asked to."""

    def fail(self, how: str) -> None:
        if how == "plain":
            raise ValueError("two\nlines")
        if how == "usage":
            raise UsageError("gamma = 7 is not in 0 … 1")
        if how == "env":
            raise EnvError("reward is NaN")
        if how == "odd":
            raise OddError(7, "out of range")
        if how == "elsewhere":
            ElsewhereError.__module__ = "a_module_that_is_not_there"
            raise ElsewhereError("what a driver cannot import")
        if how == "memory":
            raise MemoryError("cannot allocate 1 EB")
        if how == "recursion":
            self.fail(how)
        if how == "exit":
            sys.exit("the simulator's licence has expired")
        raise AssertionError(how)

    def unpicklable(self) -> Any:
        return lambda: None

    def fine(self) -> str:
        return "fine"


class Unbuildable:
    """Cannot be built."""

    def __init__(self, how: str) -> None:
        Failing().fail(how)

    def fine(self) -> str:
        return "never"


class Mortal:
    """Dies in the way it is asked to, with a child that must not outlive it."""

    def __init__(self, child: bool = False) -> None:
        self.child = subprocess.Popen(["sleep", "1000"]) if child else None

    def pids(self) -> tuple[int, int]:
        return os.getpid(), self.child.pid if self.child else 0

    def die(self, how: str, words: str = "") -> None:
        if words:
            print(words, end="", flush=True)
        if how == "forked":
            os.system("sleep 1000 &")  # which inherits what is inheritable, and lives on
            if os.fork() == 0:
                time.sleep(1000)
        if how in ("kill", "forked"):
            os.kill(os.getpid(), 9)
        if how == "exit":
            os._exit(3)
        if how == "quiet":
            os._exit(0)
        if how == "segfault":
            ctypes.string_at(0)
        if how == "abort":
            os.abort()

    def hang(self, how: str) -> None:
        if how == "loop":
            while True:
                pass
        if how == "c":  # a C call that keeps the interpreter lock
            ctypes.PyDLL(None).sleep(1000)
        time.sleep(1000)

    def close(self) -> None:
        if os.environ.get("RNF_HANG_IN_CLOSE"):
            time.sleep(1000)
        print("closed")


class Sleepy:
    """Takes its time to be built, and for each call."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        time.sleep(seconds)

    def state(self) -> float:
        time.sleep(self.seconds)
        return self.seconds

    def advance(self, seconds: float) -> None:
        time.sleep(seconds)


class Talker:
    """Prints."""

    def say(self, text: str) -> None:
        print(text, flush=True)

    def complain(self, text: str) -> None:
        print(text, file=sys.stderr)

    def shell(self, text: str) -> None:
        subprocess.run(["echo", text], check=True)

    def endless(self, chunk: int, count: int, end: str = "") -> int:
        for _ in range(count):
            sys.stdout.write("x" * chunk + end)
        sys.stdout.flush()
        return chunk * count

    def raw(self, data: bytes) -> None:
        os.write(1, data)


class Mirror:
    """Shows the process it lives in."""

    def environ(self) -> dict[str, str]:
        return dict(os.environ)

    def nice(self) -> int:
        return os.getpriority(os.PRIO_PROCESS, 0)

    def modules(self) -> list[str]:
        return sorted(sys.modules)

    def load(self, module: str) -> None:
        importlib.import_module(module)

    def stdin(self) -> str:
        return sys.stdin.read()

    def descriptors(self) -> list[str]:
        return descriptors()

    def held(self) -> int:
        from raynforce.runtimes.messages import Packed

        return Packed.held

    def touch(self, *arrays: np.ndarray) -> int:
        return len(arrays)


def descriptors() -> list[str]:
    """What each open descriptor of this process is, but for the one that this looks through."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:
            continue
    return sorted(found)


def alive(pid: int) -> bool:
    """Whether this process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
