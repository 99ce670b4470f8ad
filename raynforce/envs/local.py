"""Single environments as one vector environment: stepped in a loop here, side by side in `lanes.py`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from raynforce.envs.faults import EnvFault
from raynforce.envs.lane import Lane, LanePlan, Lost, Shared
from raynforce.envs.make import closed_on_error
from raynforce.envs.rows import Rows
from raynforce.envs.vector import Step, VectorEnv
from raynforce.errors import UsageError
from raynforce.infos import NOTHING, Info
from raynforce.trees import Tree

_BY_LANE = ("episodes", "steps", "returns", "breaks", "unbroken")


class LaneVector(VectorEnv):
    """Single environments, each reset in the step that ends its episode; equal seeds give equal episodes in all."""

    _rows: Rows

    @abstractmethod
    def _call(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a method of each `Lane`."""

    @abstractmethod
    def _step_lanes(self, action: np.ndarray) -> tuple[Sequence[int], Sequence[int], Mapping[int, Info]]:
        """Step all lanes: those whose episode ended, with the numbers in their `info`, and those that broke."""

    def reset(self, seed: int | None = None) -> dict[str, np.ndarray]:
        self._call("reset", [(seed,)] * self.num_envs)
        return self._show()

    def start_fresh(self, attempt: int) -> dict[str, np.ndarray]:
        self._call("start_fresh", [(attempt,)] * self.num_envs)
        return self._show()

    def step(self, action: np.ndarray) -> Step:
        self._require_actions(action)
        ended, broke, info = self._step_lanes(action)
        rows, final_lanes, final_obs = self._rows, self._no_lanes, self._no_final
        if len(ended):
            final_lanes = np.array(ended, np.int64)
            final_obs = {path: column[final_lanes] for path, column in rows.final.items()}
        valid, cut = self._all_valid, self._no_lanes
        if broke:
            valid, cut = valid.copy(), np.array(sorted(broke), np.int64)
            valid[cut] = False
        flags = rows.terminated.copy(), rows.truncated.copy()
        return Step(self._show(), rows.reward.copy(), *flags, valid, final_lanes, final_obs, cut, info)

    def _show(self) -> dict[str, np.ndarray]:
        self._obs = {path: column.copy() for path, column in self._rows.obs.items()}
        return self._obs

    def state(self) -> Tree:
        self.current()
        return _join(self._call("state", [()] * self.num_envs))

    def load(self, tree: Tree) -> list[str]:
        self._saved_obs(tree, "local")
        self.take_faults()
        found: list[Lost | None] = self._call("restore", [(part,) for part in _split(tree, self.num_envs)])
        self.restarted = []
        examples: dict[str, list[str]] = {}  # by reason
        for lane, lost in enumerate(found):
            if lost:
                self.restarted.append(lane)
                examples.setdefault(lost.reason, []).append(lost.example and f" (lane {lane}: {lost.example})")
        self._show()
        start_over = f"of {self.num_envs} running episodes of env {self.spec.env!r} start over"
        return [f"{len(some)} {start_over}: {reason}{some[0]}" for reason, some in examples.items()]


class LocalVector(LaneVector):
    """Lanes that are stepped one after another."""

    def __init__(
        self,
        env: str,
        env_args: Mapping[str, Any] | None,
        num_envs: int,
        *,
        seed: int,
        sampler: int = 0,
        record: bool = True,
        note: str = "",
        lane: type[Lane] = Lane,
        masked: bool = False,
    ) -> None:
        plan = LanePlan(env, dict(env_args or {}), seed, sampler, 0, record, masked)
        self._shared = Shared()
        self._lanes: list[Any] = []
        with closed_on_error(self):
            for index in range(num_envs):
                self._lanes.append(lane(plan, index, self._shared))
                if self._lanes[index].spec != self._lanes[0].spec:
                    raise other_spaces(env, index, 0)
        first = next((made for made in self._lanes if not made.saves), self._lanes[0])
        if record and not first.saves:  # a factory may make envs of several classes: one way for all
            for made in self._lanes:
                made.keep_actions()
        super().__init__(first.spec, num_envs, "; ".join(filter(None, (note, first.note))), first.way_back)
        self._rows = Rows(self.spec, num_envs)
        for index, made in enumerate(self._lanes):
            made.write_to(self._rows.one(index))
        self._ready, self._steps = first.ready, [made.step for made in self._lanes]
        self._stopped: set[int] = set()

    def stop(self, lanes: Iterable[int]) -> None:
        """Step these lanes no more, until `reset`: they stay as they are, without reward or end."""
        self._stopped.update(lanes)
        for lane in self._stopped:
            self._steps[lane] = _stays
            self._rows.reward[lane], self._rows.terminated[lane], self._rows.truncated[lane] = 0.0, False, False

    def reset(self, seed: int | None = None) -> dict[str, np.ndarray]:
        for lane in self._stopped:
            self._steps[lane] = self._lanes[lane].step
        self._stopped.clear()
        return super().reset(seed)

    def take_faults(self) -> list[EnvFault]:
        return self._shared.take_faults()

    def close(self) -> None:
        while self._lanes:
            self._lanes.pop().close()

    def _call(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        return [getattr(lane, method)(*given) for lane, given in zip(self._lanes, args, strict=True)]

    def _step_lanes(self, action: np.ndarray) -> tuple[Sequence[int], Sequence[int], Mapping[int, Info]]:
        steps = enumerate(zip(self._steps, self._ready(action), strict=True))
        broke = [lane for lane, (step, one) in steps if step(one)]
        done = (self._rows.terminated | self._rows.truncated).tobytes()
        if b"\1" not in done:
            return (), broke, NOTHING
        ended = [lane for lane, flag in enumerate(done) if flag]
        return ended, broke, {lane: info for lane in ended if (info := self._lanes[lane].take_info())} or NOTHING


def _stays(action: Any) -> bool:
    return False


def other_spaces(env: str, lane: int, first: int) -> UsageError:
    return UsageError(f"env {env!r} has other spaces in lane {lane} than in lane {first}; they must be equal")


def _join(trees: Sequence[Tree]) -> Tree:
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
    ends, parts = np.cumsum(tree["steps"]), []
    for lane in range(lanes):
        part = tree | {key: np.asarray(tree[key])[lane : lane + 1] for key in _BY_LANE if key in tree}
        part["obs"] = {key: np.asarray(array)[lane : lane + 1] for key, array in tree["obs"].items()}
        if "saved" in tree:
            part["saved"] = {"0": tree["saved"][str(lane)]} if str(lane) in tree["saved"] else {}
        if "actions" in tree:
            part["actions"] = tree["actions"][ends[lane] - tree["steps"][lane] : ends[lane]]
        parts.append(part)
    return parts
