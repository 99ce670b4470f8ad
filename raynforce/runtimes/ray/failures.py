"""Ray's errors as ours: which role it was, why, and what it said last."""

from __future__ import annotations

from collections import deque
from typing import Any

from raynforce.errors import RaynforceError, summary
from raynforce.runtimes.base import RoleDied, RoleError
from raynforce.runtimes.ray.private import ray_module
from raynforce.runtimes.ray.watching import Voices
from raynforce.runtimes.role_host import hung, with_cause

REMEMBERED = 1000  # roles that were ended: calls that waited for their answers may still fail
UNEXPECTED = "its process ended unexpectedly (killed, out of memory, or crashed in native code)"
REASONS = {  # by what Ray's page of advice says
    "its node ran out of memory; use fewer samplers or environments": ("low on memory",),
    "its node was lost": ("node has died", "its node died", "node is dead"),
    "it was ended": ("ray.kill",),
    "its node could not set up the code that was sent": ("runtime_env", "runtime environment"),
}


class Failures:
    def __init__(self, voices: Voices) -> None:
        self._voices = voices
        self._names: dict[str, str] = {}
        self._ended: deque[str] = deque()
        self._deaths: dict[str, tuple[str, str, str]] = {}  # how, who, and the last words

    def begin(self, actor: str, name: str) -> None:
        self._names[actor] = name
        self._voices.begin(name)

    def end(self, actor: str) -> None:
        """It is not needed any more, and will be forgotten after some others."""
        self._ended.append(actor)
        if len(self._ended) > REMEMBERED:
            old = self._ended.popleft()
            self._names.pop(old, None)
            self._deaths.pop(old, None)

    def ours(self, error: Any, name: str) -> RaynforceError:
        """One of our errors, in one line. A call fails with the error of the answer it was waiting for, too."""
        kinds = ray_module("exceptions")
        if isinstance(error, kinds.RayTaskError):
            cause = error.cause
            if isinstance(cause, RaynforceError):
                with_cause(cause)
                return cause
            if isinstance(cause, kinds.RayError):
                return self.ours(cause, name)
            return RoleError(f"{name}: {summary(cause)}", name)
        if isinstance(error, kinds.RayActorError):
            return self._death(error, name)
        if isinstance(error, (kinds.WorkerCrashedError, kinds.OutOfMemoryError, kinds.NodeDiedError)):
            return RoleDied(f"{name} died: {_reason(str(error))}", name)
        if isinstance(error, kinds.ObjectLostError):
            return RoleDied(f"{name}: an answer it was to get was lost with the node that held it")
        return RoleError(f"{name}: {summary(error)}", name)

    def _death(self, error: Any, name: str) -> RoleDied:
        actor = error.actor_id or ""
        name = self._names.get(actor, name)
        if isinstance(error, ray_module("exceptions").ActorUnavailableError):
            return RoleDied(f"{name} cannot be reached: its node was lost, or the way to it", name)
        if actor in self._deaths:
            return RoleDied(*self._deaths[actor])
        reason = _reason(str(error))
        said = self._voices.last(name) if reason == UNEXPECTED else []
        death = f"{name} died: {hung(said) or reason}", name, "\n".join(said)
        if actor in self._names:
            self._deaths[actor] = death
        return RoleDied(*death)


def _reason(text: str) -> str:
    flat = " ".join(text.split())
    return next((reason for reason, signs in REASONS.items() if any(sign in flat for sign in signs)), UNEXPECTED)
