"""The ray runtime: each role is a Ray actor, on this machine or on the nodes of a cluster."""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from raynforce.config import Config
from raynforce.errors import RaynforceError, summary
from raynforce.runtimes.base import Handle, Pending, Place, RoleDied, RoleError, Runtime
from raynforce.runtimes.cluster import Cluster, connect
from raynforce.runtimes.host import Host, pack, with_cause
from raynforce.runtimes.placing import needs

ANYWHERE = Place()
PATIENCE = 5.0  # seconds after which a wait for room on the cluster is explained
CLOSING = 3.0  # seconds for roles to close what they have opened
HEALTH_EVERY = 1.0  # seconds between looks at the object store


class RayHost(Host):
    """A host that Ray calls by its role's name, in process titles and in front of what it prints."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __repr__(self) -> str:
        return self.name

    def arrive(self) -> None:
        """Answered as soon as there was room for this role."""


class RayPending(Pending):
    """An answer on its way; Ray keeps the value for as long as this object lives."""

    def __init__(self, ref: Any, name: str, names: dict[str, str]) -> None:
        self.ref = ref
        self.name = name
        self._names = names

    def result(self) -> Any:
        ray = _ray()
        try:
            return ray.get(self.ref)
        except ray.exceptions.RayError as error:
            failure = _ours(error, self.name, self._names)
        raise failure


class RayHandle(Handle):
    """A role in a Ray actor."""

    def __init__(self, actor: Any, name: str, names: dict[str, str]) -> None:
        self.actor = actor
        self.name = name
        self._names = names
        names[actor._actor_id.hex()] = name

    def call(self, method: str, *args: Any) -> RayPending:
        plain = [arg.ref if isinstance(arg, RayPending) else arg for arg in args]
        return RayPending(self.actor.call.remote(method, *plain), self.name, self._names)


class RayRuntime(Runtime):
    """Roles as Ray actors, on a Ray of our own or on one that runs already."""

    def __init__(self, config: Config, say: Callable[[str], None] = lambda _: None) -> None:
        self._cluster = connect(config, say)
        self.places = self._cluster.places
        self._actor: Any = _ray().remote(RayHost)
        self._listening = ExitStack()
        _hear(self._listening, say)
        if self._cluster.folder is not None:
            _tail(self._listening, self._cluster.folder, say)
        self._arrivals = Arrivals(self._cluster, say)
        self._handles: list[RayHandle] = []
        self._names: dict[str, str] = {}  # of roles, by their actor's id
        self._store = ObjectStore()

    def spawn(self, role: str, *args: Any, name: str, place: Place = ANYWHERE) -> RayHandle:
        asked = needs(place)
        options = {"num_cpus": asked.pop("CPU", 0), "num_gpus": asked.pop("GPU", 0), "resources": asked}
        actor = self._actor.options(**options, max_restarts=0, max_concurrency=1).remote(name)
        self._arrivals.expect(actor.arrive.remote(), name)
        # Where code was sent, a node may have other files under the names of the driver's search path.
        actor.build.remote(pack(role, args, name, place, path=[] if self._cluster.shipped else None))
        handle = RayHandle(actor, name, self._names)
        self._handles.append(handle)
        return handle

    def wait(
        self, pendings: Sequence[Pending], count: int | None = None, timeout: float | None = None
    ) -> tuple[list[Pending], list[Pending]]:
        ray = _ray()
        refs = [pending.ref for pending in pendings if isinstance(pending, RayPending)]
        different = list(dict.fromkeys(refs))
        if not different:
            return [], []
        wanted = len(different) if count is None else min(count, len(different))
        if wanted == 0:
            wanted, timeout = len(different), 0
        ready = set(ray.wait(different, num_returns=wanted, timeout=timeout, fetch_local=False)[0])
        there = [ref in ready for ref in refs]
        return (
            [pending for pending, is_there in zip(pendings, there, strict=True) if is_there],
            [pending for pending, is_there in zip(pendings, there, strict=True) if not is_there],
        )

    def share(self, value: Any) -> RayPending:
        return RayPending(_ray().put(value), "driver", self._names)

    def health(self) -> dict[str, float]:
        used = self._store.used_bytes()
        return {} if used is None else {"health/object_store_mb": used / 1e6}

    def close(self, *, now: bool = False) -> None:
        ray = _ray()
        handles, self._handles = self._handles, []
        try:
            waiting = self._arrivals.close()
            if not now:
                closing = [handle.actor.close.remote() for handle in handles if handle.name not in waiting]
                if closing:
                    ray.wait(closing, num_returns=len(closing), timeout=CLOSING, fetch_local=False)
            for handle in handles:
                ray.kill(handle.actor)
        finally:
            self._listening.close()
            self._cluster.close(now=now)


class Arrivals:
    """Notices when roles wait for room on a cluster that others use too, and says so."""

    def __init__(self, cluster: Cluster, say: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._say = say
        self._expected: dict[Any, str] = {}
        self._timer: threading.Timer | None = None
        self._patience = PATIENCE
        self._lock = threading.Lock()

    def expect(self, ref: Any, name: str) -> None:
        with self._lock:
            self._expected[ref] = name
            self._set_timer()

    def missing(self) -> list[str]:
        """Names of roles that have not found room yet."""
        ray = _ray()
        with self._lock:
            if self._expected:
                refs = list(self._expected)
                for ref in ray.wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)[0]:
                    del self._expected[ref]
            return list(self._expected.values())

    def close(self) -> list[str]:
        """Stop looking; returns who has not come."""
        missing = self.missing()
        with self._lock:
            self._expected = {}
            if self._timer is not None:
                self._timer.cancel()
        return missing

    def _set_timer(self) -> None:
        if self._timer is None and not self._cluster.started:  # our own Ray has room for all
            self._timer = threading.Timer(self._patience, self._explain)
            self._timer.daemon = True
            self._timer.start()

    def _explain(self) -> None:
        missing = self.missing()
        if not missing:
            with self._lock:
                self._timer = None
            return
        who = missing[0] if len(missing) == 1 else f"{missing[0]} and {len(missing) - 1} more"
        self._say(f"{who} wait{'s' * (len(missing) == 1)} for room: {self._cluster.waiting_for()}")
        with self._lock:
            self._timer = None
            self._patience = min(60.0, 2 * self._patience)
            self._set_timer()


class ObjectStore:
    """How full this node's object store is, asked of its raylet at most once a second."""

    def __init__(self) -> None:
        self._looked = -HEALTH_EVERY
        self._used: int | None = None
        self._stub: Any = None

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
            node = _ray("_private.worker")._global_node
            channel = _ray("_private.grpc_utils").init_grpc_channel(f"{node.node_ip_address}:{node.node_manager_port}")
            self._stub = _ray("core.generated.node_manager_pb2_grpc").NodeManagerServiceStub(channel)
        request = _ray("core.generated.node_manager_pb2").GetNodeStatsRequest(include_memory_info=False)
        return int(self._stub.GetNodeStats(request, timeout=0.5).store_stats.object_store_bytes_used)


def _hear(stack: ExitStack, say: Callable[[str], None]) -> None:
    """Pass on what workers print; Ray's own printer writes to stdout, which carries the result.

    What Ray itself has to say stays unsaid: a worker's death is reported by the call that it did not answer.
    """
    worker, dispatcher = _ray("_private.worker"), _ray("_private.ray_logging").global_worker_stdstream_dispatcher

    def pass_on(batch: Mapping[str, Any], **_: Any) -> None:
        name = batch.get("actor_name")
        for line in batch["lines"] if name else ():
            say(f"{name}: {line}")

    printer = worker.print_to_stdstream
    handlers = [handler for name, handler in dispatcher.handlers if name == "ray_print_logs"]
    worker.print_to_stdstream = pass_on  # for those who print without the dispatcher
    dispatcher.remove_handler("ray_print_logs")
    dispatcher.add_handler("raynforce", pass_on)

    def undo() -> None:
        worker.print_to_stdstream = printer
        dispatcher.remove_handler("raynforce")
        for handler in handlers:
            dispatcher.add_handler("ray_print_logs", handler)

    stack.callback(undo)


def _tail(stack: ExitStack, folder: Path, say: Callable[[str], None]) -> None:
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


def _ray(module: str = "") -> Any:
    """Ray, or a module of it, imported when it is needed; most of it has no types."""
    return importlib.import_module(f"ray.{module}" if module else "ray")


def _ours(error: Any, name: str, names: dict[str, str]) -> BaseException:
    """Ray's error as one of ours, in one line. A call fails with the error of the answer it was waiting for, too."""
    kinds = _ray("exceptions")
    if isinstance(error, kinds.RayTaskError):
        cause = error.cause
        if isinstance(cause, RaynforceError):
            return with_cause(cause)
        if isinstance(cause, kinds.RayError):
            return _ours(cause, name, names)
        return RoleError(f"{name}: {summary(cause)}")
    if isinstance(error, kinds.RayActorError):
        return RoleDied(f"{names.get(error.actor_id or '', name)} died: {_reason(str(error))}")
    if isinstance(error, kinds.ObjectLostError):
        return RoleDied(f"{name}: an answer it was to get was lost with the node that held it")
    return RoleError(f"{name}: {summary(error)}")


REASONS = (
    ("low on memory", "its node ran out of memory; use fewer samplers or environments"),
    ("node has died", "its node was lost"),
    ("its node died", "its node was lost"),
    ("ray.kill", "it was ended"),
    ("runtime_env", "its node could not set up the code that was sent"),
    ("runtime environment", "its node could not set up the code that was sent"),
)


def _reason(text: str) -> str:
    """Why an actor died, without Ray's page of advice."""
    flat = " ".join(text.split())
    for sign, reason in REASONS:
        if sign in flat:
            return reason
    return "its process ended unexpectedly (killed, out of memory, or crashed in native code)"
