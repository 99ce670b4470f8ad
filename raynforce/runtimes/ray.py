"""The ray runtime: each role is a Ray actor, on this machine or on the nodes of a cluster."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any

from raynforce.config import Config
from raynforce.errors import RaynforceError
from raynforce.runtimes.base import Handle, Pending, Place, RoleDied, RoleError, Runtime
from raynforce.runtimes.cluster import connect
from raynforce.runtimes.host import Host, pack, with_cause
from raynforce.runtimes.placing import needs

PATIENCE = 5.0  # seconds until a wait for roles that have not started is explained
CLOSING = 3.0  # seconds for roles to close what they have opened
HEALTH_EVERY = 1.0  # seconds between looks at the object store


class RayHost(Host):
    """A host that Ray calls by its role's name, in its process title and in what it prints."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def __repr__(self) -> str:
        return self.name


class RayPending(Pending):
    """An answer on its way; the object lives as long as this does."""

    def __init__(self, ref: Any, name: str) -> None:
        self.ref = ref
        self.name = name

    def result(self) -> Any:
        import ray

        try:
            return ray.get(self.ref)
        except ray.exceptions.RayError as error:
            raise _ours(error, self.name) from None


class RayHandle(Handle):
    """A role in a Ray actor."""

    def __init__(self, actor: Any, name: str) -> None:
        self.actor = actor
        self.name = name

    def call(self, method: str, *args: Any) -> RayPending:
        plain = [arg.ref if isinstance(arg, RayPending) else arg for arg in args]
        return RayPending(self.actor.call.remote(method, *plain), self.name)


class RayRuntime(Runtime):
    """Roles as Ray actors, on our own Ray or one that runs already."""

    def __init__(self, config: Config, say: Callable[[str], None] = lambda _: None) -> None:
        import ray

        self._say = say
        self._cluster = connect(config, say)
        self.places = self._cluster.places
        self._actor = ray.remote(RayHost)
        self._handles: list[RayHandle] = []
        self._starting: list[Any] = []  # answers of `build` that have not been seen to come
        self._since = time.monotonic()
        self._explained = False
        self._looked = -HEALTH_EVERY
        self._health: dict[str, float] = {}
        self._closed = False

    def spawn(self, role: str, *args: Any, name: str, place: Place = Place()) -> RayHandle:
        asked = needs(place)
        options = {"num_cpus": asked.pop("CPU", 0), "num_gpus": asked.pop("GPU", 0), "resources": asked}
        actor = self._actor.options(**options, max_restarts=0, max_concurrency=1).remote(name)
        packed = pack(role, args, name, place)
        if self._cluster.shipped:
            packed = _without_path(packed)
        self._starting.append(actor.build.remote(packed))
        self._since, self._explained = time.monotonic(), False
        self._handles.append(RayHandle(actor, name))
        return self._handles[-1]

    def wait(
        self, pendings: Sequence[Pending], count: int | None = None, timeout: float | None = None
    ) -> tuple[list[Pending], list[Pending]]:
        import ray

        by_ref = {pending.ref: pending for pending in pendings if isinstance(pending, RayPending)}
        wanted = len(by_ref) if count is None else min(count, len(by_ref))
        if wanted <= 0:
            return [], list(pendings)
        self._explain(list(by_ref), wanted, timeout)
        ready, _ = ray.wait(list(by_ref), num_returns=wanted, timeout=timeout, fetch_local=False)
        there = set(ready)
        done = [pending for pending in pendings if pending.ref in there]  # type: ignore[attr-defined]
        return done, [pending for pending in pendings if pending.ref not in there]  # type: ignore[attr-defined]

    def share(self, value: Any) -> RayPending:
        import ray

        return RayPending(ray.put(value), "driver")

    def health(self) -> dict[str, float]:
        now = time.monotonic()
        if now - self._looked >= HEALTH_EVERY:
            self._looked = now
            self._health = _store_use()
        return self._health

    def close(self, *, now: bool = False) -> None:
        import ray

        if self._closed:
            return
        self._closed = True
        try:
            if not now and self._handles:
                closing = [handle.actor.close.remote() for handle in self._handles]
                ray.wait(closing, num_returns=len(closing), timeout=CLOSING, fetch_local=False)
            for handle in self._handles:
                ray.kill(handle.actor)
        finally:
            self._handles, self._starting = [], []
            self._cluster.close(now=now)

    def _explain(self, refs: list[Any], wanted: int, timeout: float | None) -> None:
        """Say once why nothing happens, when roles wait for room on the cluster."""


def _store_use() -> dict[str, float]:
    return {}


def _without_path(packed: bytes) -> bytes:
    """Leave the driver's search path out: the code was sent, and a node may have other files where the driver has it."""
    (*settings, _), args = pickle.loads(packed)
    return pickle.dumps(((*settings, []), args), protocol=5)


def _ours(error: Any, name: str) -> BaseException:
    """Ray's error as one of ours, in one line."""
    import ray

    if isinstance(error, ray.exceptions.RayTaskError):
        cause = error.cause
        if isinstance(cause, ray.exceptions.RayError):
            return _ours(cause, name)
        if isinstance(cause, RaynforceError):
            return with_cause(cause)
        return RoleError(f"{name}: {cause!r}")
    if isinstance(error, ray.exceptions.RayActorError):
        return RoleDied(f"{name} died: {_reason(str(error))}")
    return RoleError(f"{name}: {_reason(str(error))}")


def _reason(text: str) -> str:
    return " ".join(text.split())
