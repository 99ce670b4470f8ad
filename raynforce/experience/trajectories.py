"""Trajectories of environments that go their own pace: each in order and whole, cut into fragments as they fill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from raynforce.experience.builder import STATE, EndedEpisode, InFlight, allocate, final_columns, finish
from raynforce.experience.fragment import Arrays, Fragment
from raynforce.infos import NOTHING, Info
from raynforce.spaces import ActionSpec, ObsLeaf


class End(NamedTuple):
    row: int
    last: Arrays  # its true last observation, `[1, ...]`
    info: Info | None = None  # what it told; None: it was cut


class LaneSegment(NamedTuple):
    lane: int
    columns: Arrays  # [T+1, ...] observations, `[T, ...]` the rest
    ends: Sequence[End]
    episodes: Sequence[EndedEpisode]


class Trajectories:
    """What `lanes` environments are at, T rows of each.

    A lane takes turns: an observation (`begin`, or the last `step`), an action (`act`), and the environment's answer
    (`step`), or it breaks (`cut`). `fragment` cuts one once all lanes together have enough steps. A lane that has
    filled its T rows goes on in new ones, and is in the fragment more than once.
    """

    def __init__(
        self,
        obs: Sequence[ObsLeaf],
        action: ActionSpec,
        length: int,
        lanes: int,
        *,
        states: Mapping[str, int] = NOTHING,
        every: int = 0,
    ) -> None:
        """`states` are the sizes of a policy's recurrent states, recorded in `every` so many rows."""
        self.length, self.lanes = length, lanes
        self.steps = 0  # environment steps that are in no fragment yet
        self._seen, self._rest = allocate(obs, action, length, lanes)
        self._rest |= {"logp": np.zeros((length, lanes), np.float32), "version": np.zeros((length, lanes), np.int64)}
        self._paths = list(self._seen)
        self._obs_paths = [leaf.path for leaf in obs]
        # The same by one index, `row * lanes + lane`: numpy finds elements by one array in half the time of two.
        self._flat = {path: c.reshape(-1, *c.shape[2:]) for path, c in (self._seen | self._rest).items()}
        self._place = np.arange(lanes)  # where each lane's newest observation is
        self._full: list[LaneSegment] = []
        self._ends: list[list[End]] = [[] for _ in range(lanes)]
        self._flying = InFlight(lanes)  # episodes that lanes' first rows go on with
        self.sequence = 0  # number of the next fragment
        self._every = every
        shape = (-(-length // every), lanes) if states else (0, lanes)
        self._state0 = {name: np.zeros((*shape, size), np.float32) for name, size in states.items()}  # [P, B, size]
        # What the newest action of each lane was chosen with.
        self._used = {name: np.zeros((lanes, size), np.float32) for name, size in states.items()}

    def acting(self, envs: np.ndarray) -> np.ndarray:
        """The lanes that are to act in these environments: here each has one, which has its number."""
        return envs

    def for_envs(self, envs: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """What `acting` lanes do, as their environments take it, `[K, ...]`."""
        return actions

    def begin(self, lanes: np.ndarray, obs: Mapping[str, np.ndarray]) -> np.ndarray:
        """New episodes: their first observations `[K, ...]`; returns whose."""
        places = self._place[lanes]
        for path in self._paths:
            self._flat[path][places] = obs[path]
        return lanes

    def newest(self, lanes: np.ndarray) -> Arrays:
        places = self._place[lanes]
        return {path: self._flat[path].take(places, 0) for path in self._paths}

    def act(
        self,
        lanes: np.ndarray,
        action: np.ndarray,
        logp: np.ndarray,
        version: int,
        state: Mapping[str, np.ndarray] = NOTHING,
    ) -> None:
        """Which actions were chosen for them, with which log-probabilities, by which policy version, and from which
        recurrent `state`."""
        places, flat = self._place[lanes], self._flat
        flat["action"][places] = action
        flat["logp"][places] = logp
        flat["version"][places] = version
        if state:
            piece, within = np.divmod(places // self.lanes, self._every)
            begins = within == 0
            for name, array in state.items():
                self._used[name][lanes] = array
                self._state0[name][piece[begins], lanes[begins]] = array[begins]

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
        """What their environments answered; at the `ended` `[E]` of K lanes `obs` is the next episode's already.

        Returns the lanes whose episodes have ended."""
        places, flat = self._place[lanes], self._flat
        flat["reward"][places] = reward
        after = places + self.lanes
        for path in self._paths:
            flat[path][after] = obs[path]
        self._place[lanes] = after
        self.steps += len(lanes)
        for e, k in enumerate(ended.tolist()):
            flat["terminated"][places[k]], flat["truncated"][places[k]] = terminated[k], truncated[k]
            last = {path: final_obs[path][e : e + 1].copy() for path in self._obs_paths}
            lane = int(lanes[k])
            self._ends[lane].append(End(int(places[k]) // self.lanes, last, info.get(lane, NOTHING)))
        full = self.length * self.lanes
        if after.max() >= full:
            for lane in lanes[after >= full].tolist():
                self._fill(lane)
        return np.asarray(lanes[ended])

    def cut(self, lanes: np.ndarray) -> None:
        """Their environments broke: episodes in flight end with what was seen last; `begin` is next."""
        for lane in lanes.tolist():
            row = int(self._place[lane]) // self.lanes - 1
            if row < 0:  # what it gave before is in an earlier segment, which ends where it broke
                self._flying.restart(lane)
            elif not (self._rest["terminated"][row, lane] or self._rest["truncated"][row, lane]):
                self._rest["truncated"][row, lane] = True
                last = {path: self._seen[path][row + 1, lane][None].copy() for path in self._obs_paths}
                self._ends[lane].append(End(row, last))

    def _fill(self, lane: int) -> None:
        """The rows of a lane are full: they are a segment, and it goes on at the first one."""
        columns = {name: column[:, lane, None].copy() for name, column in (self._seen | self._rest).items()}
        columns |= {STATE + name: states[:, lane, None].copy() for name, states in self._state0.items()}
        columns["valid"] = np.ones((self.length, 1), np.bool_)
        ends, lanes = self._ends[lane], np.array([lane])
        episodes = self._flying.add(columns, [(end.row, 0, end.info) for end in ends], lanes)
        self._full.append(LaneSegment(lane, columns, ends, episodes))
        self._restart(lanes)

    def _restart(self, lanes: np.ndarray) -> None:
        """They go on in their first rows, with the observation they are at, and the action that may be under way."""
        places = self._place[lanes]
        for path in self._paths:
            self._flat[path][lanes] = self._flat[path][places]
        under_way = places < self.length * self.lanes
        for name in self._rest:
            self._flat[name][lanes[under_way]] = self._flat[name][places[under_way]]
        for name, states in self._state0.items():
            states[0, lanes[under_way]] = self._used[name][lanes[under_way]]
        for name in ("terminated", "truncated"):  # written where an episode ends alone
            self._rest[name][:, lanes] = False
        self._place[lanes] = lanes
        for lane in lanes.tolist():
            if self._ends[lane]:
                self._ends[lane] = []

    def fragment(self, steps: int, sampler: int = 0) -> Fragment | None:
        """A fragment of all that there is, if that is at least so many steps."""
        if self.steps < max(1, steps):
            return None
        gathered = self._place // self.lanes  # [N]
        (some,) = (gathered > 0).nonzero()
        parts = [segment.columns for segment in self._full]
        ends = [segment.ends for segment in self._full]
        episodes = [episode for segment in self._full for episode in segment.episodes]
        if len(some):
            parts.append(self._cut_off(some, gathered[some], self.length if parts else int(gathered.max())))
            ends += (mine := [self._ends[lane] for lane in some.tolist()])
            told = [(end.row, b, end.info) for b, several in enumerate(mine) for end in several]
            episodes += self._flying.add(parts[-1], told, some)
        columns = parts[0]
        if len(parts) > 1:
            columns = {name: np.concatenate([part[name] for part in parts], axis=1) for name in parts[0]}
        columns["lane"] = np.array([*(segment.lane for segment in self._full), *some.tolist()], np.int64)
        index = np.array([end.row * len(ends) + b for b, several in enumerate(ends) for end in several], np.int64)
        columns |= final_columns(columns, [index], [end.last for several in ends for end in several])
        self._restart(some)
        self._full, self.steps = [], 0
        sequence, self.sequence = self.sequence, self.sequence + 1
        version = int(columns["version"][columns["valid"]].min())
        states = {name: columns.pop(STATE + name) for name in self._state0}
        named = {"version": version, "sampler": sampler, "sequence": sequence}
        return finish(columns, episodes, **named, state0=states, every=self._every)

    def _cut_off(self, lanes: np.ndarray, steps: np.ndarray, rows: int) -> Arrays:
        """The first rows of these lanes, which have so many `steps` `[K]`; the rows beyond are not valid."""
        columns = {path: column[: rows + 1].take(lanes, 1) for path, column in self._seen.items()}
        columns |= {name: column[:rows].take(lanes, 1) for name, column in self._rest.items()}
        pieces = -(-rows // self._every) if self._state0 else 0
        columns |= {STATE + name: states[:pieces].take(lanes, 1) for name, states in self._state0.items()}
        columns["valid"] = valid = np.arange(rows)[:, None] < steps  # [T, K]
        for name in self._rest:
            columns[name][~valid] = 0
        (short,) = (steps < rows).nonzero()
        last = steps[short] - 1, short  # they end there, as by truncation, if they do not end anyway
        columns["truncated"][last] |= ~columns["terminated"][last]
        return columns


def in_turn(lanes: np.ndarray) -> list[np.ndarray]:
    """The places `[...]` of all lanes' first segments, of those that have a second one, and so on."""
    order = np.argsort(lanes, kind="stable")
    first = np.searchsorted(lanes[order], lanes[order])  # where each lane begins
    turn = np.empty(len(lanes), np.int64)
    turn[order] = np.arange(len(lanes)) - first
    return [np.flatnonzero(turn == k) for k in range(int(turn.max(initial=-1)) + 1)]
