"""Walkers, whose answers follow from their state and what they were given, and a pool of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from pools import Witness

from raynforce.errors import CheckpointError, ContractError, EnvError, UsageError
from raynforce.runtimes.base import Handle, Place, Runtime
from raynforce.runtimes.member import Job, Member, Rules
from raynforce.runtimes.pool import Pool

DEADLINE = 30.0
ERRORS: dict[str, Callable[[str], Exception]] = {
    "usage": UsageError,
    "contract": ContractError,
    "checkpoint": CheckpointError,
    "env": EnvError,
    "plain": ValueError,
}


class Walker:
    """Its answers follow from its state and what it was given; it fails when it is told to, once or always."""

    def __init__(self, start: int = 1, pad: int = 0) -> None:
        self.total = np.array([start])  # changed in place: what it gave away before changes too, inline
        self.sequence = 0
        self.pad = np.zeros(pad, np.uint8)

    def work(self, value: Any = 0, do: str = "", flag: str = "") -> int:
        if do and (not flag or take(flag)):
            self.do(do)
        self.total[0] = (self.total[0] * 31 + int(np.sum(value)) + 7) % 1_000_003
        self.sequence += 1
        return int(self.total[0])

    def produce(self, value: Any = 0, do: str = "", flag: str = "") -> tuple[np.ndarray, tuple[int, int]]:
        answer = self.work(value, do, flag)
        return np.full(1000, answer), (self.sequence - 1, answer)

    def learn(self, *values: Any) -> int:
        return self.work(sum(int(np.sum(value)) for value in values))

    def publish(self) -> np.ndarray:
        return self.total.copy()

    def do(self, what: str) -> None:
        if what == "die":
            print("famous last words", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "hang":
            time.sleep(1000)
        if what.startswith("sleep"):
            time.sleep(float(what[5:]))
            return
        raise ERRORS[what](f"{what} is wrong")

    def state(self) -> dict[str, Any]:
        self.slowly("state")
        return {"total": self.total, "sequence": self.sequence, "pad": self.pad}

    def load(self, tree: dict[str, Any]) -> list[str]:
        self.slowly("load")
        self.total, self.sequence = tree["total"].copy(), tree["sequence"]
        return []

    def slowly(self, method: str) -> None:
        """Dies in it, or takes a while, if files say so."""
        folder = os.environ.get("RNF_TEST_FLAGS")
        if folder and take(f"{folder}/die_in_{method}"):
            os.kill(os.getpid(), signal.SIGKILL)
        if folder and Path(f"{folder}/slow_{method}").exists():
            time.sleep(0.3)

    def start_fresh(self, sequence: int, attempt: int) -> None:
        self.total, self.sequence = np.array([1000 * attempt]), sequence

    def greet(self) -> list[str]:
        return ["hello"]

    def pid(self) -> int:
        return os.getpid()


def take(flag: str) -> bool:
    """Whether a file was there; it is not any more."""
    try:
        os.unlink(flag)
    except FileNotFoundError:
        return False
    return True


class Scene:
    """A pool of walkers on one runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.witness = Witness()
        self.pool = Pool(runtime, self.witness)

    def add(self, kind: str = "sampler", count: int = 1, pad: int = 0, place: Place | None = None, **rules: Any) -> Any:
        def make(index: int) -> Handle:
            name = f"sampler {index}" if kind == "sampler" else kind
            return self.runtime.spawn("walkers:Walker", index + 1, pad, name=name, place=place)

        rules = {"work": "work", "backoff": 0.01} | rules
        members = self.pool.add(kind, make, count, Rules(**rules))
        return members if count > 1 else members[0]

    def wait(self, *jobs: Job) -> list[Any]:
        assert self.pool.wait(jobs, DEADLINE)
        return [job.result() for job in jobs]

    def until(self, done: Callable[[], bool], *jobs: Job) -> None:
        """Let the pool go on until something has happened, with these jobs or whatever else it has to do."""
        deadline = time.monotonic() + DEADLINE
        while not done():
            assert time.monotonic() < deadline
            self.pool.next(jobs, 0.05)

    def work(self, member: Member, *args: Any) -> int:
        return int(self.wait(self.pool.submit(member, "work", *args))[0])


def expected(count: int, start: int = 1, value: int = 0) -> list[int]:
    walker = Walker(start)
    return [walker.work(value) for _ in range(count)]
