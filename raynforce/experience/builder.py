"""What fragments are built of: columns, episodes in flight, true last observations.

Samplers write whole rows, the policy server by lane: one way for both would cost samplers an index per row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from raynforce.experience.fragment import INFO, Arrays, Fragment
from raynforce.infos import NOTHING, Info, values
from raynforce.spaces import ActionSpec, ObsLeaf

Columns = Mapping[str, np.ndarray]
STATE = "state0/"
SEQUENCE = "sequence"


def allocate(obs: Sequence[ObsLeaf], action: ActionSpec, rows: int, lanes: int) -> tuple[Arrays, Arrays]:
    """Columns `[T+1, B, ...]` of what is seen, the mask of allowed actions included, and `[T, B, ...]` of the rest."""
    seen = {leaf.path: np.zeros((rows + 1, lanes, *leaf.shape), leaf.dtype) for leaf in obs}
    kind = np.float32 if action.kind == "box" else np.int64
    rest = {"action": np.zeros((rows, lanes, *action.shape), kind), "reward": np.zeros((rows, lanes), np.float32)}
    return seen, rest | {name: np.zeros((rows, lanes), np.bool_) for name in ("terminated", "truncated")}


class EndedEpisode(NamedTuple):
    total: float
    length: int
    info: Info = NOTHING  # numbers in `info` where it ended


class InFlight:
    """Returns and lengths of the episodes in flight by lane, carried from one fragment to the next."""

    def __init__(self, lanes: int) -> None:
        self.returns = np.zeros(lanes, np.float64)
        self.lengths = np.zeros(lanes, np.int64)

    def restart(self, lanes: Sequence[int] | slice | int = slice(None)) -> None:
        self.returns[lanes], self.lengths[lanes] = 0, 0

    def add(
        self, columns: Arrays, ends: Iterable[tuple[int, int, Info | None]], lanes: np.ndarray | slice = slice(None)
    ) -> list[EndedEpisode]:
        """Add rows and the column `first`; returns what ended. `ends` are row, column, `info` (None: cut) by time."""
        valid = columns["valid"]
        first = np.empty_like(valid)
        first[0] = self.lengths[lanes] == 0
        first[1:] = (columns["terminated"] | columns["truncated"])[:-1] | ~valid[:-1]
        columns["first"] = first & valid
        total = np.cumsum(columns["reward"] * valid, axis=0, dtype=np.float64) + self.returns[lanes]  # [T, B]
        count = np.cumsum(valid, axis=0) + self.lengths[lanes]
        found, used_total, used_count = [], np.zeros_like(total[0]), np.zeros_like(count[0])
        for t, b, info in ends:
            if info is not None:
                found.append(EndedEpisode(total[t, b] - used_total[b], count[t, b] - used_count[b], info))
            used_total[b], used_count[b] = total[t, b], count[t, b]
        self.returns[lanes], self.lengths[lanes] = total[-1] - used_total, count[-1] - used_count
        return found


def final_columns(columns: Arrays, index: Sequence[np.ndarray], last: Sequence[Mapping[str, np.ndarray]]) -> Arrays:
    """Where `obs` shows the next episode already, and the true last observations `[K, ...]` there."""
    found = {"final/index": np.concatenate(index) if index else np.zeros(0, np.int64)}
    for path in [path for path in columns if path in ("obs", "global_state") or path.startswith("obs/")]:
        none = np.empty((0, *columns[path].shape[2:]), columns[path].dtype)
        found[f"final/{path}"] = np.concatenate([each[path] for each in last]) if last else none
    return found


def finish(
    columns: Arrays,
    episodes: Sequence[EndedEpisode],
    *,
    version: int,
    sampler: int,
    sequence: int,
    state0: Columns = NOTHING,
    every: int = 0,
) -> Fragment:
    """The fragment of these columns; `state0` `[P, B, ...]` are the recurrent states of `every` so many rows."""
    columns["episode/return"] = np.array([each.total for each in episodes], np.float32)
    columns["episode/length"] = np.array([each.length for each in episodes], np.int64)
    columns |= {INFO + name: column for name, column in values([each.info for each in episodes]).items()}
    if state0:
        columns |= {STATE + name: column for name, column in state0.items()}
        columns[SEQUENCE] = np.arange(0, len(columns["reward"]), every)
    for column in columns.values():
        column.flags.writeable = False  # as it is when received from another process
    return Fragment(columns, version, sampler, sequence)
