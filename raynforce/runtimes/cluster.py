"""A Ray to run on: started here for this run alone, or joined where one is running."""

from __future__ import annotations

import importlib
import json
import logging
import os
import platform
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raynforce.config import Config
from raynforce.errors import UsageError, summary
from raynforce.experience.memory import available_bytes
from raynforce.runtimes.base import Place
from raynforce.runtimes.host import THREADS
from raynforce.runtimes.placing import code_roots, needs, place_roles, require_room, total_needs

Say = Callable[[str], None]

PACKAGE = Path(__file__).parents[1]
SMALLEST_STORE = 200_000_000
BYTES_PER_STEP = 32_768  # of one environment, generous: most observations are far smaller
SHARED_MEMORY = "/dev/shm"
AUTH = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
CHANGED = ("RAY_ADDRESS", "PYTHONBREAKPOINT")  # what Ray sets in this process, to be put back
DRIVER = {"RAY_get_check_signal_interval_milliseconds": "100"}  # how soon Ctrl-C is noticed while waiting
LOCAL = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray's name for: listen on the loopback interface alone
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # Ray's 15 would make learner and samplers alike; each role sets its own
    # The raylet looks for its object store once a second, which is there after some milliseconds.
    "RAY_raylet_client_connect_timeout_milliseconds": "20",
    "RAY_raylet_client_num_connect_attempts": "500",
}
NOT_SHIPPED = [".?*", "__pycache__", "*.pyc", "venv", "runs", "checkpoints", "*.pem", "*.key", "auth_token"]

# Sleeps until the pipe closes that only the driver holds open. Then workers end by themselves, but Ray's agents wait a
# minute for the dead. An agent is told from a later process with its id by when it began, the 22nd field.
JANITOR = """
read agents; while read _; do :; done; sleep 2
for agent in $agents; do
    [ "$(cut -d' ' -f22 /proc/${agent%:*}/stat)" = "${agent#*:}" ] && kill -9 "${agent%:*}"
done
rm -rf "$0"; sleep 3; rm -rf "$0"
"""


class Cluster:
    """The Ray that this process is connected to; `close` leaves nothing behind that was started here."""

    def __init__(self, address: str, places: Mapping[str, Place], *, folder: Path | None, shipped: bool) -> None:
        self.address = address
        self.places = places
        self.folder = folder
        """Where our own Ray keeps its files, in `r`; None if it is not ours."""
        self.shipped = shipped
        """Whether code was sent to the nodes, which then do not look for it where the driver has it."""
        self._at_close = ExitStack()

    @property
    def started(self) -> bool:
        """Whether it is ours, and ends with the run."""
        return self.folder is not None

    def waiting_for(self) -> str:
        """One sentence on why roles may not have started yet."""
        ray = _ray()
        total, free = ray.cluster_resources(), ray.available_resources()
        names = sorted({name for place in self.places.values() for name in needs(place)})
        shares = [f"{free.get(name, 0):g} of {total.get(name, 0):g} {name}{'s' * (len(name) == 3)}" for name in names]
        return f"the cluster has {' and '.join(shares) or 'room'} free"

    def close(self, *, now: bool = False) -> None:
        """Leave the cluster, or end it if it was started here; `now` kills roles that are busy."""
        if now and self.started:
            _kill(_workers())
        self._at_close.close()


def connect(config: Config, say: Say) -> Cluster:
    """Connect this process to the Ray that the settings name: one already in use here, one to join, or our own."""
    try:
        ray = _ray()
    except ImportError as error:
        raise UsageError("the ray runtime needs Ray: pip install 'raynforce[ray]', or use --runtime process") from error
    if ray.is_initialized():
        return _adopt(config, say)
    named = os.environ.get("RAY_ADDRESS")
    address = config.ray.address or named or "local"
    if address == "auto" and named:
        address = named
    with _own_signals():
        return _start(config, say) if address == "local" else _join(config, address, say)


def _adopt(config: Config, say: Say) -> Cluster:
    """The user's script has called `ray.init` itself, and will call `ray.shutdown` itself."""
    ray = _ray()
    places = _placed(config, [node["Resources"] for node in ray.nodes() if node["Alive"]], say)
    return Cluster(ray.get_runtime_context().gcs_address, places, folder=None, shipped=False)


# Starting our own


def _start(config: Config, say: Say) -> Cluster:
    """A Ray of this run's own: loopback only, with a token of its own, in a directory of its own."""
    require_room(config)
    store = _store_bytes(config)
    places, _ = place_roles(config, None)
    asked = total_needs(places, config.sampling.samplers)
    cpus, gpus = max(1, -int(-asked.pop("CPU", 1.0) // 1)), asked.pop("GPU", 0.0)
    if cpus > (cores := _cores()):
        say(f"{config.sampling.samplers + 1} roles share {cores} core{'s' * (cores > 1)}")

    ray = _ray()
    with ExitStack() as stack:
        folder, watch = _own_folder(stack)
        stack.enter_context(_environment({**_unchanged(), **DRIVER, **LOCAL, **_own_token()}))
        with _environment(dict.fromkeys(THREADS, "1")), _few_processes(stack):
            try:
                ray.init(
                    "local",
                    num_cpus=cpus,  # as many workers are started ahead
                    resources=asked,
                    object_store_memory=store,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.CRITICAL,
                    job_config=_job(),
                    _temp_dir=str(folder / "r"),
                    _skip_env_hook=True,
                )
            except Exception as error:
                raise UsageError(f"Ray did not start: {summary(error)}; --runtime process needs no Ray") from error
        watch(_workers())
        if gpus > ray.cluster_resources().get("GPU", 0.0):
            place_roles(config, [ray.cluster_resources()])  # says what there is
        cluster = Cluster(ray.get_runtime_context().gcs_address, places, folder=folder, shipped=False)
        cluster._at_close = stack.pop_all()
        return cluster


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _store_bytes(config: Config) -> int:
    """Room for a few fragments of each sampler; refuses a /dev/shm in which Ray cannot live."""
    sampling = config.sampling
    wanted = 4 * sampling.samplers * sampling.envs * sampling.fragment * BYTES_PER_STEP
    limits = [0.3 * memory for memory in [available_bytes()] if memory is not None]
    free = _shared_memory_bytes()
    if free is not None:
        limits.append(0.5 * free)
        if free < SMALLEST_STORE:
            raise UsageError(
                f"Ray needs {SMALLEST_STORE / 1e6:.0f} MB of shared memory, {SHARED_MEMORY} has {free / 1e6:.0f} MB "
                "free: in docker use --shm-size=1g, or use --runtime process, which needs none"
            )
    return max(SMALLEST_STORE, int(min([wanted, *limits])))


def _shared_memory_bytes() -> int | None:
    """Free bytes for shared memory; None where Ray does not use it."""
    try:
        status = os.statvfs(SHARED_MEMORY)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def _own_token() -> dict[str, str]:
    """Authentication is on with a token that only this process and its children know, unless the user has set it."""
    mode, token, path = (os.environ.get(name) for name in AUTH)
    if mode is not None and mode.lower() != "token":
        return {}
    own = token is None and path is None and not (mode and _token_file().exists())
    return {"RAY_AUTH_MODE": "token", **({"RAY_AUTH_TOKEN": secrets.token_hex(32)} if own else {})}


def _own_folder(stack: ExitStack) -> tuple[Path, Callable[[Sequence[_Process]], None]]:
    """A private directory that is gone afterwards, even if this process is killed; and whom to end with it."""
    base = tempfile.gettempdir()
    base = base if len(base) <= 18 else "/tmp"  # a socket's path may have 107 bytes, Ray adds 75
    folder = Path(tempfile.mkdtemp(prefix="rnf-", dir=base))  # Ray opens its own directory to all, so it gets an inner
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    janitor = subprocess.Popen(
        ["/bin/sh", "-c", JANITOR, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # spared from Ctrl-C
    )
    stack.callback(janitor.communicate)
    stack.callback(janitor.kill)

    def watch(processes: Sequence[_Process]) -> None:
        assert janitor.stdin is not None
        janitor.stdin.write(" ".join(f"{process.pid}:{process.began}" for process in processes) + "\n")
        janitor.stdin.flush()

    return folder, watch


@contextmanager
def _few_processes(stack: ExitStack) -> Iterator[None]:
    """Start Ray without what a run on one machine has no use for: autoscaler, dashboard, its agent, log monitor.

    Each is a Python process of its own, and Ray waits for them. Names that this Ray does not have stay unused.
    """
    node, constants, utils = _ray("_private.node"), _ray("_private.ray_constants"), _ray("_private.utils")

    class Node(node.Node):  # type: ignore[misc, name-defined]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            stack.callback(_end_own, self)  # also if it is interrupted in the middle of starting
            super().__init__(*args, **kwargs)

        def start_monitor(self) -> None: ...

        def start_log_monitor(self) -> None: ...

        def start_api_server(self, **_: Any) -> None:
            self._webui_url = ""

    def missing() -> ImportError:
        return ImportError("the dashboard is not wanted")

    patches = [
        (node, "Node", Node),
        (utils, "get_dashboard_dependency_error", missing),
        (constants, "ENABLE_RAY_CLUSTER", False),  # Ray may have been imported before its variable was set
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


def _end_own(node: Any) -> None:
    """End Ray and wait until its processes are gone."""
    workers = _workers(node)
    _ray().shutdown()
    if getattr(node, "all_processes", None):  # it was not up yet
        node.kill_all_processes(check_alive=False, allow_graceful=False)
        _kill(workers)
    deadline = time.monotonic() + 1.0
    while (left := [process for process in workers if process.alive()]) and time.monotonic() < deadline:
        time.sleep(0.01)
    _kill(left)


@dataclass(frozen=True)
class _Process:
    """A process, told from a later one with the same id by when it began."""

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


def _workers(node: Any = None) -> list[_Process]:
    """What our own Ray has started: its workers and agents."""
    node = node or _ray("_private.worker")._global_node
    started = [info.process.pid for infos in getattr(node, "all_processes", {}).values() for info in infos]
    children: list[int] = []
    for pid in started:
        with suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                children += map(int, (task / "children").read_text().split())
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
    ray = _ray()
    with ExitStack() as stack:
        stack.enter_context(_environment({**_unchanged(), **DRIVER}))
        address = _located(address)
        found = _probe(address, stack)
        _require_same_versions(address, found)
        places = _placed(config, found.nodes, say)
        sent_already = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ  # by `ray job submit`
        elsewhere = bool(found.hosts - {socket.gethostname()}) and not sent_already
        shipped = {"always": True, "never": False, "auto": elsewhere}[config.ray.ship_code]
        code = {"runtime_env": _shipment(config, stack)} if shipped else {"job_config": _job()}
        stack.callback(ray.shutdown)
        try:
            ray.init(address, log_to_driver=True, logging_level=logging.CRITICAL, **code)
        except Exception as error:
            raise UsageError(
                f"joining Ray at {address} failed: {summary(error.__cause__ or error)}; run this on a node of the "
                "cluster, or submit it with `ray job submit`"
            ) from error
        cluster = Cluster(address, places, folder=None, shipped=shipped)
        cluster._at_close = stack.pop_all()
        return cluster


def _located(address: str) -> str:
    """`host:port` of a cluster that listens."""
    if "://" in address:
        raise UsageError(
            f"ray.address = {address!r}: Ray Client is far too slow to train through; run on a node of the cluster "
            "with ray.address=auto, or submit a job with `ray job submit`"
        )
    if address == "auto":
        address = _local_address()
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 65536) or any(c.isspace() for c in address):
        raise UsageError(
            f"ray.address = {address!r} is not an address: give host:port, such as 127.0.0.1:6379, or auto, or local"
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=3) as connection:
            speaks = _speaks_grpc(connection)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UsageError(
            f"no Ray at {address}: {why}; check the address (`ray status` on its head), "
            "or leave it out to start a Ray for this run"
        ) from error
    if not speaks:
        raise _stranger(address)
    return address


def _local_address() -> str:
    with suppress(Exception):
        if address := _ray("_private.services").canonicalize_bootstrap_address("auto"):
            return str(address)
    raise UsageError(
        "ray.address = 'auto': no Ray runs on this machine; start one with `ray start --head`, "
        "or leave the address out to start one for this run"
    )


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


def _stranger(address: str, why: str = "") -> UsageError:
    return UsageError(
        f"what listens at {address} does not answer as Ray does{why}; give the address that `ray start --head` printed"
    )


def _probe(address: str, stack: ExitStack) -> _Found:
    """Ask the cluster's control store what it is: a cheap call that fails at once where tokens do not match."""
    refused = _ray("exceptions").AuthenticationError
    _require_readable_token(address)
    with suppress(refused):
        return _ask(address)
    if os.environ.get("RAY_AUTH_MODE") is None and _has_token():
        stack.enter_context(_environment({"RAY_AUTH_MODE": "token"}))
        with suppress(refused):
            return _ask(address)
    raise _refused(address, "the token here is not the cluster's" if _has_token() else "it wants a token")


def _ask(address: str) -> _Found:
    with _environment({"RAY_py_gcs_connect_timeout_s": "5"}), _silent():
        try:
            client = _ray("_raylet").GcsClient(address=address)
            about = json.loads(client.internal_kv_get(b"CLUSTER_METADATA", namespace=b"cluster", timeout=5) or b"{}")
            nodes = client.get_all_node_info(timeout=5).values()
        except _ray("exceptions").AuthenticationError:
            raise
        except Exception as error:
            raise _stranger(address, f": {summary(error)}") from error
    alive = [node for node in nodes if node.state == _ray("core.generated.gcs_pb2").GcsNodeInfo.ALIVE]
    return _Found(
        about.get("ray_version", ""),
        about.get("python_version", ""),
        [dict(node.resources_total) for node in alive],
        {node.node_manager_hostname for node in alive},
    )


def _token_file() -> Path:
    return Path.home() / ".ray" / "auth_token"


def _has_token() -> bool:
    _, token, path = (os.environ.get(name) for name in AUTH)
    return bool(token or path or _token_file().exists())


def _require_readable_token(address: str) -> None:
    """Ray aborts the process where it is told to use a token and finds none."""
    mode, token, path = (os.environ.get(name) for name in AUTH)
    if token is None and path is not None and not os.access(path, os.R_OK):
        raise UsageError(f"RAY_AUTH_TOKEN_PATH = {path!r} cannot be read: point it to a file with the cluster's token")
    if mode is not None and mode.lower() == "token" and not _has_token():
        raise _refused(address, "RAY_AUTH_MODE=token is set, but there is no token here")


def _refused(address: str, why: str) -> UsageError:
    return UsageError(
        f"Ray at {address} refused the connection: {why}; set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH to a file "
        "with the cluster's token (`ray get-auth-token` on its head shows it)"
    )


def _require_same_versions(address: str, found: _Found) -> None:
    here, python = _ray().__version__, platform.python_version()
    if found.ray and (here != found.ray or python.split(".")[:2] != found.python.split(".")[:2]):
        raise UsageError(
            f"Ray at {address} is Ray {found.ray} on Python {found.python}, here is Ray {here} on Python {python}: "
            f"make them match, with ray=={found.ray} under Python {'.'.join(found.python.split('.')[:2])}"
        )


def _placed(config: Config, nodes: Sequence[Mapping[str, float]], say: Say) -> dict[str, Place]:
    places, notes = place_roles(config, nodes)
    for note in notes:
        say(note)
    return places


def _job() -> Any:
    """Workers find this package where the driver has it."""
    return _ray("job_config").JobConfig(_py_driver_sys_path=[str(PACKAGE.parent)])


def _shipment(config: Config, stack: ExitStack) -> dict[str, Any]:
    """A runtime environment with this package and the directories that the user's modules live in."""
    roots = code_roots(config)
    if not roots:  # without a directory of its own, Ray would put the driver's current one first
        roots = [Path(tempfile.mkdtemp(prefix="rnf-"))]
        stack.callback(shutil.rmtree, roots[0], ignore_errors=True)
    first, *others = roots
    modules = [path for root in others for path in root.iterdir() if path.suffix == ".py" or _is_package(path)]
    return {"working_dir": str(first), "py_modules": [*map(str, [PACKAGE, *modules])], "excludes": NOT_SHIPPED}


def _is_package(path: Path) -> bool:
    return (path / "__init__.py").exists()


# The state of this process


def _ray(module: str = "") -> Any:
    """Ray, or a module of it, imported when it is needed; most of it has no types."""
    return importlib.import_module(f"ray.{module}" if module else "ray")


@contextmanager
def _environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables for a while; None removes one."""
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
    if any(name.startswith("RAY_") for name in values):  # Ray's C++ side keeps copies: read them anew
        raylet = _ray("_raylet")
        raylet.Config.initialize("")
        raylet.AuthenticationTokenLoader.instance().reset_cache()


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
