"""What a run wants to know of the Ray it is on: what workers print, and how full the object store is."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from raynforce.runtimes.host import LastLines
from raynforce.runtimes.ray.state import ray_module

HEALTH_EVERY = 1.0  # seconds between looks at the object store
KEPT = 1 << 30  # seconds that a worker in reserve is kept
LATE = 0.5  # seconds that the last lines of a process may take from its node to here
LOG = re.compile(r"(?P<kind>worker|python-core-worker)-.*[-_](?P<pid>\d+)\.(out|err|log)")


class Raylet:
    """Ray's own process on this node: how full its object store is, and a worker in reserve."""

    def __init__(self) -> None:
        self._looked = -HEALTH_EVERY
        self._used: int | None = None
        self._stub: Any = None
        self._channel: Any = None

    def used_bytes(self) -> int | None:
        """Bytes in the object store, asked for at most once a second."""
        if time.monotonic() - self._looked >= HEALTH_EVERY:
            self._looked = time.monotonic()
            try:
                request = ray_module("core.generated.node_manager_pb2").GetNodeStatsRequest(include_memory_info=False)
                stats = self._open().GetNodeStats(request, timeout=0.5).store_stats
                self._used = int(stats.object_store_bytes_used)
            except Exception:  # a figure for the log is never worth a run
                self._used = None
        return self._used

    def start_worker(self) -> None:
        """Have a worker started ahead, for a role that may have to be restarted. Does not wait."""
        messages, worker = ray_module("core.generated.node_manager_pb2"), ray_module("_private.worker").global_worker
        with suppress(Exception):  # without it, a restart takes somewhat longer
            request = messages.PrestartWorkersRequest(
                language=ray_module("core.generated.common_pb2").Language.PYTHON,
                job_id=worker.current_job_id.binary(),
                keep_alive_duration_secs=KEPT,
                num_workers=1,
            )
            request.runtime_env_info.serialized_runtime_env = "{}"
            self._open().PrestartWorkers.future(request, timeout=5)

    def _open(self) -> Any:
        if self._stub is None:
            node = ray_module("_private.worker")._global_node
            self._channel = ray_module("_private.grpc_utils").init_grpc_channel(
                f"{node.node_ip_address}:{node.node_manager_port}"
            )
            self._stub = ray_module("core.generated.node_manager_pb2_grpc").NodeManagerServiceStub(self._channel)
        return self._stub

    def close(self) -> None:
        """Before Ray ends: an open channel would complain on stderr."""
        if self._channel is not None:
            self._channel.close()


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
        """The last lines of a role whose process has ended."""
        self.catch_up(name)
        return list(self._said.get(name, ()))

    def begin(self, name: str) -> None:
        """A role of this name starts, perhaps anew."""
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


def hear(stack: ExitStack, voices: Voices) -> None:
    """Take what workers print; Ray's own printer writes to stdout, which carries the result.

    What Ray itself has to say stays unsaid: a worker's death is reported by the call that it did not answer.
    """
    worker, dispatcher = (
        ray_module("_private.worker"),
        ray_module("_private.ray_logging").global_worker_stdstream_dispatcher,
    )

    def pass_on(batch: Mapping[str, Any], **_: Any) -> None:
        name = batch.get("actor_name")
        if name:
            for line in batch["lines"]:
                voices.hear(name, line)
            return
        for handler in handlers if batch.get("task_name") else ():  # a task of the user's own
            handler(batch)

    printer = worker.print_to_stdstream
    handlers = [handler for name, handler in dispatcher.handlers if name == "ray_print_logs"]
    worker.print_to_stdstream = pass_on  # for those who print without the dispatcher
    dispatcher.remove_handler("ray_print_logs")
    dispatcher.add_handler("raynforce", pass_on)

    def undo() -> None:
        worker.print_to_stdstream = printer
        dispatcher.remove_handler("raynforce")
        for handler in handlers if ray_module().is_initialized() else ():
            dispatcher.add_handler("ray_print_logs", handler)

    stack.callback(undo)


class Tail:
    """The same on our own Ray, which has no log monitor: follow the files that workers write into."""

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
                gone = _is_gone(found["pid"])
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
        """Read every now and then, until the stack is left."""
        stop = threading.Event()

        def run() -> None:
            while not stop.wait(0.25):
                self.read()
            self.read()

        thread = threading.Thread(target=run, name="raynforce-worker-output", daemon=True)
        thread.start()
        stack.callback(thread.join)
        stack.callback(stop.set)


def _is_gone(pid: str) -> bool:
    """Whether a process has ended, though its parent may not have taken note."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1] in (b"Z", b"X")
    except OSError:
        return True
