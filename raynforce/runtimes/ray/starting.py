"""Starting a Ray for one run: loopback only, with a token and a directory of its own, and nothing left of it after."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import subprocess
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from raynforce.config import Config
from raynforce.errors import UsageError, summary
from raynforce.memory import available_bytes
from raynforce.runtimes.placing import Demands, place_roles, require_room, total_needs
from raynforce.runtimes.placing import cores as machine_cores
from raynforce.runtimes.ray import private
from raynforce.runtimes.ray.cluster import Cluster, Say
from raynforce.runtimes.ray.private import ray_module
from raynforce.runtimes.ray.state import (
    AUTH,
    DRIVER,
    PACKAGE,
    environment,
    kill,
    kill_marked,
    token_file,
    unchanged,
    workers,
)
from raynforce.threads import VARIABLES

SMALLEST_STORE = 200_000_000
BYTES_PER_STEP = 32_768  # of one environment, generous: most observations are far smaller
SHARED_MEMORY = "/dev/shm"
LOCAL = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray's name for: listen on the loopback interface alone
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_task_events_report_interval_ms": "0",  # for the dashboard, which is not there: they fill the control store
    "RAY_worker_niceness": "0",  # Ray's 15 would make learner and samplers alike; each role sets its own
    # The raylet looks for its object store once a second, which is there after some milliseconds.
    "RAY_raylet_client_connect_timeout_milliseconds": "20",
    "RAY_raylet_client_num_connect_attempts": "500",
}

MARK = "RAYNFORCE_RAY"  # in the environment of everything that this Ray starts, and that roles start on it
# Sleeps until the pipe closes that only the driver holds open, gives everyone time to end by themselves (Ray's agents
# would take a minute, and a simulator may never notice), ends who is left, and cleans up. Ray's own processes write
# their titles over their environment, but have their logs open in the directory.
JANITOR = f"""
while read _; do :; done; sleep 2
for place in /proc/[0-9]*; do
    if grep -qsz "^{MARK}=$0\\$" $place/environ || ls -l $place/fd 2>/dev/null | grep -qF " -> $0/"; then
        kill -9 "${{place#/proc/}}"
    fi
done
rm -rf "$0"; sleep 3; rm -rf "$0"
"""


def start(config: Config, say: Say, demands: Demands) -> Cluster:
    require_room(config, demands)
    store = _store_bytes(config)
    places, _ = place_roles(config, None, demands)
    asked = total_needs(places, config.sampling.samplers)
    cpus, gpus = max(1, -int(-asked.pop("CPU", 1.0) // 1)), asked.pop("GPU", 0.0)
    if cpus > (cores := machine_cores()):
        say(f"{config.sampling.samplers + 1} roles share {cores} core{'s' * (cores > 1)}")

    say("starting Ray")
    ray = ray_module()
    with ExitStack() as stack:
        folder = _own_folder(stack)
        stack.enter_context(environment({**unchanged(), **DRIVER, **LOCAL, **_own_token(), MARK: str(folder)}))
        with environment(dict.fromkeys(VARIABLES, "1")), private.few_processes(stack, _end_own):
            try:
                ray.init(
                    "local",
                    num_cpus=cpus,  # as many workers are started ahead
                    resources=asked,
                    object_store_memory=store,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.CRITICAL,
                    job_config=private.job(PACKAGE.parent),
                    _temp_dir=str(folder / "r"),
                    _skip_env_hook=True,
                )
            except Exception as error:
                raise UsageError(f"Ray did not start: {summary(error)}; --runtime process needs no Ray") from error
        if gpus > ray.cluster_resources().get("GPU", 0.0):
            place_roles(config, [ray.cluster_resources()], demands)  # says what there is
        return Cluster(ray.get_runtime_context().gcs_address, places, folder, at_close=stack.pop_all())


def _store_bytes(config: Config) -> int:
    """Room for a few fragments of each sampler; refuses a /dev/shm in which Ray cannot live."""
    sampling = config.sampling
    wanted = 4 * sampling.samplers * sampling.envs * sampling.fragment * BYTES_PER_STEP
    limits = [0.3 * memory for memory in [available_bytes()] if memory is not None]
    free = shared_memory_bytes()
    if free is not None:
        limits.append(0.5 * free)
        if free < SMALLEST_STORE:
            has = f"{SHARED_MEMORY} has {free / 1e6:.0f} MB free"
            fix = "in docker use --shm-size=1g, or use --runtime process, which needs none"
            raise UsageError(f"Ray needs {SMALLEST_STORE / 1e6:.0f} MB of shared memory, {has}: {fix}")
    return max(SMALLEST_STORE, int(min([wanted, *limits])))


def shared_memory_bytes() -> int | None:
    """Free bytes for shared memory; None where Ray does not use it."""
    with suppress(OSError):
        return shutil.disk_usage(SHARED_MEMORY).free
    return None


def _own_token() -> dict[str, str]:
    """Authentication is on with a token that only this process and its children know, unless the user has set it."""
    mode, token, path = (os.environ.get(name) for name in AUTH)
    if mode is not None and mode.lower() != "token":
        return {}
    own = token is None and path is None and not (mode and token_file().exists())
    return {"RAY_AUTH_MODE": "token", **({"RAY_AUTH_TOKEN": secrets.token_hex(32)} if own else {})}


def _own_folder(stack: ExitStack) -> Path:
    """A private directory that is gone afterwards with all that was started for it, even if this process is killed."""
    base = tempfile.gettempdir()
    base = base if len(base) <= 18 else "/tmp"  # a socket's path may have 107 bytes, Ray adds 75
    folder = Path(tempfile.mkdtemp(prefix="rnf-", dir=base))  # Ray opens its own directory to all, so it gets an inner
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    janitor = subprocess.Popen(
        ["/bin/sh", "-c", JANITOR, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # spared from Ctrl-C
    )
    stack.callback(janitor.communicate)
    stack.callback(janitor.kill)
    stack.callback(kill_marked, f"{MARK}={folder}")
    return folder


def _end_own(node: Any) -> None:
    started = workers(node)
    ray_module().shutdown()
    if private.started_processes(node):  # it was not up yet
        private.end_node(node)
        kill(started)
    deadline = time.monotonic() + 1.0
    while (left := [process for process in started if process.alive()]) and time.monotonic() < deadline:
        time.sleep(0.01)
    kill(left)
