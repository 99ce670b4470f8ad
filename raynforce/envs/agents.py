"""Lanes of agents: a lane is one agent in one environment. Agents that come and go are lanes with rows not valid."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from raynforce.envs.faults import EnvFault
from raynforce.envs.joined import STATE
from raynforce.envs.vector import Step, VectorEnv
from raynforce.errors import UsageError
from raynforce.spaces import (
    ACTING,
    MASK,
    TERMINATED,
    TRUNCATED,
    Agents,
    EnvSpec,
    ObsLeaf,
    action_slices,
    forbids_all,
    leaf_name,
)
from raynforce.trees import Tree

ID = "obs/agent"  # the leaf that says which agent a lane is
Arrays = dict[str, np.ndarray]
Seen = Mapping[str, np.ndarray]  # of all agents of some environments, as one has them, `[E, ...]`
NOBODY = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Seats:
    """Lanes that one policy plays: `[B]` environments, and the agents in them, which have equal spaces."""

    env: np.ndarray
    agent: np.ndarray

    @staticmethod
    def all_of(envs: int, agents: Sequence[int]) -> Seats:
        """All of these agents, environment after environment."""
        return Seats(np.repeat(np.arange(envs), len(agents)), np.tile(np.asarray(agents, np.int64), envs))


def lane_spec(joined: EnvSpec, kind: int = 0, *, ids: bool = False) -> EnvSpec:
    """What one agent of this kind takes and gives; with `ids`, it also sees which one it is."""
    assert joined.agents is not None
    found = joined.agents.kinds[kind]
    obs = found.obs
    if ids:
        plain = obs[0].path == "obs"
        leaves = (replace(obs[0], path="obs/observation"),) if plain else obs
        obs = (*leaves, ObsLeaf(ID, "discrete", (), "int64", (len(joined.agents.names),), (0,)))
    args = {name: value for name, value in joined.args.items() if name != STATE}
    return replace(joined, obs=obs, action=found.action, args=args)


class Sight:
    """What lanes see of what all agents of their environments do. With `ids`, they see which agent they are; with
    `states`, what they see has the `global_state` beside it."""

    def __init__(self, agents: Agents, *, ids: bool = False, states: bool = False) -> None:
        self._agents, self._ids = agents, ids
        self.state_leaf = ObsLeaf("global_state", "box", (agents.state_width,), "float32") if states else None

    def seen(self, joined: Seen, env: np.ndarray, agent: np.ndarray, kind: int, rows: np.ndarray) -> Arrays:
        """Of agents `[B]` of one kind, which have these rows in its leaves; each `[B, ...]`."""
        found = self._agents.kinds[kind]
        plain = self._ids and found.obs[0].path == "obs"
        paths = ["obs/observation"] if plain else [leaf.path for leaf in found.obs]
        seen = {path: joined[f"obs/{leaf_name(kind, i)}"][env, rows] for i, path in enumerate(paths)}
        if self._ids:
            seen[ID] = agent.copy()
        if MASK in seen:  # of those that are not to act it may forbid everything
            seen[MASK][forbids_all(seen[MASK], found.action.sizes)] = 1
        if self.state_leaf is not None:
            seen["global_state"] = self._state(joined)[env]
        return seen

    def _state(self, joined: Seen) -> np.ndarray:
        """The global state, `[E, S]`."""
        if self._agents.state:
            return joined["obs/state"]
        kinds = enumerate(self._agents.kinds)
        names = [leaf_name(k, i) for k, kind in kinds for i, leaf in enumerate(kind.obs) if leaf.path != MASK]
        parts = [joined[f"obs/{name}"] for name in names]
        return np.concatenate([x.reshape(len(x), math.prod(x.shape[1:])).astype(np.float32) for x in parts], axis=1)


class Outcome(NamedTuple):
    """What a step was to each agent of some environments, `[K, N]`; and which of these are over or broke, `[K]`."""

    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    acted: np.ndarray
    was_open: np.ndarray  # whose episode went on before
    over: np.ndarray
    cut: np.ndarray


class Presence:
    """Who is to act in each environment, and whose episode goes on, `[E, N]`."""

    def __init__(self, agents: Agents, envs: int) -> None:
        self._turns = agents.turns
        self.acting, self.open = (np.zeros((envs, len(agents.names)), np.bool_) for _ in range(2))

    def begin(self, envs: np.ndarray, seen: Seen) -> None:
        self.acting[envs] = self.open[envs] = seen["obs/flags"][:, ACTING] != 0

    def step(
        self, envs: np.ndarray, seen: Seen, ended: np.ndarray, final: Seen, broken: np.ndarray = NOBODY
    ) -> Outcome:
        """These K environments were stepped. `seen` is of the next episode already in rows that have `ended`, with
        `final` seen last, or are `broken`."""
        over, cut = np.zeros(len(envs), np.bool_), np.zeros(len(envs), np.bool_)
        over[ended], cut[broken] = True, True
        acted, was_open = self.acting[envs], self.open[envs]
        reward, flags = seen["obs/reward"], seen["obs/flags"]
        acting = flags[:, ACTING] != 0
        if over.any() or cut.any():
            reward, flags = reward.copy(), flags.copy()
            reward[ended], flags[ended] = final["obs/reward"], final["obs/flags"]
            reward[cut], flags[cut] = 0, 0
        terminated = flags[:, TERMINATED] != 0
        truncated = flags[:, TRUNCATED] != 0
        if not self._turns:  # who is not there earns nothing; a simulator may say otherwise
            reward, terminated, truncated = reward * acted, terminated & acted, truncated & acted
        truncated |= over[:, None] & was_open & ~terminated  # it ended without a word on them
        goes_on = was_open & ~(terminated | truncated)
        self.open[envs] = np.where((over | cut)[:, None], acting, goes_on | acting)
        self.acting[envs] = acting
        return Outcome(reward, terminated, truncated, acted, was_open, over, cut)


class World:
    """Environments of several agents, stepped together, seen from the seats of each player."""

    def __init__(self, inner: VectorEnv, players: Sequence[Seats], *, ids: bool = False, states: bool = False) -> None:
        agents = inner.spec.agents
        assert agents is not None
        self.inner, self.agents = inner, agents
        self.sight, self._presence = Sight(agents, ids=ids, states=states), Presence(agents, inner.num_envs)
        self.envs, self._all = inner.num_envs, np.arange(inner.num_envs)
        slices = action_slices(agents)
        self._action = np.zeros((self.envs, slices[-1].stop), np.float32)
        self._parts: list[tuple[Seats, int, np.ndarray, np.ndarray]] = []  # seats, kind, rows in it, action's columns
        self.views: list[AgentVector] = []
        for number, seats in enumerate(players):
            kind = agents.kind_of(int(seats.agent[0]))
            rows = np.array([agents.kinds[kind].agents.index(agent) for agent in seats.agent.tolist()])
            columns = np.array([np.r_[slices[agent]] for agent in seats.agent.tolist()])
            self._parts.append((seats, kind, rows, columns))
            self.views.append(AgentVector(self, number, seats, lane_spec(inner.spec, kind, ids=ids)))

    @property
    def acting(self) -> np.ndarray:
        """Who is to act, `[E, N]`."""
        return self._presence.acting

    def begin(self, seen: Seen) -> None:
        self._presence.begin(self._all, seen)

    def step(self, actions: Sequence[np.ndarray]) -> list[Step]:
        """Step all environments with each player's actions `[B, ...]`, ready for the environment."""
        for (seats, _, _, columns), action in zip(self._parts, actions, strict=True):
            self._action[seats.env[:, None], columns] = action.reshape(len(action), -1)
        step = self.inner.step(self._action)
        found = self._presence.step(self._all, step.obs, step.final_lanes, step.final_obs, step.cut)
        ended = found.terminated | found.truncated
        where = np.full(self.envs, -1)
        where[step.final_lanes] = np.arange(len(step.final_lanes))
        steps = []
        for seats, kind, rows, _ in self._parts:
            place = seats.env, seats.agent
            (last,) = np.nonzero(ended[place] & found.over[seats.env])
            lost = np.flatnonzero(found.cut[seats.env] & found.was_open[place])
            final = self._no_final(kind)
            if len(last):
                final = self.sight.seen(step.final_obs, where[seats.env[last]], seats.agent[last], kind, rows[last])
            seen = self.sight.seen(step.obs, seats.env, seats.agent, kind, rows)
            valid = found.acted[place] & ~found.cut[seats.env]
            flat = found.reward[place], found.terminated[place], found.truncated[place], valid
            steps.append(Step(seen, *flat, last, final, lost))
        return steps

    def _no_final(self, kind: int) -> Arrays:
        nothing = {path: column[:0] for path, column in self.inner.current().items()}
        return self.sight.seen(nothing, NOBODY, NOBODY, kind, NOBODY)

    def seen_now(self, number: int) -> Arrays:
        seats, kind, rows, _ = self._parts[number]
        return self.sight.seen(self.inner.current(), seats.env, seats.agent, kind, rows)

    def state(self) -> Tree:
        return {"inner": self.inner.state(), "open": self._presence.open.copy()}

    def load(self, tree: Tree) -> list[str]:
        notes = self.inner.load(tree["inner"])
        self.begin(self.inner.current())
        kept = np.ones(self.envs, np.bool_)
        kept[self.inner.restarted] = False
        self._presence.open[kept] = np.asarray(tree["open"])[kept]
        return notes


class AgentVector(VectorEnv):
    """The lanes of one player. Alone in its world it is stepped as any vector environment; of several players, the
    first resets, saves and loads the world, and the others follow it."""

    def __init__(self, world: World, number: int, seats: Seats, spec: EnvSpec) -> None:
        super().__init__(spec, len(seats.env), world.inner.note, world.inner.way_back)
        self.world, self.seats, self._number = world, seats, number
        self.turns = world.agents.turns
        self.state_leaf = world.sight.state_leaf

    @property
    def _leads(self) -> bool:
        return self._number == 0

    def reset(self, seed: int | None = None) -> Arrays:
        if self._leads:
            self.world.begin(self.world.inner.reset(seed))
        return self.current()

    def start_fresh(self, attempt: int) -> Arrays:
        if self._leads:
            self.world.begin(self.world.inner.start_fresh(attempt))
        return self.current()

    def step(self, action: np.ndarray) -> Step:
        self._require_actions(action)
        return self.world.step([action])[0]

    def current(self) -> Arrays:
        return self.world.seen_now(self._number)

    def take_faults(self) -> list[EnvFault]:
        return self.world.inner.take_faults() if self._leads else []

    def state(self) -> Tree:
        return self.world.state() if self._leads else {}

    def load(self, tree: Tree) -> list[str]:
        notes = self.world.load(tree) if self._leads else []
        self.restarted = np.flatnonzero(np.isin(self.seats.env, self.world.inner.restarted)).tolist()
        return notes

    def close(self) -> None:
        if self._leads:
            self.world.inner.close()


def shared(inner: VectorEnv, *, ids: bool = False, states: bool = False) -> AgentVector:
    """All agents as lanes of one policy."""
    agents = inner.spec.agents
    assert agents is not None
    require_one_kind(inner.spec)
    seats = Seats.all_of(inner.num_envs, range(len(agents.names)))
    return World(inner, [seats], ids=ids, states=states).views[0]


def require_one_kind(spec: EnvSpec) -> None:
    agents = spec.agents
    if agents is not None and len(agents.kinds) > 1:
        first, other = (agents.names[kind.agents[0]] for kind in agents.kinds[:2])
        why = f"agents of env {spec.env!r} have different spaces ({first!r} and {other!r})"
        raise UsageError(f"{why}, and one policy is to play all: give each kind its own under policies")
