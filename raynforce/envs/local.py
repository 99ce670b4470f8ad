"""Single environments stepped in a loop, as one vector environment; one that breaks is made anew by itself."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from raynforce.envs.describe import flatten_obs, in_range, misfit, wrong_reset, wrong_step
from raynforce.envs.faults import MOST_BYTES, EnvFault, trace_of
from raynforce.envs.make import Env, close_env, make_described
from raynforce.envs.snapshots import NoTree, Pair, difference, keepers, pair_of
from raynforce.envs.vector import FINITE, Step, derive_seed, finite, first_of_attempt, same
from raynforce.errors import CheckpointError, ContractError, EnvError, UsageError, summary
from raynforce.infos import NOTHING, Info, numbers
from raynforce.spaces import EnvSpec, ObsLeaf
from raynforce.trees import Tree

BREAKS_IN_A_ROW = 3
"""How often an environment may break and be made anew with no more than `STEPS_BETWEEN` steps in between."""
STEPS_BETWEEN = 10
REPLAY = "by replaying their actions"
Lost = dict[str, list[str]]
"""Why running episodes could not be brought back: by reason, an example for each lane."""


class Broke(Exception):
    """An env broke; what it raised, if anything, is the cause."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(what)
        self.kind, self.what = kind, what


class _Lost(NamedTuple):
    """Why an episode could not be brought back."""

    reason: str
    example: str = ""


class LocalVector:
    """Single environments stepped in a plain loop, each reset in the step in which its episode ends.

    Episode seeds derive from (seed, sampler, lane, episode); lanes count from `first`. With `record`, running episodes
    are saved by the environment's `save_state` and loaded by its `load_state`; where there is no such pair, their
    actions are kept, so that `load` can replay them. Without `record` it starts new episodes.

    An env that raises, or returns what is no observation or reward, is closed; a new one takes its place and begins
    the lane's next episode, while the other lanes go on. `faults` tells of it. It is an `EnvError` if a lane does
    not get on with that, and a `ContractError` if nothing but nonsense comes from the first step on.
    """

    def __init__(
        self,
        env: str,
        env_args: Mapping[str, Any] | None,
        num_envs: int,
        *,
        seed: int,
        sampler: int = 0,
        first: int = 0,
        record: bool = True,
        note: str = "",
    ) -> None:
        self.num_envs = num_envs
        self.restarted: list[int] = []
        self.faults: list[EnvFault] = []
        self._env, self._args, self._seed, self._sampler = env, dict(env_args or {}), seed, sampler
        self._first = first
        self._envs: list[Env] = []
        try:
            self.spec = self._make_all()
        except BaseException:
            self.close()
            raise
        self._leaves: tuple[ObsLeaf, ...] = self.spec.obs
        self._plain = self._leaves[0].path == "obs"
        self._floats = [i for i, leaf in enumerate(self._leaves) if np.dtype(leaf.dtype).kind == "f"]
        action_space = self._envs[0].action_space
        self._scalar_action = isinstance(action_space, spaces.Discrete)
        self._env_action_dtype = action_space.dtype
        self._action_shape = (num_envs, *self.spec.action.shape)
        self._lanes = np.arange(num_envs)
        self._episodes = np.full(num_envs, -1, np.int64)
        self._steps = np.zeros(num_envs, np.int64)
        self._proven = False  # whether any lane's step has gone well
        self._clock = 0
        self._broke_at = np.zeros(num_envs, np.int64)  # by the clock
        self._breaks = np.zeros(num_envs, np.int64)  # in a row
        self._obs: list[np.ndarray] = []  # the current ones, in the order of the leaves; empty before the first reset
        self._returns = np.zeros(num_envs, np.float64)  # of the running episodes
        pairs, reasons = zip(*(pair_of(made) for made in self._envs), strict=True)
        self._pairs: list[Pair | None] = list(pairs)
        self._saves = record and None not in pairs
        self._saved = False  # whether any lane could be saved yet
        self._unsaved: dict[int, Broke] = {}  # lanes that broke when they were to be saved: seen in their next step
        # Actions of the running episodes: lane b's are [b, :steps[b]].
        replays = record and not self._saves
        self._actions = np.empty((num_envs, 64, *self.spec.action.shape), self.spec.action.dtype) if replays else None
        self.way_back = REPLAY if replays else "not at all: they begin anew"
        if self._saves:
            self.way_back = f"through {pairs[0]}"
        reason = next(filter(None, reasons), "") if replays else ""
        said = f"running episodes of env {env!r} come back {self.way_back}, {reason}" if reason else ""
        self._keeps = next(iter(keepers(self._envs[0])), None) if replays else None
        if self._keeps:
            what, fix = self._keeps
            said = f"running episodes of env {env!r} start over at resume: {what}; {fix}"
        self.note = "; ".join(filter(None, (note, said)))
        self._all_valid = np.ones(num_envs, np.bool_)
        self._all_valid.flags.writeable = False  # shared by all steps
        self._no_lanes = np.empty(0, np.int64)
        self._no_final = {leaf.path: np.empty((0, *leaf.shape), leaf.dtype) for leaf in self._leaves}

    def _make_all(self) -> EnvSpec:
        specs: list[EnvSpec] = []
        for lane in range(self.num_envs):
            made, spec = make_described(self._env, self._args)
            self._envs.append(made)
            specs.append(spec)
            if specs[lane] != specs[0]:
                raise UsageError(
                    f"env {self._env!r} has other spaces in lane {lane} than in lane 0; they must be equal"
                )
        return specs[0]

    def reset(self, seed: int | None = None) -> dict[str, np.ndarray]:
        if seed is not None:
            self._seed = seed
            self._episodes[:] = -1
        self._breaks[:] = 0
        obs = self._new_obs()
        for lane in range(self.num_envs):
            try:
                self._begin(lane, int(self._episodes[lane]) + 1, obs)
            except Broke as broken:
                if not self._proven:
                    raise self._error(broken, self._fault(lane, broken)) from broken.__cause__
                self._restart(lane, broken, obs)
        self._obs = obs
        return self.current()

    def start_fresh(self, attempt: int) -> dict[str, np.ndarray]:
        self._episodes[:] = first_of_attempt(attempt) - 1
        self._proven = True  # in the first run
        return self.reset()

    def take_faults(self) -> list[EnvFault]:
        faults, self.faults = self.faults, []
        return faults

    def current(self) -> dict[str, np.ndarray]:
        self._must_be_reset()
        return {leaf.path: array for leaf, array in zip(self._leaves, self._obs, strict=True)}

    def step(self, action: np.ndarray) -> Step:
        self._must_be_reset()
        if action.shape != self._action_shape:
            raise UsageError(f"the actions have shape {action.shape}; expected {self._action_shape}")
        self._record(action)
        self._steps += 1
        self._clock += 1
        obs = self._new_obs()
        reward = np.empty(self.num_envs, np.float32)
        terminated = np.empty(self.num_envs, np.bool_)
        truncated = np.empty(self.num_envs, np.bool_)
        ended: list[int] = []
        told: Mapping[int, Info] = NOTHING
        broke: list[int] = []
        final: list[list[np.ndarray]] = [[] for _ in self._leaves]
        for lane, choice in enumerate(self._for_env(action)):
            try:
                if lane in self._unsaved:
                    raise self._unsaved[lane]
                reward[lane], end, cut, info = self._step_lane(lane, choice, obs)
                terminated[lane], truncated[lane] = end, cut
                if not (end or cut):
                    continue
                self._require_finite(lane, obs, reward)  # here, because the row will show the next episode
            except Broke as broken:
                broke.append(lane)
                self._restart(lane, broken, obs)
                reward[lane], terminated[lane], truncated[lane] = 0.0, False, False
                continue
            ended.append(lane)
            if found := numbers(info):
                told = {**told, lane: found}
            for rows, array in zip(final, obs, strict=True):
                rows.append(array[lane].copy())
            try:
                self._begin(lane, int(self._episodes[lane]) + 1, obs)
            except Broke as broken:
                self._restart(lane, broken, obs)
        if not (finite(reward) and all(finite(obs[i]) for i in self._floats)):
            broke = sorted(broke + self._restart_not_finite(obs, reward))
        self._proven = self._proven or len(broke) < self.num_envs
        self._obs = obs
        self._returns += reward
        final_lanes, final_obs = self._no_lanes, self._no_final
        if ended:
            self._returns[ended] = 0.0
            final_lanes = np.array(ended, np.int64)
            final_obs = {leaf.path: np.array(rows) for leaf, rows in zip(self._leaves, final, strict=True)}
        valid, broken_lanes = self._all_valid, self._no_lanes
        if broke:
            valid, broken_lanes = valid.copy(), np.array(broke, np.int64)
            valid[broken_lanes] = False
        return Step(self.current(), reward, terminated, truncated, valid, final_lanes, final_obs, broken_lanes, told)

    def state(self) -> Tree:
        self._must_be_reset()
        tree: Tree = {
            "kind": "local",
            "episodes": self._episodes.copy(),  # [B]
            "steps": self._steps.copy(),  # [B]
            "returns": self._returns.copy(),  # [B]
            "proven": self._proven,
            "breaks": self._breaks.copy(),  # [B]
            "unbroken": self._clock - self._broke_at,  # [B]
            "obs": {str(i): array for i, array in enumerate(self._obs)},  # by number: a path's '/' would nest
        }
        if self._saves:
            tree["saved"] = self._save()
        elif self._actions is not None:
            longest = int(self._steps.max())
            taken = np.arange(longest) < self._steps[:, None]  # [B, longest]
            tree["actions"] = self._actions[:, :longest][taken]  # [sum of steps, ...] lane after lane
        return tree

    def load(self, tree: Tree) -> list[str]:
        return lost_episodes(self._env, self.num_envs, self.bring_back(tree))

    def bring_back(self, tree: Tree) -> Lost:
        """Go on from a saved state; what could not be brought back begins anew."""
        saved = saved_obs(self.spec, self.num_envs, tree)
        obs = self._new_obs()
        self.restarted, self.faults = [], []
        self._proven = bool(tree.get("proven", True))
        self._breaks[:], self._broke_at[:] = tree.get("breaks", 0), np.negative(tree.get("unbroken", 0))
        self._clock = 0
        lost: Lost = {}
        for lane in range(self.num_envs):
            try:
                why = self._bring_back(lane, tree, obs, saved)
                if why is None:
                    continue
                self._begin(lane, int(tree["episodes"][lane]) + 1, obs)
            except Broke as broken:
                why = _Lost("it broke on the way there", broken.what)
                self._restart(lane, broken, obs)
            self.restarted.append(lane)
            lost.setdefault(why.reason, []).append(why.example and f" (lane {self._first + lane}: {why.example})")
        self._obs = obs
        return lost

    def close(self) -> None:
        while self._envs:
            close_env(self._envs.pop())

    def _begin(self, lane: int, episode: int, obs: list[np.ndarray]) -> None:
        """Start an episode in a lane and write its first observation."""
        self._episodes[lane], self._steps[lane], self._returns[lane] = episode, 0, 0.0
        self._unsaved.pop(lane, None)
        try:
            result: Any = self._envs[lane].reset(seed=self._episode_seed(lane))
        except (Exception, SystemExit) as error:
            raise Broke("raised", f"reset raised {summary(error)}") from error
        if wrong := wrong_reset(result):
            raise Broke("garbage", wrong)
        self._put(lane, result[0], obs)
        self._require_finite(lane, obs)

    def _step_lane(self, lane: int, choice: Any, obs: list[np.ndarray]) -> tuple[float, bool, bool, Any]:
        """Step one lane and write its observation; returns reward, terminated, truncated, info."""
        try:
            result: Any = self._envs[lane].step(choice)
        except (Exception, SystemExit) as error:
            raise Broke("raised", f"step raised {summary(error)}") from error
        if wrong := wrong_step(result):
            raise Broke("garbage", wrong)
        raw, reward, terminated, truncated, info = result
        self._put(lane, raw, obs)
        return float(reward), bool(terminated), bool(truncated), info

    def _put(self, lane: int, raw: Any, obs: list[np.ndarray]) -> None:
        """Write one env's observation into row `lane` of the batch, if it fits."""
        try:
            values = (raw,) if self._plain else flatten_obs(raw, self._leaves).values()
        except UsageError as error:
            raise Broke("garbage", str(error)) from None
        for leaf, array, value in zip(self._leaves, obs, values, strict=True):
            try:
                one = np.asarray(value)
                fits = one.shape == leaf.shape  # asked first, because copyto would broadcast
                if fits:
                    np.copyto(array[lane, ...], one, casting="same_kind")
                    fits = not leaf.sizes or in_range(one, leaf)
            except Exception:  # it may be anything
                fits = False
            if not fits:
                raise Broke("garbage", f"the observation {misfit(value, leaf)}")

    def _require_finite(self, lane: int, obs: list[np.ndarray], reward: np.ndarray | None = None) -> None:
        """Refuse NaN and infinity in one lane."""
        if reward is not None and not math.isfinite(reward[lane]):
            raise Broke("garbage", f"reward = {reward[lane]}; {FINITE}")
        for i in self._floats:
            row = obs[i][lane]
            if not finite(row):
                bad = row[~np.isfinite(row)][0]
                raise Broke("garbage", f"{self._leaves[i].path} = {bad}; {FINITE}")

    def _restart_not_finite(self, obs: list[np.ndarray], reward: np.ndarray) -> list[int]:
        """Restart the lanes whose step gave NaN or infinity, and return them."""
        found = []
        for lane in range(self.num_envs):
            try:
                self._require_finite(lane, obs, reward)
            except Broke as broken:
                found.append(lane)
                self._restart(lane, broken, obs)
                reward[lane] = 0.0
        return found

    def _restart(self, lane: int, broken: Broke, obs: list[np.ndarray]) -> None:
        """Put a new env in the place of one that broke, and begin the lane's next episode in it."""
        while True:
            self._note(lane, broken)
            close_env(self._envs[lane])
            episode = int(self._episodes[lane]) + 1
            self._episodes[lane], self._steps[lane] = episode, 0  # also if it breaks before it has begun
            try:
                self._envs[lane] = self._made_again()
                self._pairs[lane], _ = pair_of(self._envs[lane])
                self._begin(lane, episode, obs)
                return
            except Broke as again:
                broken = again

    def _made_again(self) -> Env:
        try:
            made, spec = make_described(self._env, self._args)
        except (Exception, SystemExit) as error:
            raise Broke("raised", f"it could not be made again: {summary(error)}") from error
        if spec != self.spec:
            close_env(made)
            raise Broke("garbage", "made again, it has other spaces")
        return made

    def _note(self, lane: int, broken: Broke) -> None:
        """Add to the faults; an error if going on is of no use."""
        fault = self._fault(lane, broken)
        if broken.kind == "garbage" and not self._proven and self._breaks[lane]:
            raise self._error(broken, fault) from broken.__cause__
        calm = self._clock - self._broke_at[lane] > STEPS_BETWEEN
        self._breaks[lane] = 1 if calm else self._breaks[lane] + 1
        self._broke_at[lane] = self._clock
        if self._breaks[lane] > BREAKS_IN_A_ROW:
            often = f", {self._breaks[lane]} times in a row within {STEPS_BETWEEN} steps"
            raise self._error(broken, fault, often) from broken.__cause__
        self.faults.append(fault)

    def _fault(self, lane: int, broken: Broke) -> EnvFault:
        step = int(self._steps[lane])
        past = None if self._actions is None else self._actions[lane, :step]
        too_long = past is not None and past.nbytes > MOST_BYTES
        return EnvFault(
            env=self._env,
            args=self._args,
            kind=broken.kind,
            lane=self._first + lane,
            seed=self._episode_seed(lane),
            step=step,
            cause=broken.what,
            trace=trace_of(broken.__cause__),
            actions=None if past is None or too_long else past.copy(),
            too_long=too_long,
        )

    def _error(self, broken: Broke, fault: EnvFault, often: str = "") -> EnvError:
        kind = ContractError if broken.kind == "garbage" and not self._proven else EnvError
        where = f"in lane {fault.lane}{often} (episode seed {fault.seed}, step {fault.step})"
        error = kind(f"env {self._env!r} broke {where}: {broken.what}")
        error.facts = fault.facts()
        return error

    def _for_env(self, action: np.ndarray) -> Sequence[Any]:
        """Actions as a single env expects them: an int, or an array of its space's dtype that it may keep."""
        if self._scalar_action:
            return action.tolist()
        return action.astype(self._env_action_dtype)  # type: ignore[return-value]

    def _record(self, action: np.ndarray) -> None:
        if self._actions is None:
            return
        actions = self._actions = _with_room(self._actions, int(self._steps.max()) + 1)
        actions[self._lanes, self._steps] = action

    def _save(self) -> Tree:
        """The states of all lanes that can be saved, by lane. One that breaks here is made anew in its next step."""
        states: Tree = {}
        for lane in range(self.num_envs):
            if lane in self._unsaved:
                continue
            try:
                states[str(lane)] = self._save_lane(lane)
            except Broke as broken:
                if not self._saved:
                    raise self._error(broken, self._fault(lane, broken)) from broken.__cause__
                self._unsaved[lane] = broken
        return states

    def _save_lane(self, lane: int) -> Tree:
        pair = self._pairs[lane]
        if pair is None:
            raise Broke("garbage", "made again, it has no save_state and load_state any more")
        try:
            state = pair.save()
        except NoTree as error:
            raise ContractError(f"env {self._env!r} cannot be saved: {error}") from None
        except (Exception, SystemExit) as error:
            raise Broke("raised", f"{pair.saver} raised {summary(error)}") from error
        self._saved = True
        return state

    def _bring_back(self, lane: int, tree: Tree, obs: list[np.ndarray], saved: list[np.ndarray]) -> _Lost | None:
        """Bring a lane to where it was, or tell why that is not possible."""
        states, steps, pair = tree.get("saved"), np.asarray(tree["steps"]), self._pairs[lane]
        if states is not None and str(lane) in states and pair is not None:
            return self._load_lane(lane, pair, tree, obs, saved)
        end, count = int(steps[: lane + 1].sum()), int(steps[lane])
        if "actions" in tree or not count:
            return self._replay(lane, tree, np.asarray(tree.get("actions", ())[end - count : end]), obs, saved)
        if states is None:
            return _Lost("they were saved with exact_resume=false")
        if str(lane) not in states:
            return _Lost("they could not be saved")
        return _Lost("they were saved by save_state and load_state or a snapshot, which it does not have any more")

    def _load_lane(
        self, lane: int, pair: Pair, tree: Tree, obs: list[np.ndarray], saved: list[np.ndarray]
    ) -> _Lost | None:
        """Bring a lane to where it was by giving its env the state that it has saved."""
        self._begin(lane, int(tree["episodes"][lane]), obs)  # so that all exists that an episode needs
        state = tree["saved"][str(lane)]
        try:
            pair.load(state)
        except (Exception, SystemExit) as error:
            raise Broke("raised", f"{pair.loader} raised {summary(error)}") from error
        where = difference(state, self._save_lane(lane))
        if where:
            reason = f"what its {pair.loader} was given is not what its {pair.saver} gives afterwards"
            return _Lost(reason, f"{where!r} differs")
        self._steps[lane], self._returns[lane] = tree["steps"][lane], tree["returns"][lane]
        for now, then in zip(obs, saved, strict=True):
            now[lane] = then[lane]
        return None

    def _replay(
        self, lane: int, tree: Tree, past: np.ndarray, obs: list[np.ndarray], saved: list[np.ndarray]
    ) -> _Lost | None:
        """Bring a lane to where it was by taking its past actions again, if that leads there."""
        why = f"as {self._keeps[0]}" if self._keeps else f"and `raynforce doctor {self._env}` tells why"
        reason = f"replaying their actions led elsewhere, {why}"
        self._begin(lane, int(tree["episodes"][lane]), obs)
        if len(past):
            if self._actions is not None:
                self._actions = _with_room(self._actions, len(past))
                self._actions[lane, : len(past)] = past
            for choice in self._for_env(past):
                self._steps[lane] += 1
                reward, terminated, truncated, _ = self._step_lane(lane, choice, obs)
                self._returns[lane] += np.float32(reward)  # as a step adds them up
                if terminated or truncated:
                    return _Lost(reason, f"it ended after {self._steps[lane]} of {len(past)} steps")
        for leaf, now, then in zip(self._leaves, obs, saved, strict=True):
            if not same(now[lane], then[lane]):
                what = _difference(leaf.path, now[lane], then[lane])
                return _Lost(reason, f"after {len(past)} steps {what}")
        if "returns" in tree and self._returns[lane] != tree["returns"][lane]:
            was = f"{tree['returns'][lane]:.9g}"
            return _Lost(reason, f"after {len(past)} steps the return is {self._returns[lane]:.9g}, not {was}")
        return None

    def _new_obs(self) -> list[np.ndarray]:
        return [np.empty((self.num_envs, *leaf.shape), leaf.dtype) for leaf in self._leaves]

    def _episode_seed(self, lane: int) -> int:
        return derive_seed(self._seed, self._sampler, self._first + lane, int(self._episodes[lane]))

    def _must_be_reset(self) -> None:
        if not self._obs:
            raise UsageError(f"env {self._env!r} has no running episodes yet; call reset() or load() first")


def saved_obs(spec: EnvSpec, num_envs: int, tree: Tree) -> list[np.ndarray]:
    """The saved observations, once the saved state is known to fit a vector of single environments."""
    if tree.get("kind") != "local":
        raise CheckpointError(f"env {spec.env!r} was saved by another vector implementation; resume with the same one")
    saved = [np.asarray(tree["obs"][str(i)]) for i in range(len(tree["obs"]))]
    shapes = [array.shape for array in saved]
    expected = [(num_envs, *leaf.shape) for leaf in spec.obs]
    if shapes != expected:
        raise CheckpointError(f"env {spec.env!r} was saved with observations {shapes}, now they are {expected}")
    return saved


def lost_episodes(env: str, lanes: int, lost: Lost) -> list[str]:
    """What could not be brought back, in a sentence for each reason."""
    return [
        f"{len(examples)} of {lanes} running episodes of env {env!r} start over: {reason}{examples[0]}"
        for reason, examples in lost.items()
    ]


def _with_room(actions: np.ndarray, steps: int) -> np.ndarray:
    """Actions `[B, T, ...]` with T doubled until `steps` fit."""
    while steps > actions.shape[1]:
        actions = np.concatenate([actions, np.empty_like(actions)], axis=1)
    return actions


def _difference(path: str, now: np.ndarray, then: np.ndarray) -> str:
    """The first element that differs, in numbers."""
    index = int(np.argmax(now.reshape(-1) != then.reshape(-1)))
    return f"{path}[{index}] is {now.reshape(-1)[index]}, not {then.reshape(-1)[index]}"
