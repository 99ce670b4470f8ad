"""What a Ray worker runs; it imports little, as a role that is restarted waits for it."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from raynforce.runtimes.role_host import RoleHost


class Arrival(NamedTuple):
    """Where a role has found room."""

    node: str  # Ray's id
    host: str  # as people know it
    pid: int


class RayHost(RoleHost):
    """A host whose output Ray marks with its role's name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        import ray

        node: Any = ray.util
        os.environ["RAYNFORCE_NODE"] = node.get_node_ip_address()  # where roles on other nodes find this one

    def __repr__(self) -> str:
        return self.name

    def arrive(self) -> Arrival:
        import ray

        return Arrival(str(ray.get_runtime_context().get_node_id()), os.uname().nodename, os.getpid())
