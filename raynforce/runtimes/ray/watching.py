"""What a run wants to know of the Ray it is on: what workers print, and how full the object store is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from raynforce.runtimes.ray.state import ray_module

HEALTH_EVERY = 1.0  # seconds between looks at the object store


class ObjectStore:
    """How full this node's object store is, asked of its raylet at most once a second."""

    def __init__(self) -> None:
        self._looked = -HEALTH_EVERY
        self._used: int | None = None
        self._stub: Any = None
        self._channel: Any = None

    def used_bytes(self) -> int | None:
        if time.monotonic() - self._looked >= HEALTH_EVERY:
            self._looked = time.monotonic()
            try:
                self._used = self._ask()
            except Exception:  # a figure for the log is never worth a run
                self._used = None
        return self._used

    def _ask(self) -> int:
        if self._stub is None:
            node = ray_module("_private.worker")._global_node
            self._channel = ray_module("_private.grpc_utils").init_grpc_channel(
                f"{node.node_ip_address}:{node.node_manager_port}"
            )
            self._stub = ray_module("core.generated.node_manager_pb2_grpc").NodeManagerServiceStub(self._channel)
        request = ray_module("core.generated.node_manager_pb2").GetNodeStatsRequest(include_memory_info=False)
        return int(self._stub.GetNodeStats(request, timeout=0.5).store_stats.object_store_bytes_used)

    def close(self) -> None:
        """Before Ray ends: an open channel would complain on stderr."""
        if self._channel is not None:
            self._channel.close()


def hear(stack: ExitStack, say: Callable[[str], None]) -> None:
    """Pass on what workers print; Ray's own printer writes to stdout, which carries the result.

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
                say(f"{name}: {line}")
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


def tail(stack: ExitStack, folder: Path, say: Callable[[str], None]) -> None:
    """The same on our own Ray, which has no log monitor: follow the files that workers write into."""
    stop = threading.Event()
    names: dict[Path, str] = {}
    positions: dict[Path, int] = {}

    def read(path: Path) -> None:
        with path.open("rb") as file:
            file.seek(positions.get(path, 0))
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]  # a line that is still being written comes next time
        positions[path] = positions.get(path, 0) + len(whole)
        for line in whole.decode(errors="replace").splitlines():
            if line.startswith(":actor_name:"):
                names[path] = line.removeprefix(":actor_name:")
            elif path in names and not line.startswith((":job_id:", ":task_name:")):
                say(f"{names[path]}: {line}")

    def read_all() -> None:
        for path in folder.glob("r/session_latest/logs/worker-*"):
            with suppress(OSError):
                read(path)

    def follow() -> None:
        while not stop.wait(0.25):
            read_all()
        read_all()

    thread = threading.Thread(target=follow, name="raynforce-worker-output", daemon=True)
    thread.start()
    stack.callback(thread.join)
    stack.callback(stop.set)
