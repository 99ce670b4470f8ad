"""One of several seeds that train side by side, in a process of its own: `python -m raynforce.one_seed`.

Its job comes on stdin, which stays open for as long as somebody wants the result. What it tells goes to stdout, a JSON
object a line; what the user's code prints goes to stderr.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raynforce.errors import RaynforceError, reason
from raynforce.runs.progress import Progress, ProgressState, ReportPace
from raynforce.threads import cap_threads

if TYPE_CHECKING:
    from raynforce.config import Config

TELL_EVERY = 0.25  # seconds
GRACE = 30.0  # seconds that a run has to end with a checkpoint once nobody wants it any more


@dataclass(frozen=True)
class SeedJob:
    """What to do: train a config, or resume a run."""

    out: str
    config: Config | None  # None: the run is there already, and is resumed
    changes: dict[str, Any]  # settings of a resumed run, dotted
    log: tuple[str, ...] = ()  # services that metrics are sent to, as `--log` names them
    go_on: bool = False  # with a run of this config that is there already
    began: float = 0.0  # on the monotonic clock, which all processes of a machine share


def pack(job: SeedJob, given: bytes) -> bytes:
    """What the process reads; `given` is what the user's script defines: see `raynforce.given`."""
    from raynforce.given import dumps

    data = dumps(job) if given else pickle.dumps(job)
    return pickle.dumps(([os.path.abspath(path) for path in sys.path], given, data))


class Teller(Progress):
    """Shows a run to the process that started this one."""

    def __init__(self, write: Callable[[dict[str, Any]], None]) -> None:
        self._write, self._pace = write, ReportPace(TELL_EVERY)
        self._waiting: ProgressState | None = None

    def update(self, snapshot: ProgressState) -> None:
        self._waiting = snapshot
        if self._pace.is_due():
            self.stop()

    def message(self, text: str) -> None:
        self._write({"message": text})

    def fault(self, text: str) -> None:
        self._write({"fault": text})

    def stop(self) -> None:
        if self._waiting is not None:
            self._write({"snapshot": asdict(self._waiting)})
            self._waiting = None


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # until there is a run, which has a checkpoint to write first
        signal.signal(number, lambda number, _: os._exit(128 + number))
    cap_threads()  # before numpy is imported
    from raynforce.runtimes.worker import forget_home

    forget_home()
    told = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)

    def write(facts: dict[str, Any]) -> None:
        with contextlib.suppress(BrokenPipeError):  # nobody listens any more, and our lifeline says so too
            told.write(json.dumps(facts).encode() + b"\n")

    with open(0, "rb", closefd=False) as orders:
        path, given, data = pickle.load(orders)
    sys.path[:] = [*path, *(p for p in sys.path if p not in path)]
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    try:
        write({"result": _run(given, data, Teller(write))})
    except KeyboardInterrupt as interrupt:
        sys.exit(128 + (interrupt.args[0] if interrupt.args and isinstance(interrupt.args[0], int) else 2))
    except (Exception, SystemExit) as error:
        code = error.exit_code if isinstance(error, RaynforceError) else 1
        if not isinstance(error, RaynforceError):
            traceback.print_exc()
        write({"error": reason(error), "code": code})
        sys.exit(code)


def _run(given: bytes, data: bytes, teller: Teller) -> dict[str, Any]:
    from raynforce import api
    from raynforce.given import unpack
    from raynforce.sinks import services

    unpack(given)
    job: SeedJob = pickle.loads(data)
    how: dict[str, Any] = {"progress": teller, "began": job.began}
    try:
        if job.config is None:
            run = api.resume(job.out, settings=job.changes, sinks=services(job.log, Path(job.out)), **how)
        else:
            run = api.start(job.config, {}, job.out, go_on=job.go_on, sinks=services(job.log), **how)
    except api.Interrupted as interrupted:
        run = interrupted.run
    return run.result.to_json()


def _end_with_stdin() -> None:
    """Ask this process to end once the other end of its stdin is gone."""
    os.read(0, 1)
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        os.kill(os.getpid(), number)
        time.sleep(GRACE)


if __name__ == "__main__":
    main()
