"""An environment's own vector implementation, in whichever way it resets, with snapshots for exact resume."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode

from raynforce.envs.describe import Args, describe, flatten_obs, leaf_spaces
from raynforce.envs.faults import EnvFault, trace_of
from raynforce.envs.make import close_env, locate, make
from raynforce.envs.masks import KEY, misfit
from raynforce.envs.snapshots import path_of, snapshot_of
from raynforce.envs.vector import NOT_AT_ALL, Step, VectorEnv, derive_seed, first_of_attempt
from raynforce.envs.wrappers import KEY as WRAPPERS
from raynforce.envs.wrappers import SETTING
from raynforce.errors import ContractError, EnvError, UsageError, summary
from raynforce.infos import NOTHING, Info, numbers
from raynforce.spaces import MASK, forbids, forbids_all
from raynforce.trees import Tree

Arrays = dict[str, np.ndarray]
GymVector = gymnasium.vector.VectorEnv[Any, Any, Any]


def registered_vector(
    env: str, args: dict[str, Any], num_envs: int, *, exact_resume: bool
) -> tuple[GymVector | None, str]:
    """The env's registered vector implementation; or None and why it does not serve (empty: there is none)."""
    name = locate(env)
    if not isinstance(name, str) or gymnasium.registry[name].vector_entry_point is None:
        return None, ""
    if args.get(WRAPPERS):
        return None, f"env {env!r} is stepped in a loop: {SETTING} are around single environments"
    if gymnasium.registry[name].entry_point is not None:
        close_env(make(env, args))  # it says best what is wrong with env_args
    if args.get("max_episode_steps") == -1:  # gymnasium.make's word for "no time limit", which only wrappers know
        return None, f"env {env!r} is stepped in a loop: its vector implementation cannot go without a time limit"
    try:
        vector = gymnasium.make_vec(name, num_envs, vectorization_mode="vector_entry_point", **args)
    except Exception as error:
        return None, f"env {env!r} is stepped in a loop: its vector implementation failed ({summary(error)})"
    if exact_resume and snapshot_of(vector) is None:
        close_env(vector)
        return None, f"env {env!r} is stepped in a loop: its vector implementation has no snapshot for exact resume"
    return vector, ""


class NativeVector(VectorEnv):
    """A gymnasium `VectorEnv` of any autoreset mode; one random stream, and whatever breaks is an `EnvError`."""

    def __init__(
        self, env: str, vector: GymVector, *, seed: int, sampler: int = 0, env_args: Args = None, masked: bool = False
    ) -> None:
        space, action_space = vector.single_observation_space, vector.single_action_space
        spec = describe(env, space, action_space, env_args, masked=masked)
        self._snapshot = snapshot_of(vector)
        by = f"through the snapshot registered for {path_of(vector)}"
        super().__init__(spec, vector.num_envs, "", by if self._snapshot is not None else NOT_AT_ALL)
        self._vector, self._seed, self._sampler = vector, seed, sampler
        self._proven = False  # whether a step has gone well
        self._mode = AutoresetMode(vector.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP))
        self._action_dtype = vector.action_space.dtype
        paths = [path for path, _ in leaf_spaces(env, space)]
        self._shown = spec.obs[: len(paths)]  # what observations have
        self._leaves = [(x.path, np.dtype(x.dtype), (self.num_envs, *x.shape)) for x in self._shown]
        self._masks = MASK if MASK in paths else f"infos[{KEY!r}]" if spec.masked else ""  # where they come from
        self._everyone = np.arange(self.num_envs)
        self._resets = self._steps = 0
        self._ended = np.zeros(self.num_envs, np.bool_)  # NEXT_STEP: lanes whose next step only resets
        self._resetting = False

    def reset(self, seed: int | None = None) -> Arrays:
        if seed is not None:
            self._seed, self._resets = seed, 0
        stream = derive_seed(self._seed, self._sampler, self._resets)
        self._resets += 1
        try:
            raw, infos = self._vector.reset(seed=stream)
        except (Exception, SystemExit) as error:
            raise self._broken(f"reset raised {summary(error)}", error) from error
        self._obs = self._seen(raw, infos)
        self._ended = np.zeros(self.num_envs, np.bool_)
        self._resetting = False
        return self._obs

    def start_fresh(self, attempt: int) -> Arrays:
        self._resets = first_of_attempt(attempt)
        self._proven = True  # in the first run
        return self.reset()

    def take_faults(self) -> list[EnvFault]:
        return []

    def step(self, action: np.ndarray) -> Step:
        self._require_actions(action)
        self._steps += 1
        try:
            raw, rewards, ends, cuts, infos = self._vector.step(action.astype(self._action_dtype, copy=False))
        except (Exception, SystemExit) as error:
            raise self._broken(f"step raised {summary(error)}", error) from error
        try:
            reward = np.array(rewards, np.float32)
            terminated, truncated = np.array(ends, np.bool_), np.array(cuts, np.bool_)
        except (TypeError, ValueError) as error:
            raise self._broken(f"reward, terminated, truncated are no arrays of numbers: {summary(error)}") from error
        if not reward.shape == terminated.shape == truncated.shape == (self.num_envs,):
            came = f"{reward.shape}, {terminated.shape}, {truncated.shape}"
            raise self._broken(f"reward, terminated, truncated have shapes {came}; expected ({self.num_envs},)")
        obs = self._seen(raw, infos, None if self._mode is AutoresetMode.SAME_STEP else terminated)
        valid = self._all_valid
        if self._resetting:
            valid = ~self._ended
            reward[self._ended] = 0.0
            terminated &= valid
            truncated &= valid
        ended = terminated | truncated
        any_ended = bool(np.count_nonzero(ended))
        final_lanes, final_obs = self._no_lanes, self._no_final
        told = self._told(infos, np.flatnonzero(ended)) if any_ended and infos else NOTHING
        if self._mode is AutoresetMode.NEXT_STEP:
            self._ended, self._resetting = ended, any_ended
        elif any_ended:
            final_lanes = np.flatnonzero(ended)
            final_obs = self._finish(obs, ended, final_lanes, infos, truncated & ~terminated)
        self._obs = obs
        self._proven = True
        return Step(obs, reward, terminated, truncated, valid, final_lanes, final_obs, self._no_lanes, told)

    def state(self) -> Tree:
        obs = self.current().values()
        tree: Tree = {"kind": "native", "resets": self._resets, "steps": self._steps, "ended": self._ended}
        tree["obs"] = {str(i): array for i, array in enumerate(obs)}  # by number: a path's '/' would nest
        if self._snapshot is not None:
            tree["env"] = self._snapshot.save(self._vector)
        return tree

    def load(self, tree: Tree) -> list[str]:
        saved = self._saved_obs(tree, "native")
        self._resets, self._steps = int(tree["resets"]), int(tree["steps"])
        self._proven = self._steps > 0
        self.restarted = []
        self.reset()  # also gives the env its buffers; the seed is one that was not used before
        if self._snapshot is None or "env" not in tree:
            self.restarted = list(range(self.num_envs))
            which = f"all {self.num_envs} running episodes of env {self.spec.env!r} start over"
            return [f"{which}: its vector implementation has no snapshot; exact_resume=true would replay them"]
        self._resets = int(tree["resets"])
        self._snapshot.load(self._vector, tree["env"])
        self._obs = {leaf.path: array.copy() for leaf, array in zip(self.spec.obs, saved, strict=True)}
        self._ended = np.array(tree["ended"], np.bool_)
        self._resetting = bool(self._ended.any())
        return []

    def close(self) -> None:
        close_env(self._vector)

    def _copied(self, raw: Any) -> Arrays:
        """Copy a batched observation: the env may reuse its memory. In C order: a policy rounds otherwise."""
        try:
            values = flatten_obs(raw, self._shown)
        except UsageError as error:
            raise self._broken(str(error)) from error
        obs = {}
        for path, dtype, shape in self._leaves:
            try:
                array = obs[path] = np.array(values[path], dtype, order="C")
            except Exception as error:  # it may be anything
                raise self._broken(f"the observation {path!r} is no array: {summary(error)}") from error
            if array.shape != shape:
                raise self._broken(f"the observation {path!r} has shape {array.shape}; expected {shape}")
        return obs

    def _finish(
        self, obs: Arrays, ended: np.ndarray, lanes: np.ndarray, infos: Mapping[str, Any], cut: np.ndarray
    ) -> Arrays:
        """The true last observations `[K, ...]` of the lanes that ended; `obs` then shows their next episodes. Of those
        that were `cut` `[B]`, masks are needed."""
        if self._mode is AutoresetMode.DISABLED:
            final = {path: array[lanes] for path, array in obs.items()}
            try:
                raw, again = self._vector.reset(options={"reset_mask": ended.copy()})
            except (Exception, SystemExit) as error:
                raise self._broken(f"reset raised {summary(error)}", error) from error
            for path, array in self._seen(raw, again, ~ended).items():
                obs[path][lanes] = array[lanes]
            return final
        last = infos.get("final_obs")
        if last is None:
            raise self._broken("it resets in the same step, but infos has no 'final_obs' for the episodes that ended")
        try:
            if isinstance(last, np.ndarray) and last.dtype == object:  # [B] observations, None where none ended
                rows = [flatten_obs(last[lane], self._shown) for lane in lanes]
                final = {path: np.array([row[path] for row in rows], dtype) for path, dtype, _ in self._leaves}
            else:
                values = flatten_obs(last, self._shown)
                final = {path: np.array(np.asarray(values[path])[lanes], dtype) for path, dtype, _ in self._leaves}
        except Exception as error:  # it may be anything
            raise self._broken(f"infos['final_obs'] does not fit: {summary(error)}") from error
        for path, _, (_, *shape) in self._leaves:
            if final[path].shape != (len(lanes), *shape):
                came = f"{path!r} of shape {final[path].shape[1:]}"
                raise self._broken(f"infos['final_obs'] has {came}; expected {tuple(shape)}")
        if self._masks and self._masks != MASK:
            final[MASK] = self._mask_in(infos.get("final_info"), ~cut)[lanes]
        if self._masks:
            self._require_allowed(final[MASK][cut[lanes]], lanes[cut[lanes]])
        return final

    def _seen(self, raw: Any, infos: Any, over: np.ndarray | None = None) -> Arrays:
        """What is seen, a mask included that comes in `infos`; none is needed of lanes `[B]` that are `over`."""
        obs = self._copied(raw)
        if self._masks:
            over = np.zeros(self.num_envs, np.bool_) if over is None else over
            if self._masks != MASK:
                obs[MASK] = self._mask_in(infos, over)
            obs[MASK][over & ~obs[MASK].any(axis=1)] = 1  # in a step that only resets any action will do
            self._require_allowed(obs[MASK], self._everyone)
        return obs

    def _mask_in(self, infos: Any, over: np.ndarray) -> np.ndarray:
        """The masks `[B, n]` in `infos`; all is allowed where there is none, and the episode is `over` `[B]`."""
        choices = sum(self.spec.action.sizes)
        masks = np.ones((self.num_envs, choices), np.int8)
        given: Any = infos.get(KEY) if isinstance(infos, Mapping) else None
        there = ~self._all_valid if given is None else infos.get(f"_{KEY}", self._all_valid)
        for lane in range(self.num_envs):
            if there[lane]:
                if wrong := misfit(given[lane], choices):
                    raise self._broken(f"{self._masks} of env {lane} {wrong}")
                masks[lane] = given[lane]
            elif not over[lane]:
                raise self._broken(f"there is no {self._masks} of env {lane}; give it with every observation")
        return masks

    def _require_allowed(self, masks: np.ndarray, lanes: np.ndarray) -> None:
        """Of masks `[K, n]` of these lanes, each must allow some action."""
        bad = forbids_all(masks, self.spec.action.sizes)
        if bad.any():
            raise self._broken(f"{self._masks} of env {lanes[bad][0]} {forbids(masks, self.spec.action.sizes)}")

    def _told(self, infos: Any, lanes: np.ndarray) -> Mapping[int, Info]:
        """By lane the numbers in `infos` (arrays `[B]` with masks `_key`, or `[B]` dicts) of episodes that ended."""
        found: dict[int, Info] = {}
        with contextlib.suppress(Exception):  # they may be anything, which is no reason to stop
            last = infos.get("final_info", {}) if self._mode is AutoresetMode.SAME_STEP else infos
            for lane in lanes.tolist():
                if told := numbers(_of_lane(last, lane) if isinstance(last, Mapping) else last[lane]):
                    found[lane] = told
        return found

    def _broken(self, what: str, raised: BaseException | None = None) -> EnvError:
        kind = "garbage" if raised is None else "raised"
        cls = ContractError if raised is None and not self._proven else EnvError
        error = cls(f"env {self.spec.env!r} (its own vector implementation, step {self._steps}) broke: {what}")
        fault = EnvFault(self.spec.env, self.spec.args, kind, None, None, self._steps, what, trace_of(raised))
        error.facts = fault.facts()
        return error


def _of_lane(infos: Mapping[str, Any], lane: int) -> dict[str, Any]:
    masks = {f"_{name}" for name in infos}
    mine = {name: c[lane] for name, c in infos.items() if name not in masks and isinstance(c, np.ndarray) and c.ndim}
    return {name: value for name, value in mine.items() if f"_{name}" not in infos or infos[f"_{name}"][lane]}
