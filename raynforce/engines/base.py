"""The engine seam: what a run needs from whatever trains.

Calls come in this order: the constructor, which refuses what cannot be trained and starts nothing; `open`; `load`, or
`begin_from`, or neither; then `rounds`, with `state` between two of them; `close`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from raynforce.auto import settle
from raynforce.config import Config
from raynforce.errors import RaynforceError
from raynforce.policies.acting import ActingSpec, PolicyVersion
from raynforce.roles.learned import Learned
from raynforce.runtimes.base import Closable, Pending
from raynforce.runtimes.member import Job, Watcher
from raynforce.runtimes.pool import Pool
from raynforce.spaces import EnvSpec
from raynforce.trees import Tree


class Round(NamedTuple):
    """One turn of an engine: what a report is made of."""

    learned: Learned  # counts and metrics, and the fragments that were learned from
    version: Job | Pending  # the policy version that it led to: a reference, fetched only if it is needed
    seconds: Mapping[str, float]  # how long its parts took, as metrics by full name


class Supervisor(Watcher, Protocol):
    """Notified of faults in a run, which it writes down."""

    lost: int  # steps that were lost with the fault that will be told next

    def say(self, text: str) -> None: ...  # the consequence of a failure
    def env_faults(self, role: str, faults: Sequence[Mapping[str, object]]) -> None: ...  # environments that broke
    def role_failed(self, role: str, cause: str, action: str) -> None: ...  # one that is not of a pool


class Totals(NamedTuple):
    """What an engine counts over the whole run, for its result."""

    dropped_steps: int = 0  # sampled and never learned from
    lost_steps: int = 0  # lost with a role, at most
    abandoned_episodes: int = 0  # in flight at the checkpoint, and impossible to go on with


class Engine(Closable):
    """Trains one policy. Subclasses set `acting` in the constructor and `pool` in `open`."""

    acting: ActingSpec  # how its policy acts: what evaluation, `best` and `raynforce.load` need
    pool: Pool  # where its roles live; the run's evaluator joins them

    def __init__(self, config: Config, env: EnvSpec) -> None:
        """Refuse a config that it cannot train, with one line. Nothing is started yet."""
        self.config, self.env = config, env

    @classmethod
    def settle(cls, config: Config) -> tuple[Config, EnvSpec, str]:
        """The config without `auto`, what its environment takes and gives, and one line that says what was chosen."""
        return settle(config)

    def require_resumable(self, before: Config, run: str) -> None:
        """Refuse to go on with a run whose config was `before`, where its checkpoints do not allow that."""
        return  # most can go on with any

    @abstractmethod
    def open(self, supervisor: Supervisor, say: Callable[[str], None]) -> None:
        """Start what trains; `say` is told what a user should know."""

    def begin_from(self, version: PolicyVersion, seen: int) -> None:
        """Begin with the weights of another run, after so many observations."""
        raise RaynforceError(f"engine {self.config.engine!r} cannot begin with the weights of another run")

    @abstractmethod
    def load(self, saved: Mapping[str, Tree]) -> list[str]:
        """Go on from a checkpoint (`state` and `counts`); returns sentences on what is not as it was."""

    @abstractmethod
    def newest(self) -> tuple[Job | Pending, int]:
        """The policy version before the first round, and its number."""

    @abstractmethod
    def rounds(self, waiting: Callable[[str], None]) -> Iterator[Round]:
        """Train, round by round, for ever; `waiting` is told who is waited for when that takes long."""

    @abstractmethod
    def state(self, known: Callable[[str], Collection[str]]) -> dict[str, Tree]:
        """What a checkpoint holds, by part, without the segments of a part that are `known` to be on the disk."""

    def counts(self) -> Tree:
        """Small facts that a checkpoint holds beside the run's own."""
        return {}

    def keeps_learning_after(self, error: RaynforceError) -> bool:
        """Whether what was learned survived a failure, so that it can be saved; `last_round` is asked next."""
        return False

    def last_round(self) -> Round | None:
        """After such a failure: let an update that is under way come to its end, and return it."""
        return None

    def metrics(self) -> dict[str, float]:
        """More to report, by full name. Raises if its books do not balance."""
        return {}

    def totals(self) -> Totals:
        return Totals()

    def where_the_time_went(self, run: Mapping[str, float], steps: int) -> str:
        """A few lines on what bound the run, from the driver's seconds by purpose and the steps trained meanwhile.

        While it goes on these are 0, and nothing may be tried out for it: it is asked for every second.
        """
        return ""
