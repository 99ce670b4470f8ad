"""Episodes that were recorded, as arrays; from fragments, and into the form that files have."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from raynforce.errors import UsageError
from raynforce.experience.fragment import Arrays, Fragment
from raynforce.policies.acting import action_map
from raynforce.spaces import MASK, ActionSpec, EnvSpec, ObsLeaf


class Episode(NamedTuple):
    obs: Mapping[str, np.ndarray]  # by leaf, [n + 1, ...]: what each action was chosen for, then the last
    action: np.ndarray  # [n, ...] as the environment takes it
    reward: np.ndarray  # [n] float32
    terminated: bool
    truncated: bool


@dataclass(frozen=True)
class Episodes:
    """E episodes with N steps in all, one after another."""

    obs: Mapping[str, np.ndarray]
    """By leaf, `[N + E, ...]`: of each episode what its actions were chosen for, then its last observation."""
    action: np.ndarray
    """`[N, ...]`, as the environment takes them."""
    reward: np.ndarray
    """`[N]` float32."""
    length: np.ndarray
    """`[E]` int64, steps of each."""
    terminated: np.ndarray
    """`[E]` bool; one that did not terminate was truncated, so that values are bootstrapped there."""
    truncated: np.ndarray
    """`[E]` bool."""

    @property
    def count(self) -> int:
        return len(self.length)

    @property
    def steps(self) -> int:
        return len(self.reward)

    @property
    def starts(self) -> np.ndarray:
        """`[E]` the first step of each; its first observation is as many rows further as there are episodes before."""
        return np.cumsum(self.length) - self.length

    def returns(self) -> np.ndarray:
        """`[E]` float64."""
        return np.add.reduceat(self.reward.astype(np.float64), self.starts) if self.count else np.zeros(0)

    def each(self) -> Iterator[Episode]:
        for e, (start, length) in enumerate(zip(self.starts.tolist(), self.length.tolist(), strict=True)):
            rows, seen = slice(start, start + length), slice(start + e, start + e + length + 1)
            obs = {path: column[seen] for path, column in self.obs.items()}
            yield Episode(obs, self.action[rows], self.reward[rows], bool(self.terminated[e]), bool(self.truncated[e]))

    def fingerprint(self) -> str:
        """Equal for equal content: a run that is resumed finds out whether its data is what it was."""
        digest = hashlib.blake2b(digest_size=16)
        for column in (*self.obs.values(), self.action, self.reward, self.length, self.terminated, self.truncated):
            digest.update(np.ascontiguousarray(column).view(np.uint8).reshape(-1).data if column.size else b"")
        return digest.hexdigest()


def joined(several: Sequence[Episode], env: EnvSpec) -> Episodes:
    """These, in this order."""
    kind = np.float32 if env.action.kind == "box" else np.int64
    none = Episode(
        {leaf.path: np.zeros((0, *leaf.shape), leaf.dtype) for leaf in env.obs},
        np.zeros((0, *env.action.shape), kind),
        np.zeros(0, np.float32),
        False,
        False,
    )
    all_of_them = [none, *several]
    return Episodes(
        {leaf.path: np.concatenate([one.obs[leaf.path] for one in all_of_them]) for leaf in env.obs},
        np.concatenate([one.action for one in all_of_them]),
        np.concatenate([one.reward for one in all_of_them]),
        np.array([len(one.reward) for one in several], np.int64),
        np.array([one.terminated for one in several], np.bool_),
        np.array([one.truncated for one in several], np.bool_),
    )


class Gathering:
    """Puts the episodes of each lane together again, whose steps come in fragments."""

    def __init__(self, env: EnvSpec, lanes: int) -> None:
        self._paths = [leaf.path for leaf in env.obs]
        self._to_env = action_map(env.action)
        self._turns = env.agents is not None and env.agents.turns
        self._parts: list[list[Arrays]] = [[] for _ in range(lanes)]  # of episodes under way, by lane

    def add(self, fragment: Fragment) -> list[list[Episode]]:
        """The episodes that ended in it, by lane."""
        terminated, truncated, valid = (fragment[name] for name in ("terminated", "truncated", "valid"))
        places = {int(at): k for k, at in enumerate(fragment["final/index"])}
        action = self._to_env(fragment["action"])
        ended: list[list[Episode]] = [[] for _ in self._parts]
        for lane, parts in enumerate(self._parts):
            start = 0
            for t in np.flatnonzero(terminated[:, lane] | truncated[:, lane]).tolist():
                k = places.get(t * fragment.lanes + lane)
                if k is None and self._turns:  # all ends have their place: others have more rows, and it goes on
                    continue
                self._take(parts, fragment, action, lane, np.flatnonzero(valid[start : t + 1, lane]) + start)
                start = t + 1
                last = {p: fragment[p][t + 1, lane] if k is None else fragment[f"final/{p}"][k] for p in self._paths}
                ended[lane] += self._closed(lane, last, bool(terminated[t, lane]), bool(truncated[t, lane]))
            self._take(parts, fragment, action, lane, np.flatnonzero(valid[start:, lane]) + start)
        return ended

    def cut(self, lane: int, fragment: Fragment) -> list[Episode]:
        """End what is under way in a lane after this fragment, truncated."""
        row = int(fragment["valid"][:, lane].sum()) if self._turns else fragment.length
        now = {path: fragment[path][row, lane] for path in self._paths}
        return self._closed(lane, now, False, True)

    def length(self, lane: int) -> int:
        """Steps of what is under way there."""
        return sum(len(part["reward"]) for part in self._parts[lane])

    def _take(self, parts: list[Arrays], fragment: Fragment, action: np.ndarray, lane: int, rows: np.ndarray) -> None:
        if len(rows):
            seen = {path: fragment[path][rows, lane] for path in self._paths}
            parts.append({**seen, "action": action[rows, lane], "reward": fragment["reward"][rows, lane]})

    def _closed(self, lane: int, last: Mapping[str, np.ndarray], terminated: bool, truncated: bool) -> list[Episode]:
        parts, self._parts[lane] = self._parts[lane][:], self._parts[lane]
        self._parts[lane].clear()
        if not parts:  # its env broke before its first step
            return []
        whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        obs = {path: np.concatenate([whole[path], np.asarray(last[path])[None]]) for path in self._paths}
        return [Episode(obs, whole["action"], whole["reward"], terminated, truncated)]


# -- whether it fits an environment ------------------------------------------------------------------------------------


def fitted(what: str, array: np.ndarray, leaf: ObsLeaf | ActionSpec, env: str) -> np.ndarray:
    """A column `[N, ...]` in the dtype of a leaf; refused if it is another kind of thing."""
    wanted = np.float32 if isinstance(leaf, ActionSpec) and leaf.kind == "box" else np.dtype(leaf.dtype)
    fits = f"does not fit env {env!r}, whose {what.rpartition(': ')[2]} is {described(leaf)}"
    if array.shape[1:] != tuple(leaf.shape):
        raise UsageError(f"{what} has shape {array.shape[1:]} and {fits}: record it on this env, or name another one")
    if not np.can_cast(array.dtype, wanted, "same_kind"):
        raise UsageError(f"{what} is {array.dtype} and {fits}: record it on this env, or name another one")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise UsageError(f"{what} has numbers that are not finite: leave these episodes out")
    if leaf.sizes and len(array):
        index = array.reshape(len(array), -1) - np.asarray(leaf.start)
        bad = np.argwhere((index < 0) | (index >= np.asarray(leaf.sizes)))
        if len(bad):
            value = array.reshape(len(array), -1)[tuple(bad[0])]
            raise UsageError(f"{what} has {value} and {fits}: record it on this env, or name another one")
    if isinstance(leaf, ActionSpec) and leaf.kind == "box" and len(array):
        low, high = (np.asarray(bound).reshape(leaf.shape) for bound in (leaf.low, leaf.high))
        slack = 1e-4 * np.where(np.isfinite(high - low), high - low, 1.0)  # of rounding
        bad = np.argwhere((array < low - slack) | (array > high + slack))
        if len(bad):
            raise UsageError(f"{what} has {array[tuple(bad[0])]:g} and {fits}: record what the env was given")
    return np.ascontiguousarray(array.astype(wanted, copy=False))


def require_allowed(episodes: Episodes, env: EnvSpec, what: str) -> None:
    """Refuse actions that the masks beside them forbid: their likelihood could not be learned."""
    if not env.masked:
        return
    acted = np.ones(episodes.steps + episodes.count, np.bool_)
    acted[np.cumsum(episodes.length + 1) - 1] = False
    chosen = to_recorded(env.action, episodes.action).reshape(episodes.steps, -1) + np.cumsum(
        (0, *env.action.sizes[:-1])
    )
    if not np.take_along_axis(episodes.obs[MASK][acted], chosen, axis=1).all():
        raise UsageError(f"{what} has actions that its own action_mask forbids: record what the env was given")


def described(leaf: ObsLeaf | ActionSpec) -> str:
    """`box (4,) float32`, `discrete 2`."""
    shape = " x ".join(map(str, leaf.sizes)) or f"{tuple(leaf.shape)} {leaf.dtype}"
    ends = {*leaf.low} | {*leaf.high} if isinstance(leaf, ActionSpec) else set()
    return f"{leaf.kind} {shape}" + (f" from {min(ends):g} to {max(ends):g}" if ends else "")


def to_recorded(action: ActionSpec, given: np.ndarray) -> np.ndarray:
    """Undo `action_map`: actions `[N, ...]` as fragments have them."""
    if action.kind != "box":
        return given - np.asarray(action.start, np.int64).reshape(action.shape)
    low, high = (np.asarray(bound, np.float64).reshape(action.shape) for bound in (action.low, action.high))
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        return given.astype(np.float32)
    half = np.where(high > low, (high - low) / 2, 1.0)
    return np.clip((given - (high + low) / 2) / half, -1.0, 1.0).astype(np.float32)
