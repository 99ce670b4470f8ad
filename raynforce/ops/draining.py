"""A job whose node is being drained ends as after SIGTERM: with a last checkpoint, before the node is taken away."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from contextlib import suppress
from typing import Any

from raynforce.runtimes.ray.private import ray_module

JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # set by Ray for the driver of a job
EVERY = 2.0  # seconds from one look to the next


def watch() -> None:
    """In the driver of a job, look from time to time whether its node is to go; elsewhere do nothing."""
    if JOB in os.environ and os.environ.get("RAY_ADDRESS"):
        threading.Thread(target=_watch, name="raynforce-draining", daemon=True).start()


def _watch() -> None:
    with suppress(Exception):  # a Ray that cannot be asked: the node's end comes unannounced then
        time.sleep(EVERY)  # while the run starts, which is busy enough
        client: Any = ray_module("_raylet").GcsClient(address=os.environ["RAY_ADDRESS"])
        node = own_node(client)
        while node not in client.get_draining_nodes(timeout=5):
            time.sleep(EVERY)
        os.kill(os.getpid(), signal.SIGTERM)


def own_node(client: Any) -> str:
    """The node that this job's driver is on, as Ray has noted it."""
    job = json.loads(os.environ[JOB])["metadata"]["job_submission_id"]
    module = ray_module("dashboard.modules.job.common")
    key = f"{module.JobInfoStorageClient.JOB_DATA_KEY_PREFIX}{job}".encode()
    found = client.internal_kv_get(key, namespace=b"job", timeout=5)
    return str(json.loads(found)["driver_node_id"])
