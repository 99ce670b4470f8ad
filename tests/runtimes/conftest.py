"""One Ray for all tests of this folder that need just any, and one head node for those that join."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from raynforce.config import Config, SamplingConfig
from raynforce.runtimes.base import Runtime
from raynforce.runtimes.cluster import Cluster, connect

TOKEN = "c0ffee" * 8


class SharedRay:
    """A Ray of our own that starts when it is first asked for; runtimes find it in use and leave it running."""

    def __init__(self) -> None:
        self.cluster: Cluster | None = None

    def open(self) -> None:
        if self.cluster is None:
            config = Config(env="CartPole-v1", runtime="ray", sampling=SamplingConfig(samplers=7))
            self.cluster = connect(config, lambda text: None)

    def close(self) -> None:
        if self.cluster is not None:
            self.cluster.close()
            self.cluster = None


@pytest.fixture(scope="session")
def shared_ray() -> Iterator[SharedRay]:
    shared = SharedRay()
    yield shared
    shared.close()


@pytest.fixture
def make_ray(shared_ray: SharedRay) -> Callable[[], Runtime]:
    """Makes ray runtimes that share one Ray."""
    from raynforce.runtimes.ray import RayRuntime

    shared_ray.open()
    return lambda: RayRuntime(Config(env="CartPole-v1", runtime="ray"), lambda text: None)


@pytest.fixture
def no_ray(shared_ray: SharedRay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This process is not connected to any Ray, has no settings of Ray, and a home of its own."""
    shared_ray.close()
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


@dataclass(frozen=True)
class Head:
    """A cluster of one node that was started by hand, as a user would: 4 CPUs, 1 simulator, and a token."""

    address: str
    folder: Path
    token: str = TOKEN


@pytest.fixture(scope="session")
def head() -> Iterator[Head]:
    folder = Path(tempfile.mkdtemp(prefix="rnt-", dir="/tmp"))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTHONPATH"))}
    environment |= {"HOME": str(folder), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    words = ["start", "--head", "--block", "--port=0", "--num-cpus=4", "--resources", '{"simulator": 1}']
    words += ["--include-dashboard=false", "--object-store-memory=200000000", f"--temp-dir={folder}"]
    log = folder / "start.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", *words],
            cwd=folder,  # it shall not find this package by itself
            env=environment,
            stdout=output,
            stderr=output,
        )
    try:
        deadline = time.monotonic() + 60
        while not (found := re.search(r"--address='([^']+)'", log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield Head(found[1], folder)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)
        shutil.rmtree(folder, ignore_errors=True)
