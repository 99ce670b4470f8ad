"""The ray runtime: each role is a Ray actor, on this machine or on the nodes of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from raynforce.config import Config
from raynforce.errors import RaynforceError, summary
from raynforce.runtimes.base import Handle, Pending, Place, RoleDied, RoleError, Runtime
from raynforce.runtimes.host import Host, pack, with_cause
from raynforce.runtimes.placing import needs
from raynforce.runtimes.ray.connecting import connect
from raynforce.runtimes.ray.state import ray_module
from raynforce.runtimes.ray.watching import ObjectStore, hear, tail

CLOSING = 3.0  # seconds for roles to close what they have opened


class RayHost(Host):
    """A host that Ray calls by its role's name, in process titles and in front of what it prints."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __repr__(self) -> str:
        return self.name

    def arrive(self) -> None:
        """Answered as soon as there was room for this role."""


class RayPending(Pending):
    """An answer on its way; Ray keeps the value for as long as this object lives."""

    def __init__(self, ref: Any, name: str, names: dict[str, str]) -> None:
        self.ref = ref
        self.name = name
        self._names = names

    def result(self) -> Any:
        ray = ray_module()
        try:
            return ray.get(self.ref)
        except ray.exceptions.RayError as error:
            failure = _ours(error, self.name, self._names)
        raise failure


class RayHandle(Handle):
    """A role in a Ray actor."""

    def __init__(self, actor: Any, name: str, names: dict[str, str]) -> None:
        self.actor = actor
        self.name = name
        self._names = names
        names[actor._actor_id.hex()] = name

    def call_parts(self, method: str, args: Sequence[Any], parts: int) -> list[Pending]:
        plain = [arg.ref if isinstance(arg, RayPending) else arg for arg in args]
        asked = self.actor.call if parts == 1 else self.actor.call.options(num_returns=parts)
        answer = asked.remote(method, *plain)
        return [RayPending(ref, self.name, self._names) for ref in ([answer] if parts == 1 else answer)]

    def end(self) -> None:
        ray_module().kill(self.actor)


class RayRuntime(Runtime):
    """Roles as Ray actors, on a Ray of our own or on one that runs already."""

    def __init__(self, config: Config, say: Callable[[str], None] = lambda _: None) -> None:
        self._cluster = connect(config, say)
        self._hearing, self._reading, self._store = ExitStack(), ExitStack(), ObjectStore()
        with ExitStack() as undo:  # if the rest cannot be done
            undo.callback(self._cluster.close, now=True)
            self.places = self._cluster.places
            self._actor: Any = ray_module().remote(RayHost)
            hear(self._hearing, say)
            if self._cluster.folder is not None:
                tail(self._reading, self._cluster.folder, say)
            undo.pop_all()
        self._expected: dict[Any, str] = {}  # roles that had not found room when we last looked
        self._handles: list[RayHandle] = []
        self._names: dict[str, str] = {}  # of roles, by their actor's id

    def spawn(self, role: str, *args: Any, name: str, place: Place | None = None) -> RayHandle:
        place = place or Place()
        asked = needs(place)
        options = {"num_cpus": asked.pop("CPU", 0), "num_gpus": asked.pop("GPU", 0), "resources": asked}
        actor = self._actor.options(**options, max_restarts=0, max_concurrency=1).remote(name)
        self._expected[actor.arrive.remote()] = name
        # Where code was sent, a node may have other files under the names of the driver's search path.
        actor.build.remote(pack(role, args, name, place, path=[] if self._cluster.shipped else None))
        handle = RayHandle(actor, name, self._names)
        self._handles.append(handle)
        return handle

    def wait(
        self, pendings: Sequence[Pending], count: int | None = None, timeout: float | None = None
    ) -> tuple[list[Pending], list[Pending]]:
        ray = ray_module()
        refs = [pending.ref for pending in pendings if isinstance(pending, RayPending)]
        different = list(dict.fromkeys(refs))
        if not different:
            return [], []
        wanted = len(different) if count is None else min(count, len(different))
        if wanted == 0:
            wanted, timeout = len(different), 0
        ready = set(ray.wait(different, num_returns=wanted, timeout=timeout, fetch_local=False)[0])
        if len(ready) == wanted < len(different):  # Ray stops counting there, and there may be more
            ready = set(ray.wait(different, num_returns=len(different), timeout=0, fetch_local=False)[0])
        there = [ref in ready for ref in refs]
        return (
            [pending for pending, is_there in zip(pendings, there, strict=True) if is_there],
            [pending for pending, is_there in zip(pendings, there, strict=True) if not is_there],
        )

    def share(self, value: Any) -> RayPending:
        return RayPending(ray_module().put(value), "driver", self._names)

    def health(self) -> dict[str, float]:
        used = self._store.used_bytes()
        return {} if used is None else {"health/object_store_mb": used / 1e6}

    def excuse(self) -> str:
        waiting = self._without_room()
        return f" to start or to find room: {self._cluster.waiting_for()}" if waiting else ""

    def _without_room(self) -> list[str]:
        """Roles for which the cluster has not found room yet."""
        if self._expected:
            refs = list(self._expected)
            for ref in ray_module().wait(refs, num_returns=len(refs), timeout=0, fetch_local=False)[0]:
                del self._expected[ref]
        return list(self._expected.values())

    def close(self, *, now: bool = False) -> None:
        ray = ray_module()
        handles, self._handles = self._handles, []
        try:
            waiting = self._without_room()
            if not now:
                closing = [handle.actor.close.remote() for handle in handles if handle.name not in waiting]
                if closing:
                    ray.wait(closing, num_returns=len(closing), timeout=CLOSING, fetch_local=False)
            for handle in handles:
                ray.kill(handle.actor)
        finally:
            self._store.close()
            self._reading.close()
            self._cluster.close(now=now)
            self._hearing.close()  # last: Ray prints what has come late as it closes


def _ours(error: Any, name: str, names: dict[str, str]) -> BaseException:
    """Ray's error as one of ours, in one line. A call fails with the error of the answer it was waiting for, too."""
    kinds = ray_module("exceptions")
    if isinstance(error, kinds.RayTaskError):
        cause = error.cause
        if isinstance(cause, RaynforceError):
            return with_cause(cause)
        if isinstance(cause, kinds.RayError):
            return _ours(cause, name, names)
        return RoleError(f"{name}: {summary(cause)}")
    if isinstance(error, kinds.RayActorError):
        return RoleDied(f"{names.get(error.actor_id or '', name)} died: {_reason(str(error))}")
    if isinstance(error, kinds.ObjectLostError):
        return RoleDied(f"{name}: an answer it was to get was lost with the node that held it")
    return RoleError(f"{name}: {summary(error)}")


REASONS = (
    ("low on memory", "its node ran out of memory; use fewer samplers or environments"),
    ("node has died", "its node was lost"),
    ("its node died", "its node was lost"),
    ("ray.kill", "it was ended"),
    ("runtime_env", "its node could not set up the code that was sent"),
    ("runtime environment", "its node could not set up the code that was sent"),
)


def _reason(text: str) -> str:
    """Why an actor died, without Ray's page of advice."""
    flat = " ".join(text.split())
    for sign, reason in REASONS:
        if sign in flat:
            return reason
    return "its process ended unexpectedly (killed, out of memory, or crashed in native code)"
