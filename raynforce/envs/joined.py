"""One PettingZoo environment as one gymnasium environment: what its agents see, get and do, stacked in arrays.

So that all that holds for environments (faults, seeds, exact resume, processes) holds for those of several agents too;
`agents.py` makes lanes of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from raynforce.envs.describe import Args, Space, describe, flatten_obs, misfit
from raynforce.envs.masks import KEY, has_mask, not_flags, random_actions
from raynforce.errors import UsageError, summary
from raynforce.spaces import (
    ACTING,
    FORBIDS,
    MASK,
    TERMINATED,
    TRUNCATED,
    AgentKind,
    Agents,
    ObsLeaf,
    action_bounds,
    action_slices,
    forbids_all,
    leaf_name,
)

STATE = "raynforce.state"  # an argument that no factory can have: give the global state too


def is_of_agents(made: Any) -> bool:
    """Whether it has the methods of a PettingZoo environment, parallel or AEC."""
    has = all(hasattr(made, name) for name in ("possible_agents", "observation_space", "action_space", "step", "reset"))
    return has and callable(made.observation_space) and callable(made.action_space)


class EnvOfAgents(gymnasium.Env[Any, Any]):
    """An environment that may have several agents; its spaces are then of all of them."""

    agents: Agents | None = None


class JoinedEnv(EnvOfAgents):
    """A parallel environment, in which each step is one of all agents, or an AEC one, in which one agent moves.

    The observation has for each kind of agent its leaves `[A, ...]`, and of all `[N]` their `reward` and `flags`:
    who is to act next, whose episode ended, and how. Rewards of an AEC environment are shown when the agent is next to
    act, or is over. The action is one vector of all agents' actions; those of agents that are not to act are ignored.
    """

    def __init__(self, name: str, env: Any, env_args: Args = None, *, state: bool = False) -> None:
        self.env = env
        self.turns = hasattr(env, "agent_iter")
        self.render_mode = getattr(env, "render_mode", None)
        self.metadata = dict(getattr(env, "metadata", None) or {})
        names = tuple(map(str, env.possible_agents))
        if not names:
            raise UsageError(f"env {name!r} has no agents: its possible_agents is empty")
        agents = self.agents = Agents(names, _kinds(name, env, env_args), self.turns, _state_size(env))
        self._gives_state = state and agents.state > 0
        self._index = {agent: i for i, agent in enumerate(env.possible_agents)}
        self._reward = np.zeros(len(names), np.float32)
        self._flags = np.zeros((3, len(names)), np.uint8)
        self._seen: dict[str, np.ndarray] = {"reward": self._reward, "flags": self._flags}
        self._places: list[tuple[tuple[ObsLeaf, ...], list[np.ndarray]]] = []  # by agent
        kinds = agents.kinds
        for k, kind in enumerate(kinds):
            self._seen |= {
                leaf_name(k, i): np.zeros((len(kind.agents), *leaf.shape), leaf.dtype)
                for i, leaf in enumerate(kind.obs)
            }
        for agent in range(len(names)):
            k = agents.kind_of(agent)
            row = kinds[k].agents.index(agent)
            places = [self._seen[leaf_name(k, i)][row, ...] for i in range(len(kinds[k].obs))]
            self._places.append((kinds[k].obs, places))
        if self._gives_state:
            self._seen["state"] = np.zeros(agents.state, np.float32)
        self.observation_space = spaces.Dict({key: _box(array) for key, array in self._seen.items()})
        self._actions = [_Decoder(env.action_space(agent)) for agent in env.possible_agents]
        self._slices = action_slices(agents)
        self._masks = {
            agent: (kinds[agents.kind_of(agent)].action, mask)
            for agent, where in enumerate(self._places)
            for leaf, mask in zip(*where, strict=True)
            if leaf.path == MASK
        }
        self.action_space = Moves(agents, {agent: mask for agent, (_, mask) in self._masks.items()})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        for array in self._seen.values():
            array[...] = 0  # also of agents that are not there yet: an episode depends on its seed and actions alone
        for leaves, places in self._places:
            for leaf, place in zip(leaves, places, strict=True):
                if leaf.start:  # the smallest value that there is
                    place[...] = np.reshape(leaf.start, leaf.shape)
        if self.turns:
            self.env.reset(seed=seed, options=options)
            self._to_next()
        else:
            seen, infos = self.env.reset(seed=seed, options=options)
            self._show(seen, infos)
            self._flags[ACTING, [self._index[agent] for agent in self.env.agents]] = 1
        if not self._flags[ACTING].any():
            raise UsageError("no agent is to act after reset")
        return self._given(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        acting = np.flatnonzero(self._flags[ACTING]).tolist()
        self._reward[:], self._flags[:] = 0, 0
        if self.turns:
            (agent,) = acting
            self.env.step(self._actions[agent](action[self._slices[agent]]))
            self._to_next()
        else:
            self._step_all(acting, action)
        over = not self._flags[ACTING].any()
        return self._given(), float(self._reward.sum()), over, False, {}

    def render(self) -> Any:
        return self.env.render()

    def close(self) -> None:
        self.env.close()

    def _step_all(self, acting: list[int], action: np.ndarray) -> None:
        names = self.env.possible_agents
        moves = {names[i]: self._actions[i](action[self._slices[i]]) for i in acting}
        result = self.env.step(moves)
        if not isinstance(result, tuple) or len(result) != 5 or not all(isinstance(part, Mapping) for part in result):
            raise UsageError("step of a parallel environment must return five dictionaries by agent")
        seen, rewards, terminated, truncated, infos = result
        self._show(seen, infos)
        flags, left = self._flags, set(self.env.agents)
        for i in acting:
            name = names[i]
            self._reward[i] = rewards.get(name, 0.0)
            flags[TERMINATED, i] = bool(terminated.get(name, False))
            over = bool(truncated.get(name)) or name not in left  # one that has left is over, whatever is said of it
            flags[TRUNCATED, i] = over and not flags[TERMINATED, i]
        for name in left:  # and so is one that is said to be over, though it is still listed
            flags[ACTING, self._index[name]] = not (terminated.get(name) or truncated.get(name))

    def _to_next(self) -> None:
        """Let agents that are over leave, up to one that is to move; each gets what it earned since its last move."""
        env = self.env
        while env.agents:
            agent = env.agent_selection
            i = self._index[agent]
            seen, reward, terminated, truncated, info = env.last()
            self._show({agent: seen}, {agent: info})
            self._reward[i] += reward
            if not (terminated or truncated):
                self._flags[ACTING, i] = 1
                return
            self._flags[TERMINATED if terminated else TRUNCATED, i] = 1
            env.step(None)

    def _show(self, seen: Mapping[Any, Any], infos: Any) -> None:
        for agent, raw in seen.items():
            leaves, places = self._places[self._index[agent]]
            for leaf, place, value in zip(leaves, places, flatten_obs(raw, leaves).values(), strict=True):
                common = type(value) is np.ndarray and (value.shape, value.dtype.kind) == (leaf.shape, place.dtype.kind)
                if (leaf.sizes or not common) and (wrong := misfit(value, leaf)):
                    raise UsageError(f"the observation of {agent!r}: {wrong}")
                place[...] = value
        for agent, info in infos.items() if isinstance(infos, Mapping) else ():
            if has_mask(info) and self._index[agent] not in self._masks:
                what = f"the info of {agent!r} has an {KEY!r}, and at the first reset none of its kind had one"
                raise UsageError(f"{what}: give it from the beginning, or leave it out")

    def _require_choices(self) -> None:
        """Refuse masks that are none, or leave an agent that is to act nothing to choose."""
        for agent, (action, mask) in self._masks.items():
            if self._flags[ACTING, agent]:
                wrong = not_flags(mask) or (FORBIDS if forbids_all(mask[None], action.sizes)[0] else "")
                if wrong:
                    raise UsageError(f"the observation of {self.env.possible_agents[agent]!r}: {MASK!r} {wrong}")

    def _given(self) -> dict[str, np.ndarray]:
        self._require_choices()
        if self._gives_state:
            self._seen["state"][:] = np.asarray(self.env.state(), np.float32).reshape(-1)
        return self._seen


class Moves(spaces.Box):
    """Actions of all agents; what is drawn are those that `masks`, by agent where what it sees now is shown, allow."""

    def __init__(self, agents: Agents, masks: Mapping[int, np.ndarray]) -> None:
        actions = [agents.kinds[agents.kind_of(agent)].action for agent in range(len(agents.names))]
        low, high = (np.concatenate(side) for side in zip(*map(action_bounds, actions), strict=True))
        super().__init__(low.astype(np.float32), high.astype(np.float32), dtype=np.float32)
        slices = action_slices(agents)
        self._masked = [(slices[agent], actions[agent], mask) for agent, mask in masks.items()]

    def sample(self, *args: Any, **how: Any) -> Any:
        action = super().sample(*args, **how)
        for part, spec, mask in self._masked:
            action[part] = random_actions(spec, 1, self.np_random, mask[None] != 0).reshape(-1)
        return action


class _Decoder:
    """A part of the joined action as what an agent's space takes."""

    def __init__(self, space: Space) -> None:
        self._discrete = isinstance(space, spaces.Discrete)
        self._shape, self._dtype = space.shape, space.dtype
        self._whole = not isinstance(space, spaces.Box)

    def __call__(self, part: np.ndarray) -> Any:
        if self._discrete:
            return round(float(part[0]))
        return (np.rint(part) if self._whole else part).astype(self._dtype).reshape(self._shape)


def _box(array: np.ndarray) -> spaces.Box:
    if array.dtype.kind == "f":
        return spaces.Box(-np.inf, np.inf, array.shape, array.dtype.type)
    limits = np.iinfo(array.dtype)
    return spaces.Box(limits.min, limits.max, array.shape, array.dtype.type)


def _kinds(name: str, env: Any, env_args: Args) -> tuple[AgentKind, ...]:
    found: dict[tuple[Any, ...], list[int]] = {}
    for i, agent in enumerate(env.possible_agents):
        try:
            seen, acts = env.observation_space(agent), env.action_space(agent)
        except Exception as error:
            raise UsageError(f"env {name!r} has no spaces for agent {agent!r}: {summary(error)}") from error
        spec = describe(name, seen, acts, env_args)
        found.setdefault((spec.obs, spec.action), []).append(i)
    return tuple(AgentKind(tuple(agents), *key) for key, agents in found.items())


def _state_size(env: Any) -> int:
    try:
        space = env.state_space
    except Exception:  # a wrapper asks what may have none
        return 0
    return math.prod(space.shape) if isinstance(space, spaces.Box) else 0
