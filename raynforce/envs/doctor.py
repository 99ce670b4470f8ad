"""The doctor: tries an environment for a moment and says in plain words what is wrong with it and how to fix it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from raynforce.envs.cost import Cost, Stopwatch
from raynforce.envs.describe import describe, flatten_obs, is_flag, is_scalar, leaf_spaces, misfit, short
from raynforce.envs.make import Env, close_env, locate, make
from raynforce.envs.native import NativeVector
from raynforce.envs.patience import patience
from raynforce.envs.vector import Step, VectorEnv, make_vector, same
from raynforce.errors import EnvError, RaynforceError, UsageError, summary
from raynforce.spaces import EnvSpec, ObsLeaf
from raynforce.trees import Tree, join, split

Level = Literal["ok", "warning", "error"]

_SECONDS = 10.0
_HANGS = 120.0  # seconds after which it is given up: it hangs, or is too slow to be tried
_SHARE = 0.1  # of that time, to save and load it


@dataclass(frozen=True)
class Finding:
    """One thing the doctor looked at."""

    level: Level
    title: str
    detail: str


@dataclass
class Report:
    """All findings, in the order of the checks."""

    env: str
    findings: list[Finding] = field(default_factory=list)
    spec: EnvSpec | None = None
    """What it takes and gives, once that is known."""
    cost: Cost | None = None
    """Of its steps, one environment at a time."""
    native: bool = False
    """Whether it has a vector implementation of its own."""

    @property
    def ok(self) -> bool:
        """Whether the environment can be trained on: no finding is an error."""
        return all(finding.level != "error" for finding in self.findings)

    def add(self, level: Level, title: str, detail: str) -> None:
        """Note a finding; the same title is noted once, however often it happens."""
        if all(finding.title != title for finding in self.findings):
            self.findings.append(Finding(level, title, detail))


def check_env(env: str, env_args: Mapping[str, Any] | None = None, *, steps: int = 500) -> Report:
    """Try the environment for at most `steps` steps and about ten seconds, a tenth of them to save and load it.

    Whatever a bad environment does becomes a finding; only a name that cannot be found is a `UsageError`.
    """
    if steps < 4:
        raise UsageError(f"steps is {steps}; the checks need 4 or more")
    locate(env)
    report = Report(env)
    started = time.monotonic()
    try:
        made = make(env, env_args)
    except UsageError as error:
        report.add("error", "cannot be made", str(error))
        return report
    seconds = time.monotonic() - started
    checkup = _Checkup(env, made, report, steps)
    try:
        with patience(_HANGS, "the doctor"):
            rollout = checkup.run()
    except _GiveUp:
        return report
    except EnvError:
        report.add("error", "hangs", f"{checkup.doing} was not through {_HANGS:g} seconds after the first reset began")
        return report
    finally:
        close_env(made)  # before the next one is made: some simulators can only be had once
    if report.ok:
        affordable = int(_SHARE * _SECONDS / 4 / max(1e-9, float(np.mean(rollout.step_seconds))))
        actions = rollout.actions[: max(1, min(affordable, steps // 20, 23))]  # mostly not the length of an episode
        _check_resume(env, env_args, report, actions, fresh=seconds < _SHARE * _SECONDS)
    return report


class _GiveUp(Exception):
    """The env cannot be tried any further; the report says why."""


@dataclass
class _Rollout:
    """What a stretch of episodes showed."""

    actions: list[Any] = field(default_factory=list)
    trace: list[tuple[np.ndarray, ...]] = field(default_factory=list)
    """Per reset and step the leaves, then `[reward, terminated, truncated]` for a step."""
    step_seconds: list[float] = field(default_factory=list)
    reset_seconds: list[float] = field(default_factory=list)
    computed_seconds: list[float] = field(default_factory=list)
    """Of the steps."""
    terminated: list[int] = field(default_factory=list)
    """Lengths of the episodes that ended by themselves."""
    truncated: list[int] = field(default_factory=list)


class _Checkup:
    """The checks that need the running env, in order; each adds its findings to the report."""

    def __init__(self, name: str, env: Env, report: Report, steps: int) -> None:
        self.name, self.env, self.report = name, env, report
        # One stretch, the same again to compare, and two steps for the reset in mid-episode.
        self.stretch = (steps - 2) // 2
        self.seconds = self.computed = 0.0  # that the last call of the env alone took, and computed
        self.doing = ""
        self.leaves: tuple[ObsLeaf, ...] = ()
        self.boxes: dict[str, spaces.Box] = {}

    def run(self) -> _Rollout:
        self.check_spaces()
        self.check_reset()
        rollout = self.rollout()
        if self.report.ok:
            self.report.add("ok", "steps", f"{len(rollout.actions)} steps gave numbers and flags of the right kind")
        self.check_ends(rollout)
        self.check_same_again(rollout)
        self.check_reset_in_mid_episode()
        self.check_scale(rollout)
        self.check_speed(rollout)
        return rollout

    def stop(self, title: str, detail: str) -> _GiveUp:
        self.report.add("error", title, detail)
        return _GiveUp()

    def check_spaces(self) -> None:
        try:
            spec = describe(self.name, self.env.observation_space, self.env.action_space)
        except UsageError as error:
            raise self.stop("spaces are not supported", str(error)) from error
        except Exception as error:
            detail = f"{summary(error)}; set self.observation_space and self.action_space in __init__"
            raise self.stop("spaces are missing", detail) from error
        self.report.spec, self.leaves = spec, spec.obs
        for path, space in leaf_spaces(self.name, self.env.observation_space):
            if isinstance(space, spaces.Box):
                self.boxes[path] = space
        self.report.add(
            "ok", "spaces", f"observation {short(self.env.observation_space)}, action {short(self.env.action_space)}"
        )
        if spec.action.kind == "box" and not np.all(np.isfinite([*spec.action.low, *spec.action.high])):
            detail = "actions will not be clipped there; give Box finite low and high if the env has limits"
            self.report.add("warning", "the action space has infinite bounds", detail)

    def check_reset(self) -> None:
        first = self.reset(1)[1]
        self.report.add("ok", "reset", "returns (obs, info)")
        again = self.reset(1)[1]
        if not _all_same(first, again):
            detail = (
                "two resets with the same seed showed different observations, so no run can be repeated and resume "
                "starts new episodes; call super().reset(seed=seed) and draw all random numbers from self.np_random"
            )
            self.report.add("warning", "reset(seed) is not deterministic", detail)
        elif all(_all_same(first, self.reset(seed)[1]) for seed in (2, 3, 4)):
            detail = (
                "four different seeds showed the same first observation; fine if the start is meant to be fixed, "
                "otherwise draw it from self.np_random after super().reset(seed=seed)"
            )
            self.report.add("warning", "every episode starts the same", detail)
        else:
            self.report.add("ok", "seeding", "the same seed starts the same episode, other seeds start others")

    def rollout(self, actions: list[Any] | None = None) -> _Rollout:
        """Episodes of random actions, or of the given ones, with the same seeds each time."""
        out = _Rollout()
        if actions is None:
            self.env.action_space.seed(0)
        deadline = time.monotonic() + 0.9 * (1 - _SHARE) / 2 * _SECONDS
        episode, length = 0, 0
        raw = self.begin(out, episode)
        for index in range(self.stretch if actions is None else len(actions)):
            if index and time.monotonic() > deadline:
                break
            action = self.env.action_space.sample() if actions is None else actions[index]
            out.actions.append(action)
            new, leaves, reward, terminated, truncated = self.step(action, f"step {length + 1} of episode {episode}")
            out.step_seconds.append(self.seconds)
            out.computed_seconds.append(self.computed)
            out.trace.append((*leaves, np.array([reward, terminated, truncated], np.float64)))
            self.check_aliasing(raw, new)
            raw, length = new, length + 1
            if terminated or truncated:
                (out.terminated if terminated else out.truncated).append(length)
                episode, length = episode + 1, 0
                raw = self.begin(out, episode)
        return out

    def begin(self, out: _Rollout, episode: int) -> Any:
        raw, leaves = self.reset(100 + episode)
        out.reset_seconds.append(self.seconds)
        out.trace.append(leaves)
        return raw

    def reset(self, seed: int) -> tuple[Any, tuple[np.ndarray, ...]]:
        """Reset the env; gives the observation as it came, and copies of its leaves."""
        self.doing = f"reset(seed={seed})"
        watch = Stopwatch()
        try:
            result: Any = self.env.reset(seed=seed)
        except (Exception, SystemExit) as error:
            detail = f"reset(seed={seed}) raised {summary(error)}"
            if isinstance(error, TypeError) and "seed" in str(error):
                detail += "; declare it as def reset(self, *, seed=None, options=None)"
            raise self.stop("reset raises", detail) from error
        self.seconds, self.computed = watch.stop()
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
            detail = f"it returned {_kinds(result)}; return (obs, info), where info is a dict and may be empty"
            raise self.stop("reset does not return (obs, info)", detail)
        return result[0], self.check_obs(result[0], "reset")

    def step(self, action: Any, where: str) -> tuple[Any, tuple[np.ndarray, ...], float, bool, bool]:
        self.doing = where
        watch = Stopwatch()
        try:
            result: Any = self.env.step(action)
        except (Exception, SystemExit) as error:
            raise self.stop("step raises", f"{where}, action {short(action)}: {summary(error)}") from error
        self.seconds, self.computed = watch.stop()
        if not isinstance(result, tuple) or len(result) != 5:
            detail = f"it returned {_kinds(result)}; return (obs, reward, terminated, truncated, info)"
            raise self.stop("step does not return 5 values", detail)
        raw, reward, terminated, truncated, info = result
        if not is_scalar(reward):
            detail = f"{where}: the reward is {short(reward)} ({type(reward).__name__}); return float(reward)"
            raise self.stop("the reward is not a number", detail)
        if not np.isfinite(reward):
            self.report.add("error", "the reward is not finite", f"{where}: it is {reward}; look for a division or log")
        for title, flag in (("terminated", terminated), ("truncated", truncated)):
            if not is_flag(flag):
                detail = f"{where}: it is {short(flag)} ({type(flag).__name__}); return True or False"
                raise self.stop(f"{title} is not a bool", detail)
            if not isinstance(flag, bool | np.bool_):
                self.report.add(
                    "warning", f"{title} is not a bool", f"{where}: it is {short(flag)}; return bool({title})"
                )
        if not isinstance(info, dict):
            self.report.add("warning", "info is not a dict", f"{where}: it is a {type(info).__name__}; return {{}}")
        return raw, self.check_obs(raw, where), float(reward), bool(terminated), bool(truncated)

    def check_obs(self, raw: Any, where: str) -> tuple[np.ndarray, ...]:
        """Copies of an observation's leaves as they will be stored, once they are known to fit."""
        try:
            values = flatten_obs(raw, self.leaves)
        except UsageError as error:
            raise self.stop("the observation does not fit its space", f"{where}: {error}") from error
        stored = []
        for leaf in self.leaves:
            value = values[leaf.path]
            wrong = misfit(value, leaf)
            if wrong:
                detail = f"{where}: {wrong}; change what the env returns, or its observation_space"
                raise self.stop("the observation does not fit its space", detail)
            array = np.array(value)
            stored.append(array.astype(leaf.dtype))
            if leaf.path in self.boxes:
                self.check_box(array, leaf, self.boxes[leaf.path], where)
        return tuple(stored)

    def check_box(self, array: np.ndarray, leaf: ObsLeaf, box: spaces.Box, where: str) -> None:
        if array.dtype != box.dtype:
            detail = f"{where}: {leaf.path!r} is {array.dtype} but declared {box.dtype}; return obs.astype({box.dtype})"
            self.report.add("warning", "the observation has another dtype", detail)
        if not np.all(np.isfinite(array)):
            detail = f"{where}: {leaf.path!r} holds NaN or infinity; training would end there"
            self.report.add("error", "the observation is not finite", detail)
        elif np.any(array < box.low) or np.any(array > box.high):
            worst = array[(array < box.low) | (array > box.high)].reshape(-1)[0]
            detail = f"{where}: {leaf.path!r} holds {worst}; widen low and high of the Box, or clip"
            self.report.add("warning", "the observation leaves its bounds", detail)

    def check_aliasing(self, before: Any, now: Any) -> None:
        old, new = flatten_obs(before, self.leaves), flatten_obs(now, self.leaves)
        for path, array in new.items():
            if isinstance(array, np.ndarray) and array.size and np.may_share_memory(array, old[path]):
                detail = (
                    f"{path!r} is the same memory at every step, so an observation that was kept changes later; "
                    "Raynforce copies at once and is safe, other code is not: return obs.copy()"
                )
                self.report.add("warning", "observations share memory", detail)

    def check_ends(self, rollout: _Rollout) -> None:
        ended, cut, steps = rollout.terminated, rollout.truncated, len(rollout.actions)
        both = sum(1 for row in rollout.trace if len(row) > len(self.leaves) and row[-1][1] and row[-1][2])
        if both:
            detail = (
                f"{both} of {len(ended)} ends were terminated and truncated at once, which counts as terminated; "
                "a time limit should set truncated alone, so that the future is still worth something"
            )
            self.report.add("warning", "terminated and truncated together", detail)
        if not ended and not cut:
            if _time_limit(self.env) is None:
                detail = (
                    f"none of {steps} steps ended an episode and there is no time limit; returns are only known at "
                    "an end: wrap the env in gymnasium.wrappers.TimeLimit, or register it with max_episode_steps"
                )
                self.report.add("warning", "episodes may never end", detail)
            else:
                self.report.add("ok", "episodes", f"none ended in {steps} steps; the time limit ends them")
        elif not cut and len(ended) >= 3 and len(set(ended)) == 1 and ended[0] > 1:
            detail = (
                f"all {len(ended)} episodes terminated after exactly {ended[0]} steps; if that is a time limit, return "
                "truncated=True instead, so that the future is still worth something; if it is the task, all is well"
            )
            self.report.add("warning", "terminated may be a time limit", detail)
        else:
            self.report.add("ok", "episodes", f"{len(ended)} terminated and {len(cut)} truncated in {steps} steps")

    def check_same_again(self, rollout: _Rollout) -> None:
        again = self.rollout(rollout.actions)
        for index, (then, now) in enumerate(zip(rollout.trace, again.trace, strict=False)):
            if not _all_same(then, now):
                detail = (
                    f"the same seed and actions led elsewhere after {index} observations, so a resumed run starts new "
                    "episodes where it cannot replay the old; draw all random numbers from self.np_random"
                )
                self.report.add("warning", "episodes are not deterministic", detail)
                return
        self.report.add("ok", "determinism", f"the same seed and {len(again.actions)} actions gave the same episodes")

    def check_reset_in_mid_episode(self) -> None:
        self.reset(1)
        self.step(self.env.action_space.sample(), "step 1 before a reset in mid-episode")
        self.reset(2)
        self.step(self.env.action_space.sample(), "step 1 after a reset in mid-episode")
        self.report.add("ok", "reset in mid-episode", "works")

    def check_scale(self, rollout: _Rollout) -> None:
        """Large inputs slow learning down: look at what came, as the declared bounds are often infinite."""
        for index, leaf in enumerate(self.leaves):
            if leaf.kind != "box" or leaf.dtype != "float32":
                continue
            largest = max(float(np.max(np.abs(row[index]), initial=0.0)) for row in rollout.trace)
            bounds = np.concatenate([self.boxes[leaf.path].low.reshape(-1), self.boxes[leaf.path].high.reshape(-1)])
            declared = float(np.max(np.abs(bounds), initial=0.0))
            advice = f"{leaf.path!r}: values up to {largest:.3g} came, bounds reach {declared:.3g}"
            if largest > 10.0:
                self.report.add("warning", "observations are large", f"{advice}; set network.normalize_obs=true")
            elif declared > 1000.0:
                detail = f"{advice}; if values grow in training, set network.normalize_obs=true"
                self.report.add("ok", "observation bounds are very large", detail)

    def check_speed(self, rollout: _Rollout) -> None:
        self.report.cost = cost = Cost.of(rollout.step_seconds, rollout.computed_seconds, rollout.reset_seconds)
        p50, p99 = (float(x) for x in np.percentile(rollout.step_seconds, [50, 99]))
        detail = (
            f"{1 / max(cost.mean or 0.0, 1e-9):,.0f} steps/s; step p50 {p50 * 1e3:.3g} ms, p99 {p99 * 1e3:.3g} ms "
            f"({p99 / max(p50, 1e-9):.1f} times), reset {float(np.mean(rollout.reset_seconds)) * 1e3:.3g} ms"
        )
        self.report.add("ok", "speed", detail)


def _check_resume(
    env: str, env_args: Mapping[str, Any] | None, report: Report, actions: list[Any], *, fresh: bool
) -> None:
    """Play, save, play on; load and play on with the same actions; into a `fresh` env, as a resume does, if asked."""
    vector: VectorEnv | None = None
    try:
        vector = make_vector(env, env_args, 1, seed=0)
        _say_vectorised(vector, report)
        choices = np.array(actions, vector.spec.action.dtype)[:, None]  # [k, 1, ...]
        vector.reset()
        for choice in choices:
            vector.step(choice)
        tree = _through_a_file(vector.state())
        then = [vector.step(choice) for choice in choices]
        if fresh:
            vector.close()
            vector = make_vector(env, env_args, 1, seed=0)
        notes = vector.load(tree)
        now = []
        for choice in choices:
            now.append(vector.step(choice))
            vector.state()  # which must not change the course of things
    except (Exception, SystemExit) as error:
        detail = str(error) if isinstance(error, RaynforceError) else summary(error)
        report.add("error", "running episodes cannot be saved", detail)
        return
    finally:
        if vector is not None:
            vector.close()
    other = next((i for i, pair in enumerate(zip(then, now, strict=True)) if not _all_same(*map(_arrays, pair))), None)
    if notes:
        report.add("warning", "running episodes begin anew at resume", notes[0])
    elif other is not None:
        detail = (
            f"they come back {vector.way_back}, but with the same actions step {other + 1} after loading was not that "
            "of before: save and load all that step() depends on, and change nothing while saving"
        )
        report.add("warning", "running episodes go another way after resume", detail)
    else:
        detail = f"come back {vector.way_back}: {len(now)} steps after loading were the same as before"
        report.add("ok", "running episodes", detail)


def _say_vectorised(vector: VectorEnv, report: Report) -> None:
    report.native = isinstance(vector, NativeVector)
    if report.native:
        report.add("ok", "vectorised by its own implementation", "all lanes are stepped in one call")
    else:
        report.add("ok", "vectorised by a loop", vector.note or "single envs are stepped one after the other")


def _through_a_file(tree: Tree) -> Tree:
    """As a checkpoint would give it back: arrays apart, the rest as JSON."""
    arrays, rest = split(tree)
    return join({path: array.copy() for path, array in arrays.items()}, json.loads(json.dumps(rest)))


def _arrays(step: Step) -> tuple[np.ndarray, ...]:
    return (*step.obs.values(), step.reward, step.terminated, step.truncated, *step.final_obs.values())


def _time_limit(env: Env) -> int | None:
    """The episode length that gymnasium's `TimeLimit` enforces, if the env is wrapped in it."""
    layer: Any = env
    while isinstance(layer, gymnasium.Wrapper):
        if isinstance(layer, gymnasium.wrappers.TimeLimit):
            return int(layer._max_episode_steps)
        layer = layer.env
    return None


def _all_same(a: tuple[np.ndarray, ...], b: tuple[np.ndarray, ...]) -> bool:
    return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))


def _kinds(result: Any) -> str:
    if isinstance(result, tuple):
        return f"{len(result)} values ({', '.join(type(x).__name__ for x in result)})"
    return f"a {type(result).__name__}"
