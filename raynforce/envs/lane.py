"""One environment: stepped, checked, reset when its episode ends, made again when it breaks, saved and restored."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from raynforce.envs.describe import (
    bits,
    flatten_obs,
    in_range,
    leaf_spaces,
    misfit,
    unread_note,
    wrong_reset,
    wrong_step,
)
from raynforce.envs.faults import MOST_BYTES, EnvFault, count_break, trace_of
from raynforce.envs.make import close_env, make_described
from raynforce.envs.masks import KEY, has_mask, not_flags
from raynforce.envs.masks import misfit as mask_misfit
from raynforce.envs.rows import Rows
from raynforce.envs.snapshots import NoTree, Pair, difference, keepers, pair_of
from raynforce.envs.vector import FINITE, NOT_AT_ALL, derive_seed, finite, first_of_attempt
from raynforce.errors import ContractError, EnvError, UsageError, summary
from raynforce.infos import Info, numbers
from raynforce.spaces import MASK, forbids, forbids_all
from raynforce.trees import Tree

REPLAY = "by replaying their actions"
_FEW = 32  # numbers whose sum, in float64, shows sooner than numpy whether all are finite


class Broke(Exception):
    """An env broke; what it raised, if anything, is the cause."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(what)
        self.kind, self.what = kind, what


class Lost(NamedTuple):
    reason: str
    example: str = ""


class LanePlan(NamedTuple):
    """What all lanes are made from. Lane i has the number `first` + i in faults and seeds."""

    env: str
    args: dict[str, Any]
    seed: int
    sampler: int
    first: int
    record: bool
    masked: bool = False


@dataclass
class Shared:
    proven: bool = False  # whether a step of any of them went well
    saved: bool = False  # whether any of them could be saved
    faults: list[EnvFault] = field(default_factory=list)

    def take_faults(self) -> list[EnvFault]:
        faults, self.faults = self.faults, []
        return faults


class Lane:
    """One environment and its running episode. Steps write into its row and allocate nothing.

    Episode seeds derive from (seed, sampler, number, episode). With `record`, the running episode is saved and restored
    by the env's `save_state` and `load_state`, or by replaying its actions where there is no such pair.

    An env that raises or returns garbage is closed, and a new one begins the next episode; `shared.faults` has it. Too
    often in a row is an `EnvError`; garbage twice in a row before any step went well is a `ContractError`.
    """

    def __init__(self, plan: LanePlan, index: int = 0, shared: Shared | None = None) -> None:
        self.plan, self.number, self.shared = plan, plan.first + index, shared or Shared()
        self.env, self.spec = make_described(plan.env, plan.args, masked=plan.masked)
        self._info: Info | None = None
        self._seed = plan.seed
        self._leaves = self.spec.obs
        paths = [path for path, _ in leaf_spaces(plan.env, self.env.observation_space)]
        self._shown = self._leaves[: len(paths)]  # what observations have
        self._masks = MASK if MASK in paths else f"info[{KEY!r}]" if self.spec.masked else ""  # where they come from
        self._plain = self._leaves[0].path == "obs"
        action_space = self.env.action_space
        self._scalar_action, self._action_dtype = isinstance(action_space, spaces.Discrete), action_space.dtype
        self._episode, self._steps, self._return = -1, 0, 0.0
        self._breaks, self._unbroken = 0, 0  # breaks in a row, and steps since the last one
        self._unsaved: Broke | None = None  # it broke when it was to be saved: seen in its next step
        self._use(Rows(self.spec, 1))
        self._pair, reason = pair_of(self.env)
        self.saves = plan.record and self._pair is not None
        replays = plan.record and not self.saves
        self._actions: np.ndarray | None = None  # [T, ...], of the running episode: the first `_steps`
        if replays:
            self.keep_actions()
        self.way_back = REPLAY if replays else NOT_AT_ALL
        if self._pair and self.saves:
            self.way_back = f"through {self._pair.name}"
        self._keeps = next(iter(keepers(self.env)), None) if replays else None
        if self._keeps:
            note = f"running episodes of env {plan.env!r} start over at resume: {'; '.join(self._keeps)}"
        elif replays and reason:
            note = f"running episodes of env {plan.env!r} come back {self.way_back}, {reason}"
        else:
            note = ""
        self.note = "; ".join(filter(None, (unread_note(plan.env, self.env.observation_space), note)))

    def keep_actions(self) -> None:
        self.saves, self._actions = False, np.empty((64, *self.spec.action.shape), self.spec.action.dtype)

    def write_to(self, row: Rows) -> None:
        """Use this row from now on; it begins with what the present one holds."""
        row.live[...] = self.row.live
        self._use(row)

    def _use(self, row: Rows) -> None:
        self.row = row
        self._places = [column[0, ...] for column in row.obs.values()]
        self._finals = [column[0, ...] for column in row.final.values()]
        self._mask = row.obs[MASK][0] if self._masks else np.empty(0, np.int8)
        leaf = self._leaves[0]
        self._common = (leaf.shape, np.dtype(leaf.dtype)) if self._plain and not leaf.sizes else None
        both = zip(row.obs, self._places, strict=True)
        self._floats = [(path, place.reshape(-1)) for path, place in both if place.dtype.kind == "f"]  # flat views

    def begin_at(self, episode: int) -> None:
        """Begin with this episode; if it is not the first, it replaces an env that has worked."""
        if episode:
            self.shared.proven, self._episode = True, episode - 1
        self.reset()

    def start_fresh(self, attempt: int) -> None:
        """Begin an episode that no other attempt (1 or more) and no first run has played."""
        self.begin_at(first_of_attempt(attempt))

    def reset(self, seed: int | None = None) -> None:
        """Begin the next episode; with `seed`, the first one of that seed."""
        if seed is not None:
            self._seed, self._episode = seed, -1
        self._breaks = 0
        try:
            self._begin(self._episode + 1)
        except Broke as broken:
            if not self.shared.proven:
                raise self._fault(broken).error(self._error_kind(broken)) from broken.__cause__
            self._restart(broken)

    def ready(self, actions: np.ndarray) -> Sequence[Any]:
        """Actions as the env expects them: ints, or arrays of its space's dtype that it may keep."""
        if self._scalar_action:
            return actions.tolist()
        return actions.astype(self._action_dtype)  # type: ignore[return-value]

    def step(self, action: Any) -> bool:
        """Take a step with an action that is `ready`, and begin the next episode if it ends one; whether it broke."""
        row, steps = self.row, self._steps
        if self._actions is not None:
            if steps == len(self._actions):
                self._actions = np.concatenate([self._actions, np.empty_like(self._actions)])
            self._actions[steps] = action
        row.steps[0] = self._steps = steps + 1
        self._unbroken += 1
        try:
            if self._unsaved is not None:
                raise self._unsaved
            row.reward[0], end, cut, info = self._advance(action)
            reward = row.reward.item()  # as float32
            self._require_finite(reward)
        except Broke as broken:
            self._restart(broken)
            row.reward[0], row.terminated[0], row.truncated[0] = 0.0, False, False
            return True
        self._return += reward
        row.terminated[0], row.truncated[0] = end, cut
        if end or cut:
            self._info = numbers(info) or None
            for last, place in zip(self._finals, self._places, strict=True):
                last[...] = place
            try:
                self._begin(self._episode + 1)
            except Broke as broken:
                self._restart(broken)
        self.shared.proven = True
        return False

    def take_info(self) -> Info | None:
        """The numbers in `info` of an episode that ended since the last call."""
        info, self._info = self._info, None
        return info

    def close(self) -> None:
        close_env(self.env)

    # -- one call of the environment ----------------------------------------------------------------------

    def _begin(self, episode: int) -> None:
        self._note_start(episode)
        self._unsaved = None
        try:
            result: Any = self.env.reset(seed=self._episode_seed())
        except (Exception, SystemExit) as error:
            raise Broke("raised", f"reset raised {summary(error)}") from error
        if wrong := wrong_reset(result):
            raise Broke("garbage", wrong)
        self._put(result[0])
        if self._masks or has_mask(result[1]):
            self._put_mask(result[1])
        self._require_finite(0.0)

    def _note_start(self, episode: int) -> None:
        self.row.episode[0] = self._episode = episode
        self.row.steps[0] = self._steps = 0
        self._return = 0.0

    def _advance(self, action: Any) -> tuple[float, bool, bool, Any]:
        try:
            result: Any = self.env.step(action)
        except (Exception, SystemExit) as error:
            raise Broke("raised", f"step raised {summary(error)}") from error
        if wrong := wrong_step(result):
            raise Broke("garbage", wrong)
        raw, reward, terminated, truncated, info = result
        self._put(raw)
        if self._masks:
            self._put_mask(info, over=bool(terminated))
        return float(reward), bool(terminated), bool(truncated), info

    def _put(self, raw: Any) -> None:
        if type(raw) is np.ndarray and (raw.shape, raw.dtype) == self._common:  # the common case, without detours
            self._places[0][...] = raw
            return
        try:
            values = (raw,) if self._plain else flatten_obs(raw, self._shown).values()
        except UsageError as error:
            raise Broke("garbage", str(error)) from None
        for leaf, place, value in zip(self._shown, self._places, values, strict=False):
            try:
                one = np.asarray(value)
                fits = one.shape == leaf.shape  # asked first, because copyto would broadcast
                if fits:
                    np.copyto(place, one, casting="same_kind")
                    fits = not leaf.sizes or in_range(one, leaf)
            except Exception:  # it may be anything
                fits = False
            if not fits:
                raise Broke("garbage", f"the observation {misfit(value, leaf)}")

    def _put_mask(self, info: Any, *, over: bool = False) -> None:
        """Check the mask, which may come in `info`; of an episode that is `over` there need be none."""
        place, where = self._mask, self._masks
        if not where:
            why = "its actions are continuous: masks are for discrete ones"
            if self.spec.action.kind != "box":
                why = "the very first reset had none, or took long: always give it, or as a leaf of the observation"
            raise Broke("garbage", f"reset gave info[{KEY!r}], and {why}")
        if where != MASK:
            value = info.get(KEY) if isinstance(info, Mapping) else None
            if value is None and over:
                value = np.ones_like(place)
            elif value is None:
                raise Broke("garbage", f"there is no {where}, which was there at first; give it with every observation")
            if wrong := mask_misfit(value, place.size):
                raise Broke("garbage", f"{where} {wrong}")
            place[...] = value
        elif wrong := not_flags(place):
            raise Broke("garbage", f"{where} {wrong}")
        if not over and forbids_all(place[None], self.spec.action.sizes)[0]:
            raise Broke("garbage", f"{where} {forbids(place[None], self.spec.action.sizes)}")

    def _require_finite(self, reward: float) -> None:
        if not math.isfinite(reward):
            raise Broke("garbage", f"reward = {reward}; {FINITE}")
        for path, flat in self._floats:
            if not (math.isfinite(sum(flat.tolist())) if flat.size <= _FEW else finite(flat)):
                raise Broke("garbage", f"{path} = {flat[~np.isfinite(flat)][0]}; {FINITE}")

    # -- an environment that breaks -----------------------------------------------------------------------

    def _restart(self, broken: Broke) -> None:
        """Replace an env that broke, and begin the next episode."""
        while True:
            self._note_break(broken)
            close_env(self.env)
            self._note_start(self._episode + 1)  # also if it breaks before it has begun
            try:
                self._make_again()
                self._begin(self._episode)
                return
            except Broke as again:
                broken = again

    def _make_again(self) -> None:
        try:
            self.env, spec = make_described(self.plan.env, self.plan.args, masked=self.plan.masked)
        except (Exception, SystemExit) as error:
            raise Broke("raised", f"it could not be made again: {summary(error)}") from error
        if spec != self.spec:
            raise Broke("garbage", "made again, it has other spaces")
        self._pair, _ = pair_of(self.env)

    def _note_break(self, broken: Broke) -> None:
        fault, kind = self._fault(broken), self._error_kind(broken)
        if kind is ContractError and self._breaks:
            raise fault.error(kind) from broken.__cause__
        self._breaks = count_break(fault, self._breaks, self._unbroken, kind, broken.__cause__)
        self._unbroken = 0
        self.shared.faults.append(fault)

    def _error_kind(self, broken: Broke) -> type[EnvError]:
        return ContractError if broken.kind == "garbage" and not self.shared.proven else EnvError

    def _fault(self, broken: Broke) -> EnvFault:
        past = None if self._actions is None else self._actions[: self._steps].copy()
        too_long = past is not None and past.nbytes > MOST_BYTES
        where = self.number, self._episode_seed(), self._steps
        trace, actions = trace_of(broken.__cause__), None if too_long else past
        return EnvFault(self.plan.env, self.plan.args, broken.kind, *where, broken.what, trace, actions, too_long)

    def _episode_seed(self) -> int:
        return derive_seed(self._seed, self.plan.sampler, self.number, self._episode)

    # -- save and restore ---------------------------------------------------------------------------------

    def state(self) -> Tree:
        """All that is needed to go on from here, in the form of a vector of one lane."""
        counts = {"episodes": self._episode, "steps": self._steps, "returns": self._return}
        counts |= {"breaks": self._breaks, "unbroken": self._unbroken}
        tree: Tree = {"kind": "local", "proven": self.shared.proven}
        tree |= {name: np.array([count]) for name, count in counts.items()}
        tree["obs"] = {str(i): array.copy() for i, array in enumerate(self.row.obs.values())}  # a path's '/' would nest
        if self.saves:
            tree["saved"] = self._save()
        elif self._actions is not None:
            tree["actions"] = self._actions[: self._steps].copy()
        return tree

    def _save(self) -> Tree:
        """The env's own state under "0"; nothing if it breaks: then its next step makes it again."""
        if self._unsaved is not None:
            return {}
        try:
            return {"0": self._saved_state()}
        except Broke as broken:
            if not self.shared.saved:
                raise self._fault(broken).error(self._error_kind(broken)) from broken.__cause__
            self._unsaved = broken
            return {}

    def _saved_state(self) -> Tree:
        pair = self._pair
        if pair is None:
            raise Broke("garbage", "made again, it has no save_state and load_state any more")
        try:
            state = pair.save()
        except NoTree as error:
            raise ContractError(f"env {self.plan.env!r} cannot be saved: {error}") from None
        except (Exception, SystemExit) as error:
            raise Broke("raised", f"{pair.saver} raised {summary(error)}") from error
        self.shared.saved = True
        return state

    def restore(self, tree: Tree) -> Lost | None:
        """Go on from a saved state; or begin the next episode, and tell why."""
        self.shared.proven = bool(tree.get("proven", True))
        self._breaks, self._unbroken = (int(tree[key][0]) if key in tree else 0 for key in ("breaks", "unbroken"))
        episode = int(tree["episodes"][0])
        try:
            lost = self._restore(tree, episode)
            if lost is not None:
                self._begin(episode + 1)
            return lost
        except Broke as broken:
            self._restart(broken)
            return Lost("it broke on the way there", broken.what)

    def _restore(self, tree: Tree, episode: int) -> Lost | None:
        states, steps = tree.get("saved"), int(tree["steps"][0])
        if states and self._pair is not None:
            return self._load(tree, episode, self._pair)
        if "actions" in tree or not steps:
            return self._replay(tree, episode, np.asarray(tree.get("actions", ())))
        if states is None:
            return Lost("they were saved with exact_resume=false")
        if not states:
            return Lost("they could not be saved")
        return Lost("they were saved by save_state and load_state or a snapshot, which it does not have any more")

    def _load(self, tree: Tree, episode: int, pair: Pair) -> Lost | None:
        """Restore the episode by giving the env the state that it has saved."""
        self._begin(episode)  # so that all exists that an episode needs
        state = tree["saved"]["0"]
        try:
            pair.load(state)
        except (Exception, SystemExit) as error:
            raise Broke("raised", f"{pair.loader} raised {summary(error)}") from error
        if where := difference(state, self._saved_state()):
            given = f"what its {pair.loader} was given is not what its {pair.saver} gives afterwards"
            return Lost(given, f"{where!r} differs")
        self.row.steps[0] = self._steps = int(tree["steps"][0])
        self._return = float(tree["returns"][0])
        for i, place in enumerate(self._places):
            place[...] = tree["obs"][str(i)][0]
        return None

    def _replay(self, tree: Tree, episode: int, past: np.ndarray) -> Lost | None:
        """Restore the episode by taking its past actions again, if that leads there."""
        why = f"as {self._keeps[0]}" if self._keeps else f"and `raynforce doctor {self.plan.env}` tells why"
        reason = f"replaying their actions led elsewhere, {why}"
        self._begin(episode)
        if len(past):
            if self._actions is not None:
                self._actions = np.concatenate([past, np.empty_like(past)]).astype(self._actions.dtype, copy=False)
            for action in self.ready(past):
                self._steps += 1
                reward, terminated, truncated, _ = self._advance(action)
                self._return += float(np.float32(reward))  # as a step adds them up
                if terminated or truncated:
                    return Lost(reason, f"it ended after {self._steps} of {len(past)} steps")
            self.row.steps[0] = self._steps
        for i, (leaf, now) in enumerate(zip(self._leaves, self._places, strict=True)):
            then = np.asarray(tree["obs"][str(i)])[0, ...]
            if bits(now) != bits(then):
                first = int(np.argmax(now.reshape(-1) != then.reshape(-1)))
                differs = f"{leaf.path}[{first}] is {now.reshape(-1)[first]}, not {then.reshape(-1)[first]}"
                return Lost(reason, f"after {len(past)} steps {differs}")
        if "returns" in tree and self._return != (then := tree["returns"][0]):
            return Lost(reason, f"after {len(past)} steps the return is {self._return:.9g}, not {then:.9g}")
        return None
