"""A Ray to run on: started here for this run alone, or joined where one is running."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import platform
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from raynforce.config import Config
from raynforce.errors import UsageError, summary
from raynforce.experience.memory import available_bytes
from raynforce.runtimes.base import Place
from raynforce.runtimes.host import THREADS
from raynforce.runtimes.placing import place_roles, require_room, total_needs

Say = Callable[[str], None]

SMALLEST_STORE = 200_000_000
BYTES_PER_STEP = 32_768  # of one environment, generous: most observations are far smaller
SHARED_MEMORY = "/dev/shm"
AUTH = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
LOCAL = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray's name for: listen on the loopback interface alone
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # Ray's 15 would make learner and samplers alike; each role sets its own
    # The raylet looks for its object store once a second, which is there after some milliseconds.
    "RAY_raylet_client_connect_timeout_milliseconds": "20",
    "RAY_raylet_client_num_connect_attempts": "500",
}
DRIVER = {"RAY_get_check_signal_interval_milliseconds": "100"}  # how soon Ctrl-C is noticed while waiting
CHANGED = ("RAY_ADDRESS", "RAY_CLIENT_MODE", "PYTHONBREAKPOINT")  # what Ray sets in this process, to be put back
NOT_SHIPPED = [".*", "__pycache__", "*.pyc", "venv", "runs", "checkpoints", "*.pem", "*.key", "auth_token"]


class Cluster:
    """The Ray that this process is connected to; `close` leaves nothing behind that was started here."""

    def __init__(self, address: str, places: Mapping[str, Place], *, started: bool, shipped: bool) -> None:
        self.address = address
        self.places = places
        self.started = started
        """Whether it is ours, to be ended with the run."""
        self.shipped = shipped
        """Whether code was sent to the nodes, which then do not look for it where the driver has it."""
        self._at_close = ExitStack()
        self._now = False

    def waiting_for(self) -> str:
        """One sentence on why roles may not have started yet."""
        import ray

        total, free = ray.cluster_resources(), ray.available_resources()
        names = [name for name in ("CPU", "GPU") if total.get(name)]
        shares = [f"{free.get(name, 0):g} of {total[name]:g} {name}s" for name in names]
        return f"the cluster has {' and '.join(shares) or 'no CPUs'} free"

    def close(self, *, now: bool = False) -> None:
        """Leave the cluster, or end it if it was started here."""
        self._now = now
        self._at_close.close()


def connect(config: Config, say: Say) -> Cluster:
    """Connect this process to the Ray that the settings name: one already in use here, one to join, or our own."""
    try:
        import ray
    except ImportError as error:
        raise UsageError("the ray runtime needs Ray: pip install 'ray>=2.56', or use --runtime process") from error
    if ray.is_initialized():
        return _adopt(config, say)
    address = config.ray.address or os.environ.get("RAY_ADDRESS") or "local"
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or address
    with _own_signals():
        return _start(config, say) if address == "local" else _join(config, address, say)


def _adopt(config: Config, say: Say) -> Cluster:
    """The user's script has called `ray.init` itself, and will call `ray.shutdown` itself."""
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    places = _placed(config, nodes, say)
    cluster = Cluster(ray.get_runtime_context().gcs_address, places, started=False, shipped=False)
    _hear_workers(cluster._at_close, say)
    return cluster


# Starting our own


def _start(config: Config, say: Say) -> Cluster:
    """A Ray of this run's own: loopback only, with a token of its own, in a directory of its own."""
    require_room(config)
    store = _store_bytes(config)
    places, _ = place_roles(config, None)
    total = total_needs(places, config.sampling.samplers)
    cpus, cores = max(1, int(-(-total.pop("CPU", 1.0) // 1))), _cores()
    gpus = total.pop("GPU", 0.0)
    if cpus > cores:
        say(f"{config.sampling.samplers + 1} roles share {cores} core{'s' * (cores > 1)}")

    with ExitStack() as stack:
        folder = _own_folder(stack)
        stack.enter_context(_environment({**_unchanged(), **DRIVER, **LOCAL, **_own_token()}))
        with _environment(dict.fromkeys(THREADS, "1")), _few_processes():
            import ray

            try:
                ray.init(
                    "local",
                    num_cpus=cpus,  # as many workers are started ahead
                    resources=total,
                    object_store_memory=store,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level="CRITICAL",
                    job_config=_job(),
                    _temp_dir=folder,
                    _skip_env_hook=True,
                )
            except Exception as error:
                ray.shutdown()
                raise UsageError(f"Ray did not start: {summary(error)}; --runtime process needs no Ray") from error
        cluster = Cluster(ray.get_runtime_context().gcs_address, places, started=True, shipped=False)
        stack.callback(_end_own, cluster)
        if gpus > ray.cluster_resources().get("GPU", 0.0):
            place_roles(config, [ray.cluster_resources()])
        _hear_workers(stack, say)
        _tail_workers(stack, Path(folder), say)
        cluster._at_close = stack.pop_all()
        return cluster


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _store_bytes(config: Config) -> int:
    """Room for a few fragments of each sampler; refuses a /dev/shm in which Ray cannot live."""
    sampling = config.sampling
    fragment = sampling.envs * sampling.fragment * BYTES_PER_STEP
    wanted = max(SMALLEST_STORE, 4 * sampling.samplers * fragment)
    free = _shared_memory_bytes()
    if free is not None:
        if free < SMALLEST_STORE:
            raise UsageError(
                f"Ray needs {SMALLEST_STORE / 1e6:.0f} MB of shared memory, {SHARED_MEMORY} has {free / 1e6:.0f} MB "
                "free: in docker use --shm-size=1g, or use --runtime process, which needs none"
            )
        wanted = min(wanted, max(SMALLEST_STORE, int(0.5 * free)))
    memory = available_bytes()
    return wanted if memory is None else max(SMALLEST_STORE, min(wanted, int(0.3 * memory)))


def _shared_memory_bytes() -> int | None:
    """Free bytes for shared memory; None where Ray does not use it."""
    try:
        status = os.statvfs(SHARED_MEMORY)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def _own_token() -> dict[str, str | None]:
    """Authentication is on with a token that only this process and its children know, unless the user has set it."""
    mode, token, path = (os.environ.get(name) for name in AUTH)
    if mode is not None and mode.lower() != "token":
        return {}
    own = token is None and path is None and not (mode and _token_file().exists())
    return {"RAY_AUTH_MODE": "token", **({"RAY_AUTH_TOKEN": secrets.token_hex(32)} if own else {})}


def _token_file() -> Path:
    return Path.home() / ".ray" / "auth_token"


def _own_folder(stack: ExitStack) -> str:
    """A private directory that is gone afterwards, even if this process is killed."""
    base = tempfile.gettempdir()
    base = base if len(base) <= 20 else "/tmp"  # a socket's path may have 107 bytes, Ray adds 75
    folder = tempfile.mkdtemp(prefix="rnf-", dir=base)
    # It sleeps until the pipe closes, which only this process holds open; its own session spares it Ctrl-C.
    script = 'read _; for _ in 1 2 3 4 5; do sleep 1; rm -rf "$0"; done'
    janitor = subprocess.Popen(
        ["/bin/sh", "-c", script, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )

    def clean() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        janitor.kill()
        janitor.communicate()

    stack.callback(clean)
    return folder


@contextmanager
def _few_processes() -> Iterator[None]:
    """Start Ray without what a run on one machine has no use for: autoscaler, dashboard, its agent, log monitor.

    Each is a Python process of its own, and Ray waits for them. Names that this Ray does not have stay unused.
    """
    import ray._private.node as node
    import ray._private.ray_constants as constants
    import ray._private.utils as utils

    class Node(node.Node):  # type: ignore[misc]
        def start_monitor(self) -> None: ...

        def start_log_monitor(self) -> None: ...

        def start_api_server(self, **_: Any) -> None:
            self._webui_url = ""

    def missing() -> ImportError:
        return ImportError("the dashboard is not wanted")

    patches = [
        (node, "Node", Node),
        (utils, "get_dashboard_dependency_error", missing),
        (constants, "ENABLE_RAY_CLUSTER", False),  # read from the environment when Ray was imported
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in patches if hasattr(module, name)]
    for module, name, value in patches:
        if hasattr(module, name):
            setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def _end_own(cluster: Cluster) -> None:
    """End Ray and wait until its processes are gone."""
    import ray
    import ray._private.worker as worker

    node = getattr(worker, "_global_node", None)
    started = [info.process.pid for infos in getattr(node, "all_processes", {}).values() for info in infos]
    workers = [child for pid in started for child in _children(pid)]
    if cluster._now:
        _kill(workers)
    ray.shutdown()
    deadline = time.monotonic() + 1.0
    while (left := [pid for pid in workers if pid.alive()]) and time.monotonic() < deadline:
        time.sleep(0.01)
    _kill(left)


@dataclass(frozen=True)
class _Process:
    """A process that is told apart from a later one with the same id by when it began."""

    pid: int
    began: str

    def alive(self) -> bool:
        return _began(self.pid) == self.began


def _began(pid: int) -> str:
    """When a process began, in the kernel's clock ticks; empty if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _children(pid: int) -> list[_Process]:
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []
    return [_Process(child, _began(child)) for child in children]


def _kill(processes: Sequence[_Process]) -> None:
    for process in processes:
        if process.alive():
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


# Joining one that runs


@dataclass(frozen=True)
class _Found:
    """What a running cluster says of itself."""

    ray: str
    python: str
    nodes: list[dict[str, float]]
    hosts: set[str]


def _join(config: Config, address: str, say: Say) -> Cluster:
    """Join a running cluster; whatever is in the way is found before Ray is asked, which would wait or abort."""
    import ray

    with ExitStack() as stack:
        stack.enter_context(_environment({**_unchanged(), **DRIVER}))
        address = _located(address)
        found = _probe(address, stack)
        _require_same_versions(address, found)
        places = _placed(config, found.nodes, say)
        elsewhere = found.hosts - {socket.gethostname()}
        mode = config.ray.ship_code
        in_job = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ  # `ray job submit` has shipped the code
        shipped = mode == "always" or (mode == "auto" and bool(elsewhere) and not in_job)
        try:
            ray.init(
                address,
                log_to_driver=True,
                logging_level="CRITICAL",
                runtime_env=_shipment(config, stack) if shipped else None,
                job_config=None if shipped else _job(),
            )
        except Exception as error:
            ray.shutdown()
            raise UsageError(
                f"joining Ray at {address} failed: {summary(error.__cause__ or error)}; run this on a node of the "
                "cluster, or submit it with `ray job submit`"
            ) from error
        cluster = Cluster(address, places, started=False, shipped=shipped)
        stack.callback(ray.shutdown)
        _hear_workers(stack, say)
        cluster._at_close = stack.pop_all()
        return cluster


def _located(address: str) -> str:
    """`host:port` of a cluster that listens."""
    if "://" in address:
        raise UsageError(
            f"ray.address = {address!r}: Ray Client is far too slow to train through; "
            "run on a node of the cluster with --ray-address auto, or submit a job with `ray job submit`"
        )
    if address == "auto":
        from ray._private.services import canonicalize_bootstrap_address

        try:
            address = canonicalize_bootstrap_address("auto") or ""
        except Exception:
            address = ""
        if not address:
            raise UsageError(
                "ray.address = 'auto': no Ray runs on this machine; start one with `ray start --head`, "
                "or leave the address out to start one for this run"
            )
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdigit() and 0 < int(port) < 65536) or any(c.isspace() for c in address):
        raise UsageError(
            f"ray.address = {address!r} is not an address: give host:port, such as 127.0.0.1:6379, or auto, or local"
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=3) as connection:
            speaks = _speaks_grpc(connection)
    except OSError as error:
        raise UsageError(
            f"no Ray at {address}: {error.strerror or error}; check the address (`ray status` on the head), "
            "or leave it out to start a Ray for this run"
        ) from error
    if not speaks:
        _refuse_stranger(address)
    return address


def _speaks_grpc(connection: socket.socket) -> bool:
    """Whether a greeting of HTTP/2 is answered in kind; Ray would try for half a minute."""
    if os.environ.get("RAY_USE_TLS", "0") not in ("0", ""):
        return True  # it will not answer one in the clear
    settings = b"\0\0\0\4\0\0\0\0\0"  # an empty frame of that type
    try:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings)
        return connection.recv(9)[3:4] == b"\4"
    except OSError:
        return False


def _refuse_stranger(address: str, error: Exception | None = None) -> NoReturn:
    why = f": {summary(error)}" if error else ""
    raise UsageError(
        f"what listens at {address} does not answer as Ray does{why}; give the address that `ray start --head` printed"
    ) from error


def _probe(address: str, stack: ExitStack) -> _Found:
    """Ask the cluster's control store what it is: a cheap call that fails at once where tokens do not match."""
    from ray.exceptions import AuthenticationError

    _require_readable_token(address)
    try:
        return _ask(address)
    except AuthenticationError:
        if os.environ.get("RAY_AUTH_MODE") is None and _has_token():
            stack.enter_context(_environment({"RAY_AUTH_MODE": "token"}))
            with suppress(AuthenticationError):
                return _ask(address)
            _refuse_token(address, "the token here is not the cluster's")
        _refuse_token(address, "the token here is not the cluster's" if _has_token() else "it wants a token")


def _ask(address: str) -> _Found:
    from ray._raylet import GcsClient
    from ray.core.generated.gcs_pb2 import GcsNodeInfo
    from ray.exceptions import AuthenticationError

    with _environment({"RAY_py_gcs_connect_timeout_s": "5"}), _silent():
        try:
            client = GcsClient(address=address)
            about = json.loads(client.internal_kv_get(b"CLUSTER_METADATA", namespace=b"cluster", timeout=5) or b"{}")
            nodes = list(client.get_all_node_info(timeout=5).values())
        except AuthenticationError:
            raise
        except Exception as error:
            _refuse_stranger(address, error)
    alive = [node for node in nodes if node.state == GcsNodeInfo.ALIVE]
    return _Found(
        about.get("ray_version", ""),
        about.get("python_version", ""),
        [dict(node.resources_total) for node in alive],
        {node.node_manager_hostname for node in alive},
    )


def _require_readable_token(address: str) -> None:
    """Ray aborts the process where it is told to use a token and finds none."""
    mode, token, path = (os.environ.get(name) for name in AUTH)
    if token is None and path is not None and not os.access(path, os.R_OK):
        raise UsageError(f"RAY_AUTH_TOKEN_PATH = {path!r} cannot be read: point it to a file with the cluster's token")
    if mode is not None and mode.lower() == "token" and not _has_token():
        _refuse_token(address, "RAY_AUTH_MODE=token is set, but there is no token here")


def _has_token() -> bool:
    _, token, path = (os.environ.get(name) for name in AUTH)
    return bool(token or path or _token_file().exists())


def _refuse_token(address: str, why: str) -> NoReturn:
    raise UsageError(
        f"Ray at {address} refused the connection: {why}; set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH to a file "
        "with the cluster's token (`ray get-auth-token` on its head node shows it)"
    )


def _require_same_versions(address: str, found: _Found) -> None:
    import ray

    here, there = (ray.__version__, platform.python_version()), (found.ray, found.python)
    if found.ray and (here[0] != there[0] or here[1].split(".")[:2] != there[1].split(".")[:2]):
        raise UsageError(
            f"Ray at {address} is Ray {there[0]} on Python {there[1]}, here is Ray {here[0]} on Python {here[1]}: "
            f"they must match; pip install ray=={there[0]} under Python {'.'.join(there[1].split('.')[:2])}"
        )


def _placed(config: Config, nodes: Sequence[Mapping[str, float]], say: Say) -> dict[str, Place]:
    places, notes = place_roles(config, nodes)
    for note in notes:
        say(note)
    return places


# The user's code on other machines


def _job() -> Any:
    """Workers find this package where the driver has it."""
    from ray.job_config import JobConfig

    return JobConfig(_py_driver_sys_path=[str(Path(__file__).parents[2])])


def _shipment(config: Config, stack: ExitStack) -> dict[str, Any]:
    """A runtime environment with this package and the directories that the user's modules live in."""
    roots = _code_roots([config.env, config.algo, config.network.factory or ""])
    if not roots:  # without a directory of its own, Ray would put the driver's current one first
        roots = [tempfile.mkdtemp(prefix="rnf-")]
        stack.callback(shutil.rmtree, roots[0], ignore_errors=True)
    first, *others = roots
    neighbours = [str(path) for root in others for path in Path(root).iterdir() if _is_module(path)]
    return {
        "working_dir": first,
        "py_modules": [str(Path(__file__).parents[1]), *neighbours],
        "excludes": NOT_SHIPPED,
    }


def _code_roots(names: Sequence[str]) -> list[str]:
    """Directories from which these `module:name` are imported, of those that are the user's own."""
    installed = [Path(path).resolve() for path in {*sysconfig.get_paths().values(), str(Path(__file__).parents[1])}]
    roots: list[str] = []
    for name in names:
        if ":" not in name:
            continue
        module = name.partition(":")[0].partition(".")[0]
        spec = importlib.machinery.PathFinder.find_spec(module, [os.getcwd(), *sys.path])
        spec = spec or importlib.util.find_spec(module)
        places = list(spec.submodule_search_locations or [spec.origin]) if spec else []
        if not places or places[0] is None:
            continue  # its import will fail with a better message
        found = Path(places[0]).resolve()
        root = str(found.parent)
        if root not in roots and not any(found.is_relative_to(path) for path in installed):
            roots.append(root)
    return roots


def _is_module(path: Path) -> bool:
    return path.suffix == ".py" or (path / "__init__.py").exists()


# What workers print


def _hear_workers(stack: ExitStack, say: Say) -> None:
    """Pass on what workers print; Ray's own printer writes to stdout, which is not ours to write to.

    What Ray itself has to say stays unsaid: a worker's death is reported by the call that it did not answer.
    """
    import ray._private.worker as worker
    from ray._private.ray_logging import global_worker_stdstream_dispatcher as dispatcher

    def pass_on(batch: Mapping[str, Any], **_: Any) -> None:
        name = batch.get("actor_name")
        for line in batch["lines"] if name else ():
            say(f"{name}: {line}")

    printer = worker.print_to_stdstream
    worker.print_to_stdstream = pass_on  # for those who print without the dispatcher
    handlers = [handler for name, handler in dispatcher.handlers if name == "ray_print_logs"]
    dispatcher.remove_handler("ray_print_logs")
    dispatcher.add_handler("raynforce", pass_on)

    def undo() -> None:
        worker.print_to_stdstream = printer
        dispatcher.remove_handler("raynforce")
        if worker.global_worker.connected:  # the user's own session goes on
            for handler in handlers:
                dispatcher.add_handler("ray_print_logs", handler)

    stack.callback(undo)


def _tail_workers(stack: ExitStack, folder: Path, say: Say) -> None:
    """The same without Ray's log monitor: read what workers have written into their files."""
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
        for path in folder.glob("session_latest/logs/worker-*"):
            with suppress(OSError):
                read(path)

    def follow() -> None:
        while not stop.wait(0.25):
            read_all()

    thread = threading.Thread(target=follow, name="raynforce-worker-output", daemon=True)
    thread.start()

    def end() -> None:
        stop.set()
        thread.join()
        read_all()

    stack.callback(end)


# The state of this process


@contextmanager
def _environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables (None removes one) for a while. Ray's C++ side keeps its own copy of some, so it is told."""
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if any(name.startswith("RAY_") for name in values):
        from ray._raylet import AuthenticationTokenLoader, Config as RayConfig

        RayConfig.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()


def _unchanged() -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in CHANGED}


@contextmanager
def _silent() -> Iterator[None]:
    """Keep what Ray's C++ side writes to stderr from the screen; only around calls that end soon."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@contextmanager
def _own_signals() -> Iterator[None]:
    """`ray.init` takes over SIGTERM; give it back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
