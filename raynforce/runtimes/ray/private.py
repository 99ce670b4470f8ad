"""All that is used of Ray's private parts, and what is done with a Ray that lacks them."""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from raynforce.errors import UsageError

TRIED = "2.60."  # the Ray whose insides are known well enough to leave parts of it out
CURRENT = Path("/tmp/ray/ray_current_cluster")
KEPT = 1 << 30  # seconds that a worker in reserve is kept
LACKING = (ImportError, AttributeError, TypeError)  # of a part that is not there, or takes other arguments


def ray_module(module: str = "") -> Any:
    """Ray, or a module of it, imported when it is needed; most of it has no types."""
    return importlib.import_module(f"ray.{module}" if module else "ray")


def ignored(root: Path) -> list[Callable[[Path], bool]] | None:
    """What Ray leaves out because `.gitignore` or `.rayignore` name it; None if it cannot be asked."""
    try:
        packaging = ray_module("_private.runtime_env.packaging")
        quiet = logging.getLogger("raynforce.quiet")
        return list(packaging.get_excludes_from_ignore_files(root, include_gitignore=True, logger=quiet))
    except LACKING:
        return None


def gpus_here() -> int | None:
    """How many GPUs a Ray that is started here would have; None if it cannot be asked."""
    try:
        manager = ray_module("_private.accelerators").get_accelerator_manager_for_resource("GPU")
        there = int(manager.get_current_node_num_accelerators())
        visible = manager.get_current_process_visible_accelerator_ids()
        return there if visible is None else min(there, len(visible))
    except LACKING:
        return None


def reread_environment() -> None:
    """Ray's C++ side keeps copies of variables and token. A Ray that cannot read them anew takes what it began with."""
    with suppress(*LACKING):
        raylet = ray_module("_raylet")
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def own_sigterm() -> Iterator[None]:
    """Keep Ray from taking SIGTERM over, to exit in its own way; another Ray may do so."""
    utils = ray_module("_private.utils")
    before = getattr(utils, "set_sigterm_handler", None)
    if before is None:
        yield
        return
    utils.set_sigterm_handler = lambda handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = before


@contextmanager
def uncounted_callbacks() -> Iterator[None]:
    """Keep Tune from importing W&B, MLflow and Comet, where they are installed, to count callbacks that are theirs."""
    with ExitStack() as stack:
        with suppress(*LACKING):
            usage = ray_module("air._internal.usage")
            stack.callback(setattr, usage, "tag_callbacks", usage.tag_callbacks)
            usage.tag_callbacks = lambda callbacks: False
        yield


@contextmanager
def ready_trials() -> Iterator[None]:
    """Have Tune's actors ask for no environment of their own, so that they get processes that were started ahead."""
    with ExitStack() as stack:
        with suppress(*LACKING):
            cache, remote = ray_module("tune.execution.class_cache")._ActorClassCache, ray_module().remote
            stack.callback(setattr, cache, "get", cache.get)
            made: dict[Any, Any] = {}
            cache.get = lambda self, kind: made.get(kind) or made.setdefault(kind, remote(kind))
        yield


def job(path: Path) -> Any:
    """Workers look for modules in `path`; else they have to be installed there."""
    kind = ray_module("job_config").JobConfig
    try:
        return kind(_py_driver_sys_path=[str(path)])
    except TypeError:
        return kind()


def local_address() -> str:
    """Where the Ray that runs on this machine listens; empty if there is none."""
    try:
        return str(ray_module("_private.services").canonicalize_bootstrap_address("auto") or "")
    except LACKING:
        with suppress(OSError):
            return CURRENT.read_text().strip()
    except Exception:  # it found none
        pass
    return ""


class About(NamedTuple):
    ray: str
    python: str
    nodes: list[dict[str, float]]
    hosts: set[str]
    grows: bool = False  # an autoscaler may add nodes


def ask(address: str) -> About:
    """Ask the cluster's control store what it is: a cheap call that fails at once where tokens do not match."""
    try:
        client = ray_module("_raylet").GcsClient(address=address)
        about = json.loads(client.internal_kv_get(b"CLUSTER_METADATA", namespace=b"cluster", timeout=5) or b"{}")
        nodes = client.get_all_node_info(timeout=5).values()
        state = ray_module("core.generated.gcs_pb2").GcsNodeInfo.ALIVE
        alive = [node for node in nodes if node.state == state]
        resources = [dict(node.resources_total) for node in alive]
        hosts = {node.node_manager_hostname for node in alive}
        autoscaler = _has_autoscaler(client, alive)
    except LACKING as error:
        problem = f"Ray {ray_module().__version__} cannot be asked what runs at {address}"
        fix = f"use Ray {TRIED}x on all nodes, or call ray.init in a script of your own before you train"
        raise UsageError(f"{problem}: {fix}") from error
    return About(about.get("ray_version", ""), about.get("python_version", ""), resources, hosts, autoscaler)


class Seen(NamedTuple):
    """A node, as the control store knows it."""

    address: str
    port: int
    hostname: str
    head: bool
    total: dict[str, float]
    free: dict[str, float]


class Looked(NamedTuple):
    nodes: list[Seen]
    waiting: list[dict[str, Any]]  # what is asked for and has no room: resources, count
    failed: list[str]  # why nodes could not be started
    dashboard: str  # where it listens; empty if there is none


def look(address: str) -> Looked:
    """More of a cluster that was asked before: its nodes one by one, and what waits for room."""
    client = ray_module("_raylet").GcsClient(address=address)
    state = ray_module("core.generated.gcs_pb2").GcsNodeInfo.ALIVE
    alive = [node for node in client.get_all_node_info(timeout=5).values() if node.state == state]
    dashboard = client.internal_kv_get(b"dashboard", namespace=b"dashboard", timeout=5) or b""
    free: dict[str, dict[str, float]] = {}
    waiting: list[dict[str, Any]] = []
    failed: list[str] = []
    with suppress(*LACKING):
        found = ray_module("autoscaler.v2.sdk").get_cluster_status(address)
        nodes = [*found.active_nodes, *found.idle_nodes]
        free = {node.node_id: node.available_resources() for node in nodes}
        failed = [launch.details or launch.ray_node_type_name for launch in found.failed_launches]
        demands = [*found.resource_demands.ray_task_actor_demand, *found.resource_demands.placement_group_demand]
        bundles = [bundle for demand in demands for bundle in demand.bundles_by_count]
        waiting = [{"resources": dict(bundle.bundle), "count": bundle.count} for bundle in bundles]
    seen = []
    for node in alive:
        total = dict(node.resources_total)
        where = node.node_manager_address, node.node_manager_port, node.node_manager_hostname
        seen.append(Seen(*where, node.is_head_node, total, free.get(node.node_id.hex(), total)))
    return Looked(seen, waiting, failed, dashboard.decode())


def grows(address: str) -> bool:
    """Whether an autoscaler looks after the cluster that this process uses."""
    with suppress(Exception):  # a Ray that cannot be asked is taken as it is
        return ask(address).grows
    return False


def _has_autoscaler(client: Any, nodes: Sequence[Any]) -> bool:
    """Ray's first autoscaler names the types of its nodes; with the second, the head has an id from its provider."""
    with suppress(ValueError, AttributeError, TypeError):
        report = json.loads(client.internal_kv_get(b"__autoscaling_status", namespace=None, timeout=5) or b"{}")
        kinds = (report.get("autoscaler_report") or {}).get("node_type_mapping") or {}
        if any(not name.startswith("node_") for name in kinds.values()):
            return True
        raylet = ray_module("_raylet")
        where, key = raylet.GCS_AUTOSCALER_STATE_NAMESPACE, raylet.GCS_AUTOSCALER_V2_ENABLED_KEY
        second = client.internal_kv_get(key.encode(), namespace=where.encode(), timeout=5)
        return second == b"1" and any(node.is_head_node and node.instance_id for node in nodes)
    return False


def started_processes(node: Any = None) -> list[int]:
    """Process ids of what our own Ray has started; none where it does not tell: then they end by themselves."""
    with suppress(*LACKING):
        node = node or ray_module("_private.worker")._global_node
        return [info.process.pid for infos in node.all_processes.values() for info in infos]
    return []


@contextmanager
def few_processes(stack: ExitStack, end: Callable[[Any], None]) -> Iterator[None]:
    """Start Ray without autoscaler, dashboard, its agent and log monitor, processes it waits for: 2 s instead of 8. An
    untried Ray starts in full. `end` is called with Ray's node when the stack is left."""
    parts = []
    with suppress(*LACKING):
        node, utils = ray_module("_private.node"), ray_module("_private.utils")
        constants = ray_module("_private.ray_constants")

        class Node(node.Node):  # type: ignore[misc, name-defined]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                stack.callback(end, self)  # also if it is interrupted in the middle of starting
                super().__init__(*args, **kwargs)

            def start_monitor(self) -> None: ...

            def start_log_monitor(self) -> None: ...

            def start_api_server(self, **_: Any) -> None:
                self._webui_url = ""

        def missing() -> ImportError:
            return ImportError("the dashboard is not wanted")

        parts = [
            (node, "Node", node.Node, Node),
            (utils, "get_dashboard_dependency_error", utils.get_dashboard_dependency_error, missing),
            # Ray may have been imported before its variable was set.
            (constants, "ENABLE_RAY_CLUSTER", constants.ENABLE_RAY_CLUSTER, False),
        ]
    if not parts or not ray_module().__version__.startswith(TRIED):
        stack.callback(ray_module().shutdown)
        yield
        return
    for module, name, _, ours in parts:
        setattr(module, name, ours)
    try:
        yield
    finally:
        for module, name, before, _ in parts:
            setattr(module, name, before)


def end_node(node: Any) -> None:
    """End the processes of a node that was not up yet when it was interrupted."""
    with suppress(*LACKING):
        if node.all_processes:
            node.kill_all_processes(check_alive=False, allow_graceful=False)


def actor_id(actor: Any) -> str:
    """By which errors name an actor; without it, who waited for an answer is named."""
    return str(actor._actor_id.hex()) if hasattr(actor, "_actor_id") else ""


def room_near(asked: Mapping[str, float], node: str | None) -> Any:
    """A placement group, on this node if there is one and Ray can be told so."""
    make = ray_module("util.placement_group").placement_group
    try:
        return make([dict(asked)], strategy="STRICT_PACK", _soft_target_node_id=node)
    except TypeError:
        return make([dict(asked)], strategy="STRICT_PACK")


class Raylet:
    """Ray's own process on this node: how full its object store is, and a worker in reserve. Both are optional."""

    def __init__(self) -> None:
        self._stub: Any = None
        self._channel: Any = None

    def used_bytes(self) -> int | None:
        try:
            request = ray_module("core.generated.node_manager_pb2").GetNodeStatsRequest(include_memory_info=False)
            return int(self._open().GetNodeStats(request, timeout=0.5).store_stats.object_store_bytes_used)
        except Exception:  # a figure for the log is never worth a run
            return None

    def start_worker(self) -> None:
        """Have a worker started ahead, for a role that may have to be restarted. Does not wait."""
        with suppress(Exception):
            language = ray_module("core.generated.common_pb2").Language.PYTHON
            job_id = ray_module("_private.worker").global_worker.current_job_id.binary()
            request = ray_module("core.generated.node_manager_pb2").PrestartWorkersRequest(
                language=language, job_id=job_id, keep_alive_duration_secs=KEPT, num_workers=1
            )
            request.runtime_env_info.serialized_runtime_env = "{}"
            self._open().PrestartWorkers.future(request, timeout=5)

    def _open(self) -> Any:
        if self._stub is None:
            node = ray_module("_private.worker")._global_node
            address = f"{node.node_ip_address}:{node.node_manager_port}"
            self._channel = ray_module("_private.grpc_utils").init_grpc_channel(address)
            self._stub = ray_module("core.generated.node_manager_pb2_grpc").NodeManagerServiceStub(self._channel)
        return self._stub

    def close(self) -> None:
        """Before Ray ends: an open channel would complain on stderr."""
        if self._channel is not None:
            self._channel.close()


def redirect_output(stack: ExitStack, hear: Callable[[str, str], None]) -> None:
    """Take what workers print, by name and line: Ray's own printer writes to stdout, which carries the result. Ray's
    own messages are dropped: a worker's death is reported by the call that it did not answer."""
    with suppress(*LACKING):
        worker = ray_module("_private.worker")
        dispatcher = ray_module("_private.ray_logging").global_worker_stdstream_dispatcher
        printer = worker.print_to_stdstream
        handlers = [handler for name, handler in dispatcher.handlers if name == "ray_print_logs"]

        def pass_on(batch: Mapping[str, Any], **_: Any) -> None:
            if name := batch.get("actor_name"):
                for line in batch["lines"]:
                    hear(name, line)
                return
            for handler in handlers if batch.get("task_name") else ():  # a task of the user's own
                handler(batch)

        def undo() -> None:
            worker.print_to_stdstream = printer
            dispatcher.remove_handler("raynforce")
            for handler in handlers if ray_module().is_initialized() else ():
                dispatcher.add_handler("ray_print_logs", handler)

        dispatcher.remove_handler("ray_print_logs")
        dispatcher.add_handler("raynforce", pass_on)
        worker.print_to_stdstream = pass_on  # for those who print without the dispatcher
        stack.callback(undo)
