"""What many tests share: one Ray, started when the first of them asks for it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def shared_ray() -> Iterator[None]:
    """A Ray that this process is connected to, in a directory of its own; runs on `ray` use it as they find it."""
    import ray

    folder = tempfile.mkdtemp(prefix="rnft-", dir="/tmp")  # short: a socket's path may have 107 bytes
    mine = {"HOME": folder, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in mine.items():
            patch.setenv(name, value)
        patch.delenv("RAY_ADDRESS", raising=False)
        ray.init(
            "local",
            num_cpus=8,
            object_store_memory=200_000_000,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=folder,
        )
    yield
    ray.shutdown()
    os.environ.pop("RAY_AUTH_MODE", None)  # which Ray leaves behind
    shutil.rmtree(folder, ignore_errors=True)
