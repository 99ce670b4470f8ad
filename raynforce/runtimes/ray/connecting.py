"""Which Ray: one in use in this process, one to join (after checks: Ray would wait or abort), or our own."""

from __future__ import annotations

import logging
import os
import platform
import socket
from contextlib import ExitStack, suppress

from raynforce.config import Config
from raynforce.errors import UsageError, summary
from raynforce.runtimes.placing import PLAIN, Demands
from raynforce.runtimes.ray import private
from raynforce.runtimes.ray.cluster import Cluster, Say, placed
from raynforce.runtimes.ray.private import About, ray_module
from raynforce.runtimes.ray.shipping import shipment
from raynforce.runtimes.ray.starting import start
from raynforce.runtimes.ray.state import AUTH, DRIVER, PACKAGE, environment, own_signals, silent, token_file, unchanged


def connect(config: Config, say: Say, demands: Demands = PLAIN) -> Cluster:
    try:
        ray = ray_module()
    except ImportError as error:
        raise UsageError("the ray runtime needs Ray: pip install 'ray[default]', or use --runtime process") from error
    if ray.is_initialized():
        return _adopt(config, say, demands)
    named = os.environ.get("RAY_ADDRESS")
    address = config.ray.address or named or "local"
    if address == "auto" and named:
        address = named
    with own_signals() as received:
        cluster = start(config, say, demands) if address == "local" else join(config, address, say, demands)
    if received:
        cluster.close()
        raise KeyboardInterrupt(received[0])
    return cluster


def _adopt(config: Config, say: Say, demands: Demands) -> Cluster:
    """The user's script has called `ray.init` itself, and will call `ray.shutdown` itself."""
    ray = ray_module()
    address, asked = ray.get_runtime_context().gcs_address, config.ray.address
    if asked not in (None, "auto", address):
        problem = f"ray.address = {asked!r}, but this process uses Ray at {address} already"
        raise UsageError(f"{problem}: leave the address out to use that one, or call ray.shutdown() first")
    grows = private.grows(address)
    places = placed(config, [node["Resources"] for node in ray.nodes() if node["Alive"]], say, demands, grows=grows)
    return Cluster(address, places, grows=grows)


def join(config: Config, address: str, say: Say, demands: Demands) -> Cluster:
    ray = ray_module()
    with ExitStack() as stack:
        stack.enter_context(environment({**unchanged(), **DRIVER}))
        address, found = reach(address, stack)
        _require_same_versions(address, found)
        places = placed(config, found.nodes, say, demands, grows=found.grows)
        sent_already = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ  # by `ray job submit`
        elsewhere = bool(found.hosts - {socket.gethostname()}) and not sent_already
        shipped = {"always": True, "never": False, "auto": elsewhere}[config.ray.ship_code]
        code = {"runtime_env": shipment(config, stack)} if shipped else {"job_config": private.job(PACKAGE.parent)}
        stack.callback(ray.shutdown)
        try:
            ray.init(address, log_to_driver=True, logging_level=logging.CRITICAL, **code)
        except Exception as error:
            fix = "run this on a node of the cluster, or submit it with `ray job submit`"
            if shipped:
                folder = code["runtime_env"]["working_dir"]
                fix = f"{folder} was to be sent: keep large files out of where your modules are"
            raise UsageError(f"joining Ray at {address} failed: {summary(error.__cause__ or error)}; {fix}") from error
        return Cluster(address, places, grows=found.grows, shipped=shipped, at_close=stack.pop_all())


def reach(address: str, stack: ExitStack) -> tuple[str, About]:
    """Where a cluster listens, and what it is; the settings that it took to be heard hold until the stack is left."""
    address = _located(address)
    return address, _probe(address, stack)


def _located(address: str) -> str:
    """`host:port` of a cluster that listens."""
    if address.startswith(("http://", "https://")):
        problem = f"ray.address = {address!r} is a dashboard's, for `raynforce submit --address URL`"
        raise UsageError(f"{problem}; here give HOST:PORT of the cluster's head, such as 10.0.0.1:6379")
    if "://" in address:
        problem = f"ray.address = {address!r}: Ray Client is far too slow to train through"
        fix = "run on a node of the cluster with ray.address=auto, or submit a job with `raynforce submit`"
        raise UsageError(f"{problem}; {fix}")
    if address == "auto" and not (address := private.local_address()):
        problem = "ray.address = 'auto': no Ray runs on this machine; start one with `ray start --head`"
        raise UsageError(f"{problem}, or leave the address out to start one for this run")
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 65536) or any(c.isspace() for c in address):
        problem = f"ray.address = {address!r} is not an address"
        raise UsageError(f"{problem}: give host:port, such as 127.0.0.1:6379, or auto, or local")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=3) as connection:
            speaks = _speaks_grpc(connection)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        problem = f"no Ray at {address}: {why}; check the address (`ray status` on its head)"
        raise UsageError(f"{problem}, or leave it out to start a Ray for this run") from error
    if not speaks:
        raise _stranger(address)
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


def _stranger(address: str, why: str = "") -> UsageError:
    problem = f"what listens at {address} does not answer as Ray does{why}"
    return UsageError(f"{problem}; give the address that `ray start --head` printed")


def _probe(address: str, stack: ExitStack) -> About:
    """What the cluster is; where tokens do not match, that fails at once."""
    refused = ray_module("exceptions").AuthenticationError
    _require_readable_token(address)
    with suppress(refused):
        return _ask(address)
    if os.environ.get("RAY_AUTH_MODE") is None and has_token():
        stack.enter_context(environment({"RAY_AUTH_MODE": "token"}))
        with suppress(refused):
            return _ask(address)
    raise _refused(address, "the token here is not the cluster's" if has_token() else "it wants a token")


def _ask(address: str) -> About:
    with environment({"RAY_py_gcs_connect_timeout_s": "5"}), silent():
        try:
            return private.ask(address)
        except (ray_module("exceptions").AuthenticationError, UsageError):
            raise
        except Exception as error:
            raise _stranger(address, f": {summary(error)}") from error


def has_token() -> bool:
    _, token, path = (os.environ.get(name) for name in AUTH)
    return bool(token or path or token_file().exists())


def _require_readable_token(address: str) -> None:
    """Ray aborts the process where it is told to use a token and finds none."""
    mode, token, path = (os.environ.get(name) for name in AUTH)
    if token is None and path is not None and not os.access(path, os.R_OK):
        raise UsageError(f"RAY_AUTH_TOKEN_PATH = {path!r} cannot be read: point it to a file with the cluster's token")
    if mode is not None and mode.lower() == "token" and not has_token():
        raise _refused(address, "RAY_AUTH_MODE=token is set, but there is no token here")


def _refused(address: str, why: str) -> UsageError:
    fix = "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH to a file with the cluster's token"
    shown = "(`ray get-auth-token` on its head shows it)"
    return UsageError(f"Ray at {address} refused the connection: {why}; {fix} {shown}")


def _require_same_versions(address: str, found: About) -> None:
    here, python = ray_module().__version__, platform.python_version()
    if found.ray and (here != found.ray or python.split(".")[:2] != found.python.split(".")[:2]):
        problem = f"Ray at {address} is Ray {found.ray} on Python {found.python}, here is Ray {here} on Python {python}"
        fix = f"make them match, with ray=={found.ray} under Python {'.'.join(found.python.split('.')[:2])}"
        raise UsageError(f"{problem}: {fix}")
