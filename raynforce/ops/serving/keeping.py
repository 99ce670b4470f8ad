"""Which policies are served: read from runs, replaced by newer ones of equal spaces, and brought back."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from raynforce.errors import RaynforceError, UsageError, reason, summary
from raynforce.policies.acting import ActingSpec, PolicyVersion
from raynforce.policy import Policy, read_policy
from raynforce.runs import checkpoint
from raynforce.runs.directory import find_policy
from raynforce.runs.mirrored import local_path
from raynforce.runs.store import is_url
from raynforce.spaces import EnvSpec

MAIN, CANARY = "main", "canary"
KEPT = 5  # policies that `rollback` can go back to
LOOK, LOOK_AT_URL = 1.0, 30.0  # seconds between two looks for a new checkpoint


@dataclass(frozen=True)
class Served:
    """A policy as data: what a replica needs to act, and where it is from."""

    name: str
    run: str
    checkpoint: str
    step: int
    sha256: str  # of its manifest
    acting: Mapping[str, Any]
    version: Mapping[str, Any]

    @property
    def number(self) -> int:
        return int(self.version["number"])

    def policy(self, seed: int | None = None) -> Policy:
        """Ready to act, which is tried: a policy that fails must not be the one that is served."""
        policy = Policy(ActingSpec.from_json(dict(self.acting)), PolicyVersion.from_state(dict(self.version)), seed)
        try:
            env = policy.spec.env
            policy.act(zeros(env, 1), {} if policy.recurrent else None, all_allowed(env))
        except Exception as error:
            raise UsageError(f"the policy of {self.checkpoint} does not act: {reason(error)}") from error
        return policy

    def about(self) -> dict[str, Any]:
        facts = ("name", "run", "checkpoint", "step", "sha256")
        return {name: getattr(self, name) for name in facts} | {"version": self.number}


def all_allowed(env: EnvSpec) -> np.ndarray | None:
    """The mask that allows everything, for a policy that needs one."""
    return np.ones(sum(env.action.sizes), np.bool_) if env.masked else None


def zeros(env: EnvSpec, lanes: int) -> Any:
    """Observations of the spaces' smallest values, in the form that `act` takes."""
    tree: Any = {}
    for leaf in env.obs:
        array = np.zeros((lanes, *leaf.shape), leaf.dtype)
        if leaf.start:
            array += np.asarray(leaf.start, leaf.dtype).reshape(leaf.shape)
        if leaf.path == "obs":
            return array
        *inner, last = leaf.path.split("/")[1:]
        node = tree
        for key in inner:
            node = node.setdefault(key, {})
        node[last] = array
    return tree


class Source:
    """The checkpoint of a run that is to be served, at this moment."""

    def __init__(self, name: str, run: str | Path, which: str) -> None:
        self.name, self.run, self._which = name, str(run), which
        self.seconds = LOOK_AT_URL if is_url(self.run) else LOOK

    def find(self) -> Path:
        """Where it is: of a link, what it points to, which stays the same while it is read."""
        path = local_path(self.run)
        return find_policy(path if is_url(self.run) else path.expanduser(), self._which).resolve()

    def read(self) -> Served:
        path = self.find()
        manifest = checkpoint.manifest(path)
        spec, version = read_policy(path)
        facts = manifest.get("step", 0), manifest["sha256"]
        return Served(self.name, self.run, str(path), *facts, spec.to_json(), version.state())


@dataclass
class Slot:
    source: Source
    served: Served
    policy: Policy
    earlier: deque[Served] = field(default_factory=lambda: deque(maxlen=KEPT))
    refused: set[str] = field(default_factory=set)  # by path: told once, and not tried again by `follow`
    looked: float = 0.0


class Keeper:
    """The policies that are served, by name: `main`, and perhaps `canary`. Its methods read files, and may take time.

    `changed` is called with each policy that is taken.
    """

    def __init__(
        self,
        run: str | Path,
        which: str = "best",
        canary: str | Path | None = None,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._say = say
        self._lock = threading.Lock()
        self._slots: dict[str, Slot] = {}
        self.taken, self.refused = 0, 0
        for name, where in ((MAIN, run), (CANARY, canary)):
            if where is not None:
                source = Source(name, where, which)
                served = source.read()
                self._slots[name] = Slot(source, served, served.policy(), looked=time.monotonic())
        spec = self._slots[MAIN].policy.spec.env
        for slot in self._slots.values():
            if difference := differs(spec, slot.policy.spec.env):
                raise UsageError(f"the canary at {slot.source.run} has other spaces than {run}: {difference}")

    @property
    def served(self) -> dict[str, Served]:
        return {name: slot.served for name, slot in self._slots.items()}

    @property
    def env(self) -> EnvSpec:
        return self._slots[MAIN].policy.spec.env

    def reload(self) -> list[Served]:
        """Take the runs' checkpoints of this moment; those that changed. Refused ones raise, and nothing changes."""
        with self._lock:
            found: list[tuple[Slot, Served, Policy]] = []
            for slot in self._slots.values():
                if (served := self._read(slot)) is not None:
                    found.append((slot, served, self._tried(slot, served)))
            for slot, served, policy in found:
                self._take(slot, served, policy)
            return [served for _, served, _ in found]

    def rollback(self, name: str = MAIN) -> Served:
        """Serve what was served before; `follow` then waits for another checkpoint than the one that is left."""
        with self._lock:
            slot = self._slots.get(name)
            if slot is None:
                raise UsageError(f"there is no policy {name!r}: served are {', '.join(self._slots)}")
            if not slot.earlier:
                raise UsageError(f"nothing was served before {slot.served.checkpoint}: there is no way back")
            slot.refused.add(slot.served.checkpoint)
            slot.served = slot.earlier.pop()
            slot.policy = slot.served.policy()
            self.taken += 1
            self._say(f"{name}: back to version {slot.served.number} of {slot.served.checkpoint}")
            return slot.served

    def follow(self) -> list[Served]:
        """Take new checkpoints, where it is time to look for them; what is refused is told once."""
        with self._lock:
            return [served for slot in self._slots.values() if (served := self._followed(slot)) is not None]

    def _followed(self, slot: Slot) -> Served | None:
        now = time.monotonic()
        if now - slot.looked < slot.source.seconds:
            return None
        slot.looked = now
        path = ""
        try:
            path = str(slot.source.find())
            if path == slot.served.checkpoint or path in slot.refused or (served := self._read(slot)) is None:
                return None
            self._take(slot, served, self._tried(slot, served))
            return served
        except RaynforceError as error:
            if path not in slot.refused:
                self._say(f"{slot.source.name}: {error}; version {slot.served.number} stays")
            slot.refused.add(path)
            return None

    def _read(self, slot: Slot) -> Served | None:
        """What is new of a slot's run; None if nothing is."""
        served = slot.source.read()
        return served if served.sha256 != slot.served.sha256 else None

    def _tried(self, slot: Slot, served: Served) -> Policy:
        try:
            policy = served.policy()
            if difference := differs(self.env, policy.spec.env):
                problem = f"the spaces of {served.checkpoint} are not those that are served ({difference})"
                raise UsageError(f"{problem}: start another server for it")
        except RaynforceError:
            self.refused += 1
            raise
        except Exception as error:
            self.refused += 1
            raise UsageError(f"{served.checkpoint} cannot be served: {summary(error)}") from error
        return policy

    def _take(self, slot: Slot, served: Served, policy: Policy) -> None:
        slot.earlier.append(slot.served)
        slot.served, slot.policy = served, policy
        self.taken += 1
        self._say(f"{served.name}: took version {served.number} of {served.checkpoint}")


def differs(env: EnvSpec, other: EnvSpec) -> str:
    """What of the spaces is not equal; empty if they are."""
    if env.action != other.action:
        return f"actions {_space(env.action)} and {_space(other.action)}"
    if env.obs != other.obs:
        return f"observations {_spaces(env.obs)} and {_spaces(other.obs)}"
    return ""


def _spaces(leaves: Sequence[Any]) -> str:
    return ", ".join(f"{leaf.path} {_space(leaf)}" for leaf in leaves)


def _space(space: Any) -> str:
    sizes = f" of {list(space.sizes)}" if space.sizes else ""
    bounds = f" from {min(space.low):g} to {max(space.high):g}" if getattr(space, "low", ()) else ""
    return f"{space.kind}{list(space.shape) or ''}{sizes}{bounds}"
