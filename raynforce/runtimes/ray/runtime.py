"""The ray runtime: each role is a Ray actor, on this machine or on the nodes of a cluster."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from raynforce.config import Config
from raynforce.errors import RaynforceError
from raynforce.runtimes.base import Handle, Pending, Place, Runtime, Split
from raynforce.runtimes.placing import PLAIN, Demands, needs
from raynforce.runtimes.ray.actor import Arrival, RayHost
from raynforce.runtimes.ray.cluster import Say
from raynforce.runtimes.ray.connecting import connect
from raynforce.runtimes.ray.failures import Failures
from raynforce.runtimes.ray.private import Raylet, actor_id, ray_module, redirect_output, room_near
from raynforce.runtimes.ray.watching import Tail, Voices
from raynforce.runtimes.role_host import pack

RESERVE_AFTER = 10.0  # seconds until a worker is started ahead, for a role that fails: not while all others start
RESERVING = 3  # seconds for the learner to get its room before samplers ask for theirs
HEALTH_EVERY = 1.0  # seconds between looks at the object store
CLOSING = 3.0  # seconds for roles to close what they have opened


@dataclass(eq=False)
class RayPending(Pending):
    """An answer on its way; Ray keeps the value for as long as this object lives."""

    ref: Any
    name: str
    failures: Failures

    def failure(self) -> BaseException | None:
        try:
            self.result()
        except RaynforceError as error:
            return error
        return None

    def result(self) -> Any:
        ray = ray_module()
        try:
            return ray.get(self.ref)
        except ray.exceptions.RayError as error:
            failure = self.failures.ours(error, self.name)
        raise failure


class RayShared(RayPending):
    """A value of the driver's own, put into Ray's store once somebody elsewhere wants it."""

    def __init__(self, value: Any, failures: Failures) -> None:
        self._value, self.name, self.failures = value, "driver", failures

    @cached_property
    def ref(self) -> Any:
        return ray_module().put(self._value)

    def failure(self) -> None:
        return None

    def result(self) -> Any:
        return self._value


class RayHandle(Handle):
    def __init__(self, runtime: RayRuntime, actor: Any, name: str) -> None:
        self.actor, self.name, self._runtime = actor, name, runtime
        self._arrival = actor.arrive.remote()
        self._arrived = False
        self._where: Arrival | None = None

    def call_parts(self, method: str, args: Sequence[Any], parts: int) -> list[Pending]:
        plain = [arg.ref if isinstance(arg, RayPending) else arg for arg in args]
        asked = self.actor.call if parts == 1 else self.actor.call.options(num_returns=parts)
        answer = asked.remote(method, *plain)
        failures = self._runtime.failures
        return [RayPending(ref, self.name, failures) for ref in ([answer] if parts == 1 else answer)]

    def end(self) -> None:
        self._runtime.forget(self)
        ray_module().kill(self.actor)

    def has_room(self) -> bool:
        if not self._arrived:
            self._arrived = bool(ray_module().wait([self._arrival], timeout=0, fetch_local=False)[0])
        return self._arrived

    def where(self) -> Arrival | None:
        """Where it lives, or lived; None if it has not found room yet, or never did."""
        ray = ray_module()
        if self._where is None and self.has_room():
            with suppress(ray.exceptions.RayError):
                self._where = ray.get(self._arrival)
        return self._where

    def node(self) -> str | None:
        """The id of its node, as `where`."""
        found = self.where()
        return None if found is None else found.node


class RayRuntime(Runtime):
    channel = "tcp"

    def __init__(self, config: Config, say: Say = lambda _: None, demands: Demands = PLAIN, given: bytes = b"") -> None:
        self._given = given  # what the user's script defines: see `raynforce.given`
        self._cluster = connect(config, say, demands)
        self._hearing, self._reading, self._raylet = ExitStack(), ExitStack(), Raylet()
        voices = Voices(say)
        with ExitStack() as undo:  # if the rest cannot be done
            undo.callback(self._cluster.close, now=True)
            super().__init__(self._cluster.places)
            self.grows = self._cluster.grows
            self._actor: Any = ray_module().remote(RayHost)
            self._node = str(ray_module().get_runtime_context().get_node_id())
            redirect_output(self._hearing, voices.hear)
            if self._cluster.folder is not None:
                Tail(self._cluster.folder, voices).follow(self._reading)
            undo.pop_all()
        self.failures = Failures(voices)
        self._handles: dict[RayHandle, None] = {}
        self._looked = -math.inf  # at the object store
        self._used: int | None = None  # its bytes
        self._spawned: set[str] = set()
        self._reserve_at = time.monotonic() + RESERVE_AFTER if self._cluster.started else math.inf
        self._room: Any = None  # of the one at home, on a cluster that is shared with others
        self._kept: dict[Any, None] = {}  # what is still to be brought here
        self._home: RayHandle | None = None  # who prefers the driver's node: fragments go there

    def spawn(self, role: str, *args: Any, name: str, place: Place | None = None) -> RayHandle:
        place = place or Place()
        asked = needs(place)
        options = {"num_cpus": asked.pop("CPU", 0), "num_gpus": asked.pop("GPU", 0), "resources": asked}
        strategy: Any = None  # our own Ray has one node
        if not self._cluster.started:
            strategy = self._home_room(needs(place)) if place.home and needs(place) else "SPREAD"
        options |= {"max_restarts": 0, "max_concurrency": 1, "scheduling_strategy": strategy}
        actor = self._actor.options(**options).remote(name)
        handle = RayHandle(self, actor, name)
        # Where code was sent, a node may have other files under the names of the driver's search path.
        path: list[str] | None = [] if self._cluster.shipped else None
        built = actor.build.remote(pack(role, args, name, place, path=path, given=self._given))
        self._starting.append(RayPending(built, name, self.failures))
        self.failures.begin(actor_id(actor), name)
        self._handles[handle] = None
        if place.home:
            self._home = handle
        if self._cluster.started and name in self._spawned:
            self._reserve_at = 0.0  # the one in reserve is taken
        self._spawned.add(name)
        return handle

    def _home_room(self, asked: dict[str, float]) -> Any:
        """Room on the driver's node if it is large enough, else on any; reserved, so that no sampler takes it."""
        strategies = ray_module("util.scheduling_strategies")
        if self._room is None:
            self._room = room_near(asked, self._node if self._cluster.has(self._node, asked) else None)
            self._room.wait(RESERVING)
        return strategies.PlacementGroupSchedulingStrategy(self._room, placement_group_bundle_index=0)

    def forget(self, handle: RayHandle) -> None:
        self.failures.end(actor_id(handle.actor))
        self._handles.pop(handle, None)

    def wait(self, pendings: Sequence[Pending], count: int | None = None, timeout: float | None = None) -> Split:
        ray = ray_module()
        if time.monotonic() > self._reserve_at and not self._without_room():
            self._reserve_at = math.inf
            self._raylet.start_worker()
        refs = [pending.ref for pending in pendings if isinstance(pending, RayPending)]
        different = list(dict.fromkeys(refs))
        if not different:
            return [], []
        wanted = len(different) if count is None else min(count, len(different))
        if wanted == 0:
            wanted, timeout = len(different), 0
        self._fetch()
        # Where the learner is here, answers come here anyway, and what is here outlives the node that made it.
        fetch = not self._cluster.started and self._home is not None and self._home.node() == self._node
        ready = set(ray.wait(different, num_returns=wanted, timeout=timeout, fetch_local=fetch)[0])
        if len(ready) == wanted < len(different):  # Ray stops counting there, and there may be more
            ready = set(ray.wait(different, num_returns=len(different), timeout=0, fetch_local=fetch)[0])
        pairs = list(zip(pendings, refs, strict=True))
        return [p for p, ref in pairs if ref in ready], [p for p, ref in pairs if ref not in ready]

    def share(self, value: Any) -> RayPending:
        return RayShared(value, self.failures)

    def keep(self, pending: Pending) -> Pending:
        if isinstance(pending, RayPending) and not self._cluster.started:
            self._kept[pending.ref] = None
            self._fetch()
        return pending

    def _fetch(self) -> None:
        """Bring what is to be kept to this node; Ray does not begin before it is there."""
        if self._kept:
            refs = list(self._kept)
            for ref in ray_module().wait(refs, num_returns=len(refs), timeout=0, fetch_local=True)[0]:
                del self._kept[ref]

    def health(self) -> dict[str, float]:
        if time.monotonic() - self._looked >= HEALTH_EVERY:
            self._looked, self._used = time.monotonic(), self._raylet.used_bytes()
        return {} if self._used is None else {"health/object_store_mb": self._used / 1e6}

    def pending_reason(self) -> str:
        if self._cluster.started or not self._without_room():  # our own has room for all
            return ""
        return f": not started yet, {self._cluster.waiting_for()}"

    def _without_room(self) -> list[RayHandle]:
        return [handle for handle in self._handles if not handle.has_room()]

    def close(self, *, now: bool = False) -> None:
        ray = ray_module()
        handles = list(self._handles)
        try:
            waiting = self._without_room()
            if not now:
                closing = [handle.actor.close.remote() for handle in handles if handle not in waiting]
                if closing:
                    ray.wait(closing, num_returns=len(closing), timeout=CLOSING, fetch_local=False)
            for handle in handles:
                handle.end()
            if self._room is not None:
                ray_module("util.placement_group").remove_placement_group(self._room)
        finally:
            self._raylet.close()
            self._reading.close()
            self._cluster.close(now=now)
            self._hearing.close()  # last: Ray prints what has come late as it closes
