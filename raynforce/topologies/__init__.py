"""Who talks to whom: one file each, which declares what it needs (`declaration.py`) and has the loop in plain order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raynforce.errors import UsageError
from raynforce.imports import load_object, require_named

if TYPE_CHECKING:
    from raynforce.topologies.declaration import Topology

BUILT_IN = {
    "sync": "raynforce.topologies.sync:SYNC",
    "overlap": "raynforce.topologies.overlap:OVERLAP",
    "async": "raynforce.topologies.asynchronous:ASYNC",
    "central": "raynforce.topologies.central:CENTRAL",
    "replay": "raynforce.topologies.replay:REPLAY",
    "dataset": "raynforce.topologies.dataset:DATASET",
    "shared-agent": "raynforce.topologies.shared_agent:SHARED_AGENT",
}


def topology(name: str) -> Topology:
    """The topology called `name`: a built-in one, or the user's `module:NAME`."""
    from raynforce.topologies.declaration import Topology

    require_named("topology", name, BUILT_IN, "NAME")
    found = load_object(BUILT_IN.get(name, name), "topology")
    if not isinstance(found, Topology):
        raise UsageError(f"topology {name!r} is {found!r}, not a raynforce.topologies.declaration.Topology")
    return found
