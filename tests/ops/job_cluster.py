"""Clusters that jobs are submitted to, started by hand as a user would, with dashboard and token; and their end."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

TOKEN = "decade" * 8


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in found:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in found]


@dataclass
class JobCluster:
    folder: Path
    url: str = ""
    address: str = ""
    port: int = 0  # of the dashboard, the same after a restart
    started: int = 0
    shared: bool = False
    """Whether all nodes use the head's folder: Ray finds logs of drivers on other nodes then, but what one node unpacks
    may be unpacked again by the next, under the feet of the first."""
    nodes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def variables(self) -> dict[str, str]:
        """What a shell on this cluster has set."""
        return {"HOME": str(self.folder), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}

    def start(self, *words: str, cpus: int = 4, within: Sequence[str] = ()) -> None:
        """Start a head, or add a node to it; `within` is a command that runs it, such as unshare."""
        head = not self.nodes
        dashboard, agent, client = free_ports(3)
        self.port = self.port or dashboard
        self.started += 1
        where = [f"--address={self.address}"]
        if not self.shared:
            where.append(f"--temp-dir={self.folder / f'n{self.started}'}")
        if head:
            where = ["--head", "--port=0", "--dashboard-host=127.0.0.1", f"--dashboard-port={self.port}"]
            where += [f"--ray-client-server-port={client}", f"--temp-dir={self.folder / f'n{self.started}'}"]
        where += [f"--dashboard-agent-listen-port={agent}", f"--num-cpus={cpus}", "--block", "--disable-usage-stats"]
        where += ["--object-store-memory=100000000", *words]
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("RAY_", "RAYNFORCE_", "PYTHONPATH"))
        }
        log = self.folder / f"start-{time.monotonic_ns()}.log"
        with log.open("wb") as output:
            node = subprocess.Popen(
                [*within, sys.executable, "-m", "ray.scripts.scripts", "start", *where],
                cwd=self.folder,
                env={**clean, **self.variables, "PATH": path},
                stdout=output,
                stderr=output,
            )
        self.nodes.append(node)
        if head:
            self.address = self._printed(log, node, r"--address='([^']+)'")
            self.url = f"http://127.0.0.1:{self.port}"
        else:
            self._printed(log, node, r"(Ray runtime started)")

    def _printed(self, log: Path, node: subprocess.Popen[bytes], pattern: str) -> str:
        deadline = time.monotonic() + 90
        while not (found := re.search(pattern, log.read_text())):
            assert node.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        return found[1]

    def kill(self, which: int | None = None) -> None:
        """As if the power had failed: everything of a node, or of all, with SIGKILL."""
        import psutil  # type: ignore[import-untyped]

        nodes = self.nodes if which is None else [self.nodes[which]]
        for node in nodes:
            found = [psutil.Process(node.pid), *psutil.Process(node.pid).children(recursive=True)]
            for process in found:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            node.wait(timeout=30)
            psutil.wait_procs(found, timeout=30)
        self.nodes = [node for node in self.nodes if node not in nodes]

    def close(self) -> None:
        for node in reversed(self.nodes):
            node.send_signal(signal.SIGTERM)
        for node in self.nodes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.wait(timeout=30)
        with contextlib.suppress(Exception):
            self.kill()
        end_left_over(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)


def end_left_over(folder: Path) -> None:
    """Whatever has a file open in the cluster's folder: what it started and did not end."""
    for place in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):
            if any(os.readlink(one).startswith(f"{folder}/") for one in place.iterdir()):
                os.kill(int(place.parent.name), signal.SIGKILL)


@contextlib.contextmanager
def job_cluster(*cpus: int, shared: bool = False) -> Iterator[JobCluster]:
    """A head and more nodes, with so many CPUs each."""
    cluster = JobCluster(Path(tempfile.mkdtemp(prefix="rnj-", dir="/tmp")), shared=shared)
    try:
        for count in cpus or (4,):
            cluster.start(cpus=count)
        yield cluster
    finally:
        cluster.close()
