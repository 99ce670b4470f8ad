"""What many tests share: one Ray, started when the first of them asks for it, and a cluster to join."""

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
from pathlib import Path
from typing import Any

import pinned  # noqa: F401  # before numpy is loaded
import pytest
from disks import Disk, small_disk
from hypothesis import settings
from rays import TOKEN, Head, SharedRay, on_ray
from xdist.scheduler import LoadScopeScheduling

from raynforce.config import Config, FaultsConfig
from raynforce.runtimes.base import Runtime

settings.register_profile("quick", derandomize=True)  # what lets a change land draws the same examples every time
settings.load_profile("quick")


class OneProcessForRay(LoadScopeScheduling):
    """Whoever of several processes is free takes the next test; those on Ray are all for the same one."""

    def _split_scope(self, nodeid: str) -> str:
        return "ray" if on_ray(nodeid) else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneProcessForRay:
    return OneProcessForRay(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests on Ray come first, and of those the ones that share it."""

    def order(item: pytest.Item) -> int:
        fixtures = set(getattr(item, "fixturenames", ()))
        uses = bool(fixtures & {"one_ray", "head"})
        if not on_ray(item.nodeid):
            assert not uses, f"{item.nodeid} needs the word ray in its name"
            return 2
        return 1 if uses and "shared_ray" not in fixtures else 0

    items.sort(key=order)


@pytest.fixture(scope="session", autouse=True)
def _own_surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a run remembers of this machine is not the user's, nor that of an earlier test run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("COLUMNS", raising=False)  # xdist sets it: lines are as wide as in a pipe
        yield


@pytest.fixture(scope="session", autouse=True)
def _quick_restarts() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FaultsConfig, "backoff", 0.05)
        yield


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    """A small file system of its own."""
    with small_disk(tmp_path / "disk") as small:
        yield small


@pytest.fixture(scope="session")
def one_ray() -> Iterator[SharedRay]:
    shared = SharedRay()
    yield shared
    shared.close()


@pytest.fixture
def shared_ray(one_ray: SharedRay) -> None:
    """This process is connected to a Ray, which runs on `ray` use as they find it."""
    one_ray.open()


@pytest.fixture
def make_ray(shared_ray: None) -> Callable[[], Runtime]:
    """Makes ray runtimes that share one Ray."""
    from raynforce.runtimes.ray.runtime import RayRuntime

    return lambda: RayRuntime(Config(env="CartPole-v1", runtime="ray"), lambda text: None)


@pytest.fixture
def no_ray(one_ray: SharedRay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This process is not connected to any Ray, has no settings of Ray, and a home of its own."""
    one_ray.close()
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.fixture(scope="session")
def head() -> Iterator[Head]:
    folder = Path(tempfile.mkdtemp(prefix="rnt-", dir="/tmp"))
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "RAYNFORCE_", "PYTHONPATH"))
    }
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
