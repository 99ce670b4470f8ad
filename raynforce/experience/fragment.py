"""The fragment: T steps of B lanes as contiguous arrays, the unit that crosses every process border."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from raynforce.experience.counts import Record
from raynforce.trees import Tree

INFO = "episode/info/"
EDGES = (0, 1, 2, 3, 5, 9, 17, 33)  # of lags, where the bins of a histogram begin
_NAMES = [f"lag/is_{a}" if b == a + 1 else f"lag/from_{a}_to_{b - 1}" for a, b in pairwise(EDGES)]
_NAMES.append(f"lag/from_{EDGES[-1]}")
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
    the absolute one-step error by the acting network, 0 where not valid. Columns that may be there: `obs/action_mask`
    `[T+1, B, n]` int8, 1 for each choice that is allowed at an observation, wherever masks come from (after an episode
    has terminated it may be 0 throughout); of a policy with memory `sequence` `[P]` int64, the rows at which sequences
    begin, and `state0/NAME` `[P, B, ...]`, the states that these rows were chosen with; of several agents
    `global_state` `[T+1, B, n]` float32, and `final/global_state`.
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
        if "parts" in tree:
            from raynforce.experience.team_fragment import TeamFragment

            return TeamFragment.of_state(tree)
        columns = {path: tree["columns"][str(i)] for i, path in enumerate(tree["paths"])}
        if "first" not in columns:  # in what earlier versions saved
            columns["first"] = _begun(columns["terminated"] | columns["truncated"], columns["valid"])
        return Fragment(columns, tree["version"], tree["sampler"], tree["sequence"])

    def obs(self) -> Arrays:
        """The observation columns, each `[T+1, B, ...]`."""
        return {k: v for k, v in self.columns.items() if k == "obs" or k.startswith("obs/")}

    def seen(self, paths: Iterable[str]) -> Arrays:
        """The observations that environment steps were taken from, each `[N, ...]`."""
        return {path: self.columns[path][:-1][self.columns["valid"]] for path in paths}

    def info(self) -> Arrays:
        """Numbers in `info` of the episodes that ended, each `[E]`, by their own names."""
        return {k[len(INFO) :]: v for k, v in self.columns.items() if k.startswith(INFO)}

    def state_columns(self) -> Arrays:
        """The global state `[T+1, B, n]` of several agents, if it was asked for."""
        return {"global_state": self.columns["global_state"]} if "global_state" in self.columns else {}

    def final_obs(self) -> Arrays:
        """True last observations under the observations' own paths, each `[K, ...]`."""
        return {k: self.columns[f"final/{k}"] for k in self.obs()}


def _begun(done: np.ndarray, valid: np.ndarray) -> np.ndarray:
    """Rows `[T, B]` with which an episode begins behind the end of another in the same fragment."""
    first = np.zeros_like(done)
    for t in range(1, len(done)):
        first[t] = done[t - 1] | (first[t - 1] & ~valid[t - 1])
    return first & valid


def lags(number: int, fragments: Sequence[Fragment]) -> np.ndarray:
    """`[N]` how many versions before `number` each environment step was chosen."""
    steps = [f["version"][f["valid"]] if "version" in f.columns else np.full(f.steps, f.version) for f in fragments]
    return number - np.concatenate(steps) if steps else np.zeros(0, np.int64)


def lag_metrics(number: int, fragments: Sequence[Fragment]) -> dict[str, float]:
    """Mean and largest lag; if there is any, also a histogram: the share of steps in each bin, as `lag/from_3_to_4`."""
    ages = lags(number, fragments)
    if not len(ages):
        return {}
    found = {"lag/mean": float(ages.mean()), "lag/max": float(ages.max())}
    if ages.any():
        counts = np.histogram(ages, [*EDGES, np.inf])[0] / len(ages)
        found |= dict(zip(_NAMES, counts.tolist(), strict=True))
    return found
