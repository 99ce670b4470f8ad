"""Single environments stepped side by side, as one vector environment: all together, or each at its own pace."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from raynforce.envs.faults import EnvFault
from raynforce.envs.lanes import Lanes, Parallel
from raynforce.envs.local import Lost, lost_episodes, saved_obs
from raynforce.envs.vector import Step
from raynforce.errors import UsageError
from raynforce.infos import Info
from raynforce.trees import Tree

_BY_LANE = ("episodes", "steps", "returns", "breaks", "unbroken")


class ParallelVector:
    """As `LocalVector`, with a thread or a process for each environment: equal seeds give the same episodes.

    States are the same too: what one of them has saved, the other can load. An environment that hangs for longer than
    `hang_seconds`, or whose process ends, is replaced as one that raises.
    """

    def __init__(
        self,
        env: str,
        env_args: Mapping[str, Any] | None,
        num_envs: int,
        *,
        seed: int,
        sampler: int = 0,
        parallel: Parallel,
        record: bool = True,
        hang_seconds: float = math.inf,
    ) -> None:
        how: dict[str, Any] = {"parallel": parallel, "record": record, "hang_seconds": hang_seconds}
        self._lanes = Lanes(env, env_args, num_envs, seed=seed, sampler=sampler, **how)
        self.num_envs, self.spec = num_envs, self._lanes.spec
        self.note, self.way_back = self._lanes.note, self._lanes.way_back
        self.restarted: list[int] = []
        self._all = np.arange(num_envs)
        self._watch = None if hang_seconds == math.inf else hang_seconds / 10  # seconds between two looks
        self._begun = False  # whether anyone was shown the episodes that the lanes began with
        self._obs: dict[str, np.ndarray] = {}

    def reset(self, seed: int | None = None) -> dict[str, np.ndarray]:
        while not self.idle.all():  # who steps at its own pace may have gone away in between
            self.answers(math.inf)
        if self._begun or seed is not None:
            self._lanes.reset(seed)
            self._lanes.take_info()  # of episodes that nobody waits for any more
        return self._show()

    def start_fresh(self, attempt: int) -> dict[str, np.ndarray]:
        self._lanes.call("start_fresh", [(attempt,)] * self.num_envs)
        return self._show()

    def take_faults(self) -> list[EnvFault]:
        return sorted(self._lanes.take_faults(), key=lambda fault: fault.lane or 0)

    def current(self) -> dict[str, np.ndarray]:
        self._must_be_reset()
        return self._obs

    def step(self, action: np.ndarray) -> Step:
        self._must_be_reset()
        expected = (self.num_envs, *self.spec.action.shape)
        if action.shape != expected:
            raise UsageError(f"the actions have shape {action.shape}; expected {expected}")
        lanes = self._lanes
        lanes.step(self._all, action)
        cut = np.array(sorted(self._broken()), np.int64)
        valid = np.ones(self.num_envs, np.bool_)
        valid[cut] = False
        terminated, truncated = lanes.terminated.copy(), lanes.truncated.copy()
        ended = np.flatnonzero(terminated | truncated)
        final = {path: column[ended] for path, column in lanes.final.items()}
        return Step(
            self._show(), lanes.reward.copy(), terminated, truncated, valid, ended, final, cut, lanes.take_info()
        )

    # -- each lane at its own pace: first come, first served ----------------------------------------------

    @property
    def idle(self) -> np.ndarray:
        """`[B]` lanes that are not at a step."""
        return np.isinf(self._lanes.busy_since())

    def rows(self) -> dict[str, np.ndarray]:
        """What the policy sees next, `[B, ...]`; of lanes that are at a step, something in between."""
        return self._lanes.obs

    @property
    def reward(self) -> np.ndarray:
        """`[B]` of each lane's last step."""
        return self._lanes.reward

    @property
    def ended(self) -> np.ndarray:
        """`[B]` whether each lane's last step ended its episode."""
        return self._lanes.terminated | self._lanes.truncated

    def ask(self, lanes: np.ndarray, action: np.ndarray) -> None:
        """Have these idle lanes, `[K]`, step with `action`, `[K, ...]`. Returns at once."""
        self._lanes.step(lanes, action)

    def take_info(self) -> Mapping[int, Info]:
        """By lane the numbers in `info` of episodes that have ended since this was last asked."""
        return self._lanes.take_info()

    def answers(self, until: float) -> tuple[np.ndarray, np.ndarray]:
        """Wait for some lanes, until a time on the monotonic clock: those that have stepped, and those that broke."""
        left = until - time.monotonic()
        self._lanes.wait(None if left == math.inf and self._watch is None else min(left, self._watch or left))
        done, broken = self._lanes.take()
        if self._watch is not None:
            self._lanes.overdue(time.monotonic())
        return done, np.array([lane for lane, *_ in broken], np.int64)

    def state(self) -> Tree:
        self._must_be_reset()
        return _join(self._lanes.call("state", [()] * self.num_envs))

    def load(self, tree: Tree) -> list[str]:
        saved_obs(self.spec, self.num_envs, tree)
        self._lanes.take_faults()
        found: list[Lost] = self._lanes.call("bring_back", [(part,) for part in _split(tree, self.num_envs)])
        self.restarted = [lane for lane, lost in enumerate(found) if lost]
        together: Lost = {}
        for lost in found:
            for reason, examples in lost.items():
                together.setdefault(reason, []).extend(examples)
        self._show()
        return lost_episodes(self.spec.env, self.num_envs, together)

    def close(self) -> None:
        self._lanes.close()

    def _broken(self) -> list[int]:
        """Wait for all lanes; returns those that broke."""
        broke: list[int] = []
        left = self.num_envs
        while left:
            self._lanes.wait(self._watch)
            done, broken = self._lanes.take()
            broke += [lane for lane, *_ in broken]
            left -= len(done) + len(broken)
            if self._watch is not None:
                self._lanes.overdue(time.monotonic())
        return broke

    def _show(self) -> dict[str, np.ndarray]:
        self._begun = True
        self._obs = {path: column.copy() for path, column in self._lanes.obs.items()}
        return self._obs

    def _must_be_reset(self) -> None:
        if not self._begun:
            raise UsageError(f"env {self.spec.env!r} has no running episodes yet; call reset() or load() first")


def _join(trees: Sequence[Tree]) -> Tree:
    """The state of a `LocalVector` out of those of its lanes."""
    first = trees[0]
    whole: Tree = {"kind": first["kind"], "proven": any(tree["proven"] for tree in trees)}
    whole |= {key: np.concatenate([tree[key] for tree in trees]) for key in _BY_LANE}
    whole["obs"] = {key: np.concatenate([tree["obs"][key] for tree in trees]) for key in first["obs"]}
    if "saved" in first:
        whole["saved"] = {str(lane): tree["saved"]["0"] for lane, tree in enumerate(trees) if tree["saved"]}
    if "actions" in first:
        whole["actions"] = np.concatenate([tree["actions"] for tree in trees])  # lane after lane
    return whole


def _split(tree: Tree, lanes: int) -> list[Tree]:
    """The states of the lanes out of that of a `LocalVector`."""
    ends = np.cumsum(tree["steps"])
    parts = []
    for lane in range(lanes):
        part = tree | {key: np.asarray(tree[key])[lane : lane + 1] for key in _BY_LANE if key in tree}
        part["obs"] = {key: np.asarray(array)[lane : lane + 1] for key, array in tree["obs"].items()}
        if "saved" in tree:
            part["saved"] = {"0": tree["saved"][str(lane)]} if str(lane) in tree["saved"] else {}
        if "actions" in tree:
            part["actions"] = tree["actions"][ends[lane] - tree["steps"][lane] : ends[lane]]
        parts.append(part)
    return parts
