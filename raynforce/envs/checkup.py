"""The checks that need a running environment: what it gives, when it ends, and whether it does the same again."""

from __future__ import annotations

import hashlib
import math
import time
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit

from raynforce.envs import masks
from raynforce.envs.causes import State, state_of
from raynforce.envs.cost import Cost, Stopwatch
from raynforce.envs.describe import (
    bits,
    describe,
    flatten_obs,
    is_flag,
    is_scalar,
    leaf_spaces,
    misfit,
    short,
    unread_note,
)
from raynforce.envs.frames import layers, stacks_of
from raynforce.envs.make import Env, agents_of
from raynforce.envs.masks import random_action
from raynforce.envs.patience import patience
from raynforce.errors import UsageError, summary
from raynforce.spaces import (
    ACTING,
    MASK,
    TRUNCATED,
    ActionSpec,
    AgentKind,
    Agents,
    EnvSpec,
    ObsLeaf,
    forbids,
    forbids_all,
    leaf_name,
)

STEPS = 10_000  # that are tried, unless a number is given, or time is up before
SECONDS = 4.0  # for these steps
HANGS = 120.0  # seconds after which a call is given up
_AGAIN, _AGAIN_SECONDS = 2_000, 2.0  # that are played again, to see whether they show the same
_CHUNK = 5.0  # seconds of steps that are watched together
Level = Literal["ok", "warning", "error"]
_FIRST_SEED = 100  # of the episodes that are played


class Finding(NamedTuple):
    level: Level
    title: str
    detail: str
    fix: str = ""  # what to do about it


@dataclass
class Report:
    env: str
    findings: list[Finding] = field(default_factory=list)
    spec: EnvSpec | None = None  # what it takes and gives, once that is known
    cost: Cost | None = None  # of its steps, one environment at a time
    native: bool = False  # whether it has a vector implementation of its own
    steps: int = 0  # of random play that were tried

    @property
    def ok(self) -> bool:
        return all(finding.level != "error" for finding in self.findings)

    def add(self, level: Level, title: str, detail: str, fix: str = "") -> None:
        """Note a finding; the same title is noted once, however often it happens."""
        if all(finding.title != title for finding in self.findings):
            self.findings.append(Finding(level, title, detail, fix))


class GiveUp(Exception):
    """The env cannot be tried any further; the report says why."""


@dataclass
class Rollout:
    actions: list[Any] = field(default_factory=list)
    trace: list[bytes] = field(default_factory=list)  # a digest of what each reset and step gave: images would not fit
    largest: list[float] = field(default_factory=list)  # of each leaf, by absolute value
    step_seconds: list[float] = field(default_factory=list)
    reset_seconds: list[float] = field(default_factory=list)
    computed_seconds: list[float] = field(default_factory=list)  # of the steps
    terminated: list[int] = field(default_factory=list)  # lengths of the episodes that ended by themselves
    truncated: list[int] = field(default_factory=list)
    both: int = 0  # ends that were terminated and truncated at once
    ends: list[int] = field(default_factory=list)  # numbers of the steps that ended an episode, from 1 on
    wrong: int = 0  # how much was wrong with it


class Differs(NamedTuple):
    """An episode that showed something else when it was played again."""

    what: str
    at_reset: bool
    seed: int
    actions: list[Any]
    used: State  # of the environment after it was reset to that episode once more


class Checkup:
    """The checks that need the running env; each adds its findings to the report."""

    def __init__(self, name: str, env: Env, report: Report, steps: int | None) -> None:
        self.name, self.env, self.report = name, env, report
        self.steps, self.limit = (STEPS, SECONDS) if steps is None else (steps, math.inf)
        self.seconds = self.computed = 0.0  # that the last call of the env alone took, and computed
        self.wrong = 0  # errors so far, those with the same title too
        self.doing = ""
        self.leaves: tuple[ObsLeaf, ...] = ()
        self.boxes: dict[str, spaces.Box] = {}
        self.starts_vary = False
        self.masked: bool | None = None  # whether observations come with a mask of allowed actions; None: not known yet
        self.mask: np.ndarray | None = None  # that of the last one
        self.allowed: list[float] = []  # what share of choices it allowed
        self.agents = agents_of(env)  # if there are several, observations are what all of them see
        self.watch = Stopwatch()

    def run(self) -> tuple[Rollout, Differs | None]:
        self.check_spaces()
        with patience(HANGS, "the doctor"):
            starts_differ = self.check_reset()
        rollout = self.rollout(self.steps, self.limit)
        tried = self.report.steps = len(rollout.actions)
        if not rollout.wrong:
            few = f", of {self.steps:,} that were to be tried: time was up" if tried < self.steps else ""
            self.report.add("ok", "steps", f"{tried:,} random steps gave numbers and flags of the right kind{few}")
        if self.allowed:
            share = f"{np.mean(self.allowed):.0%} of choices were allowed on average, at least one at every step"
            self.report.add("ok", "action masks", f"{share}; forbidden ones are never taken")
        self.check_ends(rollout)
        with patience(HANGS, "the doctor"):
            self.check_reset_in_mid_episode()
        differs = self.check_same_again(rollout, starts_differ)
        self.check_scale(rollout)
        self.check_speed(rollout)
        return rollout, differs

    def stop(self, title: str, detail: str, fix: str = "") -> GiveUp:
        self.error(title, detail, fix)
        return GiveUp()

    def error(self, title: str, detail: str, fix: str = "") -> None:
        self.wrong += 1
        self.report.add("error", title, detail, fix)

    def check_spaces(self) -> None:
        try:
            spaces_of = self.env.observation_space, self.env.action_space
            spec = describe(self.name, *spaces_of, stacks=stacks_of(self.env))
        except UsageError as error:
            raise self.stop("spaces are not supported", str(error)) from error
        except Exception as error:
            fix = "set self.observation_space and self.action_space in __init__"
            raise self.stop("spaces are missing", summary(error), fix) from error
        self.report.spec, self.leaves = spec, spec.obs
        leaves = leaf_spaces(self.name, self.env.observation_space)
        self.boxes = {path: space for path, space in leaves if isinstance(space, spaces.Box)}
        obs, action = (short(space) for space in spaces_of)
        if self.agents is None:
            self.report.add("ok", "spaces", f"observation {obs}, action {action}")
        else:
            self.report.add("ok", "agents", "; ".join(_kind(self.agents, kind) for kind in self.agents.kinds))
        if skipped := unread_note(self.name, self.env.observation_space):
            fix = "encode what it says as numbers if the policy is to know it"
            self.report.add("warning", "a part of the observation is skipped", skipped, fix)
        if spec.action.kind == "box" and not np.all(np.isfinite([*spec.action.low, *spec.action.high])):
            fix = "give Box finite low and high if the env has limits"
            self.report.add("warning", "the action space has infinite bounds", "actions are not clipped there", fix)
        if spec.action.sizes and math.prod(spec.action.sizes) == 1:
            self.report.add("warning", "there is one action only", "nothing can be learned from it")

    def check_reset(self) -> bool:
        """Whether resets with the same seed showed different observations."""
        first, again, *others = (self.reset(seed)[1] for seed in (1, 1, 2, 3, 4))
        if self.wrong:
            return False
        self.report.add("ok", "reset", "returns (obs, info)")
        self.starts_vary = any(first != other for other in others)
        if first == again and not self.starts_vary:
            detail = "four different seeds showed the same first observation; that is fine if the start is to be fixed"
            fix = "else call super().reset(seed=seed), and draw the start from self.np_random"
            self.report.add("warning", "every episode starts the same", detail, fix)
        return first != again

    def rollout(self, steps: int, seconds: float, actions: list[Any] | None = None) -> Rollout:
        """Episodes of random actions, or of the given ones, with the same seeds each time."""
        out = Rollout(largest=[0.0] * len(self.leaves))
        if actions is None:
            self.env.action_space.seed(0)
        until, wrong = time.monotonic() + seconds, self.wrong
        raw: Any = None
        length = 0  # of the running episode
        while len(out.actions) < steps and (not out.actions or time.monotonic() < until):
            with patience(HANGS, "the doctor"):
                chunk = min(until, time.monotonic() + _CHUNK)
                if raw is None:
                    raw = self.begin(out)
                while len(out.actions) < steps:
                    number = len(out.actions)
                    action = random_action(self.env.action_space, self.mask) if actions is None else actions[number]
                    out.actions.append(action)
                    again = "" if actions is None else ", played again"
                    raw, ended = self.advance(out, raw, action, f"step {number + 1}{again}", length := length + 1)
                    if ended:
                        raw, length = self.begin(out), 0
                    if time.monotonic() > chunk:
                        break
        out.wrong = self.wrong - wrong
        return out

    def begin(self, out: Rollout) -> Any:
        raw, digest = self.reset(_FIRST_SEED + len(out.ends))
        out.reset_seconds.append(self.seconds)
        out.trace.append(digest)
        return raw

    def advance(self, out: Rollout, raw: Any, action: Any, number: str, length: int) -> tuple[Any, bool]:
        """Take a step and note what it gave: the observation, and whether the episode ended."""
        new, digest, terminated, truncated = self.step(action, f"{number} (step {length} of episode {len(out.ends)})")
        out.step_seconds.append(self.seconds)
        out.computed_seconds.append(self.computed)
        out.trace.append(digest)
        for i, value in enumerate(self.largest):
            out.largest[i] = max(out.largest[i], value)
        if self.agents is None:  # else the arrays are those that agents were joined in
            self.check_aliasing(raw, new)
        if self.agents is not None and terminated:  # all have left: it was a time limit if it was one for some
            truncated = bool(np.any(new["flags"][TRUNCATED]))
            terminated = not truncated
        if terminated or truncated:
            (out.terminated if terminated else out.truncated).append(length)
            out.both += terminated and truncated
            out.ends.append(len(out.actions))
        return new, terminated or truncated

    def reset(self, seed: int, where: str = "") -> tuple[Any, bytes]:
        """Reset the env; gives the observation as it came, and a digest of it."""
        self.doing = where or f"reset(seed={seed})"
        self.watch.start()
        try:
            result: Any = self.env.reset(seed=seed)
        except (Exception, SystemExit) as error:
            seedless = isinstance(error, TypeError) and "seed" in str(error)
            fix = "declare it as def reset(self, *, seed=None, options=None)" if seedless else ""
            raise self.stop("reset raises", f"{self.doing} raised {summary(error)}", fix) from error
        self.seconds, self.computed = self.watch.stop()
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
            fix = "return (obs, info), where info is a dict and may be empty"
            raise self.stop("reset does not return (obs, info)", f"it returned {_kinds(result)}", fix)
        seen = self.check_obs(result[0], self.doing)
        self.check_mask(*result, self.doing, over=False)
        return result[0], _digest(seen)

    def step(self, action: Any, where: str) -> tuple[Any, bytes, bool, bool]:
        """Step the env; gives the observation as it came, a digest of all that came, terminated and truncated."""
        self.doing = where
        self.watch.start()
        try:
            result: Any = self.env.step(action)
        except (Exception, SystemExit) as error:
            raise self.stop("step raises", f"{where}, action {short(action)}: {summary(error)}") from error
        self.seconds, self.computed = self.watch.stop()
        if not isinstance(result, tuple) or len(result) != 5:
            fix = "return (obs, reward, terminated, truncated, info)"
            raise self.stop("step does not return 5 values", f"it returned {_kinds(result)}", fix)
        raw, reward, terminated, truncated, info = result
        self.check_reward(reward, where)
        for title, flag in (("terminated", terminated), ("truncated", truncated)):
            if not is_flag(flag):
                detail = f"{where}: it is {short(flag)} ({type(flag).__name__})"
                raise self.stop(f"{title} is not a bool", detail, "return True or False")
            if not isinstance(flag, bool | np.bool_):
                found = f"{where}: it is {short(flag)}"
                self.report.add("warning", f"{title} is not a bool", found, f"return bool({title})")
        if not isinstance(info, dict):
            self.report.add("warning", "info is not a dict", f"{where}: it is a {type(info).__name__}", "return {}")
        seen = self.check_obs(raw, where)
        self.check_mask(raw, info, where, over=bool(terminated))
        outcome = float(reward), bool(terminated), bool(truncated)
        return raw, _digest((seen, *outcome)), *outcome[1:]

    def check_reward(self, reward: Any, where: str) -> None:
        if not is_scalar(reward):
            detail = f"{where}: the reward is {short(reward)} ({type(reward).__name__})"
            raise self.stop("the reward is not a number", detail, "return float(reward)")
        if not np.isfinite(reward):
            self.error("the reward is not finite", f"{where}: it is {reward}", "look for a division or a log")
        elif abs(float(reward)) > _LARGEST:
            detail = f"{where}: it is {float(reward):g}; float32 ends at 3.4e38"
            self.error("the reward is too large", detail, "scale it")

    def check_obs(self, raw: Any, where: str) -> tuple[np.ndarray, ...]:
        """Copies of an observation's leaves as they will be stored, once they are known to fit."""
        try:
            values = flatten_obs(raw, self.leaves)
        except UsageError as error:
            raise self.stop("the observation does not fit its space", f"{where}: {error}") from error
        stored = []
        self.largest: list[float] = []
        for leaf in self.leaves:
            if wrong := misfit(values[leaf.path], leaf):
                fix = "change what the env returns, or its observation_space"
                raise self.stop("the observation does not fit its space", f"{where}: {wrong}", fix)
            array = np.array(values[leaf.path])
            with np.errstate(over="ignore"):
                stored.append(array.astype(leaf.dtype))
            finite = stored[-1].dtype.kind != "f" or bool(np.all(np.isfinite(stored[-1])))
            self.largest.append(float(np.max(np.abs(stored[-1]), initial=0.0)) if finite and array.size else 0.0)
            if leaf.path in self.boxes:
                self.check_box(array, leaf, self.boxes[leaf.path], where, finite=finite)
        return tuple(stored)

    def check_mask(self, raw: Any, info: Any, where: str, *, over: bool) -> None:
        """Look at the mask of allowed actions; after an episode that is `over` there need be none."""
        if self.agents is not None:  # who have had theirs checked
            self.allowed += _allowed(self.agents, raw)
            return
        mask, spec = masks.found(raw, info), self.report.spec
        assert spec is not None
        if self.masked is None:
            self.masked = mask is not None
            if mask is not None and spec.action.kind == "box":
                fix = "leave it out, or rename it"
                raise self.stop("action masks are for discrete actions", f"{where}: its actions are continuous", fix)
            if mask is not None and not spec.masked:
                self.report.spec = replace(spec, obs=(*spec.obs, masks.mask_leaf(spec.action)))
        self.mask = None
        if not self.masked or (over and mask is None):
            return
        choices, sizes = sum(spec.action.sizes), spec.action.sizes
        wrong = "is not there" if mask is None else masks.misfit(mask, choices)
        if not wrong and not over and forbids_all(np.asarray(mask)[None], sizes)[0]:
            wrong = forbids(np.asarray(mask)[None], sizes)
        if wrong:
            fix = f"give {choices} flags with every observation, 1 for each choice that is allowed"
            raise self.stop("the action mask does not fit", f"{where}: {masks.KEY} {wrong}", fix)
        if not over:
            self.mask = np.array(mask)
            self.allowed.append(float(self.mask.mean()))

    def check_box(self, array: np.ndarray, leaf: ObsLeaf, box: spaces.Box, where: str, *, finite: bool) -> None:
        if array.dtype != box.dtype:
            detail = f"{where}: {leaf.path!r} is {array.dtype} but declared {box.dtype}"
            self.report.add("warning", "the observation has another dtype", detail, f"return obs.astype({box.dtype})")
        if not np.all(np.isfinite(array)):
            detail = f"{where}: {leaf.path!r} holds NaN or infinity; a run would cut the episode there"
            self.error("the observation is not finite", detail, "look for a division, a log or a square root")
        elif not finite:
            detail = f"{where}: {leaf.path!r} holds {array[np.abs(array) > _LARGEST][0]:g}; float32 ends at 3.4e38"
            self.error("the observation is too large", detail, "scale it")
        elif (beyond := (array < box.low) | (array > box.high)).any():
            detail, fix = f"{where}: {leaf.path!r} holds {array[beyond][0]}", "widen low and high of the Box, or clip"
            self.report.add("warning", "the observation leaves its bounds", detail, fix)

    def check_aliasing(self, before: Any, now: Any) -> None:
        old, new = flatten_obs(before, self.leaves), flatten_obs(now, self.leaves)
        for path, array in new.items():
            if isinstance(array, np.ndarray) and array.size and np.may_share_memory(array, old[path]):
                same = f"{path!r} is the same memory at every step, so an observation that was kept changes later"
                detail = f"{same}; Raynforce copies at once and is safe, other code is not"
                self.report.add("warning", "observations share memory", detail, "return obs.copy()")

    def check_ends(self, rollout: Rollout) -> None:
        ended, cut, steps = rollout.terminated, rollout.truncated, len(rollout.actions)
        if rollout.both and not cut:  # else it is a coincidence
            detail = f"{rollout.both:,} of {len(ended):,} ends were both at once, which counts as terminated"
            fix = "let a time limit set truncated alone, so that the future is still worth something"
            self.report.add("warning", "terminated and truncated together", detail, fix)
        if not ended and not cut:
            if any(isinstance(layer, TimeLimit) for layer in layers(self.env)):
                self.report.add("ok", "episodes", f"none ended in {steps:,} steps; the time limit ends them")
                return
            detail = f"none of {steps:,} steps ended one, and there is no time limit; returns are known at an end"
            fix = "wrap it in gymnasium.wrappers.TimeLimit, or register it with max_episode_steps"
            self.report.add("warning", "episodes may never end", detail, fix)
        elif not cut and len(ended) >= 3 and len(set(ended)) == 1 and ended[0] > 1:
            detail = f"all {len(ended):,} episodes terminated after exactly {ended[0]} steps; fine if that is the task"
            fix = "if it is a time limit, return truncated=True: then the future is still worth something"
            self.report.add("warning", "terminated may be a time limit", detail, fix)
        else:
            detail = f"{len(ended):,} terminated and {len(cut):,} truncated in {steps:,} steps"
            self.report.add("ok", "episodes", detail)

    def check_reset_in_mid_episode(self) -> None:
        wrong = self.wrong
        for seed, when in ((1, "before"), (2, "after")):
            self.reset(seed, f"a reset {when} one in mid-episode" if seed == 1 else "a reset in mid-episode")
            self.step(random_action(self.env.action_space, self.mask), f"step 1 {when} a reset in mid-episode")
        if self.wrong == wrong:
            self.report.add("ok", "reset in mid-episode", "works")

    def check_same_again(self, rollout: Rollout, starts_differ: bool) -> Differs | None:
        """Play the same episodes again, in an environment that now has a past; what was different, if anything."""
        again = self.rollout(min(_AGAIN, len(rollout.actions)), _AGAIN_SECONDS, rollout.actions)
        pairs = zip(rollout.trace, again.trace, strict=False)
        first = next((i for i, (then, now) in enumerate(pairs) if then != now), None)
        if first is None and not starts_differ:
            if self.starts_vary:
                self.report.add("ok", "seeding", "the same seed starts the same episode, other seeds start others")
            if not again.wrong:
                detail = f"the same seeds and {len(again.actions):,} actions gave the same episodes"
                self.report.add("ok", "determinism", detail)
            return None
        # The trace has a line for each reset and each step. From its place to the episode and its step:
        starts = [0, *rollout.ends]
        episode = max(e for e in range(len(starts)) if starts[e] + e <= (first or 0))
        step = (first or 0) - starts[episode] - episode
        what = "two resets with the same seed showed different observations"
        if not starts_differ:
            where = f"at step {step} of" if step else "after the reset of"
            what = f"the same seed and actions gave something else {where} episode {episode}"
        seed = _FIRST_SEED + episode
        actions = rollout.actions[starts[episode] : starts[episode] + step]
        with patience(HANGS, "the doctor"):
            self.reset(seed)
            used = state_of(self.env)
        return Differs(what, at_reset=starts_differ, seed=seed, actions=actions, used=used)

    def check_scale(self, rollout: Rollout) -> None:
        """Large inputs slow learning down: look at what came, as the declared bounds are often infinite."""
        for leaf, largest in zip(self.leaves, rollout.largest, strict=True):
            if leaf.kind != "box" or leaf.dtype != "float32" or (leaf.path == "obs/reward" and self.agents):
                continue
            bounds = np.concatenate([self.boxes[leaf.path].low.reshape(-1), self.boxes[leaf.path].high.reshape(-1)])
            declared = float(np.max(np.abs(bounds), initial=0.0))
            came = f"{leaf.path!r}: values up to {largest:.3g} came, bounds reach {declared:.3g}"
            if largest > 10.0:
                if self.agents:
                    came = f"{_seen(self.agents, leaf.path)}: values up to {largest:.3g} came"
                self.report.add("warning", "observations are large", came, "--set network.normalize_obs=true")
            elif declared > 1000.0 and self.agents is None:
                fix = "if values grow in training: --set network.normalize_obs=true"
                self.report.add("ok", "observation bounds are very large", came, fix)

    def check_speed(self, rollout: Rollout) -> None:
        seconds = rollout.step_seconds
        cost = Cost.of(seconds, rollout.computed_seconds, rollout.reset_seconds, ends=len(rollout.ends))
        self.report.cost = cost
        p50, p99, reset = 1e3 * np.array([*np.percentile(seconds, [50, 99]), np.mean(rollout.reset_seconds)])
        times = f"step p50 {p50:.3g} ms, p99 {p99:.3g} ms, reset {reset:.3g} ms"
        self.report.add("ok", "speed", f"{1 / max(cost.mean or 0.0, 1e-9):,.0f} steps/s; {times}")


def _kind(agents: Agents, kind: AgentKind) -> str:
    """Who they are, what they see and what they do, in a few words."""
    names = ", ".join(agents.names[agent] for agent in kind.agents)
    seen = ", ".join(f"{leaf.path.removeprefix('obs/')} {_space(leaf)}" for leaf in kind.obs)
    return f"{names}: observation {seen.removeprefix('obs ')}, action {_space(kind.action)}"


def _space(leaf: ObsLeaf | ActionSpec) -> str:
    return f"{leaf.kind} {list(leaf.sizes or leaf.shape)}"


def _seen(agents: Agents, path: str) -> str:
    """Who sees a leaf of the observation of all, and what it is called there."""
    for k, kind in enumerate(agents.kinds):
        for i, leaf in enumerate(kind.obs):
            if path == f"obs/{leaf_name(k, i)}":
                return f"{leaf.path!r} of {agents.names[kind.agents[0]]!r}"
    return repr(path)


def _allowed(agents: Agents, seen: Any) -> list[float]:
    """What share of its choices each agent that is to act may take, if it has a mask."""
    shares: list[float] = []
    for k, kind in enumerate(agents.kinds):
        acting = np.flatnonzero(seen["flags"][ACTING][list(kind.agents)])
        for i, leaf in enumerate(kind.obs):
            if leaf.path == MASK:
                shares += np.mean(seen[leaf_name(k, i)][acting] != 0, axis=1).tolist()
    return shares


_LARGEST = float(np.finfo(np.float32).max)


def _digest(value: Any) -> bytes:
    return hashlib.blake2b(bits(value), digest_size=16).digest()


def _kinds(result: Any) -> str:
    if isinstance(result, tuple):
        return f"{len(result)} values ({', '.join(type(x).__name__ for x in result)})"
    return f"a {type(result).__name__}"
