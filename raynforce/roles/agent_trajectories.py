"""Trajectories of several agents in environments that go their own pace: each agent is a lane."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from raynforce.envs.agents import Presence, Seen, Sight
from raynforce.experience.fragment import Arrays
from raynforce.experience.trajectories import Trajectories
from raynforce.infos import NOTHING, Info
from raynforce.policies.acting import action_map
from raynforce.spaces import EnvSpec, ObsLeaf, joined


class AgentTrajectories(Trajectories):
    """What the agents of `envs` environments are at, all of one kind. `begin`, `step` and `cut` are of environments.

    A row is whole when its lane is next to act, or its episode ends: what it earns until then belongs to it, whether
    agents act all at once or in turns.
    """

    def __init__(
        self,
        spec: EnvSpec,
        length: int,
        envs: int,
        *,
        ids: bool = False,
        central: bool = False,
        states: Mapping[str, int] = NOTHING,
        every: int = 0,
    ) -> None:
        """`spec` is of one agent; with `central`, rows have the global state."""
        agents = spec.agents
        assert agents is not None
        self._count, self._sight = len(agents.names), Sight(agents, ids=ids, states=central)
        leaf = self._sight.state_leaf
        leaves = spec.obs if leaf is None else (*spec.obs, leaf)
        super().__init__(leaves, spec.action, length, envs * self._count, states=states, every=every)
        self._presence = Presence(agents, envs)
        self._under_way = np.zeros(self.lanes, np.bool_)  # has moved, and the row is not whole
        self._earned = np.zeros(self.lanes)  # since that move
        nothing = action_map(spec.action)(np.zeros((1, *spec.action.shape)))
        self._idle = nothing.reshape(-1).astype(np.float32)  # what those do who are not to act, within bounds
        self._read = [leaf for leaf in joined(agents)[0] if central or leaf.path != "obs/state"]

    def acting(self, envs: np.ndarray) -> np.ndarray:
        row, agent = self._presence.acting[envs].nonzero()
        return np.asarray(envs[row] * self._count + agent)

    def for_envs(self, envs: np.ndarray, actions: np.ndarray) -> np.ndarray:
        acting = self._presence.acting[envs]  # [K, N]
        all_of_them = np.tile(self._idle, (*acting.shape, 1))  # [K, N, n]
        all_of_them[acting] = actions.reshape(len(actions), -1)
        return all_of_them.reshape(len(envs), -1)

    def misfit(self, obs: tuple[ObsLeaf, ...]) -> str:
        """Why this observation of all agents is not theirs; empty if it is."""
        found = {leaf.path: (leaf.shape, leaf.dtype) for leaf in obs}
        for leaf in self._read:
            if (told := found.get(leaf.path)) != (leaf.shape, leaf.dtype):
                return f"{leaf.path} is {told} at the host; expected {(leaf.shape, leaf.dtype)}"
        return ""

    def begin(self, lanes: np.ndarray, obs: Mapping[str, np.ndarray]) -> np.ndarray:
        self._presence.begin(lanes, obs)
        self._show(lanes, obs, self._presence.acting[lanes])
        return self._all_of(lanes).reshape(-1)

    def act(
        self,
        lanes: np.ndarray,
        action: np.ndarray,
        logp: np.ndarray,
        version: int,
        state: Mapping[str, np.ndarray] = NOTHING,
    ) -> None:
        super().act(lanes, action, logp, version, state)
        self._under_way[lanes] = True

    def step(
        self,
        lanes: np.ndarray,
        obs: Mapping[str, np.ndarray],
        reward: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        ended: np.ndarray,
        final_obs: Mapping[str, np.ndarray],
        info: Mapping[int, Info] = NOTHING,
    ) -> np.ndarray:
        found, seats = self._presence.step(lanes, obs, ended, final_obs), self._all_of(lanes)  # [K, N]
        moved, acting = self._under_way[seats], self._presence.acting[lanes]
        self._earned[seats] += found.reward * moved
        over = found.terminated | found.truncated
        whole = moved & (over | acting)
        self._show(lanes, obs, acting & ~whole)
        if not whole.any():
            return seats[over]
        row, agent = whole.nonzero()
        now, (stopped,) = self._sees(obs, row, agent), over[whole].nonzero()
        last = {path: column[stopped] for path, column in now.items()}  # what those see who leave while others stay
        if len(ended):
            where = np.full(len(lanes), -1)
            where[ended] = np.arange(len(ended))
            at = where[row[stopped]]
            for path, column in self._sees(final_obs, at[at >= 0], agent[stopped][at >= 0]).items():
                last[path][at >= 0] = column
        mine = seats[whole]
        earned = self._earned[mine].astype(np.float32)
        self._under_way[mine], self._earned[mine] = False, 0.0
        super().step(mine, now, earned, found.terminated[whole], found.truncated[whole], stopped, last)
        return seats[over]

    def cut(self, lanes: np.ndarray) -> None:
        mine = self._all_of(lanes).reshape(-1)
        self._under_way[mine], self._earned[mine] = False, 0.0
        super().cut(mine)

    def _all_of(self, envs: np.ndarray) -> np.ndarray:
        """All lanes of these environments, `[K, N]`."""
        return np.asarray(envs[:, None] * self._count + np.arange(self._count))

    def _sees(self, seen: Seen, row: np.ndarray, agent: np.ndarray) -> Arrays:
        return self._sight.seen(seen, row, agent, 0, agent)

    def _show(self, envs: np.ndarray, seen: Seen, which: np.ndarray) -> None:
        """The agents `[K, N]` that begin an episode, or act for the first time in it, see this."""
        row, agent = which.nonzero()
        if len(row):
            super().begin(envs[row] * self._count + agent, self._sees(seen, row, agent))
