"""Who talks to whom: one file each, which declares what it needs (`declaration.py`) and has the loop in plain order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raynforce.errors import UsageError, nearest
from raynforce.imports import load_object

if TYPE_CHECKING:
    from raynforce.topologies.declaration import Topology

BUILT_IN = {
    "sync": "raynforce.topologies.sync:SYNC",
    "overlap": "raynforce.topologies.overlap:OVERLAP",
    "async": "raynforce.topologies.asynchronous:ASYNC",
    "central": "raynforce.topologies.central:CENTRAL",
    "replay": "raynforce.topologies.replay:REPLAY",
    "shared-agent": "raynforce.topologies.shared_agent:SHARED_AGENT",
}


def require_name(name: str) -> None:
    """Refuse a name that is neither built in nor of the form `module:NAME`."""
    if ":" not in name and name not in BUILT_IN:
        known = ", ".join(("auto", *BUILT_IN))
        problem = f"topology = {name!r} is not one of"
        raise UsageError(f"{problem}: {known}, or your own module:NAME{nearest(name, BUILT_IN)}")


def topology(name: str) -> Topology:
    """The topology called `name`: a built-in one, or the user's `module:NAME`."""
    from raynforce.topologies.declaration import Topology

    require_name(name)
    found = load_object(BUILT_IN.get(name, name), "topology")
    if not isinstance(found, Topology):
        raise UsageError(f"topology {name!r} is {found!r}, not a raynforce.topologies.declaration.Topology")
    return found
