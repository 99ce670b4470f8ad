"""A cluster on this machine whose autoscaler is Ray's own, and whose nodes are processes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import raynforce

TOKEN = "c0ffee" * 8
ROOT = Path(raynforce.__file__).parents[1]
PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
STORE = 100_000_000


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def surroundings(folder: Path) -> dict[str, str]:
    """Variables of a user of the cluster whose home is this folder."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return others | {
        "HOME": str(folder),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": TOKEN,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
    }


def _config(address: str) -> dict[str, Any]:
    provider = {"type": "external", "module": PROVIDER, "gcs_address": address}
    provider |= {"disable_node_updaters": True, "use_node_id_as_ip": True, "launch_multiple": True}
    kinds = {
        "ray.head.default": {"resources": {"CPU": 2}, "node_config": {}, "max_workers": 0},
        "worker": {
            "resources": {"CPU": 2, "object_store_memory": STORE},
            "node_config": {},
            "min_workers": 0,
            "max_workers": 3,
        },
    }
    commands = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
    return {
        "cluster_name": "fake",
        "max_workers": 3,
        "idle_timeout_minutes": 0.1,
        "upscaling_speed": 10.0,
        "provider": provider,
        "auth": {},
        "docker": {},
        "available_node_types": kinds,
        "head_node_type": "ray.head.default",
        "file_mounts": {},
        "cluster_synced_files": [],
        **{f"{name}_commands": [] for name in commands},
    }


@contextlib.contextmanager
def autoscaling(*, every: float = 1.0) -> Iterator[tuple[str, Path]]:
    """A head with two CPUs that becomes up to four nodes; its address, and a home with its files."""
    folder = Path(tempfile.mkdtemp(prefix="rna-", dir="/tmp"))
    port = free_port()
    address = f"{_own_address()}:{port}"
    (folder / "cluster.json").write_text(json.dumps(_config(address)))
    variables = surroundings(folder) | {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": str(every)}
    words = ["start", "--head", "--block", f"--port={port}", "--num-cpus=2", f"--object-store-memory={STORE}"]
    words += [f"--temp-dir={folder}", f"--autoscaling-config={folder}/cluster.json", "--dashboard-port=0"]
    log = folder / "start.log"
    with log.open("w") as output:
        command = [sys.executable, "-m", "ray.scripts.scripts", *words]
        head = subprocess.Popen(command, cwd=folder, env=variables, stdout=output, stderr=output)
    try:
        wait_until(lambda: "block forever" in log.read_text() or head.poll() is not None, 60)
        assert head.poll() is None, log.read_text()
        yield address, folder
    finally:
        head.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            head.wait(timeout=30)
        head.kill()
        end_all_of(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _own_address() -> str:
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())


def end_all_of(folder: Path) -> None:
    """End the processes whose command line names this folder: Ray's fake nodes outlive their head."""
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in (place / "cmdline").read_bytes() and int(place.name) != os.getpid():
                os.kill(int(place.name), signal.SIGKILL)


def wait_until(there: Any, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.2)
