"""The fragment: T steps of B lanes as contiguous arrays, the unit that crosses every process border."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from raynforce.experience.record import Record
from raynforce.trees import Tree

INFO = "episode/info/"
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Fragment:
    """`T` steps of `B` lanes (one agent in one environment each).

    `columns` maps a path to an array. Every fragment has

    | column | shape, dtype | meaning |
    |---|---|---|
    | `obs`, or `obs/NAME` per leaf | `[T+1, B, ...]` | raw observations; the last row begins the next fragment |
    | `action` | `[T, B, ...]` | zero-based index (int64) or unbounded float32, before mapping to the env |
    | `reward` | `[T, B]` float32 | |
    | `terminated`, `truncated` | `[T, B]` bool | kept apart: values are bootstrapped through truncation |
    | `first` | `[T, B]` bool | this row is the first step of an episode |
    | `valid` | `[T, B]` bool | False where the step only reset the lane, or broke its env: never trained on |
    | `final/index` | `[K]` int64 | `t * B + b` of episode ends where `obs[t + 1, b]` already shows the next episode |
    | `final/obs` (`final/obs/NAME`) | `[K, ...]` | the true last observations of those episodes |
    | `episode/return`, `episode/length` | `[E]` float32, int64 | episodes that ended in this fragment |
    | `episode/info/NAME` | `[E]` float64 | numbers in `info` at their ends, NaN where there was none; may be absent |

    An episode end that is not in `final/index` has its true last observation at `obs[t + 1, b]`, and then
    row `t + 1` of that lane is not valid. No episode goes on through a row that is not valid.

    An env that breaks cuts its episode: the row of the step that broke it is not valid, and the row before is
    `truncated`; if it broke in row 0, row 0 itself, with `obs[0, b]` in `final/obs`. A cut episode is not among
    `episode/return`.

    Where every environment goes its own pace, `version` `[T, B]` int64 tells which policy version chose each action
    (the fragment's own is the oldest of them) and `lane` `[B]` int64 whose steps they are; one may come more than once,
    in the order of time. A lane with fewer than T steps is truncated, and the rows after that are not valid.

    Columns that an algorithm may ask for: `logp` `[T, B]`, the behaviour log-probability; `priority` `[T, B]` float32,
    the absolute one-step error by the acting network, 0 where not valid. Columns that may be there: `state0/NAME`
    `[B, ...]`, the recurrent state of row 0; `action_mask` `[T+1, B, n]` bool, the choices allowed at each observation.
    """

    columns: Mapping[str, np.ndarray]
    version: int  # number of the policy version that chose the actions
    sampler: int
    sequence: int  # counts this sampler's fragments from 0, without gaps

    def __getitem__(self, path: str) -> np.ndarray:
        return self.columns[path]

    @property
    def length(self) -> int:
        return int(self.columns["reward"].shape[0])

    @property
    def lanes(self) -> int:
        return int(self.columns["reward"].shape[1])

    @property
    def steps(self) -> int:
        return int(np.count_nonzero(self.columns["valid"]))

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in self.columns.values())

    @property
    def record(self) -> Record:
        episodes = self.columns["episode/return"], self.columns["episode/length"]
        return Record(self.sampler, self.sequence, self.steps, *episodes, self.info())

    def state(self) -> Tree:
        """As a tree, for checkpoints; column names have slashes, so they stand apart."""
        meta = {"version": self.version, "sampler": self.sampler, "sequence": self.sequence}
        columns = {str(i): column for i, column in enumerate(self.columns.values())}
        return {**meta, "paths": list(self.columns), "columns": columns}

    @staticmethod
    def from_state(tree: Tree) -> Fragment:
        columns = {path: tree["columns"][str(i)] for i, path in enumerate(tree["paths"])}
        return Fragment(columns, tree["version"], tree["sampler"], tree["sequence"])

    def obs(self) -> Arrays:
        """The observation columns, each `[T+1, B, ...]`."""
        return {k: v for k, v in self.columns.items() if k == "obs" or k.startswith("obs/")}

    def seen(self, paths: Iterable[str]) -> Arrays:
        """The observations that environment steps were taken from, each `[N, ...]`."""
        keep = self.columns["valid"]
        return {path: self.columns[path][:-1][keep] for path in paths}

    def info(self) -> Arrays:
        """Numbers in `info` of the episodes that ended, each `[E]`, by their own names."""
        return {k[len(INFO) :]: v for k, v in self.columns.items() if k.startswith(INFO)}

    def final_obs(self) -> Arrays:
        """True last observations under the observations' own paths, each `[K, ...]`."""
        return {k: self.columns[f"final/{k}"] for k in self.obs()}
