"""The doctor: tries an environment for a moment and says in plain words what is wrong with it and how to fix it."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np

from raynforce.envs.causes import Cause, find_cause
from raynforce.envs.checkup import HANGS, Checkup, Differs, Finding, GiveUp, Report
from raynforce.envs.describe import Args, bits
from raynforce.envs.lane import REPLAY
from raynforce.envs.launching import is_simulator
from raynforce.envs.make import close_env, locate, make
from raynforce.envs.masks import random_actions, random_of
from raynforce.envs.native import NativeVector
from raynforce.envs.patience import patience
from raynforce.envs.vector import Step, VectorEnv, make_vector
from raynforce.errors import EnvError, RaynforceError, UsageError, summary
from raynforce.protocol.spaces import forbidden
from raynforce.spaces import MASK
from raynforce.trees import join, split

__all__ = ["Finding", "Report", "check_env"]

_MAKES = 1.0  # seconds that an environment may take to be made, to be made again for a check
_LOADS = 0.25  # seconds of steps on either side of saving and loading, and as many steps at most:
_COMES_BACK = "running episodes"
_LOADED = 23  # mostly not the length of an episode


def check_env(env: str, env_args: Args = None, *, steps: int | None = None) -> Report:
    """Try an environment, save and load it; whatever it does becomes a finding, but for a name that is not found."""
    if steps is not None and steps < 1:
        raise UsageError(f"steps is {steps}; it must be 1 or more")
    locate(env)
    report = Report(env)
    started = time.monotonic()
    try:
        made = make(env, env_args)
    except UsageError as error:
        report.add("error", "cannot be made", str(error))
        return report
    fresh = time.monotonic() - started < _MAKES
    checkup = Checkup(env, made, report, steps)
    try:
        rollout, differs = checkup.run()
    except GiveUp:
        return report
    except EnvError:  # patience is at an end
        report.add("error", "hangs", f"{checkup.doing} was not through in {HANGS:g} seconds")
        return report
    finally:
        checkup.watch.close()
        close_env(made)  # before the next one is made: some simulators can only be had once
    try:
        with patience(HANGS, "the doctor"):  # of what makes the environment again, if that is affordable
            if report.ok:
                affordable = int(_LOADS / max(1e-9, float(np.mean(rollout.step_seconds))))
                actions = rollout.actions[: max(1, min(affordable, len(rollout.actions) // 10, _LOADED))]
                _check_resume(env, env_args, report, actions, fresh=fresh, determined=differs is None)
            if differs is not None:
                new = (lambda: make(env, env_args)) if fresh else None
                _say_differs(report, differs, find_cause(new, differs.seed, differs.actions, differs.used))
    except EnvError:
        report.add("error", "hangs", f"made again, to save and load it, it was not through in {HANGS:g} seconds")
    return report


def _say_differs(report: Report, differs: Differs, cause: Cause | None) -> None:
    saved = any(finding.title == _COMES_BACK for finding in report.findings)  # by a pair of its own
    if cause is not None and cause.kind == "past":
        where = "a resume brings it back, in evaluation" if saved else "at resume and in evaluation"
        means = f"{where} a new environment begins without it"
        report.add("warning", "state is kept across episodes", f"{cause.what}; {differs.what}; {means}", cause.fix)
        return
    title = "reset(seed) is not deterministic" if differs.at_reset else "episodes are not deterministic"
    detail = differs.what if cause is None else f"{cause.what}; {differs.what}"
    means = "no run is repeated to the bit" + ("" if saved else ", and running episodes start over at resume")
    fix = cause.fix if cause else "draw all random numbers from self.np_random, and keep nothing across episodes"
    report.add("warning", title, f"{detail}; {means}", fix)


def _check_resume(env: str, args: Args, report: Report, actions: list[Any], *, fresh: bool, determined: bool) -> None:
    """Save in a second episode and play on; load, into a `fresh` env if asked, and play on with the same actions."""
    vector: VectorEnv | None = None
    try:
        masked = report.spec is not None and report.spec.masked
        vector = make_vector(env, args, 1, seed=0, masked=masked)
        report.native = isinstance(vector, NativeVector)
        if report.native:
            report.add("ok", "vectorised by its own implementation", "all lanes are stepped in one call")
        elif is_simulator(env):
            report.add("ok", "vectorised by the simulator", "all envs of a process are stepped in one message")
        else:
            note = vector.note if determined else ""  # else it is said beside the cause
            report.add("ok", "vectorised by a loop", note or "single envs are stepped one after the other")
        choices = np.array(actions, vector.spec.action.dtype)[:, None]  # [k, 1, ...]
        vector.reset()
        _end_an_episode(vector, choices)
        for choice in choices:
            _step(vector, choice)
        arrays, rest = split(vector.state())  # as a checkpoint would give it back: arrays apart, the rest as JSON
        tree = join({path: array.copy() for path, array in arrays.items()}, json.loads(json.dumps(rest)))
        then = [_step(vector, choice) for choice in choices]
        if fresh:
            vector.close()
            vector = make_vector(env, args, 1, seed=0, masked=masked)
        notes = vector.load(tree)
        now = []
        for choice in choices:
            now.append(_step(vector, choice))
            vector.state()  # which must not change the course of things
    except (Exception, SystemExit) as error:
        detail = str(error) if isinstance(error, RaynforceError) else summary(error)
        report.add("error", "running episodes cannot be saved", detail)
        return
    finally:
        if vector is not None:
            vector.close()
    other = next((i for i, (a, b) in enumerate(zip(then, now, strict=True)) if bits(a[:-1]) != bits(b[:-1])), None)
    if not determined and vector.way_back == REPLAY:
        return  # it was said why they do not come back, also where they happen to
    if notes:
        report.add("warning", "running episodes start over at resume", notes[0])
    elif other is not None:
        differs = f"with the same actions step {other + 1} after loading was not that of before"
        fix = "save and load all that step() depends on, also what is kept across episodes; change nothing while saving"
        detail = f"they come back {vector.way_back}, but {differs}"
        report.add("warning", "running episodes go another way after resume", detail, fix)
    else:
        detail = f"come back {vector.way_back}: {len(now)} steps after loading were the same as before"
        report.add("ok", _COMES_BACK, detail)


def _step(vector: VectorEnv, choice: np.ndarray) -> Step:
    """Take a step with this action, or another if it is forbidden where the environment is."""
    mask, action = vector.current().get(MASK), vector.spec.action
    if mask is not None:
        start = np.array(action.start).reshape(action.shape)
        if forbidden(mask, choice - start, action):
            choice = random_actions(action, 1, np.random.default_rng(0), mask).astype(action.dtype)
    agents = vector.spec.agents
    if agents is not None and any(leaf.path == MASK for kind in agents.kinds for leaf in kind.obs):
        choice = random_of(vector.spec, vector.current(), np.random.default_rng(0))
    return vector.step(choice)


def _end_an_episode(vector: VectorEnv, choices: np.ndarray) -> None:
    for number in range(4 * len(choices)):
        step = _step(vector, choices[number % len(choices)])
        if step.terminated[0] or step.truncated[0]:
            return
    vector.reset()
