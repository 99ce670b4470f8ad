"""Many environments as one: the contract of a vector environment, and what its implementations share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from raynforce.envs.addresses import is_remote
from raynforce.envs.describe import Args
from raynforce.envs.faults import EnvFault
from raynforce.envs.joined import STATE
from raynforce.envs.launching import is_simulator
from raynforce.envs.make import close_env, make_probed
from raynforce.errors import CheckpointError, EnvError, UsageError
from raynforce.infos import NOTHING, Info
from raynforce.spaces import EnvSpec, ObsLeaf
from raynforce.trees import Tree

Parallel = Literal["no", "threads", "processes"]
FINITE = "observations and rewards must be finite numbers"
NOT_AT_ALL = "not at all: they start over"  # how running episodes come back


class Step(NamedTuple):
    """What one step of all lanes gave. The arrays are not written to again by the environment."""

    obs: dict[str, np.ndarray]  # [B, ...] what the policy sees next
    reward: np.ndarray  # [B] float32
    terminated: np.ndarray  # [B] bool
    truncated: np.ndarray  # [B] bool
    valid: np.ndarray  # [B] bool, False where this step only reset the lane, or broke it
    final_lanes: np.ndarray  # [K] int64 lanes whose episode ended and whose `obs` already shows the next one
    final_obs: dict[str, np.ndarray]  # [K, ...] the true last observations of those lanes
    cut: np.ndarray  # [K] int64 lanes whose env broke in this step: `obs` shows the next episode, in a new env
    info: Mapping[int, Info] = NOTHING  # by lane the numbers in `info` of episodes that ended in this step

    @property
    def over(self) -> np.ndarray:
        """Lanes whose episode ended or was cut, `[B]`."""
        over: np.ndarray = self.terminated | self.truncated
        over[self.cut] = True
        return over


class VectorEnv(ABC):
    """`num_envs` copies of an environment, stepped together."""

    num_envs: int
    spec: EnvSpec
    turns: bool = False  # whether lanes act in turns, and rewards are shown at the next one
    state_leaf: ObsLeaf | None = None  # the global state, if it is shown beside what lanes see
    note: str  # why the environment's own vector implementation, or its own way to save episodes, is not used; or empty
    way_back: str  # how running episodes come back at resume, in words that follow "they come back"
    restarted: list[int]  # lanes whose episodes the last `load` could not restore, and began new ones in

    def __init__(self, spec: EnvSpec, num_envs: int, note: str, way_back: str) -> None:
        self.spec, self.num_envs, self.note, self.way_back = spec, num_envs, note, way_back
        self.restarted = []
        self._obs: dict[str, np.ndarray] = {}  # the current ones; empty before the first reset
        self._action_shape = (num_envs, *spec.action.shape)
        self._all_valid = np.ones(num_envs, np.bool_)
        self._all_valid.flags.writeable = False  # shared by all steps
        self._no_lanes = np.empty(0, np.int64)
        self._no_final = {leaf.path: np.empty((0, *leaf.shape), leaf.dtype) for leaf in spec.obs}

    @abstractmethod
    def reset(self, seed: int | None = None) -> dict[str, np.ndarray]:
        """Start new episodes in all lanes; with `seed`, the random streams start again from it."""

    @abstractmethod
    def step(self, action: np.ndarray) -> Step:
        """Step all lanes. `action` is `[B, ...]`, ready for the environment: start added, clipped to its bounds."""

    @abstractmethod
    def start_fresh(self, attempt: int) -> dict[str, np.ndarray]:
        """Start new episodes in all lanes whose seeds no other attempt (1 or more) and no first run has used."""

    @abstractmethod
    def take_faults(self) -> list[EnvFault]:
        """The environments that broke and were made again since this was last asked."""

    def current(self) -> dict[str, np.ndarray]:
        if not self._obs:
            raise UsageError(f"env {self.spec.env!r} has no running episodes yet; call reset() or load() first")
        return self._obs

    @abstractmethod
    def state(self) -> Tree:
        """All that is needed to go on from here."""

    @abstractmethod
    def load(self, tree: Tree) -> list[str]:
        """Go on from a saved state; returns sentences about what could not be restored exactly."""

    @abstractmethod
    def close(self) -> None: ...

    def _require_actions(self, action: np.ndarray) -> None:
        self.current()
        if action.shape != self._action_shape:
            raise UsageError(f"the actions have shape {action.shape}; expected {self._action_shape}")

    def _saved_obs(self, tree: Tree, kind: str) -> list[np.ndarray]:
        name = self.spec.env
        if tree.get("kind") != kind:
            raise CheckpointError(f"env {name!r} was saved by another vector implementation; resume with the same one")
        saved = [np.asarray(tree["obs"][str(i)]) for i in range(len(tree["obs"]))]
        shapes, expected = [array.shape for array in saved], [(self.num_envs, *leaf.shape) for leaf in self.spec.obs]
        if shapes != expected:
            raise CheckpointError(f"env {name!r} was saved with observations {shapes}, now they are {expected}")
        return saved


class Recycle(NamedTuple):
    """When a simulator's process is replaced by another; 0 is never."""

    episodes: int = 0
    hours: float = 0.0
    bytes: int = 0


NEVER = Recycle()


@dataclass(frozen=True)
class EnvArgs:
    env: str
    num_envs: int
    seed: int
    args: dict[str, Any] = field(default_factory=dict)
    exact_resume: bool = True
    parallel: Parallel = "no"
    recycle: Recycle = NEVER
    gateway: Any = None  # the `Address` where simulators that others started are asked for
    masked: bool = False  # whether they say which actions are allowed
    ids: bool = False  # of several agents: each sees which one it is
    states: bool = False  # of several agents: what they see has the global state beside it

    def vector(self, sampler: int, **more: Any) -> VectorEnv:
        """The environments as lanes; those of several agents as lanes of one policy."""
        made = self.environments(sampler, **more)
        if made.spec.agents is None:
            return made
        from raynforce.envs.agents import shared

        return shared(made, ids=self.ids, states=self.states)

    def environments(self, sampler: int, **more: Any) -> VectorEnv:
        """One row for each environment, also of several agents."""
        how: dict[str, Any] = {"exact_resume": self.exact_resume, "parallel": self.parallel, "recycle": self.recycle}
        how |= {"gateway": self.gateway, "masked": self.masked, **more}
        return make_vector(self.env, self.given, self.num_envs, seed=self.seed, sampler=sampler, **how)

    @property
    def given(self) -> dict[str, Any]:
        """What each is made with."""
        return self.args | {STATE: True} if self.states else self.args


def make_vector(
    env: str,
    env_args: Mapping[str, Any] | None,
    num_envs: int,
    *,
    seed: int,
    sampler: int = 0,
    exact_resume: bool = True,
    record: bool = True,
    parallel: Parallel = "no",
    hang_seconds: float = math.inf,
    recycle: Recycle = NEVER,
    gateway: Any = None,
    at_most: bool = False,
    masked: bool = False,
) -> VectorEnv:
    """Make `num_envs` environments: the env's own vector implementation if it serves, otherwise a loop.

    With `parallel` they are single ones in any case; a step longer than `hang_seconds` is then given up. Exact resume
    needs a snapshot of the vector implementation; the loop replays the running episodes' actions, unless `record` is
    off. With `at_most`, simulators that others started may give fewer than `num_envs`. `masked` if they say which
    actions are allowed, as `probe` finds.
    """
    from raynforce.envs.lanes import Lanes, ParallelVector  # all implement this module's contract, so they import it
    from raynforce.envs.local import LocalVector
    from raynforce.envs.native import NativeVector, registered_vector
    from raynforce.envs.simulator_vector import SimulatorVector
    from raynforce.envs.simulators import Simulators

    if num_envs < 1:
        raise UsageError(f"num_envs is {num_envs}; it must be 1 or more")
    if seed < 0:
        raise UsageError(f"seed is {seed}; it must be 0 or more")
    given = {name: value for name, value in (env_args or {}).items() if name != STATE}  # simulators always give theirs
    if is_remote(env):
        from raynforce.envs.remote import remote_lanes

        where = {"gateway": gateway, "at_most": at_most, "hang_seconds": hang_seconds}
        return SimulatorVector(remote_lanes(env, given, num_envs, seed=seed, sampler=sampler, **where))
    if is_simulator(env):
        which: dict[str, Any] = {"seed": seed, "sampler": sampler, "hang_seconds": hang_seconds, "recycle": recycle}
        return SimulatorVector(Simulators(env, given, num_envs, **which), record and exact_resume)
    record = record and exact_resume
    if parallel != "no":
        how: dict[str, Any] = {"parallel": parallel, "record": record, "hang_seconds": hang_seconds, "masked": masked}
        return ParallelVector(Lanes(env, env_args, num_envs, seed=seed, sampler=sampler, **how))
    vector, note = registered_vector(env, dict(env_args or {}), num_envs, exact_resume=exact_resume)
    if vector is not None:
        return NativeVector(env, vector, seed=seed, sampler=sampler, env_args=env_args, masked=masked)
    single: dict[str, Any] = {"seed": seed, "sampler": sampler, "record": record, "masked": masked}
    return LocalVector(env, env_args, num_envs, **single, note=note)


def probe(env: str, env_args: Mapping[str, Any] | None = None) -> EnvSpec:
    """What an environment takes and gives, found by making one and closing it again."""
    if is_remote(env):
        from raynforce.envs.remote import remote_spec

        return as_lane(remote_spec(env, env_args))
    made, spec = make_probed(env, env_args)
    close_env(made)
    return as_lane(spec)


def as_lane(spec: EnvSpec, *, ids: bool = False) -> EnvSpec:
    """What a policy sees of it: of several agents, what one of the first kind does."""
    if spec.agents is None:
        return spec
    from raynforce.envs.agents import lane_spec

    return lane_spec(spec, ids=ids)


def require_finite(env: str, columns: Mapping[str, np.ndarray], axes: tuple[str, ...], args: Args = None) -> None:
    """Refuse NaN and infinity; `axes` names the leading dimensions for the message."""
    for path, column in columns.items():
        if column.dtype.kind == "f" and not finite(column):
            place = np.argwhere(~np.isfinite(column))[0]
            where = "".join(f", {name} {i}" for name, i in zip(axes, place, strict=False))
            cause = f"{path} = {column[tuple(place)]}{where}"
            error = EnvError(f"env {env!r} returned {cause}; {FINITE}")
            error.facts = {"env": env, "args": dict(args or {}), "kind": "garbage", "cause": cause, "trace": ""}
            raise error


def finite(array: np.ndarray) -> bool:
    """Several times as fast as `isfinite(array).all()`."""
    return int(np.count_nonzero(np.isfinite(array))) == array.size


def derive_seed(seed: int, *key: int) -> int:
    """One 32-bit seed out of the run's seed and a key such as (sampler, lane, episode)."""
    return int(np.random.SeedSequence(seed, spawn_key=key).generate_state(1)[0])


def first_of_attempt(attempt: int) -> int:
    """The first episode, or reset, of an attempt: far from those of every other attempt."""
    if attempt < 1:
        raise UsageError(f"attempt is {attempt}; it must be 1 or more: 0 are the episodes that the run began with")
    return attempt << 32
