"""Trajectories of environments that go their own pace: each in order and whole, cut into fragments as they fill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from raynforce.experience.fragment import INFO, Fragment
from raynforce.infos import NOTHING, Info, values
from raynforce.spaces import ActionSpec, ObsLeaf

Arrays = dict[str, np.ndarray]


class End(NamedTuple):
    """Where an episode ended."""

    row: int
    last: Arrays
    """Its true last observation."""
    info: Info = NOTHING


class Segment(NamedTuple):
    """T steps of one lane, one after the other."""

    lane: int
    columns: Arrays
    """`[T+1, ...]` observations, `[T, ...]` the rest."""
    finals: Sequence[End]
    episodes: Sequence[tuple[float, int, Info]]
    """Return and length of the episodes that ended in it, and the numbers in `info` at their ends."""


class Trajectories:
    """What `lanes` environments are at, T rows of each. Whichever of them have something to tell are told together.

    A lane takes turns: it is shown an observation (`begin`, or the last `step`), an action is chosen for it (`act`),
    and its environment answers (`step`), or breaks (`cut`). `take` cuts a fragment as soon as all lanes together have
    enough steps, however they are spread over them, so that no step waits for others of its lane. A lane that has
    filled its T rows before goes on in new ones, and is in the fragment more than once.
    """

    def __init__(self, obs: Sequence[ObsLeaf], action: ActionSpec, length: int, lanes: int) -> None:
        self.length, self.lanes = length, lanes
        self.steps = 0
        """Environment steps that are in no fragment yet."""
        self._paths = [leaf.path for leaf in obs]
        self._obs = {leaf.path: np.zeros((length + 1, lanes, *leaf.shape), leaf.dtype) for leaf in obs}
        self._rest: Arrays = {
            "action": np.zeros((length, lanes, *action.shape), np.float32 if action.kind == "box" else np.int64),
            "reward": np.zeros((length, lanes), np.float32),
            "terminated": np.zeros((length, lanes), np.bool_),
            "truncated": np.zeros((length, lanes), np.bool_),
            "logp": np.zeros((length, lanes), np.float32),
            "version": np.zeros((length, lanes), np.int64),
        }
        # The same by one index, `row * lanes + lane`: numpy finds elements by one array in half the time of two.
        self._flat = {path: _flat(column) for path, column in (self._obs | self._rest).items()}
        self._place = np.arange(lanes)  # where each lane's newest observation is
        self._full: list[Segment] = []
        self._finals: list[list[End]] = [[] for _ in range(lanes)]
        self._cut: list[list[int]] = [[] for _ in range(lanes)]  # rows whose episode was cut
        self._returns = np.zeros(lanes, np.float64)  # of the episodes that lanes' first rows go on with
        self._lengths = np.zeros(lanes, np.int64)
        self.sequence = 0
        """Number of the next fragment."""

    def begin(self, lanes: np.ndarray, obs: Mapping[str, np.ndarray]) -> None:
        """New episodes: their first observations `[K, ...]`."""
        places = self._place[lanes]
        for path in self._paths:
            self._flat[path][places] = obs[path]

    def newest(self, lanes: np.ndarray) -> Arrays:
        """What the policy sees of these lanes, `[K, ...]`."""
        places = self._place[lanes]
        return {path: self._flat[path].take(places, 0) for path in self._paths}

    def act(self, lanes: np.ndarray, action: np.ndarray, logp: np.ndarray, version: int) -> None:
        """Which actions were chosen for them, with which log-probabilities, and by which policy version."""
        places, flat = self._place[lanes], self._flat
        flat["action"][places] = action
        flat["logp"][places] = logp
        flat["version"][places] = version

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
    ) -> None:
        """What their environments answered.

        Where an episode `ended` (`[E]` places among the K lanes), `obs` shows the next one already, `final_obs`
        `[E, ...]` its true last observation, and `info` has by lane what it told.
        """
        places, flat = self._place[lanes], self._flat
        flat["reward"][places] = reward
        after = places + self.lanes
        for path in self._paths:
            flat[path][after] = obs[path]
        self._place[lanes] = after
        self.steps += len(lanes)
        for e, k in enumerate(ended.tolist()):
            flat["terminated"][places[k]], flat["truncated"][places[k]] = terminated[k], truncated[k]
            last = {path: final_obs[path][e].copy() for path in self._paths}
            lane = int(lanes[k])
            self._finals[lane].append(End(int(places[k]) // self.lanes, last, info.get(lane, NOTHING)))
        full = self.length * self.lanes
        if after.max() >= full:
            for lane in lanes[after >= full].tolist():
                self._fill(lane)

    def cut(self, lanes: np.ndarray) -> None:
        """Their environments broke: episodes in flight end with what was seen last; `begin` is next.

        The step that broke it did not happen. What was sampled before it is as good as ever.
        """
        for lane in lanes.tolist():
            row = int(self._place[lane]) // self.lanes - 1
            if row < 0:  # what it gave before is in an earlier segment, which ends where it broke
                self._returns[lane], self._lengths[lane] = 0.0, 0
            elif not (self._rest["terminated"][row, lane] or self._rest["truncated"][row, lane]):
                self._rest["truncated"][row, lane] = True
                last = {path: column[row + 1, lane].copy() for path, column in self._obs.items()}
                self._finals[lane].append(End(row, last))
                self._cut[lane].append(row)

    def _fill(self, lane: int) -> None:
        """The rows of a lane are full: they are a segment, and it goes on at the first one."""
        columns = {name: column[:, lane].copy() for name, column in (self._obs | self._rest).items()}
        episodes = self._episodes(lane, self.length, columns["reward"].cumsum(dtype=np.float64))
        self._full.append(Segment(lane, columns, self._finals[lane], episodes))
        self._restart(np.array([lane]))

    def _episodes(self, lane: int, steps: int, rewards: np.ndarray) -> list[tuple[float, int, Info]]:
        """The episodes that ended in a lane's rows; the one in flight is carried over.

        `rewards` `[T]` are added up from the first row on.
        """
        found, so_far = [], rewards.tolist()
        total, length = float(self._returns[lane]), int(self._lengths[lane])  # of what came before
        for row, _, info in self._finals[lane]:
            if row not in self._cut[lane]:
                found.append((total + so_far[row], length + row + 1, info))
            total, length = -so_far[row], -(row + 1)
        self._returns[lane], self._lengths[lane] = total + so_far[steps - 1], length + steps
        return found

    def _restart(self, lanes: np.ndarray) -> None:
        """They go on in their first rows, with the observation they are at, and the action that may be under way."""
        places = self._place[lanes]
        for path in self._paths:
            self._flat[path][lanes] = self._flat[path][places]
        under_way = places < self.length * self.lanes
        for name in self._rest:
            self._flat[name][lanes[under_way]] = self._flat[name][places[under_way]]
        for name in ("terminated", "truncated"):  # written where an episode ends alone
            self._rest[name][:, lanes] = False
        self._place[lanes] = lanes
        for lane in lanes.tolist():
            if self._finals[lane]:
                self._finals[lane], self._cut[lane] = [], []

    def take(self, steps: int, sampler: int = 0) -> Fragment | None:
        """A fragment of all that there is, if that is at least so many steps."""
        if self.steps < max(1, steps):
            return None
        gathered = self._place // self.lanes  # [N]
        (some,) = (gathered > 0).nonzero()
        parts = [_columns_of(self._full)] if self._full else []
        if len(some):
            parts.append(self._cut_off(some, gathered[some], self.length if parts else int(gathered.max())))
        columns = parts[0]
        if len(parts) > 1:
            columns = {name: np.concatenate([part[name] for part in parts], axis=1) for name in parts[0]}
        columns |= self._ends([*(s.lane for s in self._full), *some.tolist()], columns)
        self._restart(some)
        self._full, self.steps = [], 0
        for column in columns.values():
            column.flags.writeable = False  # as it will be for whoever receives it from another process
        sequence, self.sequence = self.sequence, self.sequence + 1
        return Fragment(columns, int(columns["version"][columns["valid"]].min()), sampler, sequence)

    def _cut_off(self, lanes: np.ndarray, steps: np.ndarray, rows: int) -> Arrays:
        """The first rows of these lanes, which have so many `steps` `[K]`; the rows beyond are not valid."""
        columns = {path: column[: rows + 1].take(lanes, 1) for path, column in self._obs.items()}
        columns |= {name: column[:rows].take(lanes, 1) for name, column in self._rest.items()}
        columns["valid"] = valid = np.arange(rows)[:, None] < steps  # [T, K]
        for name in self._rest:
            columns[name][~valid] = 0
        (short,) = (steps < rows).nonzero()
        last = steps[short] - 1, short  # they end there, as by truncation, if they do not end anyway
        columns["truncated"][last] |= ~columns["terminated"][last]
        return columns

    def _ends(self, lanes: Sequence[int], columns: Arrays) -> Arrays:
        """What fragments tell of episodes that ended, of these lanes."""
        steps, rewards = columns["valid"].sum(0), columns["reward"].cumsum(0, dtype=np.float64)  # [B], [T, B]
        index: list[int] = []
        finals: list[Arrays] = []
        episodes: list[tuple[float, int, Info]] = []
        for b, lane in enumerate(lanes):
            full = b < len(self._full)
            ends = self._full[b].finals if full else self._finals[lane]
            index += [end.row * len(lanes) + b for end in ends]
            finals += [end.last for end in ends]
            if full:
                episodes += self._full[b].episodes
            elif ends:
                episodes += self._episodes(lane, int(steps[b]), rewards[:, b])
            else:
                self._returns[lane] += rewards[-1, b]
                self._lengths[lane] += steps[b]
        told: Arrays = {"final/index": np.array(index, np.int64), "lane": np.array(lanes, np.int64)}
        for path in self._paths:
            shape, rows = columns[path].shape[2:], [last[path] for last in finals]
            told[f"final/{path}"] = np.stack(rows) if rows else np.empty((0, *shape), columns[path].dtype)
        told["episode/return"] = np.array([value for value, _, _ in episodes], np.float32)
        told["episode/length"] = np.array([count for _, count, _ in episodes], np.int64)
        return told | {INFO + name: column for name, column in values([info for *_, info in episodes]).items()}


def _flat(column: np.ndarray) -> np.ndarray:
    return column.reshape(-1, *column.shape[2:])


def _columns_of(segments: Sequence[Segment]) -> Arrays:
    """Segments side by side."""
    columns = {name: np.stack([s.columns[name] for s in segments], axis=1) for name in segments[0].columns}
    return columns | {"valid": np.ones(columns["reward"].shape, np.bool_)}


def in_turn(lanes: np.ndarray) -> list[np.ndarray]:
    """The places `[...]` of all lanes' first segments, of those that have a second one, and so on."""
    order = np.argsort(lanes, kind="stable")
    first = np.searchsorted(lanes[order], lanes[order])  # where each lane begins
    turn = np.empty(len(lanes), np.int64)
    turn[order] = np.arange(len(lanes)) - first
    return [np.flatnonzero(turn == k) for k in range(int(turn.max(initial=-1)) + 1)]
