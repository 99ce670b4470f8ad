"""The runtime interface: `spawn` a role somewhere, `call` its methods, `wait` for answers, `share` a value with all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from raynforce.errors import RaynforceError
from raynforce.kernels import KernelKind, Kernels


@dataclass(frozen=True)
class Place:
    """What a role asks of the machine it lives on."""

    cpus: float = 1.0  # logical CPUs on Ray; not a limit, only what is counted
    gpus: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict)  # custom Ray resources
    threads: int = 1  # threads of its numerical libraries
    nice: int = 0  # how far it steps back for others when cores are scarce
    awake: float = 0.0  # seconds that a process stays awake for its next call before it sleeps
    home: bool = False  # on a cluster, it prefers the driver's own machine; others are spread over all
    start_seconds: float = 0.0  # a process that has not built its role by then prints its stacks and ends; 0: no limit
    call_seconds: float = 0.0  # the same for each of its calls
    kernels: Kernels = "portable"  # what its numerical libraries may choose from


class Pending(ABC):
    """The answer to a call, some day. As an argument of another call, it goes there without passing through here."""

    name: str  # whose answer it is, such as `sampler 3`

    @abstractmethod
    def result(self) -> Any:
        """Wait for the answer and bring it here; raises what the call raised. Arrays in it are read-only."""

    @abstractmethod
    def failure(self) -> BaseException | None:
        """What the call raised, if it did; for an answer that is there, and without opening it where that is dear."""

    @property
    def size(self) -> int:
        """Bytes of memory that the answer takes beside its maker; 0 where that is not known."""
        return 0


Split = tuple[list[Pending], list[Pending]]  # answers that are there, and those that are not


class Handle(ABC):
    """A role that lives somewhere. Its calls run one at a time, in the order they were made."""

    name: str

    def call(self, method: str, *args: Any) -> Pending:
        """Ask for a method to be called; any of `args` may be a `Pending`, whose value the method then gets."""
        return self.call_parts(method, args, 1)[0]

    @abstractmethod
    def call_parts(self, method: str, args: Sequence[Any], parts: int) -> list[Pending]:
        """The same for a method that returns a tuple of so many parts: each can go its own way."""

    @abstractmethod
    def end(self) -> None:
        """End it at once, whatever it is doing, and forget it; calls that it has not answered fail. Does not wait."""

    def has_room(self) -> bool:
        """Whether a machine has been found for it; on a full cluster, it starts when there is room."""
        return True


class Closable(ABC):
    """Closed at the end of its `with` block, at once if that is left by Ctrl-C or the like."""

    @abstractmethod
    def close(self, *, now: bool = False) -> None:
        """End all roles: after their own `close` (within a few seconds), or with `now` at once."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(now=kind is not None and not issubclass(kind, Exception))


class Runtime(Closable):
    """Where roles live; `close` ends all of them."""

    has_processes: bool = True  # roles have processes of their own: they work in parallel, and can be killed
    channel: Literal["direct", "unix", "tcp"] = "unix"  # between env hosts and policy
    grows: bool = False  # room is added for roles that wait for some: nobody is too few in the meantime

    def __init__(self, places: Mapping[str, Place]) -> None:
        self.places = places  # what the roles of this run ask for, by kind: `sampler`, `learner`, `evaluator`
        self._starting: list[Pending] = []  # answers that tell on what a role lives
        self._kinds: set[KernelKind] = set()

    @abstractmethod
    def spawn(self, role: str, *args: Any, name: str, place: Place | None = None) -> Handle:
        """Start `role`, a `module:Class`, without waiting; if it cannot be built, every call fails with the reason."""

    @abstractmethod
    def wait(self, pendings: Sequence[Pending], count: int | None = None, timeout: float | None = None) -> Split:
        """Wait until `count` (None: all) of these answers, or failures, are there."""

    @abstractmethod
    def share(self, value: Any) -> Pending:
        """Store a value once, to be given to any number of calls."""

    def keep(self, pending: Pending) -> Pending:
        """A value as it is now, safe from whatever may happen to the role that made it and to its node."""
        return pending

    def health(self) -> dict[str, float]:
        return {}

    def kinds(self) -> Set[KernelKind]:
        """Of the machines that roles live on, as far as they have started."""
        built, self._starting = self.wait(self._starting, 0, 0.0)
        self._kinds |= {each.result() for each in built if each.failure() is None}
        return frozenset(self._kinds)

    def pending_reason(self) -> str:
        """Why roles may not have answered yet, to be put behind their names; most often nothing."""
        return ""


class _OfRole(RaynforceError):
    def __init__(self, text: str, role: str | None = None, said: str = "", trace: str | None = None) -> None:
        super().__init__(text)
        self.role, self.said, self.trace = role, said, trace


class RoleError(_OfRole):
    """A role's method raised something of its own; the traceback from where it lives is the cause."""


class RoleDied(_OfRole):
    """The process that a role lived in is gone, or an answer was lost with it."""


class RemoteTraceback(Exception):
    """Carries a traceback as text from another process, to be printed below the error it caused."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'
