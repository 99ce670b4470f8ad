"""The Ray that a run is connected to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from raynforce.config import Config
from raynforce.runtimes.base import Place
from raynforce.runtimes.placing import Demands, Resources, count, needs, place_roles
from raynforce.runtimes.ray.private import ray_module
from raynforce.runtimes.ray.state import kill, workers

Say = Callable[[str], None]


@dataclass
class Cluster:
    """The Ray that this process is connected to; `close` leaves nothing behind that was started here."""

    address: str
    places: Mapping[str, Place]
    folder: Path | None = None  # where our own Ray keeps its files, in `r`; None if it is not ours
    grows: bool = False  # an autoscaler adds nodes when roles wait for room
    shipped: bool = False  # code was sent to the nodes, which do not look for it where the driver has it
    at_close: ExitStack = field(default_factory=ExitStack)

    @property
    def started(self) -> bool:
        return self.folder is not None

    def has(self, node: str, asked: Resources) -> bool:
        total: Resources = next((found["Resources"] for found in ray_module().nodes() if found["NodeID"] == node), {})
        return all(total.get(name, 0.0) >= amount for name, amount in asked.items())

    def waiting_for(self) -> str:
        ray = ray_module()
        total, free = ray.cluster_resources(), ray.available_resources()
        names = sorted({name for place in self.places.values() for name in needs(place)})
        shares = [f"{free.get(name, 0):g} of {count(total.get(name, 0), name)}" for name in names]
        return f"the cluster has {' and '.join(shares) or 'room'} free"

    def close(self, *, now: bool = False) -> None:
        """Leave the cluster, or end it if it was started here; `now` kills roles that are busy."""
        if now and self.started:
            kill(workers())
        self.at_close.close()


def placed(
    config: Config, nodes: Sequence[Resources], say: Say, demands: Demands, *, grows: bool = False
) -> dict[str, Place]:
    """What roles ask of a cluster that is not ours, to which nodes may be added, by hand or by its autoscaler."""
    places, notes = place_roles(config, nodes, demands, may_grow=True, grows=grows)
    for note in notes:
        say(note)
    return places
