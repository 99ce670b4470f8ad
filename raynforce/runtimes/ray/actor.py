"""What a Ray worker runs; it imports little, as a role that is restarted waits for it."""

from __future__ import annotations

from raynforce.runtimes.host import Host


class RayHost(Host):
    """A host whose output Ray marks with its role's name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __repr__(self) -> str:
        return self.name

    def arrive(self) -> str:
        """The node that has room for this role."""
        import ray

        return str(ray.get_runtime_context().get_node_id())
