"""Which Ray: one already in use in this process, one to join, or our own."""

from __future__ import annotations

import os

from raynforce.config import Config
from raynforce.errors import UsageError
from raynforce.runtimes.placing import PLAIN, Demands
from raynforce.runtimes.ray.cluster import Cluster, Say, placed
from raynforce.runtimes.ray.joining import join
from raynforce.runtimes.ray.private import ray_module
from raynforce.runtimes.ray.starting import start
from raynforce.runtimes.ray.state import own_signals


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
        raise UsageError(
            f"ray.address = {asked!r}, but this process uses Ray at {address} already: "
            "leave the address out to use that one, or call ray.shutdown() first"
        )
    places = placed(config, [node["Resources"] for node in ray.nodes() if node["Alive"]], say, demands)
    return Cluster(address, places)
