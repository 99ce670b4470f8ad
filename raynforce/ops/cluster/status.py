"""`raynforce cluster status`: what is there, what is free, what a run would get, and what is wrong."""

from __future__ import annotations

import os
import platform
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from raynforce.config import Config, SamplingConfig
from raynforce.errors import RaynforceError, UsageError
from raynforce.ops.cluster.findings import Finding
from raynforce.runtimes.placing import HIDDEN, place_roles

SLOW = 0.05  # seconds to reach a node, above which fragments take noticeably long
SILENT = 3.0  # seconds after which a node counts as out of reach
MOST = 1024  # samplers that are tried to fit


class Node(NamedTuple):
    address: str
    hostname: str
    head: bool
    total: dict[str, float]
    free: dict[str, float]
    reach_ms: float | None
    """Time to open a connection from here; None if that cannot be done."""


@dataclass
class Status:
    """A cluster, seen from this machine."""

    address: str
    ray: str
    python: str
    token: bool
    """It asks for a token."""
    autoscaler: bool
    dashboard: str
    nodes: list[Node]
    waiting: list[dict[str, Any]]
    """What roles, tasks and placement groups wait for: resources and how often."""
    samplers: int
    """Samplers, beside a learner, that would find room now."""
    findings: list[Finding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not any(finding.level == "error" for finding in self.findings)

    @property
    def total(self) -> dict[str, float]:
        return _sum([node.total for node in self.nodes])

    @property
    def free(self) -> dict[str, float]:
        return _sum([node.free for node in self.nodes])


def status(address: str = "auto") -> Status:
    """Ask the cluster at `host:port`, or the one of this machine, without joining it."""
    try:
        from raynforce.runtimes.ray import connecting, private
    except ImportError as error:
        raise UsageError("cluster status needs Ray: pip install 'ray[default]'") from error
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or "auto"
    with ExitStack() as stack:
        try:
            address, about = connecting.reach(address, stack)
        except UsageError as error:
            text = str(error).replace(", or leave the address out to start one for this run", "")
            text = text.replace(", or leave it out to start a Ray for this run", "")
            raise UsageError(text.replace("ray.address = ", "--address ")) from error
        looked = private.look(address)
        open_to_all = _takes_no_token(address)
    nodes = _reached(looked.nodes)
    found = Status(
        address=address,
        ray=about.ray,
        python=about.python,
        token=not open_to_all,
        autoscaler=about.grows,
        dashboard=looked.dashboard,
        nodes=nodes,
        waiting=looked.waiting,
        samplers=_samplers([node.free for node in nodes]),
    )
    found.findings = list(_findings(found, looked.failed))
    return found


def _takes_no_token(address: str) -> bool:
    """Whether it answers somebody who has none: asked in a process of its own, as Ray keeps the mode it began with."""
    import subprocess
    import sys

    program = "import sys; from raynforce.runtimes.ray import private; private.ask(sys.argv[1])"
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    variables |= {
        "RAY_AUTH_MODE": "disabled",
        "RAY_py_gcs_connect_timeout_s": "5",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-c", program, address]
    with suppress(subprocess.TimeoutExpired):
        return subprocess.run(command, env=variables, capture_output=True, timeout=20, check=False).returncode == 0
    return False


def _reached(nodes: Sequence[Any]) -> list[Node]:
    def reach(node: Any) -> float | None:
        began = time.monotonic()
        try:
            with socket.create_connection((node.address, node.port), timeout=SILENT):
                return 1e3 * (time.monotonic() - began)
        except OSError:
            return None

    if not nodes:
        return []
    with ThreadPoolExecutor(min(32, len(nodes))) as threads:
        times = list(threads.map(reach, nodes))
    made = [
        Node(node.address, node.hostname, node.head, _shown(node.total), _shown(node.free), took)
        for node, took in zip(nodes, times, strict=True)
    ]
    return sorted(made, key=lambda node: (not node.head, node.address))


def _samplers(free: Sequence[dict[str, float]]) -> int:
    """The most, beside a learner, with a CPU each."""
    low, high = 0, MOST + 1
    while high - low > 1:
        middle = (low + high) // 2
        config = Config(env="CartPole-v1", runtime="ray", sampling=SamplingConfig(samplers=middle))
        try:
            _, notes = place_roles(config, free)
            low, high = (low, middle) if notes else (middle, high)
        except RaynforceError:
            high = middle
    return low


def _findings(found: Status, failed: Sequence[str]) -> Iterator[Finding]:
    here = platform.python_version()
    from importlib.metadata import version

    ray = version("ray")
    if found.ray != ray:
        yield Finding(
            "error", f"the cluster has Ray {found.ray}, here is {ray}", f"pip install 'ray[default]=={found.ray}'"
        )
    if found.python.split(".")[:2] != here.split(".")[:2]:
        fix = f"use Python {'.'.join(found.python.split('.')[:2])} here, or start the cluster with this one"
        yield Finding("error", f"the cluster has Python {found.python}, here is {here}", fix)
    if not found.token:
        what = f"it asks for no token: whoever reaches {found.address} can run code on it"
        yield Finding("error", what, "start all of its nodes with RAY_AUTH_MODE=token and a token")
    host = found.dashboard.rpartition(":")[0].strip("[]")
    if host and host not in ("127.0.0.1", "localhost", "::1"):
        fix = "start the head with --dashboard-host=127.0.0.1"
        yield Finding(
            "note" if found.token else "error", f"the dashboard listens beyond loopback ({found.dashboard})", fix
        )
    for node in found.nodes:
        if node.reach_ms is None:
            fix = "open the ports of docs/cluster.md between the nodes, and run this on one of them"
            yield Finding("error", f"{node.hostname} ({node.address}) cannot be reached from here", fix)
        elif node.reach_ms > 1e3 * SLOW:
            what = f"{node.hostname} ({node.address}) takes {node.reach_ms:.0f} ms to reach"
            yield Finding("warning", what, "keep the nodes of a cluster in one network")
    for reason in failed:
        yield Finding("warning", f"a node could not be started: {reason}", "see monitor.log on the head")
    if found.waiting:
        count = sum(entry["count"] for entry in found.waiting)
        more = "the autoscaler is at it" if found.autoscaler else "add nodes, or ask for less"
        yield Finding("note", f"{count} role{'s' * (count != 1)} or tasks wait for room", more)


def _shown(resources: dict[str, float]) -> dict[str, float]:
    return {name: amount for name, amount in sorted(resources.items()) if not HIDDEN.match(name)}


def _sum(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for name, amount in part.items():
            total[name] = total.get(name, 0.0) + amount
    return total
